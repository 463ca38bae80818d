"""`hvd.allreduce` and `hvd.broadcast` in all their forms."""

import contextlib

import numpy as np
import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from kvstore_hvd.errors import MismatchError
from kvstore_hvd.mxnet_compat import engine_is_naive
from support.arrays import DTYPES, assert_same_bits, contribution, expected_sum, make

mx = pytest.importorskip("mxnet")


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays(kind, rank, size, dtype):
    """A new array of the same class, or in place; without op the average; factors. Random programs do the rest."""
    mine = contribution(rank, (17, 5), dtype)
    x = make(kind, mine)
    y = hvd.allreduce(x, op=hvd.Sum)
    assert type(y) is type(x)
    assert_same_bits(y.asnumpy(), expected_sum(size, (17, 5), dtype))
    assert_same_bits(hvd.broadcast(x, size - 1).asnumpy(), contribution(size - 1, (17, 5), dtype))
    assert_same_bits(x.asnumpy(), mine)
    assert hvd.allreduce_(x, op=hvd.Sum, name=f"in place/{dtype}") is x
    assert_same_bits(x.asnumpy(), y.asnumpy())
    assert hvd.broadcast_(x, root_rank=0) is x
    x = make(kind, np.full(5, 2 * rank + 2, dtype))
    assert hvd.allreduce(x).asnumpy().tolist() == [size + 1] * 5
    assert hvd.allreduce(x, op=hvd.Max, prescale_factor=0.5, postscale_factor=3.0).asnumpy()[0] == 3 * size


def test_average_and_op(rank, size):
    """The old parameter works and warns; with op it is a ValueError, before anything is submitted."""
    x = mx.nd.ones((2,)) * (rank + 1)
    with pytest.warns(DeprecationWarning, match="average is deprecated"):
        total = hvd.allreduce(x, average=False)
    with pytest.warns(DeprecationWarning, match="average is deprecated"):
        mean = hvd.allreduce(x, True)
    assert total.asnumpy()[0] == size * (size + 1) / 2
    assert mean.asnumpy()[0] == (size + 1) / 2
    for call in (hvd.allreduce, hvd.allreduce_):
        with pytest.raises(ValueError, match="both average and op are given"):
            call(x, average=True, op=hvd.Sum)
    with pytest.raises(ValueError, match="both average and op"):
        hvd.grouped_allreduce([x], average=False, op=hvd.Average)


@pytest.mark.parametrize("what", ["reduce op", "root"])
def test_differences_are_named_on_every_rank(rank, size, what):
    """Every rank learns who has what; arrays keep their values, and the world works on."""
    if size == 1:
        pytest.skip("one worker agrees with itself")
    mine = contribution(rank, (4,), "float32")
    x = make(mx.nd, mine)
    values = {"reduce op": ("sum", "average"), "root": ("0", "1")}[what]
    others = "rank 1" if size == 2 else f"ranks 1-{size - 1}"
    text = rf"\[rank {rank}/{size}\] .*ranks disagree on {what}\.\n  {values[0]}: rank 0    {values[1]}: {others}\n"
    with pytest.raises(kvstore_hvd.MismatchError, match=text):
        if what == "root":
            hvd.broadcast_(x, int(rank > 0), name="root").wait_to_read()
        else:
            hvd.allreduce_(x, op=hvd.Average if rank else hvd.Sum, name="op").wait_to_read()
    assert_same_bits(x.asnumpy(), mine)
    assert hvd.allreduce(mx.nd.ones((2,)), op=hvd.Sum).asnumpy().tolist() == [size] * 2


def test_wrong_arguments(rank, size):
    """Refused before anything is submitted: the next operation works."""
    x = mx.nd.ones((2,))
    for call, error, text in (
        (lambda: hvd.allreduce(x, op=hvd.Adasum), ValueError, "Adasum is not supported"),
        (lambda: hvd.allreduce(x, op=17), ValueError, "there is no op 17"),
        (lambda: hvd.allreduce(np.ones(2)), TypeError, r"\[rank \d+/\d+\] allreduce.*tensor is a numpy.ndarray"),
        (lambda: hvd.allreduce(x, name=3), TypeError, "name is 3"),
        (lambda: hvd.allreduce(x, prescale_factor="a"), TypeError, "prescale_factor is 'a'"),
        (lambda: hvd.allreduce(mx.np.array([True], dtype="bool")), TypeError, "cannot reduce dtype bool"),
        (lambda: hvd.grouped_allreduce([x, [1]]), TypeError, "tensor is a list"),
        (lambda: hvd.allreduce(mx.nd.ones((2, 2)).tostype("csr")), TypeError, "csr"),
    ):
        with pytest.raises(error, match=text):
            call()
    assert hvd.allreduce(x, op=hvd.Sum).asnumpy()[0] == size


@pytest.mark.skipif(engine_is_naive(), reason="NaiveEngine is not asynchronous")
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


def test_grouped(kind, rank, size):
    """Several arrays of different shapes and dtypes; an empty list returns itself."""
    arrays = [make(kind, contribution(rank, shape, dtype)) for shape, dtype in (((3,), "float32"), ((2, 2), "int64"))]
    first, second = hvd.grouped_allreduce(arrays, op=hvd.Sum, name="group")
    assert_same_bits(first.asnumpy(), expected_sum(size, (3,), "float32"))
    assert_same_bits(second.asnumpy(), expected_sum(size, (2, 2), "int64"))
    assert all(a is b for a, b in zip(hvd.grouped_allreduce_(arrays, op=hvd.Sum), arrays))
    assert_same_bits(arrays[1].asnumpy(), second.asnumpy())
    empty = []
    assert hvd.grouped_allreduce(empty) is empty
    assert hvd.grouped_allreduce_(empty) is empty


def test_a_group_fails_as_a_whole(kind, rank, size):
    """Where the workers disagree about one array, none is changed."""
    if size == 1:
        pytest.skip("nobody to disagree with")
    arrays = [make(kind, np.ones((3 + (rank == 0) * (place == 1),), "float32")) for place in range(3)]
    hvd.grouped_allreduce_(arrays, op=hvd.Sum, name="group that differs")
    text = {1: "disagree on shape"}
    for place, each in enumerate(arrays):
        with pytest.raises(MismatchError, match=text.get(place, "disagree on the other arrays of the group")):
            each.wait_to_read()
    with contextlib.suppress(MismatchError):  # what nobody has read yet
        kvstore_hvd.world.process.current().member.check()
    for each in arrays:
        assert (each.asnumpy() == 1).all()
    test_grouped(kind, rank, size)


def test_a_group_is_a_list(rank, size):
    """An array in its place is refused."""
    for call in (hvd.grouped_allreduce, hvd.grouped_allreduce_, hvd.grouped_allgather, hvd.grouped_reducescatter):
        for wrong in (mx.nd.ones(3), np.ones(3), None):
            with pytest.raises(TypeError, match=r"tensors is a \w+, not a list(.|\n)*Fix: pass a list of arrays"):
                call(wrong)


def test_broadcast_from_nobody(rank, size):
    """A root that does not exist."""
    for root in (size, -1, "0", True):
        with pytest.raises(ValueError, match="there is no rank"):
            hvd.broadcast(mx.nd.ones((2,)), root)


def test_devices_may_differ(kind, rank, size):
    """Between ranks, and between the arrays of a group; each result lies where its tensor does."""
    devices = [mx.cpu(rank % 2), mx.cpu(1 - rank % 2)]
    mine = contribution(rank, (5, 2), "float32")
    one = hvd.allreduce(make(kind, mine, devices[0]), op=hvd.Sum)
    several = hvd.grouped_allreduce([make(kind, mine, device) for device in devices], op=hvd.Sum)
    for result, device in zip([one, *several], [devices[0], *devices]):
        assert result.ctx == device
        assert_same_bits(result.asnumpy(), expected_sum(size, (5, 2), "float32"))
    assert hvd.broadcast(make(kind, mine, devices[0]), 0).ctx == devices[0]
