"""Gradients that cannot be summed where they lie: they go through staging memory, and nothing else changes."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from kvstore_hvd.mxnet_compat.gradients import why_staged
from support.arrays import assert_same_bits
from support.gluon import is_mxnet_2, mlp, parameters, weights
from support.networks import BATCH, backward, batch, built, step, trainer_of
from support.zero_copy import are_in_arena, both, bytes_in_place, gradient_bytes, zero_copy

mx = pytest.importorskip("mxnet")

from mxnet import autograd, gluon  # noqa: E402
from mxnet.gluon import nn  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_static_graphs")


def test_several_devices_stay_staged(rank, size):
    """Their gradients are first summed on each worker."""
    contexts = [mx.cpu(0), mx.cpu(1)]

    def run():
        net = mlp(contexts=contexts)
        trainer = trainer_of(net)
        for seed in range(3):
            with autograd.record():
                losses = [
                    (net(batch((BATCH, 8), (seed, rank, d)).copyto(ctx)) ** 2).sum() for d, ctx in enumerate(contexts)
                ]
            for loss in losses:
                loss.backward()
            trainer.step(1)
        run.net = net
        return weights(net, 0) + weights(net, 1)

    assert both(run) == 0
    assert not any(are_in_arena(run.net))
    if size > 1:
        assert {why_staged(p) for p in parameters(run.net)} == {"2 devices"}


def test_other_device_stays_staged(rank, size):
    """Arrays of ours are on cpu(0), which a parameter on cpu(1) is not."""

    def run():
        net = mlp(contexts=[mx.cpu(1)])
        trainer = trainer_of(net)
        data = batch((BATCH, 8), rank).copyto(mx.cpu(1))
        backward(net, data)
        trainer.step(1)
        return weights(net)

    assert both(run) == 0


@pytest.mark.parametrize("dtype", ["int8", "int64"])
def test_integers_stay_staged(rank, size, dtype):
    """Integer gradients are summed through staging memory."""
    param = gluon.Parameter("steps", shape=(5,), dtype=dtype, init="zeros")
    param.initialize()
    trainer = gluon.Trainer([param], "sgd", {"learning_rate": 1}, kvstore=mx.kv.create("horovod"))
    param.grad()[:] = rank + 1
    before = bytes_in_place()
    trainer.allreduce_grads()
    assert_same_bits(param.grad().asnumpy(), np.full(5, sum(range(1, size + 1)), dtype))
    assert bytes_in_place() == before
    if size > 1:
        assert why_staged(param) == dtype


@pytest.mark.skipif(is_mxnet_2(), reason="MXNet 2 has no sparse gradients in Gluon")
def test_sparse_gradients_are_left_alone(rank, size):
    """They are summed where they are, with zero copy too."""
    outcomes = []
    for on in (False, True):
        with zero_copy(on):
            net = nn.Embedding(6, 3, sparse_grad=True)
            net.initialize()
            trainer = trainer_of(net)
            with autograd.record():
                loss = net(mx.nd.array([rank, 1])).sum()
            loss.backward()
            net.weight.set_data(mx.nd.ones((6, 3)))
            trainer.step(1)
            outcomes.append(net.weight.data().asnumpy().tolist())
            assert net.weight.grad().stype == "row_sparse"
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("with_arena", ["first", "last", "all but first"])
def test_some_workers_have_it_switched_off(rank, size, with_arena):
    """The bits are the same when the gradients of any worker are elsewhere, and those stay where they are."""
    mine = {"first": rank == 0, "last": rank == size - 1, "all but first": rank != 0}[with_arena]

    def run():
        net = built("dense")
        trainer = trainer_of(net)
        for seed in range(3):
            step(net, trainer, "dense", seed, rank)
        return weights(net)

    with zero_copy(mine):
        assert both(run) == 0 or mine


def test_one_array_of_one_worker_is_elsewhere(rank, size):
    """Arrays in arenas and elsewhere within one step, differently on the workers."""
    expected = []

    def run():
        net = built("norm")
        trainer = trainer_of(net)
        step(net, trainer, "norm", 0, rank)
        first = parameters(net)[0]
        with zero_copy(False) if rank == size - 1 else contextlib.nullcontext():
            if rank == size - 1:
                first.grad_req = "null"
                first.grad_req = "write"
            step(net, trainer, "norm", 1, rank)
        expected.append(2 * gradient_bytes(net) - 4 * int(np.prod(first.shape)))
        return weights(net)

    assert both(run) == (expected[-1] if size > 1 else 0)
