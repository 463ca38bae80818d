"""`hvd.allreduce` and `hvd.broadcast` in all their forms."""

from __future__ import annotations

import contextlib
import functools

import numpy as np
import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from kvstore_hvd.errors import MismatchError
from kvstore_hvd.mxnet_compat import bfloat16, dtype_name, engine_is_naive
from support.arrays import DTYPES, assert_same_bits, contribution, expected_sum, make

mx = pytest.importorskip("mxnet")

SHAPES = [(), (1,), (17, 5), (0, 3), (256, 257)]


def parts(size, shape, dtype, seed=0):
    """Every rank's contribution."""
    return [contribution(rank, shape, dtype, seed) for rank in range(size)]


@pytest.mark.parametrize(("dtype", "shape"), zip(DTYPES, SHAPES * 2), ids=str)
def test_sum(kind, rank, size, dtype, shape):
    """A new array of the same class; the tensor is left alone; bits as the sequential sum's."""
    if kind is mx.nd and 0 in (*shape, len(shape)):
        pytest.skip("mx.nd has no such shapes")
    mine = contribution(rank, shape, dtype)
    x = make(kind, mine)
    y = hvd.allreduce(x, op=hvd.Sum)
    assert type(y) is type(x)
    assert_same_bits(y.asnumpy(), expected_sum(size, shape, dtype))
    assert_same_bits(x.asnumpy(), mine)


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_ops(kind, rank, size, dtype):
    """Min, Max, Product, in place; of the seven dtypes."""
    shape = (9, 3)
    for op, fold in ((hvd.Min, np.minimum), (hvd.Max, np.maximum)):
        x = make(kind, contribution(rank, shape, dtype))
        assert hvd.allreduce_(x, op=op, name=f"other/{op.name}/{dtype}") is x
        assert_same_bits(x.asnumpy(), functools.reduce(fold, parts(size, shape, dtype)))
    x = make(kind, np.full(shape, rank + 1, dtype))
    product = hvd.allreduce(x, op=hvd.Product).asnumpy()
    assert_same_bits(product, np.full(shape, np.prod(np.arange(1, size + 1)), dtype))


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_average_is_the_default(kind, rank, size, dtype):
    """Without op; integers are truncated."""
    x = make(kind, np.full((5,), rank + 1, dtype))
    mean = size * (size + 1) / 2 / size
    expected = int(mean) if dtype == "int32" else mean
    assert hvd.allreduce(x).asnumpy().tolist() == [expected] * 5
    assert hvd.allreduce(x, op=hvd.Average).asnumpy().tolist() == [expected] * 5


def test_bfloat16(rank, size):
    """bfloat16: a sum in float32, rounded once."""
    x = mx.nd.empty((3,), dtype=bfloat16())
    mx.nd._internal._copyto(mx.nd.array([rank + 1, 0.5, -3]), out=x)
    y = hvd.allreduce(x, op=hvd.Sum)
    assert dtype_name(y) == "bfloat16"
    wide = mx.nd._internal._copyto(y, out=mx.nd.zeros((3,)))
    assert wide.asnumpy().tolist() == [size * (size + 1) / 2, 0.5 * size, -3 * size]


@pytest.mark.parametrize("dtype", DTYPES)
def test_factors(kind, rank, size, dtype):
    """Prescale and postscale: integers in float64 and truncated, halves in float32."""
    x = make(kind, np.array([4, 8, 6], dtype))
    y = hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=1.5)
    expected = np.array([int(v * 0.5) * size * 1.5 for v in (4, 8, 6)]).astype(dtype)
    assert_same_bits(y.asnumpy(), expected)
    z = make(kind, np.array([7], dtype))
    hvd.allreduce_(z, op=hvd.Max, postscale_factor=0.5)
    assert_same_bits(z.asnumpy(), np.array([3.5]).astype(dtype))


@pytest.mark.parametrize("op", ["Sum", "Average"])
def test_products_of_halves_are_rounded(kind, rank, size, op):
    """To float16 before the sum, as Horovod rounds them; the sum itself is rounded once, with the other factor."""
    values = [np.random.default_rng(one).standard_normal((2 * size, 50)).astype("float16") for one in range(size)]
    products = [(each.astype("float32") * np.float32(1 / 3)).astype("float16") for each in values]
    total = np.float32(0)
    for each in products:
        total = total + each.astype("float32")
    expected = (total * np.float32(3.0 if op == "Sum" else 3.0 / size)).astype("float16")
    factors = {"op": getattr(hvd, op), "prescale_factor": 1 / 3, "postscale_factor": 3.0}
    assert_same_bits(hvd.allreduce(make(kind, values[rank]), **factors).asnumpy(), expected)
    part = hvd.reducescatter(make(kind, values[rank]), **factors)
    assert_same_bits(part.asnumpy(), expected[2 * rank : 2 * rank + 2])


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


def test_wrong_arguments(rank, size):
    """Refused before anything is submitted: the next operation works."""
    x = mx.nd.ones((2,))
    with pytest.raises(ValueError, match="Adasum is not supported"):
        hvd.allreduce(x, op=hvd.Adasum)
    with pytest.raises(ValueError, match="there is no op 17"):
        hvd.allreduce(x, op=17)
    with pytest.raises(TypeError, match=r"\[rank \d+/\d+\] allreduce .*tensor is a numpy.ndarray"):
        hvd.allreduce(np.ones(2), name="x")
    with pytest.raises(TypeError, match="name is 3"):
        hvd.allreduce(x, name=3)
    with pytest.raises(TypeError, match="prescale_factor is 'a'"):
        hvd.allreduce(x, prescale_factor="a")
    with pytest.raises(kvstore_hvd.UnsupportedDtypeError, match="cannot reduce dtype bool"):
        hvd.allreduce(mx.np.array([True], dtype="bool"))
    with pytest.raises(TypeError, match="tensor is a list"):
        hvd.grouped_allreduce([x, [1]])
    with pytest.raises(kvstore_hvd.UnsupportedDtypeError, match="csr"):
        hvd.allreduce(mx.nd.ones((2, 2)).tostype("csr"))
    assert hvd.allreduce(x, op=hvd.Sum).asnumpy()[0] == size


@pytest.mark.skipif(engine_is_naive(), reason="NaiveEngine is not asynchronous")
@pytest.mark.parametrize(
    "operation",
    [
        "allreduce",
        "allreduce_",
        "grouped_allreduce",
        "broadcast",
        "allgather",
        "grouped_allgather",
        "alltoall",
        "reducescatter",
        "grouped_reducescatter",
    ],
)
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
        kvstore_hvd.process.process.current().member.check()
    for each in arrays:
        assert (each.asnumpy() == 1).all()
    test_grouped(kind, rank, size)


@pytest.mark.parametrize(
    "call", [hvd.grouped_allreduce, hvd.grouped_allreduce_, hvd.grouped_allgather, hvd.grouped_reducescatter]
)
def test_a_group_is_a_list(call, rank, size):
    """An array in its place is refused."""
    for wrong in (mx.nd.ones(3), np.ones(3), None):
        with pytest.raises(TypeError, match=r"tensors is a \w+, not a list(.|\n)*Fix: pass a list of arrays"):
            call(wrong)


def test_mismatch_is_raised_everywhere(rank, size):
    """Cross-rank validation: every rank gets the error, and the world works on."""
    if size == 1:
        pytest.skip("one worker agrees with itself")
    x = mx.nd.ones((2 + (rank == 0),))
    with pytest.raises(kvstore_hvd.MismatchError, match="disagree on shape"):
        hvd.allreduce(x, name="mismatch").wait_to_read()
    with pytest.raises(kvstore_hvd.MismatchError):
        hvd.allreduce(mx.nd.ones((2,)), name="ops", op=hvd.Min if rank else hvd.Sum).wait_to_read()
    with pytest.raises(kvstore_hvd.MismatchError, match="root"):
        hvd.broadcast(mx.nd.ones((2,)), int(rank > 0), name="roots").wait_to_read()
    assert hvd.allreduce(mx.nd.ones((2,)), op=hvd.Sum).asnumpy()[0] == size


@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast(kind, rank, size, dtype):
    """Each root; a new array, or in place."""
    shape = (5, 3)
    for root in range(size):
        mine = contribution(rank, shape, dtype)
        x = make(kind, mine)
        y = hvd.broadcast(x, root)
        assert type(y) is type(x)
        assert_same_bits(y.asnumpy(), contribution(root, shape, dtype))
        assert_same_bits(x.asnumpy(), mine)
        assert hvd.broadcast_(x, root_rank=root, name=f"in-place/{dtype}") is x
        assert_same_bits(x.asnumpy(), contribution(root, shape, dtype))


def test_broadcast_from_nobody(rank, size):
    """A root that does not exist."""
    for root in (size, -1, "0", True):
        with pytest.raises(ValueError, match="there is no rank"):
            hvd.broadcast(mx.nd.ones((2,)), root)


def test_other_devices(kind, rank, size):
    """Results lie on the tensor's device."""
    x = make(kind, np.full((2,), rank, "float32"), mx.cpu(1))
    for y in (hvd.allreduce(x, op=hvd.Sum), hvd.broadcast(x, size - 1)):
        assert y.ctx == mx.cpu(1)
    assert hvd.broadcast_(x, size - 1).asnumpy()[0] == size - 1
