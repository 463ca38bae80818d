"""Executors on a real GPU: ranks that are threads, each with a stream; NCCL with as many as it allows on one GPU."""

import contextlib
import os

import pytest

from kvstore_hvd import errors, native
from kvstore_hvd.errors import LaunchError
from kvstore_hvd.gpu import kernels
from kvstore_hvd.gpu.nccl import library
from kvstore_hvd.gpu.nccl_executor import NcclExecutor
from kvstore_hvd.gpu.ring_executor import RingExecutor
from support.executor_cases import STAGING, ExecutorCases, Ranks
from support.gpu_ranks import PATIENCE_S, Exchange, device_operation, finish, on_ranks, samples

# Two ranks of NCCL on one GPU: an experiment of NCCL 2.30 and newer, which it asks to be allowed.
MANY_ON_ONE = bool(os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE"))


class RingRanks(Ranks):
    kind = "kernels"

    def __init__(self, device, size, timeout_s=PATIENCE_S):
        self.size = size
        exchange = Exchange(size)
        devices = [device] * size
        self.executors = on_ranks(
            size, lambda rank: RingExecutor(rank, devices, 0, STAGING, timeout_s, exchange.of(rank))
        )
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
        unique_id, how = nccl.unique_id(), (STAGING, PATIENCE_S, 20.0)
        self.executors = on_ranks(size, lambda rank: NcclExecutor(nccl, unique_id, rank, size, device, 0, *how))


@pytest.fixture
def rings(device, arena):
    with contextlib.ExitStack() as stack:
        yield lambda size, **options: stack.enter_context(contextlib.closing(RingRanks(device, size, **options)))


class TestKernels(ExecutorCases):
    many = 8

    @pytest.fixture
    def ranks(self, rings):
        return rings


class TestNccl(ExecutorCases):
    @pytest.fixture
    def ranks(self, device, arena):
        with contextlib.ExitStack() as stack:
            yield lambda size: stack.enter_context(contextlib.closing(NcclRanks(device, size)))


def test_a_rank_that_does_not_come(rings, new):
    world = rings(2, timeout_s=0.5)
    array = new(samples(0, 100_000, "float32"))
    steps = world.executors[0].start("allreduce", [device_operation([array.address], [array.address], 100_000)])
    with pytest.raises(errors.TimeoutError, match=r"rank 0 waited 0.5 s for rank 1's GPU"):
        finish(steps)
