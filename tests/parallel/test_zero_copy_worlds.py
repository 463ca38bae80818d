"""The memory of shared gradients: it is given back, it may be full, and worlds that are left keep theirs."""

import gc

import pytest

from kvstore_hvd import log
from support.arrays import assert_same_bits
from support.gluon import gradients, weights
from support.networks import BATCH, MODES, backward, batch, built, sequential, step, trainer_of
from support.zero_copy import (
    are_in_arena,
    arena,
    both,
    bytes_in_place,
    gradient_bytes,
    meet_again,
    settings,
    zero_copy,
)

mx = pytest.importorskip("mxnet")

from mxnet.gluon import nn  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_static_graphs")


def test_a_full_arena(rank, size, caplog):
    """What does not fit is staged, right, and said once."""
    sizes = {}

    def run():
        net = sequential(
            nn.Dense(16, in_units=8), nn.Dense(40000, in_units=16), nn.Dense(2, in_units=40000), nn.Dense(3, in_units=2)
        )
        mx.random.seed(3)
        net.initialize(mx.init.Normal(0.01))
        trainer = trainer_of(net)
        for seed in range(2):
            step(net, trainer, "dense", seed, rank)
        sizes["all"] = 2 * gradient_bytes(net)
        run.inside = are_in_arena(net)
        return weights(net)

    with settings(KVHVD_ARENA_MIB="1"):
        meet_again()
        log._logged.discard("arena-full")
        reduced = both(run)
    meet_again()
    assert any(run.inside) == (size > 1)
    assert not all(run.inside)
    assert 0 < reduced < sizes["all"] or size == 1
    said = [record for record in caplog.records if "shared gradients is full" in record.getMessage()]
    assert len(said) == (1 if size > 1 else 0)


@pytest.mark.parametrize("mode", MODES)
def test_reset_moves_gradients(rank, size, mode):
    """After a reset the next step moves gradients to the arena of the new world, and the old memory comes back.

    Where a static graph may have them, they stay, and are staged.
    """
    expected = []
    moves = mode != "static"

    def run():
        net = built("dense", mode, grad_req="add")
        trainer = trainer_of(net)
        step(net, trainer, "dense", 0, rank)
        for seed in range(1, 4):
            backward(net, batch((BATCH, 8), (seed, rank)))  # with 'add', what the gradients are now counts
            before = gradients(net)
            old = arena()
            meet_again()
            for one, other in zip(gradients(net), before):
                assert_same_bits(one, other)
            step(net, trainer, "dense", seed, rank)
            mx.nd.waitall()
            assert old is None or not run.on or not moves or old.used == 0
        expected.append(gradient_bytes(net))
        run.net = net
        return weights(net)

    run.on = False
    with zero_copy(False):
        staged = run()
    gc.collect()
    mx.nd.waitall()
    meet_again()  # arrays of other tests stay in their worlds
    run.on = True
    direct = run()
    for one, other in zip(direct, staged):
        assert_same_bits(one, other)
    assert are_in_arena(run.net) == [size > 1 and moves] * 4
    assert bytes_in_place() == (expected[-1] if size > 1 and moves else 0)
