"""Which executor a world gets, told by the workers over the real engine; and what all executors must do."""

import contextlib
import contextvars
import types
from typing import Any
from unittest.mock import Mock

import pytest

from kvstore_hvd import errors, log, native
from kvstore_hvd.errors import LaunchError
from kvstore_hvd.gpu.kernels import EXCHANGE_KERNEL
from kvstore_hvd.gpu.nccl_executor import NcclExecutor
from kvstore_hvd.gpu.ring_executor import RingExecutor
from kvstore_hvd.gpu.runtime import Device
from kvstore_hvd.gpu.staged_executor import StagedExecutor
from kvstore_hvd.world import gpus
from kvstore_hvd.world.gpus import create_executor
from kvstore_hvd.world.topology import Host, Place
from support.executor_cases import STAGING, ExecutorCases, Ranks
from support.fake_cuda import COMPILER, FakeDevice, fake_cuda, host_kernels
from support.fake_nccl import FakeNccl
from support.gpu_ranks import Exchange, HostArray, device_operation, finish, on_ranks, samples


class Engines:
    def __init__(self, size):
        self.size, self._segment = size, native.Segment.create(size)
        self._engines = on_ranks(size, lambda rank: native.Engine(self._segment, rank, 20.0, False))

    def of(self, rank):
        return self._engines[rank]

    def topology(self, rank):
        return Place.of(rank, [Host("here", "here")] * self.size, source="launcher")

    def close(self):
        on_ranks(self.size, lambda rank: self._engines[rank].shutdown())


@pytest.fixture
def engines():
    with contextlib.ExitStack() as stack:
        yield lambda size: stack.enter_context(contextlib.closing(Engines(size)))


@pytest.fixture
def cuda(monkeypatch, setting, fresh_log):
    setting(KVHVD_GPU_STAGING_MIB="2", KVHVD_START_TIMEOUT="20")
    monkeypatch.setattr(gpus, "library", Mock(side_effect=LaunchError("NCCL (libnccl.so.2) is not found.")))
    with fake_cuda() as machine:
        yield machine


def make(engines, rank):
    return create_executor(engines.of(rank), engines.topology(rank), rank)


def make_all(engines):
    return on_ranks(engines.size, lambda rank: make(engines, rank))


def refusal(engines, rank):
    with pytest.raises(LaunchError) as error:
        make(engines, rank)
    return str(error.value)


def test_without_nccl_our_kernels_and_without_both_by_the_host_which_is_said_once(engines, cuda, caplog):
    made = make_all(engines(2))
    assert {type(one) for one in made} == {RingExecutor}
    on_ranks(len(made), lambda rank: made[rank].close())
    log._logged.clear()
    cuda.peers = lambda own, other: (own, other) != (0, 2)
    made = make_all(engines(3))
    assert {type(one) for one in made} == {StagedExecutor}
    (text,) = (each for each in caplog.messages if "copied to the host" in each)
    assert "no NCCL 2.18" in text
    assert "not all GPUs reach each other's memory" in text
    on_ranks(len(made), lambda rank: made[rank].close())


def test_a_worker_without_a_gpu_fails_all_alike(engines, cuda):
    cuda.devices[1] = FakeDevice(b"x" * 16, "Old GPU", (6, 1))
    world = engines(3)
    for rank, text in enumerate(on_ranks(3, lambda rank: refusal(world, rank))):
        assert text.startswith(f"[rank {rank}/3] rank 1 cannot use the GPU.\n  rank 1:\n  Old GPU")
        assert "(compute capability 6.1) is too old" in text


def test_workers_that_disagree_about_the_path_fail_all_alike(engines, cuda, monkeypatch):
    world, path = engines(3), contextvars.ContextVar("path")
    others = {"timeout_s": 20.0, "gpu_staging_mib": 2}
    monkeypatch.setattr(gpus, "config", lambda: types.SimpleNamespace(gpu_path=path.get(), **others))

    def refused(rank):
        path.set("staged" if rank == 1 else "auto")
        return refusal(world, rank)

    for text in on_ranks(3, refused):
        assert "disagree on KVHVD_GPU_PATH.\n  auto: ranks 0, 2\n  staged: rank 1" in text


class KernelRanks(Ranks):
    """On the stand-in, with the real kernels: two ranks share a GPU, more have one each."""

    def __init__(self, size, cuda, timeout_s=60.0):
        self.size, self.kind = size, "kernels"
        exchange = Exchange(size)
        ordinals = [0 if size == 2 else each for each in range(size)]
        devices = [Device.of(each, "here") for each in ordinals]
        self.executors = on_ranks(
            size, lambda rank: RingExecutor(rank, devices, ordinals[rank], STAGING, timeout_s, exchange.of(rank))
        )
        limits = [each.modules.limits(EXCHANGE_KERNEL, "int8") for each in self.executors]
        assert {each.sharers for each in limits} == {2 if size == 2 else 1}


class NcclRanks(Ranks):
    def __init__(self, size, cuda):
        self.size, self.kind, self.nccl = size, "nccl", FakeNccl(cuda, size)
        devices, how = [Device.of(each, "here") for each in range(size)], (STAGING, 60.0, 20.0)
        self.executors = on_ranks(size, lambda r: NcclExecutor(self.nccl, "ab" * 128, r, size, devices[r], r, *how))

    def close(self):
        super().close()
        assert (self.nccl.live, len(self.nccl.ops)) == (set(), 4)


class StagedRanks(Ranks):
    def __init__(self, size, cuda):
        self.size, self.kind, self._engines = size, "staged", Engines(size)
        self.executors = on_ranks(size, lambda rank: StagedExecutor(self._engines.of(rank), rank, rank, 60.0))

    def close(self):
        super().close()
        self._engines.close()


class Cases(ExecutorCases):
    kind: type[Any]

    @pytest.fixture
    def ranks(self, machine):
        with contextlib.ExitStack() as stack:
            yield lambda size: stack.enter_context(contextlib.closing(self.kind(size, machine)))
        assert not machine.memory
        assert not machine.events

    @pytest.fixture
    def new(self):
        return HostArray


@pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")
class TestKernels(Cases):
    kind = KernelRanks

    @pytest.fixture
    def machine(self):
        with host_kernels(), fake_cuda() as machine:
            yield machine

    def test_a_rank_that_does_not_come(self, machine, new):
        world, array = KernelRanks(3, machine, timeout_s=0.1), new(samples(0, 9, "float32"))
        with pytest.raises(errors.TimeoutError, match=r"rank 2 waited 0.1 s for rank [01]'s GPU"):
            finish(world.executors[2].start("allreduce", [device_operation([array.address], [array.address], 9)]))
        world.close()


class TestNccl(TestKernels):
    kind = NcclRanks
    test_a_rank_that_does_not_come = None


class TestStaged(Cases):
    kind = StagedRanks
    test_abort_ends_what_waits_on_every_rank = None  # the engine has its own way to end

    @pytest.fixture
    def machine(self):
        with fake_cuda() as machine:
            yield machine
