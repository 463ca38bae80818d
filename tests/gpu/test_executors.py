"""Executors on a real GPU: ranks that are threads, each with a stream; NCCL with as many as it allows on one GPU."""

import os
import threading
import time

import numpy as np
import pytest

from kvstore_hvd import errors, native
from kvstore_hvd.errors import LaunchError
from kvstore_hvd.gpu import kernels
from kvstore_hvd.gpu.nccl import library
from kvstore_hvd.gpu.nccl_executor import NcclExecutor
from kvstore_hvd.gpu.ring_executor import RingExecutor
from support.executor_cases import STAGING, ExecutorCases, Ranks
from support.gpu_ranks import PATIENCE_S, Exchange, combined, device_operation, finish, on_ranks, samples

# Two ranks of NCCL on one GPU: an experiment of NCCL 2.30 and newer, which it asks to be allowed.
MANY_ON_ONE = bool(os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE"))


class RingRanks(Ranks):
    kind = "kernels"

    def __init__(self, device, size, timeout_s=PATIENCE_S):
        self.size = size
        exchange = Exchange(size)

        def make(rank):
            return RingExecutor(rank, [device] * size, 0, STAGING, timeout_s, exchange.of(rank))

        self.executors = on_ranks(size, make)
        # Loading a kernel may wait for those that run, of other ranks: all are loaded before any runs.
        for executor in self.executors:
            for dtype in native.DTYPES:
                for name in kernels.kernel_names(dtype):
                    executor.modules.limits(name, dtype)


class NcclRanks(Ranks):
    kind = "nccl"

    def __init__(self, device, size):
        self.size = size
        if os.environ.get("KVHVD_TEST_FAKE_GPU"):
            pytest.skip("NCCL needs a real GPU")
        try:
            nccl = library()
        except LaunchError as error:
            pytest.skip(str(error).splitlines()[0])
        if size > 1 and not (MANY_ON_ONE and nccl.version >= 23000):
            pytest.skip(
                "NCCL has one rank for each GPU; NCCL_MULTI_RANK_GPU_ENABLE=1 is not set, or it is older than 2.30"
            )
        unique_id = nccl.unique_id()

        def make(rank):
            return NcclExecutor(nccl, unique_id, rank, size, device, 0, STAGING, PATIENCE_S, 20.0)

        self.executors = on_ranks(size, make)


@pytest.fixture
def rings(device, arena):
    made = {}

    def make(size, **options):
        key = size, *options.items()
        if key not in made:
            made[key] = RingRanks(device, size, **options)
        return made[key]

    yield make
    for each in made.values():
        each.close()


class TestKernels(ExecutorCases):
    @pytest.fixture
    def ranks(self, rings):
        return rings


class TestNccl(ExecutorCases):
    @pytest.fixture
    def ranks(self, device, arena):
        made = []

        def make(size):
            made.append(NcclRanks(device, size))
            return made[-1]

        yield make
        for each in made:
            each.close()


class TestNcclAlone:
    """NCCL with one rank, which every GPU allows."""

    @pytest.mark.parametrize("op", ["sum", "max"])
    @pytest.mark.parametrize("count", [7, 1 << 20])
    def test_one_rank(self, device, new, op, count):
        ranks = NcclRanks(device, 1)
        given = samples(0, count, "float32")
        array = new(given)
        request = device_operation([array.address], [array.address], count, op=op)
        finish(ranks.executors[0].start("allreduce", [request]))
        np.testing.assert_array_equal(array.content, given)
        request = device_operation([array.address], [array.address], count, "float32", "sum", 2.0, 0.25)
        finish(ranks.executors[0].start("allreduce", [request]))
        np.testing.assert_array_equal(array.content.view(np.float32), given.view(np.float32) / 2)
        ranks.close()


def test_eight_ranks_many_times(rings, new):
    size, counts = 8, (1, 33, 5000, 100_000)
    given = [[samples(rank, count, "float32", n) for n, count in enumerate(counts)] for rank in range(size)]
    world = rings(size)
    arrays = [[(new(raw), new(raw)) for raw in each] for each in given]

    def work(rank, executor):
        for _ in range(50):
            batch = [device_operation([a.address], [b.address], a.nbytes // 4) for a, b in arrays[rank]]
            for steps in [executor.start("allreduce", batch), executor.start("allreduce", batch[:2])]:
                finish(steps)

    world.run(work)
    for n in range(len(counts)):
        expected = combined([each[n] for each in given], "float32", "sum")
        for rank in range(size):
            np.testing.assert_array_equal(arrays[rank][n][1].content, expected)


def test_a_rank_that_does_not_come(rings, new):
    world = rings(2, timeout_s=0.5)
    array = new(samples(0, 100_000, "float32"))
    start = time.monotonic()
    steps = world.executors[0].start("allreduce", [device_operation([array.address], [array.address], 100_000)])
    with pytest.raises(errors.TimeoutError, match=r"rank 0 waited 0.5 s for rank 1's GPU"):
        finish(steps)
    assert time.monotonic() - start < 5


def test_an_abort_is_quick(rings, new):
    world = rings(2, timeout_s=60.0)
    array = new(samples(0, 100_000, "float32"))
    steps = world.executors[0].start("allreduce", [device_operation([array.address], [array.address], 100_000)])
    time.sleep(0.2)
    assert next(steps, True) is None
    start = time.monotonic()
    thread = threading.Thread(target=world.executors[0].abort)
    thread.start()
    thread.join()
    with pytest.raises(errors.TransportError, match="were ended by rank 0"):
        finish(steps)
    assert time.monotonic() - start < 5
