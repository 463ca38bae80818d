"""Gradients in shared memory: training is as without them, bit by bit, and MXNet notices stale gradients as ever."""

from __future__ import annotations

import numpy as np
import pytest

from support.arrays import assert_same_bits, contribution, expected_sum
from support.gluon import weights
from support.networks import BATCH, backward, batch, built, trainer_of
from support.zero_copy import zero_copy

mx = pytest.importorskip("mxnet")

pytestmark = pytest.mark.usefixtures("no_static_graphs")

# -- The same bits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elsewhere", [None, 0, 1])
@pytest.mark.parametrize("count", [30_011, 100_003, 600_011])
def test_large_gradients(rank, size, count, elsewhere):
    """Workers sum those in parts, the last of which is smaller, unless that of one of them is elsewhere."""
    with zero_copy(rank != elsewhere):
        weight = mx.gluon.Parameter("weight", shape=(count,))
        weight.initialize()
        trainer = mx.gluon.Trainer({"weight": weight}, "sgd", kvstore="horovod")
        for _ in range(3):
            weight.grad()[:] = contribution(rank, (count,), "float32")
            trainer.allreduce_grads()
            assert_same_bits(weight.grad().asnumpy(), expected_sum(size, (count,), "float32"))


# -- MXNet's check for stale gradients ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kvstore", ["create", "horovod"])
def test_stale_gradients_are_noticed_as_without_us(rank, size, kvstore):
    """A step without a backward pass raises; with ignore_stale_grad it leaves alone what is stale."""

    def run():
        with zero_copy(False):
            net = built("dense")
        trainer = trainer_of(net, kvstore)
        values = []

        def attempt(**options):
            try:
                trainer.step(1, **options)
                outcome = 0
            except UserWarning:
                outcome = 1
            values.append(np.array([outcome]))
            values.extend(weights(net))

        attempt()  # before any backward pass
        backward(net, batch((BATCH, 8), rank))
        attempt()
        attempt()  # twice without a backward pass between
        attempt(ignore_stale_grad=True)
        backward(net[0], batch((BATCH, 8), rank))  # only half of the parameters
        attempt(ignore_stale_grad=True)
        attempt()
        assert [int(v[0]) for v in values if v.dtype != np.float32] == [1, 0, 1, 0, 0, 1]
        return values

    with zero_copy(False):
        staged = run()
    for one, other in zip(run(), staged):
        assert_same_bits(one, other)
