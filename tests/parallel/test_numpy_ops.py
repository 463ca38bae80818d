"""Collectives on NumPy arrays."""

from functools import reduce

import numpy as np
import pytest

import kvstore_hvd
from kvstore_hvd.errors import InvalidRequestError, KVHvdError, MismatchError, UnsupportedDtypeError
from support.arrays import assert_same_bits, contribution, expected_sum


@pytest.mark.parametrize("shape", [(), (0,), (17, 5), (600_001,)], ids=str)
def test_arrays(rank, size, shape):
    """A new array, or in place. Random programs do other dtypes, operations and factors."""
    mine = np.asarray(contribution(rank, shape, "float32"), "float32")
    before = mine.copy()
    result = kvstore_hvd.allreduce(mine, name="x")
    assert_same_bits(result, np.asarray(expected_sum(size, shape, "float32"), "float32"))
    of_last = kvstore_hvd.broadcast(mine, size - 1, "y")
    assert_same_bits(of_last, np.asarray(contribution(size - 1, shape, "float32"), "float32"))
    assert_same_bits(mine, before)
    least = reduce(np.minimum, [contribution(r, shape, "float32") for r in range(size)])
    assert_same_bits(kvstore_hvd.allreduce(mine, "x", op="min"), np.asarray(least, "float32"))
    assert kvstore_hvd.allreduce(mine, name="x", out=mine) is mine
    assert_same_bits(mine, result)
    assert kvstore_hvd.broadcast(mine, 0, name="y", out=mine) is mine
    x = np.full(5, 6 * (rank + 1), "int32")
    assert kvstore_hvd.allreduce(x, "x", op="average").tolist() == [3 * (size + 1)] * 5
    assert kvstore_hvd.allreduce(x, "x", prescale=0.5).tolist() == [3 * (size + 1) * size / 2] * 5


@pytest.mark.needs(2)
def test_ranks_disagree(rank, size):
    x = np.full(4, rank, "float32")
    for call, about in (
        (lambda: kvstore_hvd.allreduce(np.ones(2 + rank), "x"), "shape"),
        (lambda: kvstore_hvd.allreduce(x, "x", prescale=1.0 + rank, out=x), "prescale"),
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
        (lambda: kvstore_hvd.broadcast(np.ones(2), 0, "\ud800"), InvalidRequestError),
        (lambda: kvstore_hvd.barrier("\ud800"), InvalidRequestError),
        (lambda: kvstore_hvd.barrier(3), TypeError),
        (lambda: kvstore_hvd.allreduce(np.ones(2), "x", op=["sum"]), InvalidRequestError),
        (lambda: kvstore_hvd.allreduce(np.ones(2, bool), "x"), UnsupportedDtypeError),
        (lambda: kvstore_hvd.allreduce(np.ones(2, ">f4"), "x"), UnsupportedDtypeError),
        (lambda: kvstore_hvd.allreduce(np.ones((4, 4))[:, ::2], "x"), InvalidRequestError),
        (lambda: kvstore_hvd.allreduce(np.ones(2), "x", op="median"), InvalidRequestError),
        (lambda: kvstore_hvd.allreduce(np.ones(2), "x", out=np.ones(3)), InvalidRequestError),
        (lambda: kvstore_hvd.allreduce(np.ones(2), "x", out=np.ones(2, "int64")), InvalidRequestError),
        (lambda: kvstore_hvd.allreduce(np.ones(2), "x", out=np.frombuffer(bytes(16))), InvalidRequestError),
        (lambda: kvstore_hvd.broadcast(np.ones(2), 99, "x"), InvalidRequestError),
        (lambda: kvstore_hvd.broadcast(np.ones(2), True, "x"), InvalidRequestError),
        (lambda: kvstore_hvd.allreduce((x := np.ones(5))[:-1], "x", out=x[1:]), InvalidRequestError),
    ],
)
def test_wrong_calls(world, call, error):
    with pytest.raises(error, match="Fix: ") as caught:
        call()
    assert isinstance(caught.value, KVHvdError)
