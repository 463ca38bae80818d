"""Gradients in shared memory: when they come there, and when they must not; what MXNet makes anew; its memory."""

import copy
import gc

import numpy as np
import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from kvstore_hvd import log
from kvstore_hvd.config import config
from support.arrays import assert_same_bits, contribution, expected_sum
from support.gluon import array, assert_alike, gradients, parameters, weights
from support.networks import BATCH, MODES, backward, batch, built, sequential, step, trainer_of
from support.patience import in_child
from support.zero_copy import are_in_arena, arena, both, bytes_in_place, gradient_bytes, meet_again, settings, zero_copy

mx = pytest.importorskip("mxnet")

from mxnet import autograd  # noqa: E402
from mxnet.gluon import nn  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_static_graphs")


@pytest.mark.parametrize("name", ["horovod", None])
def test_gradients_that_were_there_before_move(rank, size, name):
    """Gradients from before there was a world move with their values: as the Trainer is made, or at its first step.
    With a world at initialize(), they never lie anywhere else."""
    born = built("dense")
    assert are_in_arena(born) == [size > 1] * 4
    assert all((gradient == 0).all() for gradient in gradients(born))
    assert len(gradients(copy.deepcopy(born))) == 4
    for dtype in ("float16", "float64"):
        born.cast(dtype)
        assert are_in_arena(born) == [size > 1] * 4
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
def test_stale_gradients_are_noticed_as_without_us(rank, size):
    """A step without a backward pass raises; with ignore_stale_grad it leaves alone what is stale."""
    outcomes = []

    def run():
        with zero_copy(False):
            net = built("dense")
        trainer = trainer_of(net, "horovod")
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


@pytest.mark.parametrize(("mode", "kvstore"), [*zip(MODES, ["create", "horovod", "create"]), ("static", None)])
def test_gradients_that_a_graph_may_keep(rank, size, kvstore, mode):
    """A static graph writes to the gradients of its first backward pass for ever: those must not move any more. Also
    where a local Trainer has used them: the flag of a fresh gradient is off, and yet a static graph has it."""

    def run():
        with zero_copy(False):
            net = built("dense", mode)
            backward(net, batch((BATCH, 8), (rank, 0)))  # the graph is compiled
            if kvstore is None:
                trainer_of(net, None).step(1)
        trainer = trainer_of(net, kvstore or "create")
        for seed in range(4):
            step(net, trainer, "dense", seed, rank)
        run.bytes = 4 * gradient_bytes(net)
        return weights(net) + gradients(net)

    assert both(run, own=kvstore is None) == (run.bytes if size > 1 and mode != "static" else 0)


def test_gradients_move_inside_of_record(rank, size):
    """Gradients that move while something is recorded leave nothing in the graph."""

    def run():
        with zero_copy(False):
            net = built("dense")
        trainer = trainer_of(net, "horovod")
        for _ in range(2):
            with autograd.record():
                (net(batch((BATCH, 8), rank)) ** 2).mean().backward()
                trainer.allreduce_grads()
            trainer.update(1)
        run.inside = are_in_arena(net)
        return weights(net)

    both(run)
    assert run.inside == [size > 1] * 4


def set_all(net, *grad_reqs):
    for grad_req in grad_reqs:
        for param in parameters(net):
            param.grad_req = grad_req


CHANGES = {
    "null and back": lambda net, folder: set_all(net, "null", "write"),
    "reset_ctx": lambda net, folder: [param.reset_ctx(mx.cpu()) for param in parameters(net)],
    "add": lambda net, folder: set_all(net, "add"),
    "reinit": lambda net, folder: mx.random.seed(5) or net.initialize(mx.init.Normal(0.2), force_reinit=True),
    "initialize": lambda net, folder: net.initialize(mx.init.Normal(0.2)),  # MXNet warns and changes nothing
    "load": lambda net, folder: [do(str(folder / "parameters")) for do in (net.save_parameters, net.load_parameters)],
    "cast": lambda net, folder: net.cast("float64"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", MODES)
def test_after_a_change_gradients_are_in_the_arena_again(rank, size, tmp_path, mode):
    """The steps after MXNet has replaced gradients are right, and in place."""

    def run():
        net = built("dense", mode)
        trainer = trainer_of(net)
        total, values = 0, []
        for number, change in enumerate(CHANGES):
            CHANGES[change](net, tmp_path)
            for seed in range(2):
                dtype = "float64" if change == "cast" else "float32"
                step(net, trainer, "dense", 2 * number + seed, rank, dtype)
                total += gradient_bytes(net)
            values += weights(net)
            assert are_in_arena(net) == [size > 1 and config().zero_copy] * 4, change
        run.bytes = total
        return values

    assert both(run) == (run.bytes if size > 1 else 0)


def test_a_full_arena(rank, size, caplog):
    """What does not fit is staged, right, and said once."""

    def run():
        net = sequential(
            nn.Dense(16, in_units=8), nn.Dense(40000, in_units=16), nn.Dense(2, in_units=40000), nn.Dense(3, in_units=2)
        )
        mx.random.seed(3)
        net.initialize(mx.init.Normal(0.01))
        trainer = trainer_of(net)
        for seed in range(2):
            step(net, trainer, "dense", seed, rank)
        run.bytes = 2 * gradient_bytes(net)
        run.inside = are_in_arena(net)
        return weights(net)

    with settings(KVHVD_ARENA_MIB="1"):
        meet_again()
        log._logged.discard("arena-full")
        reduced = both(run)
    meet_again()
    assert run.inside == [size > 1 and place != 2 for place in range(8)]  # 1 MiB: all but the weights of 2.5 MB
    assert 0 < reduced < run.bytes or size == 1
    said = [record for record in caplog.records if "shared gradients is full" in record.getMessage()]
    assert len(said) == (1 if size > 1 else 0)


@pytest.mark.parametrize("mode", ["plain", "static"])
def test_reset_moves_gradients(rank, size, mode):
    """After a reset the next step moves gradients to the arena of the new world, and the old memory comes back. Where a
    static graph may have them, they stay, and are staged."""
    gc.collect()
    meet_again()  # arrays of other tests stay in their worlds
    moves = mode != "static"
    net = built("dense", mode, grad_req="add")
    trainer = trainer_of(net)
    step(net, trainer, "dense", 0, rank)
    for seed in range(1, 3):
        backward(net, batch((BATCH, 8), (seed, rank)))  # with 'add', what the gradients are now counts
        before, old = gradients(net), arena()
        meet_again()
        for one, other in zip(gradients(net), before):
            assert_same_bits(one, other)
        step(net, trainer, "dense", seed, rank)
        mx.nd.waitall()
        assert old is None or not moves or old.used == 0
    assert are_in_arena(net) == [size > 1 and moves] * 4
    assert bytes_in_place() == (gradient_bytes(net) if size > 1 and moves else 0)


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


@pytest.mark.parametrize("moment", ["after a reset", "after a shutdown", "after a process set"])
def test_a_forked_child_writes_to_memory_of_its_own(dynamic, rank, size, moment):
    """The parent's gradients, in whatever world they are, stay as they are, and training goes on."""
    meet_again()
    if moment == "after a process set" and size > 1:  # which was gone when there was nothing in the arena
        hvd.remove_process_set(hvd.add_process_set([0]))
    net = built("dense")
    trainer = trainer_of(net)
    step(net, trainer, "dense", 0, rank)
    assert are_in_arena(net) == [size > 1] * 4
    data = batch((BATCH, 8), rank)
    if moment == "after a reset":
        meet_again()
    elif moment == "after a shutdown":
        mx.nd.waitall()
        kvstore_hvd.barrier()
        kvstore_hvd.shutdown()
    before = gradients(net)
    in_child(lambda: change_everything(net, before, data))
    # A child's child too has what the child has.
    in_child(lambda: nested(net))
    for one, other in zip(gradients(net), before):
        assert_same_bits(one, other)
    if moment == "after a shutdown":
        kvstore_hvd.reset()
    step(net, trainer, "dense", 1, rank)
    assert are_in_arena(net) == [size > 1] * 4
    assert_alike(net)


def nested(net):
    for param in parameters(net):
        param.grad()[:] = 5

    def look():
        assert all((gradient == 5).all() for gradient in gradients(net))
        for param in parameters(net):
            param.grad()[:] = 6

    in_child(look)
    assert all((gradient == 5).all() for gradient in gradients(net))
