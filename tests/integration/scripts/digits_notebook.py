"""Train on scikit-learn's digits as a notebook does it: one process, which has horovod.run call a function in workers.

    python digits_notebook.py --workers 4

The batch size is that of all workers together; each of them computes on its share of every batch.
"""

# %% Imports and settings
import argparse

import horovod
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description="MXNet Gluon digits with horovod.run")
parser.add_argument("--workers", type=int, default=1, help="number of workers (default: 1)")
parser.add_argument("--save", default="", help="prefix of the files for the parameters of every worker")
args = parser.parse_args()

# %% Data, which the notebook has looked at
digits = load_digits()
images = (digits.images / 16).astype("float32").reshape(-1, 1, 8, 8)
labels = digits.target.astype("float32")
order = np.random.RandomState(0).permutation(len(images))
train_set = images[order[:1500]], labels[order[:1500]]
test_set = images[order[1500:]], labels[order[1500:]]
kind = mx.np if mx.__version__.startswith("2") else mx.nd
print("mean of all pixels:", kind.array(images).mean().asnumpy().item())


# %% A model
def conv_net():
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Conv2D(channels=8, kernel_size=3, activation="tanh"))
    net.add(gluon.nn.AvgPool2D(pool_size=2, strides=2))
    net.add(gluon.nn.Flatten())
    net.add(gluon.nn.Dense(64, activation="tanh"))
    net.add(gluon.nn.Dense(10))
    return net


class Report:
    """What a worker has come to."""

    def __init__(self, rank, size, accuracy, values):
        self.rank, self.size, self.accuracy, self.values = rank, size, accuracy, values


# %% Training, which runs in the workers
def train(data, epochs, batch_size=60):
    import horovod.mxnet as hvd

    hvd.init()
    mx.random.seed(42 + hvd.rank())
    net = conv_net()
    net.initialize(mx.init.Xavier())
    net.hybridize()
    net(kind.array(data[0][:1]))
    params = net.collect_params()
    hvd.broadcast_parameters(params, root_rank=0)
    optimizer = mx.optimizer.create("sgd", learning_rate=0.2, momentum=0.9)
    trainer = hvd.DistributedTrainer(params, optimizer)
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    for epoch in range(epochs):
        shuffled = np.random.RandomState(epoch).permutation(len(data[0]))
        for start in range(0, len(shuffled), batch_size):
            mine = shuffled[start : start + batch_size][hvd.rank() :: hvd.size()]
            with autograd.record():
                loss = loss_fn(net(kind.array(data[0][mine])), kind.array(data[1][mine]))
            loss.backward()
            trainer.step(len(mine))
        if hvd.rank() == 0:
            print(f"epoch {epoch}: loss {loss.mean().asnumpy().item():.4f}")
    answers = net(kind.array(test_set[0])).asnumpy().argmax(axis=1)
    values = [param.data().asnumpy() for param in params.values()]
    return Report(hvd.rank(), hvd.size(), float((answers == test_set[1]).mean()), values)


# %% Run
reports = horovod.run(train, args=(train_set,), kwargs={"epochs": 6}, np=args.workers)
for report in reports:
    assert isinstance(report, Report)
    print(f"rank {report.rank} of {report.size}: test accuracy {report.accuracy:.4f}", flush=True)
    if args.save:
        np.savez(f"{args.save}{report.rank}.npz", *report.values)
