"""The training of elastic tests: the same bits in the workers of a job, and in one process that replays what they did.

The replay is given, for each step, the samples that each worker of each host had. It computes their gradients one
worker after the other and adds them in the order of ranks, first within hosts, as the engine promises to.

There are three ways to train (`KINDS`): a Trainer of Gluon on the store, a `DistributedTrainer`, and a Trainer of Gluon
with a `DistributedOptimizer`. The last two divide by the number of workers themselves, the program of the first does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import kvstore_hvd.mxnet as hvd  # lets MXNet run with today's NumPy

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

from support.digits import digits
from support.elastic_kinds import KINDS
from support.gluon import array, network, parameters, weights

__all__ = ["Training"]

Array = Any  # numpy.ndarray


class Training:
    """A small convolutional network that learns digits, its trainer with momentum and a learning rate that falls.

    `kind` is one of `KINDS`, empty for one process alone; `samples` the number of digits, at most 1797.
    """

    def __init__(self, kind: str, samples: int) -> None:
        images, labels = digits()
        self.samples = samples
        self._images = (images[:samples, None] / 16).astype(np.float32)
        self._labels = labels[:samples].astype(np.float32)
        self.net = network(
            nn.Conv2D(8, 3, padding=1, in_channels=1, activation="tanh"),
            nn.AvgPool2D(),
            nn.Dense(32, in_units=8 * 4 * 4, activation="tanh"),
            nn.Dense(10, in_units=32),
            seed=3,
            hybridize=True,
        )
        # It counts updates: whoever loses that count, or the momentum, has other parameters in the end.
        schedule = mx.lr_scheduler.FactorScheduler(step=20, factor=0.95, base_lr=0.05)
        settings = {"learning_rate": 0.05, "momentum": 0.9, "lr_scheduler": schedule}
        self.kind = kind
        params = self.net.collect_params()
        if kind == "DistributedTrainer":
            self.trainer = hvd.DistributedTrainer(params, "sgd", settings)
        elif kind == "DistributedOptimizer":
            optimizer = hvd.DistributedOptimizer(mx.optimizer.create("sgd", **settings))
            self.trainer = gluon.Trainer(params, optimizer, kvstore="horovod")  # which exchanges no gradients here
        else:
            self.trainer = gluon.Trainer(params, "sgd", settings, kvstore="horovod" if kind else None)
        self._loss = gluon.loss.SoftmaxCrossEntropyLoss()

    def step(self, samples: int, workers: int) -> None:
        """Update the parameters; every worker had so many samples."""
        self.trainer.step(samples * workers if self.kind == "Trainer" else samples)

    def backward(self, indices: Sequence[int]) -> float:
        """Compute the gradients of the summed loss of these samples; returns the loss."""
        which = np.asarray(indices)
        with autograd.record():
            loss = self._loss(self.net(array(self._images[which])), array(self._labels[which])).sum()
        loss.backward()
        return float(loss.asnumpy())

    def gradients(self) -> list[Array]:
        """Return copies of the gradients."""
        return [parameter.list_grad()[0].asnumpy().copy() for parameter in parameters(self.net)]

    def set_gradients(self, values: Sequence[Array]) -> None:
        """Write gradients, as an allreduce does."""
        for parameter, value in zip(parameters(self.net), values):
            parameter.list_grad()[0][:] = array(value)

    def digest(self) -> str:
        """Return a digest of all bits of the parameters."""
        return hashlib.sha256(b"".join(value.tobytes() for value in weights(self.net))).hexdigest()

    def save(self, path: Path) -> None:
        """Write the parameters to a file (.npz)."""
        np.savez(path, *weights(self.net))


def replay(kind: str, schedule: Sequence[Sequence[Sequence[Sequence[int]]]], samples: int) -> Training:
    """Do in this process the steps of workers that train in this way: in each, the samples of each host's ranks."""
    training = Training("", samples)
    for step in schedule:
        parts: list[list[list[Array]]] = []
        of_ranks = [indices for host in step for indices in host]
        for host in step:
            parts.append([])
            for indices in host:
                training.backward(indices)
                parts[-1].append(training.gradients())
        sums = [[reduce(np.add, each) for each in zip(*of_host)] for of_host in parts]
        training.set_gradients([reduce(np.add, each) for each in zip(*sums)])
        (number,) = {len(indices) for indices in of_ranks}  # the sampler sees to that
        # In the order of what divides: in float64, (1 / 3) / 7 is not always 1 / 21.
        first, then = {
            "Trainer": (1, number * len(of_ranks)),
            "DistributedTrainer": (len(of_ranks), number),
            "DistributedOptimizer": (number, len(of_ranks)),
        }[kind]
        training.trainer._scale = 1.0 / first
        training.trainer.step(then)
    return training


def main() -> None:
    """Replay the schedule in a file, and write the parameters it leads to."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("schedule", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--kind", choices=KINDS, required=True)
    options = parser.parse_args()
    replay(options.kind, json.loads(options.schedule.read_text()), options.samples).save(options.result)


if __name__ == "__main__":
    main()
