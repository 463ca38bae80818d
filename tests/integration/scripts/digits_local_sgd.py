"""Train on scikit-learn's digits with Horovod: local SGD, whose replicas meet every few updates.

    horovodrun -np 4 python digits_local_sgd.py

Each replica takes its share of every batch and updates its own parameters. After some updates all of them go on from
their mean. Workers may have several replicas each.
"""

import argparse

import horovod.mxnet as hvd
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="MXNet digits, local SGD")
parser.add_argument("--batch-size", type=int, default=60, help="training batch size of all workers (default: 60)")
parser.add_argument("--epochs", type=int, default=10, help="number of training epochs (default: 10)")
parser.add_argument("--lr", type=float, default=0.3, help="learning rate (default: 0.3)")
parser.add_argument("--replicas", type=int, default=4, help="of the model, of all workers together (default: 4)")
parser.add_argument("--period", type=int, default=5, help="updates between two means (default: 5)")
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


def replica():
    model = gluon.nn.HybridSequential()
    model.add(gluon.nn.Dense(64, activation="tanh", in_units=64), gluon.nn.Dense(10, in_units=64))
    model.initialize(mx.init.Xavier())
    model.hybridize()
    return model


def mean_of_all():
    """Let every replica of every worker have the mean of all."""
    for number, same in enumerate(zip(*(model.collect_params().values() for model in models))):
        total = sum(param.data() for param in same)
        mean = hvd.allreduce(total, op=hvd.Sum, name=f"parameter.{number}") / args.replicas
        for param in same:
            param.set_data(mean)


hvd.init()
mx.random.seed(args.seed + hvd.rank())
(images, labels), (test_images, test_labels) = get_data()

mine = range(hvd.rank(), args.replicas, hvd.size())
models = [replica() for _ in mine]
hvd.broadcast_parameters(models[0].collect_params(), root_rank=0)
for model in models[1:]:
    for param, first in zip(model.collect_params().values(), models[0].collect_params().values()):
        param.set_data(first.data())
trainers = [gluon.Trainer(model.collect_params(), "sgd", {"learning_rate": args.lr}, kvstore=None) for model in models]
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()

updates = 0
for epoch in range(args.epochs):
    order = np.random.RandomState(epoch).permutation(len(images))
    for start in range(0, len(order), args.batch_size):
        batch = order[start : start + args.batch_size]
        for number, model, trainer in zip(mine, models, trainers):
            share = batch[number :: args.replicas]
            with autograd.record():
                loss = loss_fn(model(to_mxnet(images[share])), to_mxnet(labels[share]))
            loss.backward()
            trainer.step(len(share))
        updates += 1
        if updates % args.period == 0:
            mean_of_all()
mean_of_all()

answers = models[0](to_mxnet(test_images)).asnumpy().argmax(axis=1)
accuracy = float((answers == test_labels).mean())
print(f"rank {hvd.rank()} of {hvd.size()}: test accuracy {accuracy:.4f}", flush=True)
if args.save:
    values = [param.data().asnumpy() for param in models[0].collect_params().values()]
    np.savez(f"{args.save}{hvd.rank()}.npz", *values)
