import numpy as np
import pytest

import kvstore_hvd
from kvstore_hvd.errors import InvalidRequestError, KVHvdError, UnsupportedDtypeError
from support.arrays import assert_same_bits, contribution, expected_sum


@pytest.mark.sizes
@pytest.mark.parametrize("shape", [(), (0,), (600_001,)], ids=str)
def test_arrays(rank, size, shape):
    """A new array, or in place. Random programs do other dtypes, operations and factors."""
    mine = np.asarray(contribution(rank, shape, "float32"), "float32")
    before = mine.copy()
    result = kvstore_hvd.allreduce(mine, name="x")
    assert_same_bits(result, np.asarray(expected_sum(size, shape, "float32"), "float32"))
    of_last = kvstore_hvd.broadcast(mine, np.int64(size - 1), "y")
    assert_same_bits(of_last, np.asarray(contribution(size - 1, shape, "float32"), "float32"))
    assert_same_bits(mine, before)
    same = mine.view()
    assert kvstore_hvd.allreduce(mine, name="x", out=same) is same
    assert_same_bits(mine, result)
    assert kvstore_hvd.broadcast(mine, 0, name="y", out=mine) is mine
    x = np.full(5, 6 * (rank + 1), "int32")
    for factor in ("prescale", "postscale"):
        assert kvstore_hvd.allreduce(x, "x", **{factor: 0.5}).tolist() == [3 * (size + 1) * size / 2] * 5


def test_wrong_calls(world):
    ones = np.ones(2)
    for call, error in (
        (lambda: kvstore_hvd.allreduce([1, 2], "x"), TypeError),
        (lambda: kvstore_hvd.allreduce(ones, 3), TypeError),
        (lambda: kvstore_hvd.allreduce(ones, "\ud800"), InvalidRequestError),
        (lambda: kvstore_hvd.broadcast(ones, 0, "\ud800"), InvalidRequestError),
        (lambda: kvstore_hvd.barrier("\ud800"), InvalidRequestError),
        (lambda: kvstore_hvd.barrier(3), TypeError),
        (lambda: kvstore_hvd.allreduce(ones, "x", op=["sum"]), InvalidRequestError),
        (lambda: kvstore_hvd.allreduce(ones.astype(bool), "x"), UnsupportedDtypeError),
        (lambda: kvstore_hvd.allreduce(ones.astype(">f4"), "x"), UnsupportedDtypeError),
        (lambda: kvstore_hvd.allreduce(np.ones((4, 4))[:, ::2], "x"), InvalidRequestError),
        (lambda: kvstore_hvd.allreduce(ones, "x", op="median"), InvalidRequestError),
        (lambda: kvstore_hvd.allreduce(ones, "x", out=np.ones(3)), InvalidRequestError),
        (lambda: kvstore_hvd.allreduce(ones, "x", out=np.ones(2, "int64")), InvalidRequestError),
        (lambda: kvstore_hvd.allreduce(ones, "x", out=np.frombuffer(bytes(16))), InvalidRequestError),
        (lambda: kvstore_hvd.broadcast(ones, kvstore_hvd.topology().size, "x"), InvalidRequestError),
        (lambda: kvstore_hvd.broadcast(ones, -1, "x"), InvalidRequestError),
        (lambda: kvstore_hvd.broadcast(ones, True, "x"), InvalidRequestError),
        (lambda: kvstore_hvd.allreduce((x := np.ones(5))[:-1], "x", out=x[1:]), InvalidRequestError),
    ):
        with pytest.raises(error, match="Fix: ") as caught:
            call()
        assert isinstance(caught.value, KVHvdError)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_more_than_two_gigabytes(rank, size):
    """An array whose bytes do not fit into 31 bits; needs memory for two of them on every rank."""
    if size > 2:
        pytest.skip("the memory of this many copies is not there")
    count = 2**31 + 17
    array = np.full(count, rank + 1, np.int8)
    array[-1] = 5
    kvstore_hvd.allreduce(array, "large", out=array)
    assert array[-1] == 5 * size
    total = sum(range(1, size + 1))
    for begin in range(0, count - 1, 1 << 28):
        assert (array[begin : min(begin + (1 << 28), count - 1)] == total).all()
