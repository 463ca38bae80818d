"""The executors with the real kernels, which g++ compiles for this machine: what they are given is what they expect."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore_hvd.comm.device.ring import RingExecutor
from kvstore_hvd.gpu.devices import Device
from support.executor_cases import STAGING, ExecutorCases, Ranks
from support.fake_cuda import FakeCuda, fake_cuda
from support.gpu_ranks import Exchange, HostArray, on_ranks
from support.host_kernels import COMPILER, compiled, host_kernels, loaded

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return loaded(compiled(tmp_path_factory.mktemp("kernels")))


@pytest.fixture
def cuda(library: Any) -> Iterator[FakeCuda]:
    with host_kernels(library), fake_cuda() as machine:
        yield machine


class HostRanks(Ranks):
    """On the stand-in, with the real kernels: two ranks share a GPU, more have one each."""

    def __init__(self, size: int) -> None:
        self.size, self.kind = size, "kernels"
        exchange = Exchange(size)
        ordinals = [0 if size == 2 else each for each in range(size)]
        devices = [Device.of(each, "here") for each in ordinals]
        self.executors = on_ranks(
            size, lambda rank: RingExecutor(rank, devices, ordinals[rank], STAGING, 60.0, exchange.of(rank))
        )


class TestExecutors(ExecutorCases):
    """What all executors must do."""

    @pytest.fixture
    def ranks(self, cuda: FakeCuda) -> Iterator[Callable[[int], HostRanks]]:
        with contextlib.ExitStack() as stack:
            yield lambda size: stack.enter_context(contextlib.closing(HostRanks(size)))
        assert not cuda.memory

    @pytest.fixture
    def new(self) -> Callable[..., HostArray]:
        return HostArray
