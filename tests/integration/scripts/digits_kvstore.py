"""Train on scikit-learn's digits with Horovod: Gluon's own Trainer and the KVStore 'horovod'.

    horovodrun -np 4 python digits_kvstore.py

The batch size is that of all workers together; each of them computes on its share of every batch.
"""

import argparse
import math

import horovod.mxnet as hvd
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="MXNet Gluon digits with the KVStore of Horovod")
parser.add_argument("--batch-size", type=int, default=60, help="training batch size of all workers (default: 60)")
parser.add_argument("--epochs", type=int, default=6, help="number of training epochs (default: 6)")
parser.add_argument("--lr", type=float, default=0.005, help="learning rate (default: 0.005)")
parser.add_argument("--seed", type=int, default=7, help="random seed of the first worker (default: 7)")
parser.add_argument("--save", default="", help="prefix of the files that every worker saves its parameters to")
args = parser.parse_args()

store = mx.kv.create("horovod")
hvd.init()
array = mx.np.array if mx.__version__.startswith("2") else mx.nd.array


class PartOfBatches(gluon.data.Sampler):
    """The share of one worker in every batch of a shuffled data set."""

    def __init__(self, length, batch_size, num_parts, part_index):
        self._length, self._batch_size = length, batch_size
        self._num_parts, self._part_index = num_parts, part_index
        self._epoch = 0

    def __iter__(self):
        order = np.random.RandomState(self._epoch).permutation(self._length).tolist()
        self._epoch += 1
        for start in range(0, self._length, self._batch_size):
            yield order[start : start + self._batch_size][self._part_index :: self._num_parts]

    def __len__(self):
        return math.ceil(self._length / self._batch_size)


digits = load_digits()
order = np.random.RandomState(0).permutation(len(digits.data))
images = (digits.data[order] / 16).astype("float32")
labels = digits.target[order].astype("float32")
train = gluon.data.ArrayDataset(images[:1500], labels[:1500])
sampler = PartOfBatches(len(train), args.batch_size, hvd.size(), hvd.rank())
loader = gluon.data.DataLoader(train, batch_sampler=sampler)

mx.random.seed(args.seed + hvd.rank())
net = gluon.nn.HybridSequential()
net.add(gluon.nn.Dense(64, in_units=64, activation="tanh"))
net.add(gluon.nn.Dense(32, in_units=64, activation="tanh"))
net.add(gluon.nn.Dense(10, in_units=32))
net.initialize(mx.init.Xavier())
net.hybridize()

# All workers begin with the values of the first one.
params = net.collect_params()
for key, param in params.items():
    value = param.data()
    store.broadcast(key, value, out=value)
    param.set_data(value)

trainer = gluon.Trainer(params, "adam", {"learning_rate": args.lr}, kvstore=store)
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
for _ in range(args.epochs):
    for data, label in loader:
        with autograd.record():
            loss = loss_fn(net(data), label)
        loss.backward()
        # The store sums over the workers: the step is for the batches of all of them.
        trainer.step(len(data) * store.num_workers)

answers = net(array(images[1500:])).asnumpy().argmax(axis=1)
accuracy = float((answers == labels[1500:]).mean())
print(f"rank {store.rank} of {store.num_workers}: test accuracy {accuracy:.4f}", flush=True)
if args.save:
    np.savez(f"{args.save}{store.rank}.npz", *[param.data().asnumpy() for param in params.values()])
