"""Allreduces that are prepared once: the same results and errors as those of a call, again and again."""

import gc
import sys
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import numpy as np
import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from kvstore_hvd.errors import MismatchError, ShutdownError
from support.arrays import assert_equal_on_all_ranks, assert_same_bits, contribution, expected_sum
from support.zero_copy import meet_again


@pytest.mark.parametrize(
    ("dtype", "shape"), [("float32", ()), ("float32", (0,)), ("float16", (511,)), ("int64", (70_000,))], ids=str
)
def test_sum_again_and_again(rank, size, dtype, shape):
    """Each call reduces what the array holds then; one that is in place, too."""
    mine = np.asarray(contribution(rank, shape, dtype), dtype)
    out = np.empty_like(mine)
    run = kvstore_hvd.allreduce_init(mine, "x", out=out)
    expected = np.asarray(expected_sum(size, shape, dtype), dtype)
    for _ in range(3):
        out[...] = 0
        assert run() is out
        assert_same_bits(out, expected)
    in_place = kvstore_hvd.allreduce_init(mine, "y", out=mine)
    assert in_place() is mine
    assert_same_bits(mine, expected)


def test_calls_of_both_kinds_meet(rank, size):
    """Names match, not the way of calling; scales and operations count."""
    x = np.full(3, rank + 1.0)
    total = size * (size + 1) / 2
    run = kvstore_hvd.allreduce_init(x, "x", "average", prescale=2.0)
    for step in range(4):
        here = run() if (rank + step) % 2 else kvstore_hvd.allreduce(x, "x", "average", prescale=2.0)
        assert here.tolist() == [2 * total / size] * 3
        assert_equal_on_all_ranks(here, "average")


def test_two_threads_wait_for_an_operation_each(rank, size):
    """A call is over when its own operation is: the other workers have to take part once for each."""
    run = kvstore_hvd.allreduce_init(np.ones(1000), "x")
    run()
    if size == 1:
        return
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
    run = kvstore_hvd.allreduce_init(x, "x")
    copy = x.copy()
    del x
    gc.collect()
    assert run().tolist() == [size * (size + 1) / 2] * 5
    y = copy
    run = kvstore_hvd.allreduce_init(y, "y", out=y)
    assert sys.getrefcount(y) > references
    del run
    gc.collect()
    assert sys.getrefcount(y) == references + 1  # `copy`


def test_disagreement(rank, size):
    """Every worker gets the error, arrays stay as they are, and the world goes on."""
    x = np.full(3 + (rank == 0), rank + 1.0)
    run = kvstore_hvd.allreduce_init(x, "x", out=x)
    if size == 1:
        return
    for _ in range(2):
        with pytest.raises(MismatchError):
            run()
        assert (x == rank + 1).all()
    assert kvstore_hvd.allreduce(np.ones(1), "x")[0] == size


def test_its_world_ends_it(rank, size):
    """What was prepared belongs to one world; it says so, and can be prepared anew.

    Also that of a single worker, which would hand out this worker's own values as the sum among several.
    """
    x = np.ones(2)
    run = kvstore_hvd.allreduce_init(x, "x")
    run()
    meet_again()
    for _ in range(2):
        with pytest.raises(ShutdownError, match="call allreduce_init"):
            run()
    hvd.shutdown()
    hvd.init(comm=[0])
    run = kvstore_hvd.allreduce_init(x, "x")
    alone = run().tolist()
    hvd.shutdown()
    hvd.init(comm=list(range(size)))
    assert alone == [1, 1]
    with pytest.raises(ShutdownError, match=r"has ended \(generation \d+\)\.\n  Fix: call allreduce_init"):
        run()
    assert kvstore_hvd.allreduce_init(x, "x")().tolist() == [size] * 2
