"""Train on scikit-learn's digits with Horovod: horovodrun -np 4 python digits_trainer.py PREFIX

All workers draw the same batches, and each of them computes on its share. Parameters are saved to PREFIX<rank>.npz.
"""

import logging
import sys

import horovod.mxnet as hvd
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from sklearn.datasets import load_digits

BATCH, EPOCHS = 60, 6
logging.basicConfig(level=logging.INFO)


def to_mxnet(array, context):
    kind = mx.np if mx.__version__.startswith("2") else mx.nd
    return kind.array(array, dtype="float32", ctx=context)


# Initialize Horovod
hvd.init()

# Horovod: pin context to local rank
context = mx.cpu(hvd.local_rank())
mx.random.seed(42 + hvd.rank())

digits = load_digits()
images, labels = (digits.images / 16).astype("float32").reshape(-1, 1, 8, 8), digits.target.astype("float32")
order = np.random.RandomState(0).permutation(len(images))
train, test = order[:1500], order[1500:]
model = gluon.nn.HybridSequential()
model.add(gluon.nn.Conv2D(channels=8, kernel_size=3, activation="tanh"), gluon.nn.AvgPool2D(2, 2), gluon.nn.Flatten())
model.add(gluon.nn.Dense(64, activation="tanh"), gluon.nn.Dense(10))
model.initialize(mx.init.Xavier(), ctx=context)
model.hybridize()

# Horovod: fetch and broadcast parameters
params = model.collect_params()
hvd.broadcast_parameters(params, root_rank=0)

# Horovod: create DistributedTrainer, a subclass of gluon.Trainer
trainer = hvd.DistributedTrainer(params, mx.optimizer.create("sgd", learning_rate=0.2, momentum=0.9))
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()

for epoch in range(EPOCHS):
    order = np.random.RandomState(epoch).permutation(train)
    for start in range(0, len(order), BATCH):
        mine = order[start : start + BATCH][hvd.rank() :: hvd.size()]
        with autograd.record():
            loss = loss_fn(model(to_mxnet(images[mine], context)), to_mxnet(labels[mine], context))
        loss.backward()
        trainer.step(len(mine))
    # Horovod: the mean of all workers, shown by one
    mean = hvd.allreduce(loss.mean(), name="loss").asnumpy().item()
    if hvd.rank() == 0:
        logging.info("[Epoch %d] loss=%f", epoch, mean)

answers = model(to_mxnet(images[test], context)).asnumpy().argmax(axis=1)
print(f"rank {hvd.rank()} of {hvd.size()}: test accuracy {(answers == labels[test]).mean():.4f}", flush=True)
np.savez(f"{sys.argv[1]}{hvd.rank()}.npz", *(param.data(context).asnumpy() for param in params.values()))
