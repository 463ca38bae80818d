"""What the workers of a call may differ in and what not, and how calls fare when their world ends."""

from __future__ import annotations

import contextlib
import time

import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from kvstore_hvd import config
from kvstore_hvd.errors import TransportError
from kvstore_hvd.mxnet_compat import engine_is_naive
from kvstore_hvd.process import process
from support.arrays import assert_same_bits, contribution, expected_sum, make
from support.patience import patient

mx = pytest.importorskip("mxnet")

# What differs between rank 0 (first) and the others, and the values that the error has for them.
DIFFERENCES = {
    "shape": (lambda x, first: hvd.allreduce_(x if first else x[:3], op=hvd.Sum, name="shape"), r"\(4,\)", r"\(3,\)"),
    "dtype": (
        lambda x, first: hvd.allreduce_(x if first else x.astype("float64"), op=hvd.Sum, name="dtype"),
        "float32",
        "float64",
    ),
    "reduce op": (
        lambda x, first: hvd.allreduce_(x, op=hvd.Sum if first else hvd.Average, name="op"),
        "sum",
        "average",
    ),
    "prescale": (lambda x, first: hvd.allreduce_(x, prescale_factor=2.0 - first, name="prescale"), "1", "2"),
    "postscale": (lambda x, first: hvd.allreduce_(x, postscale_factor=2.0 - first, name="postscale"), "1", "2"),
    "root": (lambda x, first: hvd.broadcast_(x, int(not first), name="root"), "0", "1"),
    "operation": (
        lambda x, first: hvd.allreduce_(x, name="kind") if first else hvd.broadcast_(x, 0, name="kind"),
        "allreduce",
        "broadcast",
    ),
}


@pytest.mark.parametrize("what", DIFFERENCES)
def test_differences_are_named_on_every_rank(rank, size, what):
    """Every rank learns who has what; arrays keep their values, and the world works on."""
    if size == 1:
        pytest.skip("one worker agrees with itself")
    call, of_first, of_others = DIFFERENCES[what]
    mine = contribution(rank, (4,), "float32")
    x = make(mx.nd, mine)
    others = "rank 1" if size == 2 else f"ranks 1-{size - 1}"
    text = rf"\[rank {rank}/{size}\] .*ranks disagree on {what}\.\n  {of_first}: rank 0    {of_others}: {others}\n"
    with pytest.raises(kvstore_hvd.MismatchError, match=text):
        call(x, rank == 0).wait_to_read()
    assert_same_bits(x.asnumpy(), mine)
    assert hvd.allreduce(mx.nd.ones((2,)), op=hvd.Sum).asnumpy().tolist() == [size] * 2


def test_devices_may_differ(kind, rank, size):
    """Between ranks, and between the arrays of a group; each result lies where its tensor does."""
    devices = [mx.cpu(rank % 2), mx.cpu(1 - rank % 2)]
    mine = contribution(rank, (5, 2), "float32")
    one = hvd.allreduce(make(kind, mine, devices[0]), op=hvd.Sum)
    several = hvd.grouped_allreduce([make(kind, mine, device) for device in devices], op=hvd.Sum)
    for result, device in zip([one, *several], [devices[0], *devices]):
        assert result.ctx == device
        assert_same_bits(result.asnumpy(), expected_sum(size, (5, 2), "float32"))


def test_one_name_several_times(kind, rank, size):
    """Calls under one name meet in the order of the calls, also while earlier ones are under way."""
    results = [
        hvd.allreduce(make(kind, contribution(rank, (7,), "float32", i)), op=hvd.Sum, name="x") for i in range(9)
    ]
    for i, result in enumerate(results):
        assert_same_bits(result.asnumpy(), expected_sum(size, (7,), "float32", i))


@pytest.mark.skipif(engine_is_naive(), reason="NaiveEngine is not asynchronous")
def test_priorities_may_differ(rank, size):
    """What is submitted with other priorities, in another order, has the same values."""
    names = [f"priority/{i}" for i in range(6)]
    mine = names[rank:] + names[:rank]
    results = {
        name: hvd.allreduce(
            make(mx.nd, contribution(rank, (5000,), "float32", name)), op=hvd.Sum, name=name, priority=rank * place - 3
        )
        for place, name in enumerate(mine)
    }
    for name in names:
        assert_same_bits(results[name].asnumpy(), expected_sum(size, (5000,), "float32", name))


def test_a_lost_world(rank, size):
    """Every call raises `HorovodInternalError` until the workers meet again; then all is well."""
    if size == 1:
        pytest.skip("needs two workers")
    with contextlib.nullcontext() if rank == 0 else contextlib.suppress(TransportError):
        hvd.barrier()
    if rank == 0:
        process.current().abort("this is a test")
    deadline = time.monotonic() + patient(30)
    while process.current().member.communicator().health() is None:
        assert time.monotonic() < deadline, "the abort never arrived"
    x = mx.nd.ones((2, 2))
    calls = [
        lambda: hvd.allreduce(x),
        lambda: hvd.grouped_allreduce_([x]),
        lambda: hvd.broadcast_(x, 0),
        lambda: hvd.allgather(x),
        lambda: hvd.alltoall(x, splits=[2] + [0] * (size - 1)),
        lambda: hvd.reducescatter(x),
        lambda: hvd.broadcast_object(1),
        lambda: hvd.allgather_object(1),
        lambda: hvd.broadcast_parameters({"x": x}),
        hvd.barrier,
    ]
    for call in calls:
        with pytest.raises(hvd.HorovodInternalError, match="this is a test"):
            call()
    assert hvd.is_initialized()
    kvstore_hvd.reset()
    assert hvd.allreduce(x, op=hvd.Sum).asnumpy().tolist() == [[size] * 2] * 2


def test_shutdown_completes_what_is_under_way(rank, size):
    """Results of calls before it are there, and can be read after it."""
    mine = contribution(rank, (300, 300), "float32")
    x = hvd.allreduce_(make(mx.nd, mine), op=hvd.Sum)
    hvd.shutdown()
    assert_same_bits(x.asnumpy(), expected_sum(size, (300, 300), "float32"))
    hvd.init()


@pytest.mark.parametrize("how", ["argument", "HOROVOD_DYNAMIC_PROCESS_SETS", "KVHVD_DYNAMIC_PROCESS_SETS"])
def test_dynamic_process_sets(rank, size, how, monkeypatch):
    """Sets may be added once `init` or the environment says so, until `shutdown`."""
    hvd.shutdown()
    if how == "argument":
        hvd.init(process_sets="dynamic")
    else:
        monkeypatch.setenv(how, "1")
        config.reload()
        hvd.init()
    if size > 1:
        last = hvd.add_process_set([size - 1])
        assert last.included() is (rank == size - 1)
        assert hvd.remove_process_set(last) is True
    hvd.shutdown()
    monkeypatch.undo()
    config.reload()
    hvd.init()
    with pytest.raises(ValueError, match="cannot be added or removed in this world"):
        hvd.add_process_set([0])


def test_groups_and_objects_of_a_set(rank, size):
    """Every collective takes a process set; its order of ranks is the set's."""
    if size < 3:
        pytest.skip("needs three workers")
    hvd.shutdown()
    few = hvd.ProcessSet([size - 1, 0])
    hvd.init(process_sets=[few])
    if few.included():
        mine = contribution(rank, (4, 3), "float32")
        members = [contribution(r, (4, 3), "float32") for r in few.ranks]
        x = make(mx.nd, mine)
        total = (members[0] + members[1]).astype("float32")
        (one,) = hvd.grouped_allreduce([x], op=hvd.Sum, process_set=few)
        assert_same_bits(one.asnumpy(), total)
        (two,) = hvd.grouped_allreduce_([make(mx.nd, mine)], op=hvd.Sum, process_set=few)
        assert_same_bits(two.asnumpy(), total)
        (rows,) = hvd.grouped_allgather([x], process_set=few)
        assert rows.shape == (8, 3)
        assert_same_bits(rows[4 * few.rank() : 4 * few.rank() + 4].asnumpy(), mine)
        (share,) = hvd.grouped_reducescatter([x], op=hvd.Sum, process_set=few)
        assert_same_bits(share.asnumpy(), total[2 * few.rank() : 2 * few.rank() + 2])
        got, received = hvd.alltoall(x, splits=[1, 3], process_set=few)
        assert received.asnumpy().tolist() == [1 + 2 * few.rank()] * 2
        assert got.shape == (2 + 4 * few.rank(), 3)
        assert hvd.allgather_object(rank, process_set=few) == few.ranks
        y = make(mx.nd, mine)
        hvd.broadcast_parameters({"y": y}, root_rank=size - 1, process_set=few)
        assert_same_bits(y.asnumpy(), members[-1])
    assert hvd.allgather_object(rank) == list(range(size))
