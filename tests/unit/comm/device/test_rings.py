"""Executors on GPUs that are not there: what ranks get, what is enqueued, and how failures end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvstore_hvd import errors
from kvstore_hvd.comm.device.executor import EventCompletion, Executor
from kvstore_hvd.comm.device.nccl import NcclExecutor
from kvstore_hvd.comm.device.ring import RingExecutor
from kvstore_hvd.errors import InvalidRequestError, LaunchError, TransportError
from kvstore_hvd.gpu.devices import Device
from kvstore_hvd.gpu.streams import Stream
from support.executor_cases import STAGING, ExecutorCases, Ranks, empty
from support.fake_cuda import FakeCuda, fake_cuda
from support.fake_nccl import FakeNccl
from support.gpu_ranks import Exchange, HostArray, combined, device_operation, finish, memory_of, on_ranks, samples
from support.patience import patient


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with fake_cuda() as machine:
        yield machine


class FakeRanks(Ranks):
    """On the stand-in."""

    def __init__(
        self,
        cuda: FakeCuda,
        kind: str,
        size: int,
        shared: bool = False,
        timeout_s: float = 30.0,
        staging: int = STAGING,
    ) -> None:
        self.cuda, self.kind, self.size, self.nccl = cuda, kind, size, FakeNccl(cuda)
        self.ordinals = [0 if shared else rank for rank in range(size)]
        exchange, unique_id = Exchange(size), self.nccl.unique_id()

        def make(rank: int) -> Executor:
            devices = [Device.of(ordinal, "host", 29900) for ordinal in self.ordinals]
            if kind == "kernels":
                arguments = rank, devices, self.ordinals[rank], staging, timeout_s, exchange.of(rank)
                return RingExecutor(*arguments)
            library: Any = self.nccl
            return NcclExecutor(
                library, unique_id, rank, size, devices[rank], self.ordinals[rank], staging, timeout_s, timeout_s
            )

        self.executors: list[Executor] = on_ranks(size, make)


@pytest.fixture
def worlds(cuda: FakeCuda) -> Iterator[Callable[..., FakeRanks]]:
    made: list[FakeRanks] = []

    def make(kind: str, size: int, **options: Any) -> FakeRanks:
        made.append(FakeRanks(cuda, kind, size, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


KINDS = ("kernels", "nccl")


class TestExecutors(ExecutorCases):
    """What all must do, on the stand-in."""

    @pytest.fixture(params=KINDS)
    def ranks(self, request: Any, worlds: Callable[..., FakeRanks]) -> Callable[[int], FakeRanks]:
        """Make ranks of either kind."""
        return lambda size: worlds(request.param, size)

    @pytest.fixture
    def new(self) -> Callable[..., HostArray]:
        """Make arrays in the memory of the host, which is that of the stand-in."""
        return HostArray


@pytest.mark.parametrize("shared", [False, True])
def test_a_large_tensor_goes_around_a_ring_unless_a_gpu_is_shared(
    worlds: Callable[..., FakeRanks], shared: bool
) -> None:
    count = STAGING
    given = [samples(rank, count, "float32") for rank in range(2)]
    world = worlds("kernels", 2, shared=shared)

    def work(rank: int, executor: Executor) -> Any:
        array, other = HostArray(given[rank]), empty(HostArray, count * 4)
        finish(executor.allreduce([device_operation([array.address], [array.address, other.address], count)]))
        np.testing.assert_array_equal(array.content, other.content)
        return array.content.copy()

    for result in world.run(work):
        np.testing.assert_array_equal(result, combined(given, "float32", "sum"))
    launched = set(world.cuda.launches())
    assert launched == ({"kvhvd_twoshot_float32_sum_2"} if shared else {"kvhvd_ring_float32_sum"})


def test_nccl_reduces_large_tensors_where_they_lie(worlds: Callable[..., FakeRanks]) -> None:
    count = 1 << 19
    world = worlds("nccl", 2)
    arrays = [[HostArray(samples(rank, count, "float32", n)) for n in range(2)] for rank in range(2)]

    def work(rank: int, executor: Executor) -> None:
        batch = [
            device_operation([a.address], [a.address], count, "float32", "average", 1.0, 0.5) for a in arrays[rank]
        ]
        finish(executor.allreduce(batch))

    world.run(work)
    assert world.cuda.launches() == []
    reduced = [call for call in world.nccl.calls if call[0] == "ncclAllReduce"]
    assert {call[1] for call in reduced} == {array.address for each in arrays for array in each}
    # The factor is NCCL's business here, and its operator is given back.
    assert world.nccl.names().count("ncclRedOpCreatePreMulSum") == world.nccl.names().count("ncclRedOpDestroy") == 4


def test_nccl_packs_small_tensors(worlds: Callable[..., FakeRanks]) -> None:
    world = worlds("nccl", 2)
    arrays = [[HostArray(samples(rank, 9000, "float32", n)) for n in range(20)] for rank in range(2)]

    def work(rank: int, executor: Executor) -> None:
        finish(executor.allreduce([device_operation([a.address], [a.address], 9000) for a in arrays[rank]]))

    world.run(work)
    assert world.nccl.names().count("ncclAllReduce") == 2  # one of each rank
    assert world.cuda.launches() == ["kvhvd_copy"] * 4


@pytest.mark.parametrize("shared", [False, True])
def test_kernels_that_meet_are_launched_cooperatively(worlds: Callable[..., FakeRanks], shared: bool) -> None:
    world = worlds("kernels", 2, shared=shared)

    def work(rank: int, executor: Executor) -> None:
        array = HostArray(samples(rank, 100, "float32"))
        finish(executor.allreduce([device_operation([array.address], [array.address], 100)]))

    world.run(work)
    launched = [call for call in world.cuda.calls if call[0] == "launch"]
    assert launched == [("launch", "kvhvd_oneshot_float32_sum", (1, 1, 1), not shared)] * 2


def test_only_whole_allocations_are_shared_and_all_is_given_back(cuda: FakeCuda) -> None:
    world = FakeRanks(cuda, "kernels", 2, shared=True)
    assert cuda.names().count("ipcGetMemHandle") == 2
    assert "ipcOpenMemHandle" not in cuda.names(), "one process: the memory is there already"
    world.close()
    assert not cuda.memory
    assert all(event.done.is_set() for event in cuda.events.values())
    assert not cuda.events
    assert not cuda.streams


def test_nccl_begins_in_the_context_of_its_device(cuda: FakeCuda) -> None:
    streams: list[int] = []

    class Watched(FakeNccl):
        def _commInitRankConfig(self, *arguments: Any) -> int:
            streams.append(len(cuda.streams))
            return super()._commInitRankConfig(*arguments)

    library: Any = Watched(cuda)
    device = Device.of(3, "host", 29900)
    NcclExecutor(library, library.unique_id(), 0, 1, device, 3, STAGING, 20.0, 20.0).close()
    library.results["ncclCommInitRankConfig"] = 5
    with pytest.raises(LaunchError):
        NcclExecutor(library, library.unique_id(), 0, 1, device, 3, STAGING, 20.0, 20.0)
    assert streams == [1]
    assert (cuda.memory, cuda.events, cuda.streams) == ({}, {}, {})


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_after_nccl_either(cuda: FakeCuda, kind: str) -> None:
    world = FakeRanks(cuda, kind, 2)

    def work(rank: int, executor: Executor) -> None:
        array = HostArray(samples(rank, 100, "float32"))
        finish(executor.allreduce([device_operation([array.address], [array.address], 100, op="max")]))

    world.run(work)
    world.close()
    assert (cuda.memory, cuda.events, cuda.streams) == ({}, {}, {})


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_does_not_come_is_a_timeout(worlds: Callable[..., FakeRanks], kind: str) -> None:
    world = worlds(kind, 2, timeout_s=0.3)
    array = HostArray(samples(0, 100_000, "float32"))
    start = time.monotonic()
    completion = world.executors[0].allreduce([device_operation([array.address], [array.address], 100_000)])
    with pytest.raises(errors.TimeoutError) as error:
        finish(completion)
    assert time.monotonic() - start < patient(20)
    if kind == "kernels":
        assert "rank 0 waited 0.3 s for rank 1's GPU" in str(error.value)
    for executor in world.executors:
        executor.abort()


def test_an_error_is_told_when_the_device_touches_nothing_any_more(cuda: FakeCuda) -> None:
    stream, goes_on = Stream(), threading.Event()
    cuda.stream_at(stream.address).push(lambda: goes_on.wait(patient(30)))
    aborts: list[str] = []
    completion = EventCompletion(stream, lambda: None, lambda: aborts.append("aborted"), timeout_s=0.0)
    while not aborts:
        assert not completion.done()
    assert not completion.done()
    goes_on.set()
    with pytest.raises(errors.TimeoutError):
        finish(completion)
    assert aborts == ["aborted"]


def test_one_rank_alone_keeps_every_bit(worlds: Callable[..., FakeRanks]) -> None:
    world = worlds("kernels", 1)
    given = np.array([0x7FC12345, 0xFFFFFFFF, 1, 0x80000000], np.uint32).view(np.uint8)
    array, other = HostArray(given), HostArray(np.zeros(16, np.uint8))
    finish(world.executors[0].allreduce([device_operation([array.address], [array.address, other.address], 4)]))
    np.testing.assert_array_equal(array.content, given)
    np.testing.assert_array_equal(other.content, given)
    assert world.cuda.launches() == []


@pytest.mark.parametrize("kind", KINDS)
def test_arrays_on_another_gpu_are_refused(worlds: Callable[..., FakeRanks], kind: str, cuda: FakeCuda) -> None:
    world = worlds(kind, 1)
    array, other = (HostArray(np.zeros(4 << 20, np.uint8)) for _ in range(2))
    cuda.places[other.address] = 3
    finish(world.executors[0].allreduce([device_operation([array.address], [array.address], 1 << 20)]))
    with pytest.raises(InvalidRequestError, match=r"is on GPU 3, but this worker's operations are on GPU 0"):
        world.executors[0].allreduce([device_operation([array.address], [other.address], 1 << 20)])


def test_several_inputs_are_refused(worlds: Callable[..., FakeRanks]) -> None:
    world = worlds("kernels", 1)
    array = HostArray(samples(0, 10, "float32"))
    with pytest.raises(InvalidRequestError, match="2 inputs"):
        world.executors[0].allreduce([device_operation([array.address] * 2, [array.address], 10)])


def test_ranks_with_different_staging_memory_are_refused(cuda: FakeCuda) -> None:
    exchange = Exchange(2)

    def make(rank: int) -> str:
        devices = [Device.of(0, "host") for _ in range(2)]
        with pytest.raises(LaunchError) as error:
            RingExecutor(rank, devices, 0, STAGING << rank, 1.0, exchange.of(rank))
        return str(error.value)

    for text in on_ranks(2, make):
        assert "KVHVD_GPU_STAGING_MIB" in text
    assert not cuda.memory


def test_a_failed_kernel_of_the_program_is_a_lost_world(worlds: Callable[..., FakeRanks], cuda: FakeCuda) -> None:
    world = worlds("kernels", 1)
    array = HostArray(samples(0, 10, "float32"))
    completion = world.executors[0].allreduce([device_operation([array.address], [array.address], 10)])
    cuda.status_of_events = 700
    with pytest.raises(TransportError, match="cudaError 700"):
        finish(completion)
    cuda.status_of_events = 0


def test_an_error_of_nccl_is_a_lost_world(worlds: Callable[..., FakeRanks]) -> None:
    world = worlds("nccl", 1)
    array = HostArray(samples(0, 100_000, "float32"))
    completion = world.executors[0].allreduce([device_operation([array.address], [array.address], 100_000)])
    world.nccl.state = 6
    with pytest.raises(TransportError, match="planted error 6"):
        finish(completion)


def test_memory_helper_reads_what_is_there() -> None:
    array = HostArray(np.arange(5, dtype=np.uint8))
    assert memory_of(array.address, 5).tolist() == [0, 1, 2, 3, 4]
