"""A training of a small net, step by step: what the ranks of jobs do in which something goes wrong."""

from __future__ import annotations

import mxnet as mx
from mxnet import autograd, gluon

__all__ = ["SmallTraining"]


class SmallTraining:
    """Its steps wait for their results."""

    def __init__(self) -> None:
        self.store = mx.kv.create("horovod")
        self.net = gluon.nn.Dense(4, in_units=3)
        self.net.initialize()
        self._trainer = gluon.Trainer(self.net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=self.store)
        self._data = (mx.np if mx.__version__.startswith("2") else mx.nd).ones((2, 3))

    def step(self) -> None:
        """Forward, backward, update."""
        with autograd.record():
            loss = (self.net(self._data) ** 2).sum()
        loss.backward()
        self._trainer.step(2)
        mx.nd.waitall()
