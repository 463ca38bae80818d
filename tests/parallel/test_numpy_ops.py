"""Collectives on NumPy arrays: dtype x size x operation x root, in place and out of place."""

from __future__ import annotations

from functools import reduce

import numpy as np
import pytest

import kvstore_hvd
from kvstore_hvd.errors import InvalidRequestError, KVHvdError, MismatchError, UnsupportedDtypeError
from support.arrays import DTYPES, assert_equal_on_all_ranks, assert_same_bits, contribution, expected_sum

SHAPES = [(), (0,), (1,), (17, 5), (1023,), (600_001,)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sum(rank, size, dtype, shape):
    mine = contribution(rank, shape, dtype)
    mine = np.asarray(mine, dtype)
    before = mine.copy()
    result = kvstore_hvd.allreduce(mine, name="x")
    assert_same_bits(result, np.asarray(expected_sum(size, shape, dtype), dtype))
    assert_same_bits(mine, before)
    assert kvstore_hvd.allreduce(mine, name="x", out=mine) is mine
    assert_same_bits(mine, result)
    assert_equal_on_all_ranks(result, "sum")


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "uint8"])
@pytest.mark.parametrize(("op", "function"), [("min", np.minimum), ("max", np.maximum), ("product", np.multiply)])
def test_other_operations(rank, size, op, function, dtype):
    shape = (1001,)
    parts = [contribution(r, shape, dtype) for r in range(size)]
    assert_same_bits(kvstore_hvd.allreduce(parts[rank], "x", op=op), reduce(function, parts))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int8"])
def test_average_and_scales(rank, size, dtype):
    x = np.full(5, 6 * (rank + 1), dtype)
    mean = 3 * (size + 1)
    assert kvstore_hvd.allreduce(x, "x", op="average").tolist() == [mean] * 5
    total = mean * size
    assert kvstore_hvd.allreduce(x, "x", prescale=0.5).tolist() == [total / 2] * 5
    assert kvstore_hvd.allreduce(x, "x", postscale=1 / 3).tolist() == [total / 3] * 5


def test_every_root(rank, size):
    for root in range(size):
        for dtype in DTYPES:
            for shape in SHAPES[:-1]:
                mine = np.asarray(contribution(rank, shape, dtype), dtype)
                expected = np.asarray(contribution(root, shape, dtype), dtype)
                assert_same_bits(kvstore_hvd.broadcast(mine, root, f"x{root}"), expected)
                assert kvstore_hvd.broadcast(mine, root, name=f"x{root}", out=mine) is mine
                assert_same_bits(mine, expected)


def test_ranks_disagree(rank, size):
    if size == 1:
        pytest.skip("one rank cannot disagree")
    x = np.full(4, rank, "float32")
    for call, about in (
        (lambda: kvstore_hvd.allreduce(np.ones(2 + rank), "x"), "shape"),
        (lambda: kvstore_hvd.allreduce(x.astype("float64" if rank else "float32"), "x"), "dtype"),
        (lambda: kvstore_hvd.allreduce(x, "x", op="min" if rank else "max", out=x), "op"),
        (lambda: kvstore_hvd.allreduce(x, "x", prescale=1.0 + rank, out=x), "prescale"),
        (lambda: kvstore_hvd.allreduce(x, "x", postscale=1.0 + rank, out=x), "postscale"),
        (lambda: kvstore_hvd.broadcast(x, rank % 2, "x", out=x), "root"),
    ):
        with pytest.raises(MismatchError, match=rf"\[rank {rank}/{size}\] .*'x': ranks disagree on .*{about}") as error:
            call()
        assert "Fix: " in str(error.value)
        assert "network" not in str(error.value)  # there is none
        assert x.tolist() == [rank] * 4
    assert kvstore_hvd.allreduce(np.ones(2), "x").tolist() == [size] * 2


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: kvstore_hvd.allreduce([1, 2], "x"), TypeError),
        (lambda: kvstore_hvd.allreduce(np.ones(2), 3), TypeError),
        (lambda: kvstore_hvd.allreduce(np.ones(2), "\ud800"), InvalidRequestError),
        (lambda: kvstore_hvd.allreduce_init(np.ones(2), "\ud800"), InvalidRequestError),
        (lambda: kvstore_hvd.broadcast(np.ones(2), 0, "\ud800"), InvalidRequestError),
        (lambda: kvstore_hvd.allreduce(np.ones(2, bool), "x"), UnsupportedDtypeError),
        (lambda: kvstore_hvd.allreduce(np.ones(2, ">f4"), "x"), UnsupportedDtypeError),
        (lambda: kvstore_hvd.allreduce(np.ones((4, 4))[:, ::2], "x"), InvalidRequestError),
        (lambda: kvstore_hvd.allreduce(np.ones(2), "x", op="median"), InvalidRequestError),
        (lambda: kvstore_hvd.allreduce(np.ones(2), "x", out=np.ones(3)), InvalidRequestError),
        (lambda: kvstore_hvd.allreduce(np.ones(2), "x", out=np.ones(2, "int64")), InvalidRequestError),
        (lambda: kvstore_hvd.allreduce(np.ones(2), "x", out=np.frombuffer(bytes(16))), InvalidRequestError),
        (lambda: kvstore_hvd.broadcast(np.ones(2), 99, "x"), InvalidRequestError),
        (lambda: kvstore_hvd.broadcast(np.ones(2), -1, "x"), InvalidRequestError),
        (lambda: kvstore_hvd.broadcast(np.ones(2), True, "x"), InvalidRequestError),
    ],
)
def test_wrong_calls(world, call, error):
    with pytest.raises(error, match="Fix: ") as caught:
        call()
    assert isinstance(caught.value, KVHvdError)


def test_overlap(world):
    x = np.ones(5)
    with pytest.raises(InvalidRequestError, match="out overlaps array"):
        kvstore_hvd.allreduce(x[:-1], "x", out=x[1:])
