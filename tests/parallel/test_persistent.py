"""Requests that the engine prepares once: `Engine.prepare`, for benchmarks."""

import gc
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import numpy as np
import pytest

import kvstore_hvd
from kvstore_hvd import native
from kvstore_hvd.errors import MismatchError
from kvstore_hvd.world import process
from support.arrays import assert_same_bits, contribution, expected_sum

pytestmark = pytest.mark.usefixtures("several")


@pytest.fixture
def several(size):
    if size == 1:
        pytest.skip("a world of one has no engine")


def prepared(array, name, out):
    addresses = [array.ctypes.data], [out.ctypes.data]
    request = native.Request("allreduce", f"np/{name}", f"'{name}'", *addresses, array.shape, array.dtype.name)
    return process.current().member.engine().prepare(request, out, array)


@pytest.mark.parametrize(("dtype", "shape"), [("float32", (0,)), ("float16", (511,)), ("int64", (70_000,))], ids=str)
def test_sum_again_and_again(rank, size, dtype, shape):
    """Each call reduces the present values, and meets calls of the other kind; one in place, too."""
    mine = np.asarray(contribution(rank, shape, dtype), dtype)
    out = np.empty_like(mine)
    run = prepared(mine, "x", out)
    expected = np.asarray(expected_sum(size, shape, dtype), dtype)
    for step in range(3):
        out[...] = 0
        assert (run() if (rank + step) % 2 else kvstore_hvd.allreduce(mine, "x", out=out)) is out
        assert_same_bits(out, expected)
    assert prepared(mine, "y", mine)() is mine
    assert_same_bits(mine, expected)


def test_two_threads_wait_for_an_operation_each(rank, size):
    """A call is over when its own operation is: the other workers have to take part once for each."""
    x = np.ones(1000)
    run = prepared(x, "x", np.empty_like(x))
    run()
    if rank != 0:
        for name in ("both have called", "one is over"):
            kvstore_hvd.allreduce(np.ones(1), name)
            run()
        return
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(run) for _ in range(2)]
        time.sleep(0.1)
        kvstore_hvd.allreduce(np.ones(1), "both have called")
        wait(calls, return_when=FIRST_COMPLETED)
        over, _ = wait(calls, timeout=0.3)
        kvstore_hvd.allreduce(np.ones(1), "one is over")
    assert len(over) == 1
    assert all((call.result() == size).all() for call in calls)


def test_it_keeps_its_arrays(rank, size):
    """The memory lives as long as the function, and no longer."""
    x = np.full(5, rank + 1.0)
    references = sys.getrefcount(x)
    run = prepared(x, "x", x)
    assert sys.getrefcount(x) > references
    assert run() is x
    del run
    gc.collect()
    assert sys.getrefcount(x) == references


def test_disagreement(rank, size):
    """Every worker gets the error, arrays stay as they are, and the world goes on."""
    x = np.full(3 + (rank == 0), rank + 1.0)
    run = prepared(x, "x", x)
    for _ in range(2):
        with pytest.raises(MismatchError):
            run()
        assert (x == rank + 1).all()
    assert kvstore_hvd.allreduce(np.ones(1), "x")[0] == size
