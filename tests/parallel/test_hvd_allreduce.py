"""`hvd.allreduce` and `hvd.broadcast`: what random programs (`fuzz`) do not say.

Operations of every kind, dtype, shape, factor, root, process set and disagreement are tests of `tests/fuzz`: a new
reduce op or dtype has its arithmetic in `fuzz/model.py`, is drawn in `fuzz/programs.py` and called in `fuzz/calls.py`;
its kernels are compared in `tests/native/test_reduce.cpp`.
"""

import contextlib

import numpy as np
import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from kvstore_hvd.errors import MismatchError
from support.arrays import assert_same_bits, contribution, expected_sum, make

mx = pytest.importorskip("mxnet")


def test_average_and_op(rank, size):
    """The old parameter works and warns; with op it is a ValueError, before anything is submitted."""
    x = mx.nd.ones((2,)) * (rank + 1)
    with pytest.warns(DeprecationWarning, match="average is deprecated"):
        total = hvd.allreduce(x, average=False)
    with pytest.warns(DeprecationWarning, match="average is deprecated"):
        mean = hvd.allreduce(x, True)
    assert total.asnumpy()[0] == size * (size + 1) / 2
    assert mean.asnumpy()[0] == hvd.allreduce(x).asnumpy()[0] == (size + 1) / 2
    for call in (hvd.allreduce, hvd.allreduce_):
        with pytest.raises(ValueError, match="both average and op are given"):
            call(x, average=True, op=hvd.Sum)
    with pytest.raises(ValueError, match="both average and op"):
        hvd.grouped_allreduce([x], average=False, op=hvd.Average)


@pytest.mark.parametrize("operation", ["allreduce_", "grouped_allgather", "broadcast", "alltoall", "reducescatter"])
def test_a_priority_that_one_rank_refuses(rank, size, operation):
    """Nothing was submitted or counted: the next call without a name still meets those of the others."""
    call, x = getattr(hvd, operation), mx.nd.ones((size, 2))
    grouped = operation.startswith("grouped")
    arguments = ([x] if grouped else x, *([0] if operation == "broadcast" else []))
    if rank == size - 1:
        with pytest.raises(TypeError, match=f"{operation.rstrip('_')}: priority is 'high'"):
            call(*arguments, priority="high")
        with pytest.raises(kvstore_hvd.errors.InvalidRequestError, match=f"priority {2**31} does not fit"):
            call(*arguments, priority=2**31)
    result = call(*arguments, priority=3)
    result = result[0] if grouped or isinstance(result, (list, tuple)) else result
    assert (result.asnumpy() == 1).all()  # means, copies


@pytest.mark.needs(2)
def test_a_group_fails_as_a_whole(kind, rank, size):
    """Where the workers disagree about one array, none is changed."""
    arrays = [make(kind, np.ones((3 + (rank == 0) * (place == 1),), "float32")) for place in range(2)]
    hvd.grouped_allreduce_(arrays, op=hvd.Sum, name="group that differs")
    text = {1: "disagree on shape"}
    for place, each in enumerate(arrays):
        with pytest.raises(MismatchError, match=text.get(place, "disagree on the other arrays of the group")):
            each.wait_to_read()
    with contextlib.suppress(MismatchError):  # what nobody has read yet
        kvstore_hvd.world.process.current().member.check()
    for each in arrays:
        assert (each.asnumpy() == 1).all()
    assert all((each.asnumpy() == size).all() for each in hvd.grouped_allreduce([arrays[0]] * 2, op=hvd.Sum))


def test_a_group_is_a_list(rank, size):
    """An array in its place is refused; an empty list returns itself."""
    empty = []
    for call in (hvd.grouped_allreduce, hvd.grouped_allreduce_, hvd.grouped_allgather, hvd.grouped_reducescatter):
        assert call(empty) is empty
        for wrong in (mx.nd.ones(3), np.ones(3), None):
            with pytest.raises(TypeError, match=r"tensors is a \w+, not a list(.|\n)*Fix: pass a list of arrays"):
                call(wrong)


def test_devices_may_differ(kind, rank, size):
    """Between ranks, and between the arrays of a group; each result has its tensor's class and device."""
    devices = [mx.cpu(rank % 2), mx.cpu(1 - rank % 2)]
    mine = contribution(rank, (5, 2), "float32")
    one = hvd.allreduce(make(kind, mine, devices[0]), op=hvd.Sum)
    several = hvd.grouped_allreduce([make(kind, mine, device) for device in devices], op=hvd.Sum)
    for result, device in zip([one, *several], [devices[0], *devices]):
        assert (type(result), result.ctx) == (type(one), device)
        assert_same_bits(result.asnumpy(), expected_sum(size, (5, 2), "float32"))
    assert isinstance(one, kind.NDArray if kind is mx.nd else kind.ndarray)
    assert hvd.broadcast(make(kind, mine, devices[0]), 0).ctx == devices[0]


def test_broadcast_from_nobody(size):
    for root in (size, -1, "0", True):
        with pytest.raises(ValueError, match="there is no rank"):
            hvd.broadcast(mx.nd.ones((2,)), root)
