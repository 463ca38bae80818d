"""Gradients in shared memory: training has the same bits as without, and they really are summed where they lie."""

from __future__ import annotations

import contextlib
import copy
import gc
import multiprocessing
import os
import signal
import sys
import time

import numpy as np
import pytest

import kvstore_hvd
from kvstore_hvd import log
from kvstore_hvd.errors import HorovodInternalError
from kvstore_hvd.mxnet_compat import gradients as gradients_module
from kvstore_hvd.mxnet_compat.gradients import why_staged
from support.arrays import assert_equal_on_all_ranks, assert_same_bits
from support.gluon import array, gradients, is_mxnet_2, mlp, parameters, weights
from support.zero_copy import (
    are_in_arena,
    arena,
    bytes_in_place,
    gradient_bytes,
    lies_in_arena,
    settings,
    zero_copy,
)

mx = pytest.importorskip("mxnet")

from mxnet import autograd, gluon  # noqa: E402
from mxnet.gluon import nn, rnn  # noqa: E402

BATCH = 4  # of each worker
CHILD_S = 60
NETS = 300


@pytest.fixture(autouse=True)
def no_static_graphs(monkeypatch):
    """Each test starts as a program of its own would; what earlier ones have compiled is gone."""
    monkeypatch.setattr(gradients_module, "_static_graphs", False)


# -- Networks: name -> (how to make it, shape of a batch) ---------------------------------------------------------


def sequential(*layers):
    net = nn.HybridSequential()
    net.add(*layers)
    return net


def conv_net():
    return sequential(
        nn.Conv2D(6, 3, padding=1, in_channels=2),
        nn.BatchNorm(in_channels=6),
        nn.Activation("relu"),
        nn.Conv2D(4, 3, in_channels=6, use_bias=False),
        nn.Flatten(),
        nn.Dense(3, in_units=4 * 6 * 6),
    )


def norm_net():
    return sequential(
        nn.Dense(600, activation="tanh", in_units=8), nn.LayerNorm(in_channels=600), nn.Dense(3, in_units=600)
    )


def lstm_net():
    return sequential(rnn.LSTM(12, num_layers=2, input_size=5), nn.Dense(3, flatten=False, in_units=12))


def tied_net():
    first = nn.Dense(8, activation="tanh", in_units=8)
    if is_mxnet_2():
        second = nn.Dense(8, activation="tanh", in_units=8).share_parameters(first.collect_params())
    else:
        second = nn.Dense(8, activation="tanh", in_units=8, params=first.collect_params())
    return sequential(first, second, nn.Dense(3, in_units=8))


def deferred_net():
    return sequential(nn.Dense(16, activation="tanh"), nn.Dense(3))


def dense_net():
    return sequential(nn.Dense(16, activation="tanh", in_units=8), nn.Dense(3, in_units=16))


def elementwise_net():
    """Has operators that MXNet can compute in half precision on a CPU."""

    class Scale(gluon.HybridBlock):
        def __init__(self):
            super().__init__()
            if is_mxnet_2():
                self.weight = gluon.Parameter("weight", shape=(8,), init="normal")
                self.bias = gluon.Parameter("bias", shape=(8,), init="normal")
            else:
                self.weight = self.params.get("weight", shape=(8,), init="normal")
                self.bias = self.params.get("bias", shape=(8,), init="normal")

        def forward(self, x, *args):
            if is_mxnet_2():
                return x * self.weight.data() + self.bias.data()
            return super().forward(x, *args)

        def hybrid_forward(self, F, x, weight, bias):  # noqa: N803 - MXNet's name
            return F.broadcast_add(F.broadcast_mul(x, weight), bias)

    if is_mxnet_2():
        del Scale.hybrid_forward  # MXNet 2 takes either method, not both
    return sequential(Scale(), Scale())


NETWORKS = {
    "conv": (conv_net, (BATCH, 2, 8, 8)),
    "norm": (norm_net, (BATCH, 8)),
    "lstm": (lstm_net, (6, BATCH, 5)),
    "tied": (tied_net, (BATCH, 8)),
    "deferred": (deferred_net, (BATCH, 8)),
    "dense": (dense_net, (BATCH, 8)),
    "elementwise": (elementwise_net, (BATCH, 8)),
}
MODES = {"plain": None, "hybrid": {}, "static": {"static_alloc": True, "static_shape": True}}


def batch(shape, seed, dtype="float32"):
    return array(np.random.default_rng(seed).standard_normal(shape).astype(dtype))


def built(name, mode="plain", grad_req="write", dtype="float32", seed=3):
    """Return an initialised network."""
    make, _ = NETWORKS[name]
    net = make()
    net.cast(dtype)
    mx.random.seed(seed)
    net.initialize(mx.init.Normal(0.3))
    if MODES[mode] is not None:
        net.hybridize(**MODES[mode])
    for param in parameters(net):
        if param.grad_req != "null":
            param.grad_req = grad_req
    return net


def trainer_of(net, kvstore="create"):
    store = mx.kv.create("horovod") if kvstore == "create" else kvstore
    return gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-3}, kvstore=store)


def backward(net, data):
    with autograd.record():
        loss = (net(data) ** 2).mean()
    loss.backward()


def step(net, trainer, name, seed, rank, dtype="float32"):
    """One step on a batch of this worker's own; with grad_req 'add' the sum of two."""
    adding = any(param.grad_req == "add" for param in parameters(net))
    for part in range(2 if adding else 1):
        backward(net, batch(NETWORKS[name][1], (seed, part, rank), dtype))
    trainer.step(1)
    if adding:
        for param in parameters(net):
            if param.grad_req != "null":
                param.grad()[:] = 0  # Parameter.zero_grad() raises in MXNet 2


def meet_again():
    """Leave the world, and meet in a fresh one, when everybody is done with the present one."""
    mx.nd.waitall()
    # Whoever is through has left already, and the world is lost to the others.
    with contextlib.suppress(HorovodInternalError):
        kvstore_hvd.barrier()
    kvstore_hvd.reset()


def both(run, own=False):
    """Run a training staged and in place; fails unless the bits are the same. Returns the bytes reduced in place.

    What `run` returns must be equal on all workers as well, unless it has values of each worker's `own`.
    """
    with zero_copy(False):
        before = bytes_in_place()
        staged = run()
        assert bytes_in_place() == before
    before = bytes_in_place()
    direct = run()
    reduced = bytes_in_place() - before
    assert len(staged) == len(direct)
    for one, other in zip(staged, direct):
        assert np.isfinite(one).all()
        assert_same_bits(other, one)
    for i, value in enumerate([] if own else direct):
        assert_equal_on_all_ranks(value, f"value {i}")
    return reduced


# -- The same bits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad_req", ["write", "add"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["conv", "norm", "lstm", "tied", "deferred"])
def test_training_has_the_bits_of_a_staged_one(rank, size, name, mode, grad_req):
    """Five steps; every gradient of every step is summed in place."""
    expected = []

    def run():
        net = built(name, mode, grad_req)
        trainer = trainer_of(net)
        values = []
        for seed in range(5):
            step(net, trainer, name, seed, rank)
            values += weights(net) + ([] if grad_req == "add" else gradients(net))
        expected.append(5 * gradient_bytes(net))
        return values

    assert both(run, own=name == "conv") == (expected[-1] if size > 1 else 0)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("mode", MODES)
def test_floating_dtypes(rank, size, mode, dtype):
    """Half, single and double precision."""
    expected = []

    def run():
        net = built("elementwise", mode, dtype=dtype)
        trainer = trainer_of(net)
        for seed in range(3):
            step(net, trainer, "elementwise", seed, rank, dtype)
        expected.append(3 * gradient_bytes(net))
        return weights(net) + gradients(net)

    assert both(run) == (expected[-1] if size > 1 else 0)


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


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kvstore", ["create", "horovod"])
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

    class Local(gluon.Trainer):
        _kvstore_hvd_synchronised = True

    def run():
        with zero_copy(False):
            net = built("dense", "static")
            step(net, Local(net.collect_params(), "sgd", {"learning_rate": 1e-3}, kvstore=None), "dense", 0, 0)
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


# -- What stays where it is ---------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("dtype", ["int32", "int8", "uint8", "int64"])
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
    """Whatever the store says to sparse gradients, it says with zero copy too."""
    outcomes = []
    for on in (False, True):
        with zero_copy(on):
            net = nn.Embedding(6, 3, sparse_grad=True)
            net.initialize()
            trainer = trainer_of(net)
            with autograd.record():
                loss = net(mx.nd.array([rank, 1])).sum()
            loss.backward()
            try:
                trainer.step(1)
                outcomes.append("ran")
            except Exception as error:
                outcomes.append(str(error))
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


# -- Fork ---------------------------------------------------------------------------------------------------------


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


def test_processes_of_multiprocessing(rank, size):
    """A process that multiprocessing forks ends in good order."""
    net = built("dense")
    trainer = trainer_of(net)
    step(net, trainer, "dense", 0, rank)
    before = gradients(net)
    data = batch((BATCH, 8), rank)
    process = multiprocessing.get_context("fork").Process(target=change_everything, args=(net, before, data))
    process.start()
    process.join(CHILD_S)
    assert process.exitcode == 0
    for one, other in zip(gradients(net), before):
        assert_same_bits(one, other)
    step(net, trainer, "dense", 1, rank)


def test_training_beside_a_data_loader_with_processes(rank, size):
    """The usual case: workers are forked in the middle of a training."""
    data = np.random.default_rng(rank).standard_normal((12, 8)).astype("float32")

    def run():
        net = built("dense")
        trainer = trainer_of(net)
        step(net, trainer, "dense", 0, rank)
        for _ in range(2):
            loader = gluon.data.DataLoader(gluon.data.ArrayDataset(data), batch_size=BATCH, num_workers=2, timeout=60)
            for rows in loader:
                backward(net, rows)
                trainer.step(1)
            del loader
        return weights(net)

    both(run)


# -- Room ---------------------------------------------------------------------------------------------------------


def test_no_net_leaves_anything_behind(rank, size):
    """Memory of gradients comes back as nets are deleted."""
    store = mx.kv.create("horovod")

    def one(number):
        net = sequential(nn.Dense(16, in_units=8), nn.Dense(3, in_units=16))
        net.initialize()
        if number % 3 == 0:
            net.hybridize()
        trainer = trainer_of(net, store)
        backward(net, batch((BATCH, 8), rank))
        if number % 2 == 0:
            trainer.step(1)

    def used():
        gc.collect()
        mx.nd.waitall()
        return arena().used if size > 1 else 0

    one(0)
    before = used()
    for number in range(NETS):
        one(number)
    # An operation may let go of its arrays a moment after everyone who waits for it has gone on.
    deadline = time.monotonic() + 20
    while used() > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


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
        log._said.discard("arena-full")
        reduced = both(run)
    meet_again()
    assert any(run.inside) == (size > 1)
    assert not all(run.inside)
    assert 0 < reduced < sizes["all"] or size == 1
    said = [record for record in caplog.records if "shared gradients is full" in record.getMessage()]
    assert len(said) == (1 if size > 1 else 0)


# -- Worlds -------------------------------------------------------------------------------------------------------


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


def test_arrays_of_lost_worlds_stay_readable(rank, size):
    """Memory of a world lasts as long as arrays in it, whatever has become of the world."""
    held = []
    for number in range(3):
        net = built("dense")
        assert lies_in_arena(parameters(net)[0].grad()) == (size > 1)
        for param in parameters(net):
            param.grad()[:] = number
        held.append(net)
        mx.nd.waitall()
        meet_again()
    for number, net in enumerate(held):
        assert all((gradient == number).all() for gradient in gradients(net))
        for param in parameters(net):
            param.grad()[:] = 9
    mx.nd.waitall()
    held.clear()
    gc.collect()
    mx.nd.waitall()
