"""`hvd.allgather`, `hvd.alltoall`, `hvd.reducescatter`: outputs that depend on all workers' arrays."""

from __future__ import annotations

import numpy as np
import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from kvstore_hvd.mxnet_compat import bfloat16, dtype_name
from support.arrays import DTYPES, assert_same_bits, contribution, expected_sum, make

mx = pytest.importorskip("mxnet")

pytestmark = pytest.mark.sizes


def rows_of(rank, rows, dtype="float32", width=(3,)):
    """Return what a rank contributes: an array of this many rows."""
    return contribution(rank, (rows, *width), dtype)


def share(rows, rank, size):
    """Return the rows that a rank keeps."""
    each, rest = divmod(rows, size)
    first = each * rank + min(rank, rest)
    return slice(first, first + each + (rank < rest))


@pytest.mark.parametrize("dtype", DTYPES)
def test_allgather(kind, rank, size, dtype):
    """Uneven first dimensions, one of them zero; in the order of ranks; the tensor is left alone."""
    for rows in (lambda r: r + 1, lambda r: 4, lambda r: 0 if r == 0 and size > 1 else 2):
        mine = rows_of(rank, rows(rank), dtype)
        if kind is mx.nd and 0 in mine.shape:
            mine_array = make(mx.np, mine).as_nd_ndarray()
        else:
            mine_array = make(kind, mine)
        got = hvd.allgather(mine_array)
        assert type(got) is type(mine_array)
        assert_same_bits(got.asnumpy(), np.concatenate([rows_of(r, rows(r), dtype) for r in range(size)]))
        assert_same_bits(mine_array.asnumpy(), mine)


def test_allgather_of_nothing(rank, size):
    """No rank has any row."""
    got = hvd.allgather(make(mx.np, np.zeros((0, 3), "float32")))
    assert got.shape == (0, 3)


@pytest.mark.parametrize("rows", [1, 1000, 200_000])
def test_large_allgather(rank, size, rows):
    """Beyond every path for small messages."""
    got = hvd.allgather(mx.nd.array(rows_of(rank, rows + 7 * rank)), name=f"large/{rows}")
    assert_same_bits(got.asnumpy(), np.concatenate([rows_of(r, rows + 7 * r) for r in range(size)]))


def test_allgather_of_bfloat16_and_other_devices(rank, size):
    """What NumPy does not know, and arrays elsewhere."""
    x = mx.nd.empty((2,), ctx=mx.cpu(1), dtype=bfloat16())
    mx.nd._internal._copyto(mx.nd.array([rank, 0.5], ctx=mx.cpu(1)), out=x)
    y = hvd.allgather(x)
    assert dtype_name(y) == "bfloat16"
    assert y.ctx == mx.cpu(1)
    wide = mx.nd._internal._copyto(y, out=mx.nd.zeros((2 * size,), ctx=mx.cpu(1)))
    assert wide.asnumpy().tolist() == [value for r in range(size) for value in (r, 0.5)]


def test_input_is_waited_for(rank, size):
    """Whatever computes the tensor comes first; also where oneDNN keeps it in a layout of its own."""
    x = mx.nd.ones((300, 300))
    for _ in range(10):
        x = mx.nd.dot(x, x) / 300
    assert hvd.allgather(x).asnumpy().sum() == pytest.approx(size * 90_000, rel=1e-3)
    picture = mx.nd.array(contribution(rank, (2, 3, 8, 8), "float32"))
    weight = mx.nd.array(contribution(0, (16, 3, 3, 3), "float32"))
    out = mx.nd.Convolution(picture, weight, kernel=(3, 3), num_filter=16, no_bias=True)
    got = hvd.allgather(out)
    assert_same_bits(got[2 * rank : 2 * rank + 2].asnumpy(), out.asnumpy())


def test_grouped_allgather(kind, rank, size):
    """Several at once; an empty list returns itself."""
    arrays = [make(kind, rows_of(rank, rank + 1)), make(kind, rows_of(rank, 2, "int64", (2, 2)))]
    first, second = hvd.grouped_allgather(arrays, name="group")
    assert_same_bits(first.asnumpy(), np.concatenate([rows_of(r, r + 1) for r in range(size)]))
    assert_same_bits(second.asnumpy(), np.concatenate([rows_of(r, 2, "int64", (2, 2)) for r in range(size)]))
    empty = []
    assert hvd.grouped_allgather(empty) is empty
    assert hvd.grouped_reducescatter(empty) is empty


@pytest.mark.parametrize("dtype", DTYPES)
def test_alltoall(kind, rank, size, dtype):
    """Equal parts without splits; uneven ones, some of them empty, with splits."""
    mine = rows_of(rank, 2 * size, dtype)
    got = hvd.alltoall(make(kind, mine))
    assert type(got) is type(make(kind, mine))
    parts = [rows_of(r, 2 * size, dtype)[2 * rank : 2 * rank + 2] for r in range(size)]
    assert_same_bits(got.asnumpy(), np.concatenate(parts))

    splits = [[(r + to) % 3 for to in range(size)] for r in range(size)]
    splits = [[*each[:-1], each[-1] + 1] for each in splits]
    mine = rows_of(rank, sum(splits[rank]), dtype)
    for form in (make(kind, np.array(splits[rank], "int32")), np.array(splits[rank], "int32"), splits[rank]):
        got, received = hvd.alltoall(make(kind, mine), splits=form)
        assert str(np.dtype(received.dtype)) == "int32"
        assert received.asnumpy().tolist() == [splits[r][rank] for r in range(size)]
        parts = []
        for r in range(size):
            start = sum(splits[r][:rank])
            parts.append(rows_of(r, sum(splits[r]), dtype)[start : start + splits[r][rank]])
        assert_same_bits(got.asnumpy(), np.concatenate(parts))


def test_alltoall_refuses_on_every_rank(rank, size):
    """Splits that do not fit on one rank: an error there and on the others, and the world works on."""
    x = mx.nd.ones((size, 2))
    last = rank == size - 1
    wrong = [
        [1] * size + [1],
        [2] + [1] * (size - 1),
        [0] + [1] * (size - 1),
        [-1, *[1] * (size - 1)],
        np.array([1.0] * size, "float32"),
    ]
    for splits in wrong:
        with pytest.raises(ValueError, match="splits is|splits has dtype float32" if last else "refused the call"):
            hvd.alltoall(x, splits=splits if last else [1] * size)
    with pytest.raises(TypeError if last else ValueError, match="splits is" if last else "refused the call"):
        hvd.alltoall(x, splits=["a"] * size if last else [1] * size)
    if size > 1:
        with pytest.raises(ValueError, match="cannot be divided" if last else "refused the call"):
            hvd.alltoall(mx.nd.ones((size + last, 2)))
    assert hvd.alltoall(x).asnumpy().tolist() == x.asnumpy().tolist()


@pytest.mark.parametrize("rows", [1, 3, 8, 11])
@pytest.mark.parametrize("dtype", DTYPES)
def test_reducescatter(kind, rank, size, dtype, rows):
    """The sum's rows, the remainder to the first ranks."""
    got = hvd.reducescatter(make(kind, rows_of(rank, rows, dtype)), op=hvd.Sum)
    assert_same_bits(got.asnumpy(), expected_sum(size, (rows, 3), dtype)[share(rows, rank, size)])


def test_reducescatter_average_and_factors(kind, rank, size):
    """The default is the average; factors as with `allreduce`."""
    x = make(kind, np.full((2 * size, 3), rank + 1, "float32"))
    assert hvd.reducescatter(x).asnumpy().tolist() == [[(size + 1) / 2] * 3] * 2
    got = hvd.reducescatter(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    assert got.asnumpy().tolist() == [[size * (size + 1)] * 3] * 2


def test_large_reducescatter(rank, size):
    """Beyond every path for small messages; the bits of the sequential sum."""
    rows = 100_003
    got = hvd.reducescatter(mx.nd.array(rows_of(rank, rows)), op=hvd.Sum)
    assert_same_bits(got.asnumpy(), expected_sum(size, (rows, 3), "float32")[share(rows, rank, size)])


def test_grouped_reducescatter(rank, size):
    """Several at once."""
    arrays = [mx.nd.array(rows_of(rank, 5)), mx.nd.array(rows_of(rank, 2), dtype="float32")]
    first, second = hvd.grouped_reducescatter(arrays, op=hvd.Sum)
    assert_same_bits(first.asnumpy(), expected_sum(size, (5, 3), "float32")[share(5, rank, size)])
    assert_same_bits(second.asnumpy(), expected_sum(size, (2, 3), "float32")[share(2, rank, size)])


def test_wrong_arguments(rank, size):
    """Refused on every rank; the world works on."""
    x = mx.nd.ones((2, 2))
    scalar = mx.np.array(1.0)
    for call in (hvd.allgather, hvd.alltoall, hvd.reducescatter):
        with pytest.raises(ValueError, match="no dimensions"):
            call(scalar)
        with pytest.raises(TypeError, match=r"tensor is a numpy\.ndarray"):
            call(np.ones(2))
        with pytest.raises(kvstore_hvd.UnsupportedDtypeError, match="dtype bool"):
            call(mx.np.array([True], dtype="bool"))
    for op in (hvd.Min, hvd.Adasum):
        with pytest.raises(ValueError, match=f"{op.name.capitalize()} is not supported"):
            hvd.reducescatter(x, op=op)
    if size > 1:
        first = rank == 0
        with pytest.raises(TypeError if first else ValueError, match="numpy" if first else "rank 0 refused the call"):
            hvd.grouped_allgather([x, np.ones(2) if first else x])
    assert hvd.allgather(x).shape == (2 * size, 2)


def test_mismatches(rank, size):
    """Every rank gets the same error with all ranks' values, and the world works on."""
    if size == 1:
        pytest.skip("one worker agrees with itself")
    first = rank == 0
    error = kvstore_hvd.MismatchError
    others = "rank 1" if size == 2 else f"ranks 1-{size - 1}"
    with pytest.raises(error, match=rf"\(2, 3\): rank 0\n  \(2, 4\): {others}"):
        hvd.allgather(mx.nd.ones((2, 3 if first else 4)))
    with pytest.raises(error, match=rf"dtype.\n  float32: rank 0\n  int32: {others}"):
        hvd.allgather(mx.nd.ones((2, 3), dtype="float32" if first else "int32"))
    with pytest.raises(error, match="number of dimensions"):
        hvd.alltoall(mx.nd.ones((size, 3) if first else (size,)))
    with pytest.raises(error, match="disagree on shape"):
        hvd.reducescatter(mx.nd.ones((2 + first, 3)))
    with pytest.raises(error, match="disagree on the operation"):
        (hvd.allgather if first else hvd.reducescatter)(mx.nd.ones((2, 3)), name="kinds")
    with pytest.raises(error, match="number of tensors"):
        hvd.grouped_allgather([mx.nd.ones((2, 3))] * (1 + first), name="counts")
    with pytest.raises(error):
        if first:
            hvd.allgather(mx.nd.ones((2, 3)), name="kinds with others")
        else:
            hvd.allreduce(mx.nd.ones((2, 3)), name="kinds with others").wait_to_read()
    with pytest.raises(error):
        hvd.reducescatter(mx.nd.ones((2, 3)), op=hvd.Sum if first else hvd.Average)
    assert hvd.allgather(mx.nd.ones((1,))).shape == (size,)


def test_failed_input(rank, size):
    """What was to compute one rank's tensor failed: all ranks hear of it."""
    if size == 1:
        pytest.skip("needs two workers")
    x = mx.nd.ones((2, 2))
    if rank == 0:
        mx.nd.waitall()
        # Fails when it is carried out, not when it is submitted.
        x = mx.nd.random.normal(0, -1, (2, 2))
    with pytest.raises(Exception, match="refused the call" if rank else ""):
        hvd.allgather(x)
    assert hvd.allgather(mx.nd.ones((1,))).shape == (size,)
