"""Train on scikit-learn's digits with Horovod: a classifier whose classes are spread over the workers.

    horovodrun -np 4 python digits_partial_classifier.py

As where there are too many classes for one worker (face recognition): every worker has the network that computes
features, and the weights of some classes. The features of all workers are gathered; each worker computes the logits of
its classes for all of them; the softmax takes the maximum and the sum over all workers.
"""

import argparse

import horovod.mxnet as hvd
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="MXNet digits, classes spread over the workers")
parser.add_argument("--batch-size", type=int, default=60, help="training batch size of all workers (default: 60)")
parser.add_argument("--epochs", type=int, default=8, help="number of training epochs (default: 8)")
parser.add_argument("--lr", type=float, default=0.5, help="learning rate (default: 0.5)")
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

backbone = gluon.nn.HybridSequential()
backbone.add(gluon.nn.Dense(64, activation="tanh", in_units=64), gluon.nn.Dense(32, activation="tanh", in_units=64))
backbone.initialize(mx.init.Xavier())
backbone.hybridize()
params = backbone.collect_params()
hvd.broadcast_parameters(params, root_rank=0)
trainer = gluon.Trainer(params, "sgd", {"learning_rate": args.lr}, kvstore=None)

# The classes of this worker, and their weights.
classes = np.array_split(np.arange(10), hvd.size())[hvd.rank()]
weights = np.random.RandomState(1).randn(10, 32).astype("float32")[classes] * 0.1

for epoch in range(args.epochs):
    order = np.random.RandomState(epoch).permutation(len(images))
    for start in range(0, len(order), args.batch_size):
        batch = order[start : start + args.batch_size]
        mine = batch[hvd.rank() :: hvd.size()]
        with autograd.record():
            features = backbone(to_mxnet(images[mine]))
        everybodys = hvd.allgather(features.detach(), name="features").asnumpy()
        answers = hvd.allgather(to_mxnet(labels[mine]), name="labels").asnumpy()

        logits = everybodys @ weights.T
        highest = hvd.allreduce(to_mxnet(logits.max(axis=1)), op=hvd.Max, name="highest").asnumpy()
        exponentials = np.exp(logits - highest[:, None])
        sums = hvd.allreduce(to_mxnet(exponentials.sum(axis=1)), op=hvd.Sum, name="sums").asnumpy()
        errors = (exponentials / sums[:, None] - (answers[:, None] == classes)) / len(batch)

        # Every worker knows the part that its classes have in the gradient of all features.
        gradients = hvd.allreduce(to_mxnet(errors @ weights), op=hvd.Sum, name="gradients of features")
        weights -= args.lr * (errors.T @ everybodys).astype("float32")
        first = len(mine) * hvd.rank()
        features.backward(gradients[first : first + len(mine)])
        hvd.grouped_allreduce_([param.list_grad()[0] for param in params.values()], op=hvd.Sum, name="backbone")
        trainer.update(1)

weights = hvd.allgather(to_mxnet(weights), name="weights").asnumpy()
answers = (backbone(to_mxnet(test_images)).asnumpy() @ weights.T).argmax(axis=1)
accuracy = float((answers == test_labels).mean())
print(f"rank {hvd.rank()} of {hvd.size()}: test accuracy {accuracy:.4f}", flush=True)
if args.save:
    np.savez(f"{args.save}{hvd.rank()}.npz", weights, *[param.data().asnumpy() for param in params.values()])
