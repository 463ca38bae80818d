"""Gradients in shared memory and forked children: a child has memory of its own, and the parent trains on."""

import os
import signal
import sys

import numpy as np
import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from support.arrays import assert_equal_on_all_ranks, assert_same_bits
from support.gluon import gradients, parameters, weights
from support.networks import BATCH, backward, batch, built, step, trainer_of
from support.zero_copy import are_in_arena, meet_again

mx = pytest.importorskip("mxnet")

pytestmark = pytest.mark.usefixtures("no_static_graphs")

CHILD_S = 60


def in_child(work):
    """Fork, have the child do `work`, and return its exit code: 0 unless it raised or was killed."""
    child = os.fork()
    if child == 0:
        signal.alarm(CHILD_S)
        try:
            work()
        except BaseException as error:
            print(f"child: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def change_everything(net, before, data):
    """In a child: read the gradients, run a backward pass, then overwrite them."""
    for one, other in zip(gradients(net), before):
        assert_same_bits(one, other)
    backward(net, data)
    assert all(np.isfinite(gradient).all() for gradient in gradients(net))
    for param in parameters(net):
        param.grad()[:] = 77
    assert all((gradient == 77).all() for gradient in gradients(net))
    again = built("dense")  # no arena for a child
    backward(again, data)
    for param in (*parameters(net), *parameters(again)):
        param._grad = None


def test_the_arena_is_known_to_forks_when_a_process_set_is_gone(dynamic, rank, size):
    """Also when nothing lay in it by then."""
    meet_again()
    if size > 1:
        hvd.remove_process_set(hvd.add_process_set([0]))
    net = built("dense")
    step(net, trainer_of(net), "dense", 0, rank)
    assert are_in_arena(net) == [size > 1] * 4
    data, before = batch((BATCH, 8), rank), gradients(net)
    assert in_child(lambda: change_everything(net, before, data)) == 0
    for one, other in zip(gradients(net), before):
        assert_same_bits(one, other)


@pytest.mark.parametrize("moment", ["in a world", "after a reset", "after a shutdown"])
def test_a_forked_child_writes_to_memory_of_its_own(rank, size, moment):
    """The parent's gradients, in whatever world they are, stay as they are, and training goes on."""
    net = built("dense")
    trainer = trainer_of(net)
    step(net, trainer, "dense", 0, rank)
    data = batch((BATCH, 8), rank)
    if moment == "after a reset":
        meet_again()
    elif moment == "after a shutdown":
        mx.nd.waitall()
        kvstore_hvd.barrier()
        kvstore_hvd.shutdown()
    before = gradients(net)
    assert in_child(lambda: change_everything(net, before, data)) == 0
    # A child's child too has what the child has.
    assert in_child(lambda: nested(net)) == 0
    for one, other in zip(gradients(net), before):
        assert_same_bits(one, other)
    if moment == "after a shutdown":
        kvstore_hvd.reset()
    step(net, trainer, "dense", 1, rank)
    assert are_in_arena(net) == [size > 1] * 4
    for i, weight in enumerate(weights(net)):
        assert_equal_on_all_ranks(weight, f"weight {i}")


def nested(net):
    for param in parameters(net):
        param.grad()[:] = 5

    def look():
        assert all((gradient == 5).all() for gradient in gradients(net))
        for param in parameters(net):
            param.grad()[:] = 6

    assert in_child(look) == 0
    assert all((gradient == 5).all() for gradient in gradients(net))
