"""Gradients in shared memory: when they come there, when they must not, and that what MXNet makes anew comes too."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from support.arrays import assert_same_bits
from support.gluon import gradients, parameters, weights
from support.networks import BATCH, MODES, NETWORKS, backward, batch, built, step, trainer_of
from support.zero_copy import are_in_arena, both, gradient_bytes, zero_copy

mx = pytest.importorskip("mxnet")

from mxnet import autograd, gluon  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_static_graphs")

# -- Where gradients come from ------------------------------------------------------------------------------------


def test_gradients_are_born_in_the_arena(rank, size):
    """With a world at initialize(), gradients never lie anywhere else."""
    net = built("dense")
    assert are_in_arena(net) == [size > 1] * 4
    assert all((gradient == 0).all() for gradient in gradients(net))
    backward(net, batch((BATCH, 8), rank))
    before = [param.grad() for param in parameters(net)]
    trainer_of(net).step(1)
    assert all(one is other.grad() for one, other in zip(before, parameters(net)))


@pytest.mark.parametrize("name", ["horovod", "dist_horovod", None])
def test_gradients_that_were_there_before_move(rank, size, name):
    """Gradients from before there was a world move with their values: as the Trainer is made, or at its first step."""
    with zero_copy(False):
        net = built("dense")
    assert are_in_arena(net) == [False] * 4
    backward(net, batch((BATCH, 8), rank))
    before = gradients(net)
    trainer = trainer_of(net, "create" if name is None else name)
    assert are_in_arena(net) == [size > 1 and name is None] * 4
    for one, other in zip(gradients(net), before):
        assert_same_bits(one, other)
    trainer.step(1)
    assert are_in_arena(net) == [size > 1] * 4


def test_a_graph_from_before_the_trainer(rank, size):
    """A loss recorded before there was a Trainer still finds the gradients when they did not have to move."""

    def run():
        net = built("dense")
        with autograd.record():
            loss = (net(batch((BATCH, 8), rank)) ** 2).sum()
        trainer = trainer_of(net)
        loss.backward()
        trainer.step(1)
        return weights(net)

    both(run)


@pytest.mark.parametrize(("mode", "kvstore"), zip(MODES, ["create", "horovod", "create"]))
def test_gradients_that_a_graph_may_keep(rank, size, kvstore, mode):
    """A static graph writes to the gradients of its first backward pass for ever: those must not move any more."""
    expected = []

    def run():
        with zero_copy(False):
            net = built("dense", mode)
            backward(net, batch((BATCH, 8), (rank, 0)))  # the graph is compiled
        trainer = trainer_of(net, kvstore)
        for seed in range(4):
            step(net, trainer, "dense", seed, rank)
        expected.append(4 * gradient_bytes(net))
        return weights(net) + gradients(net)

    reduced = both(run)
    assert reduced == (expected[-1] if size > 1 and mode != "static" else 0)


def test_gradients_that_a_local_trainer_has_used(rank, size):
    """The flag of a fresh gradient is off, and yet a static graph has it."""

    def run():
        with zero_copy(False):
            net = built("dense", "static")
            step(net, gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-3}, kvstore=None), "dense", 0, 0)
        trainer = trainer_of(net)
        for seed in range(3):
            step(net, trainer, "dense", seed, rank)
        return weights(net) + gradients(net)

    both(run)


def test_two_losses_recorded_before_the_first_step(rank, size):
    """Backward passes of graphs that are older than a step reach the gradients of the step after it."""

    def run():
        net = built("dense")
        trainer = trainer_of(net)
        with autograd.record():
            losses = [(net(batch((BATCH, 8), (rank, i))) ** 2).sum() for i in range(2)]
        for loss in losses:
            loss.backward()
            trainer.step(1)
        return weights(net)

    both(run)


def test_gradients_move_inside_of_record(rank, size):
    """Gradients that move while something is recorded leave nothing in the graph."""
    with zero_copy(False):
        net, other = built("dense"), built("dense")
    data = batch((BATCH, 8), rank)
    for one, on in ((net, True), (other, False)):
        with zero_copy(on):
            trainer = trainer_of(one, "horovod")
            for _ in range(2):
                with autograd.record():
                    (one(data) ** 2).mean().backward()
                    trainer.allreduce_grads()
                trainer.update(1)
    assert are_in_arena(net) == [size > 1] * 4
    for a, b in zip(weights(net), weights(other)):
        assert_same_bits(a, b)


def test_two_trainers_on_the_same_parameters(rank, size):
    """Both find the gradients in the arena."""
    expected = []

    def run():
        net = built("dense")
        trainers = [trainer_of(net), trainer_of(net)]
        for seed in range(4):
            step(net, trainers[seed % 2], "dense", seed, rank)
        expected.append(4 * gradient_bytes(net))
        return weights(net)

    assert both(run) == (expected[-1] if size > 1 else 0)


def test_two_trainers_on_two_nets(rank, size):
    """Each has its own keys; both are summed in place."""
    expected = []

    def run():
        names = ("dense", "conv")
        nets = [built(name) for name in names]
        trainers = [trainer_of(net) for net in nets]
        for seed in range(3):
            for name, net in zip(names, nets):
                backward(net, batch(NETWORKS[name][1], (seed, rank)))
            for trainer in trainers:
                trainer.step(1)
        expected.append(3 * sum(gradient_bytes(net) for net in nets))
        return [value for net in nets for value in weights(net)]

    assert both(run, own=True) == (expected[-1] if size > 1 else 0)


def test_parameters_without_gradients(rank, size):
    """They stay without; the others are summed in place."""
    expected = []

    def run():
        net = built("dense")
        parameters(net)[0].grad_req = "null"
        trainer = trainer_of(net)
        for seed in range(3):
            step(net, trainer, "dense", seed, rank)
        assert parameters(net)[0]._grad is None
        expected.append(3 * gradient_bytes(net))
        return weights(net)

    assert both(run) == (expected[-1] if size > 1 else 0)


# -- What replaces gradients --------------------------------------------------------------------------------------


def null_and_back(net, folder):
    for param in parameters(net):
        param.grad_req = "null"
    for param in parameters(net):
        param.grad_req = "write"


def write_to_add(net, folder):
    for param in parameters(net):
        param.grad_req = "add"


def reset_ctx(net, folder):
    for param in parameters(net):
        param.reset_ctx(mx.cpu())


def cast(net, folder):
    net.cast("float64")


def force_reinit(net, folder):
    mx.random.seed(5)
    net.initialize(mx.init.Normal(0.2), force_reinit=True)


def initialize_again(net, folder):
    net.initialize(mx.init.Normal(0.2))  # MXNet warns and changes nothing


def load_parameters(net, folder):
    file = str(folder / "parameters")
    net.save_parameters(file)
    net.load_parameters(file)


CHANGES = (null_and_back, write_to_add, reset_ctx, cast, force_reinit, initialize_again, load_parameters)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_gradients_are_in_the_arena_again(rank, size, tmp_path, change, mode):
    """The steps after MXNet has replaced gradients are right, and in place."""
    expected = []

    def run():
        net = built("dense", mode)
        trainer = trainer_of(net)
        total = 0
        for seed in range(4):
            if seed == 2:
                change(net, tmp_path)
            step(net, trainer, "dense", seed, rank, "float64" if change is cast and seed >= 2 else "float32")
            total += gradient_bytes(net)
        expected.append(total)
        run.net = net
        return weights(net)

    assert both(run) == (expected[-1] if size > 1 else 0)
    assert are_in_arena(run.net) == [size > 1] * 4


def test_a_copy_of_a_net(rank, size):
    """What MXNet lets a program do with a copied net it still may, and the copy trains as well."""

    def run():
        net = built("dense")
        backward(net, batch((BATCH, 8), rank))
        trainer = trainer_of(net)
        trainer.step(1)
        try:
            twin = copy.deepcopy(net)
        except Exception as error:
            return [np.frombuffer(type(error).__name__.encode(), np.uint8)]
        null_and_back(twin, None)  # a copied array is no variable of autograd any more
        other = trainer_of(twin)
        step(twin, other, "dense", 1, rank)
        return weights(net) + weights(twin)

    both(run)
