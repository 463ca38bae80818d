"""Train on scikit-learn's digits with Horovod: a loop that reduces the gradients by itself, beside a plain Trainer.

    horovodrun -np 4 python digits_self_reducing.py

The batch size is that of all workers together; each of them computes on its share of every batch.
"""

import argparse

import horovod.mxnet as hvd
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="MXNet digits, gradients reduced by hand")
parser.add_argument("--batch-size", type=int, default=60, help="training batch size of all workers (default: 60)")
parser.add_argument("--epochs", type=int, default=8, help="number of training epochs (default: 8)")
parser.add_argument("--lr", type=float, default=0.2, help="learning rate (default: 0.2)")
parser.add_argument("--seed", type=int, default=42, help="random seed of the first worker (default: 42)")
parser.add_argument("--save", default="", help="prefix of the files that every worker saves its parameters to")
args = parser.parse_args()


def get_data():
    """Return the training and the test set; labels follow the images."""
    digits = load_digits()
    images = (digits.data / 16).astype("float32")
    labels = digits.target.astype("float32")
    order = np.random.RandomState(0).permutation(len(images))
    train, test = order[:1500], order[1500:]
    return (images[train], labels[train]), (images[test], labels[test])


def to_mxnet(array):
    kind = mx.np if mx.__version__.startswith("2") else mx.nd
    return kind.array(array, dtype="float32")


hvd.init()
mx.random.seed(args.seed + hvd.rank())
(images, labels), (test_images, test_labels) = get_data()

model = gluon.nn.HybridSequential()
model.add(gluon.nn.Dense(64, activation="tanh", in_units=64), gluon.nn.Dense(10, in_units=64))
model.initialize(mx.init.Xavier())
model.hybridize()
params = model.collect_params()
hvd.broadcast_parameters(params, root_rank=0)

# No store: what the workers exchange is below.
trainer = gluon.Trainer(params, "sgd", {"learning_rate": args.lr, "momentum": 0.9}, kvstore=None)
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()

for epoch in range(args.epochs):
    order = np.random.RandomState(epoch).permutation(len(images))
    for start in range(0, len(order), args.batch_size):
        batch = order[start : start + args.batch_size]
        mine = batch[hvd.rank() :: hvd.size()]
        with autograd.record():
            loss = loss_fn(model(to_mxnet(images[mine])), to_mxnet(labels[mine]))
        loss.backward()
        hvd.grouped_allreduce_([param.list_grad()[0] for param in params.values()], op=hvd.Sum, name="gradients")
        trainer.update(len(batch))

answers = model(to_mxnet(test_images)).asnumpy().argmax(axis=1)
accuracy = float((answers == test_labels).mean())
print(f"rank {hvd.rank()} of {hvd.size()}: test accuracy {accuracy:.4f}", flush=True)
if args.save:
    np.savez(f"{args.save}{hvd.rank()}.npz", *[param.data().asnumpy() for param in params.values()])
