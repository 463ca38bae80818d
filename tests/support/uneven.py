"""Training with uneven inputs, in a Join."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvstore_hvd.mxnet as hvd
from support.gluon import assert_alike, backward, batch_of

mx = pytest.importorskip("mxnet")

BATCH = 4
OPTIMIZERS = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01},
    "adam": {"learning_rate": 0.01},
}


def trainer_of(net: Any, optimizer: str = "sgd", **options: Any) -> Any:
    """A Trainer with the options of `OPTIMIZERS` unless others are given."""
    return hvd.DistributedTrainer(net.collect_params(), optimizer, options or dict(OPTIMIZERS[optimizer]))


def states(trainer: Any) -> list[Any]:
    """Everything that an optimizer remembers."""

    def flat(state: Any) -> list[Any]:
        if state is None:
            return []
        return [state.asnumpy()] if hasattr(state, "asnumpy") else [x for each in state for x in flat(each)]

    values = [x for updater in trainer._updaters for key in sorted(updater.states) for x in flat(updater.states[key])]
    optimizer = trainer._optimizer
    return [*values, np.array([optimizer.num_update, optimizer.learning_rate])]


def assert_same_everywhere(net: Any, trainer: Any) -> None:
    """Parameters and states are equal on all workers, bit by bit."""
    assert_alike(net, *states(trainer))


def train(net: Any, trainer: Any, steps: int = 1, seed: Any = 1) -> None:
    """Train some steps on one batch."""
    for _ in range(steps):
        backward(net, [batch_of(seed)])
        trainer.step(BATCH)
