"""Gradients in shared memory: when they come there, when they must not, and that what MXNet makes anew comes too."""

import contextlib
import copy

import numpy as np
import pytest

from support.arrays import assert_same_bits, by_host, contribution, expected_sum
from support.gluon import array, gradients, parameters, weights
from support.networks import BATCH, MODES, backward, batch, built, step, trainer_of
from support.zero_copy import are_in_arena, both, gradient_bytes, zero_copy

mx = pytest.importorskip("mxnet")

from mxnet import autograd  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_static_graphs")

# -- Where gradients come from ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["horovod", None])
def test_gradients_that_were_there_before_move(rank, size, name):
    """Gradients from before there was a world move with their values: as the Trainer is made, or at its first step.

    With a world at initialize(), they never lie anywhere else.
    """
    born = built("dense")
    assert are_in_arena(born) == [size > 1] * 4
    assert all((gradient == 0).all() for gradient in gradients(born))
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


@pytest.mark.parametrize(
    ("count", "elsewhere"), [(30_011, None), (30_011, 0), (100_003, None), (600_011, None), (600_011, 1)]
)
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
        weight.grad()[:] = 7  # as an output only
        trainer._kvstore.pushpull("other", array(contribution(rank, (count,), "float32")), out=weight.grad())
        assert_same_bits(weight.grad().asnumpy(), expected_sum(size, (count,), "float32"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kvstore", ["create", "horovod"])
def test_stale_gradients_are_noticed_as_without_us(rank, size, kvstore):
    """A step without a backward pass raises; with ignore_stale_grad it leaves alone what is stale."""
    outcomes = []

    def run():
        with zero_copy(False):
            net = built("dense")
        trainer = trainer_of(net, kvstore)
        values = []

        def attempt(**options):
            try:
                trainer.step(1, **options)
                outcomes.append("done")
            except UserWarning:
                outcomes.append("stale")
            values.extend(weights(net))

        attempt()  # before any backward pass
        backward(net, batch((BATCH, 8), rank))
        attempt()
        attempt()  # twice without a backward pass between
        attempt(ignore_stale_grad=True)
        backward(net[0], batch((BATCH, 8), rank))  # only half of the parameters
        attempt(ignore_stale_grad=True)
        attempt()
        return values

    both(run)
    assert outcomes == ["stale", "done", "stale", "done", "done", "stale"] * 2


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


@pytest.mark.parametrize(("mode", "kvstore"), [*zip(MODES, ["create", "horovod", "create"]), ("static", None)])
def test_gradients_that_a_graph_may_keep(rank, size, kvstore, mode):
    """A static graph writes to the gradients of its first backward pass for ever: those must not move any more.

    Also where a local Trainer has used them: the flag of a fresh gradient is off, and yet a static graph has it.
    """
    expected = []

    def run():
        with zero_copy(False):
            net = built("dense", mode)
            backward(net, batch((BATCH, 8), (rank, 0)))  # the graph is compiled
            if kvstore is None:
                trainer_of(net, None).step(1)
        trainer = trainer_of(net, kvstore or "create")
        for seed in range(4):
            step(net, trainer, "dense", seed, rank)
        expected.append(4 * gradient_bytes(net))
        return weights(net) + gradients(net)

    reduced = both(run, own=kvstore is None)
    assert reduced == (expected[-1] if size > 1 and mode != "static" else 0)


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


# -- What replaces gradients --------------------------------------------------------------------------------------


def null_and_back(net, folder):
    for param in parameters(net):
        param.grad_req = "null"
    for param in parameters(net):
        param.grad_req = "write"


def load_parameters(net, folder):
    file = str(folder / "parameters")
    net.save_parameters(file)
    net.load_parameters(file)


CHANGES = {
    "null and back": null_and_back,
    "add": lambda net, folder: [setattr(param, "grad_req", "add") for param in parameters(net)],
    "reset_ctx": lambda net, folder: [param.reset_ctx(mx.cpu()) for param in parameters(net)],
    "cast": lambda net, folder: net.cast("float64"),
    "reinit": lambda net, folder: mx.random.seed(5) or net.initialize(mx.init.Normal(0.2), force_reinit=True),
    "initialize": lambda net, folder: net.initialize(mx.init.Normal(0.2)),  # MXNet warns and changes nothing
    "load": load_parameters,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("change", "mode"), [*zip(CHANGES, [*MODES] * 3), ("null and back", "static")])
def test_after_a_change_gradients_are_in_the_arena_again(rank, size, tmp_path, change, mode):
    """The steps after MXNet has replaced gradients are right, and in place."""
    expected = []

    def run():
        net = built("dense", mode)
        trainer = trainer_of(net)
        total = 0
        for seed in range(4):
            if seed == 2:
                CHANGES[change](net, tmp_path)
            step(net, trainer, "dense", seed, rank, "float64" if change == "cast" and seed >= 2 else "float32")
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


# -- What cannot be summed where it lies goes through staging memory ---------------------------------------------------


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
        (on_host,) = (ranks for ranks in by_host(list(range(size))) if rank in ranks)
        expected.append(2 * gradient_bytes(net) - (4 * int(np.prod(first.shape)) if size - 1 in on_host else 0))
        return weights(net)

    assert both(run) == (expected[-1] if size > 1 else 0)
