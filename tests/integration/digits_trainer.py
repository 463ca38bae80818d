"""Train on scikit-learn's digits with Horovod: Gluon and DistributedTrainer.

    horovodrun -np 4 python digits_trainer.py

The batch size is that of all workers together; each of them computes on its share of every batch.
"""

import argparse
import logging
import time

import horovod.mxnet as hvd
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="MXNet Gluon digits with Horovod")
parser.add_argument("--batch-size", type=int, default=60, help="training batch size of all workers (default: 60)")
parser.add_argument("--epochs", type=int, default=6, help="number of training epochs (default: 6)")
parser.add_argument("--lr", type=float, default=0.2, help="learning rate (default: 0.2)")
parser.add_argument("--momentum", type=float, default=0.9, help="SGD momentum (default: 0.9)")
parser.add_argument("--seed", type=int, default=42, help="random seed of the first worker (default: 42)")
parser.add_argument("--save", default="", help="prefix of the files that every worker saves its parameters to")
args = parser.parse_args()

logging.basicConfig(level=logging.INFO)


def get_data():
    """Return the training and the test set; labels follow the images."""
    digits = load_digits()
    images = (digits.images / 16).astype("float32").reshape(-1, 1, 8, 8)
    labels = digits.target.astype("float32")
    order = np.random.RandomState(0).permutation(len(images))
    train, test = order[:1500], order[1500:]
    return (images[train], labels[train]), (images[test], labels[test])


def get_batches(images, labels, epoch):
    """Shuffle as all workers do, and yield this worker's share of each batch."""
    order = np.random.RandomState(epoch).permutation(len(images))
    for start in range(0, len(order), args.batch_size):
        mine = order[start : start + args.batch_size][hvd.rank() :: hvd.size()]
        yield images[mine], labels[mine]


def conv_net():
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(channels=8, kernel_size=3, activation="tanh"))
    net.add(gluon.nn.AvgPool2D(pool_size=2, strides=2))
    net.add(gluon.nn.Flatten())
    net.add(gluon.nn.Dense(64, activation="tanh"))
    net.add(gluon.nn.Dense(10))
    return net


def evaluate(model, images, labels, context):
    answers = model(to_mxnet(images, context)).asnumpy().argmax(axis=1)
    return float((answers == labels).mean())


def to_mxnet(array, context):
    kind = mx.np if mx.__version__.startswith("2") else mx.nd
    return kind.array(array, dtype="float32", ctx=context)


# Initialize Horovod
hvd.init()

# Horovod: pin context to local rank
context = mx.cpu(hvd.local_rank())
mx.random.seed(args.seed + hvd.rank())

train_data, test_data = get_data()
model = conv_net()
model.initialize(mx.init.Xavier(), ctx=context)
model.hybridize()

# Horovod: fetch and broadcast parameters
params = model.collect_params()
hvd.broadcast_parameters(params, root_rank=0)

# Horovod: create DistributedTrainer, a subclass of gluon.Trainer
optimizer = mx.optimizer.create("sgd", learning_rate=args.lr, momentum=args.momentum)
trainer = hvd.DistributedTrainer(params, optimizer)
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()

for epoch in range(args.epochs):
    tic = time.time()
    for images, labels in get_batches(*train_data, epoch):
        with autograd.record():
            output = model(to_mxnet(images, context))
            loss = loss_fn(output, to_mxnet(labels, context))
        loss.backward()
        trainer.step(len(images))
    # Horovod: the mean of all workers, shown by one
    mean = hvd.allreduce(loss.mean(), name="loss").asnumpy().item()
    if hvd.rank() == 0:
        logging.info("[Epoch %d] loss=%f, %.1f s", epoch, mean, time.time() - tic)

accuracy = evaluate(model, *test_data, context)
print(f"rank {hvd.rank()} of {hvd.size()}: test accuracy {accuracy:.4f}", flush=True)
if args.save:
    values = [param.data(context).asnumpy() for param in params.values()]
    np.savez(f"{args.save}{hvd.rank()}.npz", *values)
