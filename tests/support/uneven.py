"""Training with uneven inputs, in a Join and by one process alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import kvstore_hvd.mxnet as hvd
from support.arrays import assert_equal_on_all_ranks
from support.gluon import array, backward, weights
from support.rounding import apart, sgd_roundings

mx = pytest.importorskip("mxnet")

BATCH = 4
OPTIMIZERS = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01},
    "adam": {"learning_rate": 0.01},
}


def counts_of(size: int, skew: str) -> list[int]:
    """How many samples each worker has; the last batch of some is smaller than the others."""
    if skew == "many":
        return [BATCH * (1 + 3 * r) + r for r in range(size)]
    return [4 * BATCH + 1 if r == size // 2 else 0 for r in range(size)]


def batches_of(counts: list[int], rank: int) -> list[range]:
    """The batches of one worker, as places in the samples of all."""
    first, count = sum(counts[:rank]), counts[rank]
    return [range(first + at, first + min(at + BATCH, count)) for at in range(0, count, BATCH)]


def trainer_of(kind: str, net: Any, optimizer: str = "sgd", **options: Any) -> Any:
    """A Trainer of this kind, with the options of `OPTIMIZERS` unless others are given."""
    options = options or dict(OPTIMIZERS[optimizer])
    if kind == "DistributedTrainer":
        return hvd.DistributedTrainer(net.collect_params(), optimizer, options)
    return mx.gluon.Trainer(net.collect_params(), optimizer, options, kvstore="horovod")


def states(trainer: Any) -> list[Any]:
    """Everything that an optimizer remembers."""

    def flat(state: Any) -> list[Any]:
        if state is None:
            return []
        return [state.asnumpy()] if hasattr(state, "asnumpy") else [x for each in state for x in flat(each)]

    values = [x for updater in trainer._updaters for key in sorted(updater.states) for x in flat(updater.states[key])]
    optimizer = trainer._optimizer
    return [*values, np.array([optimizer.num_update, optimizer.learning_rate])]


def assert_same_everywhere(net: Any, trainer: Any, name: str) -> None:
    """Parameters and states are equal on all workers, bit by bit."""
    for place, values in enumerate([*weights(net), *states(trainer)]):
        assert_equal_on_all_ranks(values, f"{name}/{place}")


def train(net: Any, trainer: Any, data: Any, label: Any, batches: Any, batch_size: Callable[[Any], Any] = len) -> None:
    """Train on some batches."""
    for batch in batches:
        backward(net, [(array(data[list(batch)]), array(label[list(batch)]))])
        trainer.step(batch_size(batch))


def train_alone(
    net: Any,
    counts: list[int],
    data: Any,
    label: Any,
    batch_size: Callable[[Any], Any],
) -> None:
    """One process on the samples that all workers have in each step."""
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", dict(OPTIMIZERS["sgd"]), kvstore=None)
    each = [batches_of(counts, r) for r in range(len(counts))]
    for step in range(max(map(len, each))):
        present = [batches[step] for batches in each if step < len(batches)]
        samples_of_step = [at for batch in present for at in batch]
        backward(net, [(array(data[samples_of_step]), array(label[samples_of_step]))])
        trainer.step(batch_size(present))


def assert_close(net: Any, alone: Any) -> None:
    """The parameters are equal, but for rounding: the largest of the networks here, four workers, their most steps."""
    near = apart(sgd_roundings([8, 16, 16, 3], 4 * BATCH, 14))
    for mine, theirs in zip(weights(net), weights(alone)):
        assert np.linalg.norm(mine - theirs) <= near * np.linalg.norm(theirs)
