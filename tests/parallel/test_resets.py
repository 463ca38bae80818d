"""Worlds that were left hold nothing: no descriptor, no memory, no thread, whoever keeps what of them."""

import contextlib
import gc
import os
import re
from pathlib import Path

import numpy as np
import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from kvstore_hvd import native
from kvstore_hvd.errors import HorovodInternalError, ShutdownError
from kvstore_hvd.mxnet import process_sets
from kvstore_hvd.world import process
from kvstore_hvd.world.topology import exchange
from support.arrays import request_of
from support.gluon import gradients, parameters
from support.networks import built, step, trainer_of
from support.patience import until
from support.zero_copy import lies_in_arena, meet_again

mx = pytest.importorskip("mxnet")

pytestmark = pytest.mark.usefixtures("no_static_graphs")

# What Python's and MXNet's allocators take by themselves. One world's memory that is kept is more than 60 KiB.
DRIFT_KIB = 24 << 10


def test_texts_of_any_length_reach_all(rank, size):
    """What the workers tell each other about their process sets after a reset, for one: longer than any buffer."""
    member = process.current().member
    told = [f"{worker}{'é' * 40_000 * (worker % 2)}\udcff" for worker in range(size)]
    assert exchange(member.others(), member.topology, "long texts", told[rank]) == told


def test_calls_without_a_name_meet_after_a_reset(rank, size):
    kvstore_hvd.barrier()
    with contextlib.suppress(HorovodInternalError):  # each worker makes another number; one that resets ends them all
        for _ in range(rank):
            hvd.allreduce(mx.nd.ones((2,)))
    mine = process.current().member
    until(lambda: rank or size == 1 or mine.is_lost or mine.engine().missed(1))  # rank 0 lets another one begin
    kvstore_hvd.reset()
    assert hvd.allreduce(mx.nd.ones((2,)), op=hvd.Sum).asnumpy().tolist() == [size] * 2


@pytest.fixture
def no_collector(world):
    """Without the garbage collector, and without what earlier tests have left to it."""
    gc.collect()
    mx.nd.waitall()
    gc.disable()
    yield
    gc.enable()


def mapped():
    return len({line.split()[4] for line in Path("/proc/self/maps").read_text().splitlines() if "kvstore_hvd" in line})


def links():
    found = []
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing is closed by now
            found.append(os.readlink(f"/proc/self/fd/{entry}"))
    return found


def held():
    """Descriptors, segments and threads of this process; without those by which others are watched. Those are pidfds
    (`watched`), and entries of other processes, which are read for a moment after each meeting."""
    own = [link for link in links() if "pidfd" not in link and not re.fullmatch(r"/proc/\d+/stat", link)]
    return len(own), mapped(), len(os.listdir("/proc/self/task"))


def watched():
    """How many processes this one watches: of each world all others, once it has seen that they have come."""
    return sum("pidfd" in link for link in links())


def assert_held(before, size):
    """No more is held than before, or will be once threads that have nothing more to do have ended. It may be less:
    when `before` was counted, a thread of the world that had just been left may not have ended yet."""
    until(lambda: all(now <= then for now, then in zip(held(), before)), lambda: f"{held()}, not {before}")
    assert watched() <= before[1] * (size - 1)


def memory_kib():
    status = Path("/proc/self/status").read_text()
    return sum(int(status.partition(f"{name}:")[2].split()[0]) for name in ("RssAnon", "RssShmem"))


@pytest.mark.parametrize("number", [50, pytest.param(1000, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
def test_resets_leave_nothing_behind(rank, size, no_collector, number):
    """Not even until the garbage collector comes; nor for longer than any table of descriptors lasts."""
    meet_again()  # arrays of earlier tests stay in their worlds
    net = built("dense")
    trainer = trainer_of(net)

    def some(resets):
        for seed in range(resets):
            array = np.full(50_000, rank + 1.0)
            assert (kvstore_hvd.allreduce(array, "array") == size * (size + 1) / 2).all()
            if seed % 10 == 0:
                step(net, trainer, "dense", seed, rank)
                mx.nd.waitall()
            meet_again()

    some(10)
    before, kib = held(), memory_kib()
    some(number)
    assert_held(before, size)
    assert memory_kib() < kib + DRIFT_KIB


def test_what_a_program_keeps_of_a_world_does_not_keep_the_world(rank, size, no_collector):
    """Stores, prepared operations, errors with their tracebacks, and the engine itself; all still answer."""
    meet_again()
    before = held()
    kept, errors = [], []
    for number in range(5):
        array = np.full(3, rank + 1.0)
        store = mx.kv.create("horovod")
        value = mx.nd.ones((4,))
        store.pushpull("key", value)
        assert (value.asnumpy() == size).all()
        kept += [store, value]
        if size > 1:
            engine = process.current().member.engine()
            prepared = engine.prepare(request_of(array, "prepared"), array, array)
            assert (prepared() == size * (size + 1) / 2).all()
            kept += [prepared, engine, process.current().member.arena, process.current().member.adapter]
            if number % 2:  # a lost world
                kvstore_hvd.barrier()
                engine.abort("the test says so")
                with pytest.raises(HorovodInternalError) as lost:
                    kvstore_hvd.allreduce(array, "lost")
                errors.append(lost.value)
                kvstore_hvd.reset()
                continue
        meet_again()
    assert_held(before, size)
    for each in kept:
        if isinstance(each, mx.kv.KVStoreBase):
            each.pushpull("key", mx.nd.ones((4,)))
    if size > 1:
        with pytest.raises(ShutdownError, match="this rank has shut down"):
            kept[2]()
        assert isinstance(kept[3].health(), HorovodInternalError)  # it was left early
        assert "the test says so" in str(kept[9].health())
        assert kept[4].used == 0
    kvstore_hvd.barrier()
    assert_held(before, size)


def test_arrays_keep_their_world_and_no_other(rank, size, no_collector):
    """Gradients that lie in the memory of a world: its segment goes with the last of them, at once."""
    meet_again()
    before = held()
    net = built("dense")
    arrays = [param.grad() for param in parameters(net)]
    assert all(lies_in_arena(array) for array in arrays) == (size > 1)
    for array in arrays:
        array[:] = rank
    mx.nd.waitall()
    for _ in range(3):
        meet_again()
    until(lambda: mapped() == before[1] + (size > 1))
    assert all((array == rank).all() for array in gradients(net))
    del net, array
    gc.collect()  # a net has cycles of its own
    mx.nd.waitall()
    until(lambda: mapped() == before[1] + (size > 1))
    arrays.clear()
    until(lambda: mapped() == before[1])
    assert_held(before, size)


@pytest.mark.needs(2)
def test_process_sets_hold_nothing_either(rank, size, dynamic, no_collector):
    meet_again()
    before = held()
    evens = process_sets.add_process_set(range(0, size, 2))
    inside = held()
    is_shared = rank % 2 == 0 and size > 2
    assert inside[1] == before[1] + is_shared
    for _ in range(5):
        meet_again()
    assert_held(inside, size)
    process_sets.remove_process_set(evens)
    assert_held(before, size)


@pytest.mark.needs(2)
def test_a_world_that_could_not_be_joined_holds_nothing(rank, size, no_collector, monkeypatch):
    """There was no memory for the arena: nothing is kept of that world, whoever keeps the error."""
    meet_again()
    before = held()

    def refuse(segment, own):
        del segment  # the error keeps this frame
        raise MemoryError("the test says so")

    errors = []
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(native, "Arena", refuse)
            with pytest.raises(MemoryError, match="the test says so") as error:
                kvstore_hvd.reset()
            errors.append(error.value)
        kvstore_hvd.reset()
    assert_held(before, size)
