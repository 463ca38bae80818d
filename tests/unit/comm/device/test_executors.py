"""Which executor a world gets, told by the workers over the real engine; and the way by the host."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvstore_hvd import log, native
from kvstore_hvd.comm.base import Communicator, Request
from kvstore_hvd.comm.device import executors, ring
from kvstore_hvd.comm.device.executor import Executor
from kvstore_hvd.comm.device.executors import create_executor
from kvstore_hvd.comm.device.nccl import NcclExecutor
from kvstore_hvd.comm.device.ring import RingExecutor
from kvstore_hvd.comm.device.split import SplitExecutor
from kvstore_hvd.comm.device.staged import StagedExecutor
from kvstore_hvd.comm.shm import native_request
from kvstore_hvd.errors import ConfigError, LaunchError, MismatchError, TransportError
from kvstore_hvd.gpu import nccl_library
from kvstore_hvd.gpu.nccl_library import OLDEST
from kvstore_hvd.worlds.topology import Host, Topology
from support.fake_cuda import FakeCuda, FakeDevice, fake_cuda
from support.fake_nccl import FakeNccl
from support.gpu_ranks import combined, device_operation, finish, on_ranks, samples

config = importlib.import_module("kvstore_hvd.config")


class Engines:
    """Engines of ranks that are threads, with what executors need of a communicator."""

    def __init__(self, size: int) -> None:
        self.size, self._segment = size, native.Segment.create(size)
        self._engines = on_ranks(size, lambda rank: native.Engine(self._segment, rank, 20.0, False))

    def of(self, rank: int) -> Any:
        engine = self._engines[rank]

        class Through:
            def run(self, request: Request) -> None:
                engine.run(native_request(request))

            def submit(self, request: Request) -> native.Work:
                return engine.submit(native_request(request))

        return Through()

    def topology(self, rank: int) -> Topology:
        return Topology.of(rank, [Host("here", "here")] * self.size, source="launcher")

    def operations(self) -> list[dict[str, int]]:
        """How many operations each name has had, on each rank."""
        reports = [engine.report() for engine in self._engines]
        return [{name: each.operations for name, each in report.names.items()} for report in reports]

    def close(self) -> None:
        on_ranks(self.size, lambda rank: self._engines[rank].shutdown())


@pytest.fixture
def engines() -> Iterator[Callable[[int], Engines]]:
    made: list[Engines] = []

    def make(size: int) -> Engines:
        made.append(Engines(size))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    monkeypatch.setattr(log, "_said", set())
    with fake_cuda() as machine:
        yield machine


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    def set_them(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        config.reload()

    set_them(KVHVD_GPU_STAGING_MIB="2", KVHVD_START_TIMEOUT="20")
    yield set_them
    monkeypatch.undo()
    config.reload()


@pytest.fixture
def nccl(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    library = FakeNccl(cuda)
    monkeypatch.setattr(executors, "library", lambda: library)
    return library


def refuse() -> Any:
    raise LaunchError("NCCL (libnccl.so.2) is not found.")


def make_all(engines: Engines, ordinals: list[int]) -> list[Executor]:
    def make(rank: int) -> Executor:
        through: Communicator = engines.of(rank)
        return create_executor(through, engines.topology(rank), ordinals[rank])

    made: list[Executor] = on_ranks(engines.size, make)
    return made


def close_all(made: list[Executor]) -> None:
    on_ranks(len(made), lambda rank: made[rank].close())


@pytest.mark.parametrize("reach", [False, True])
def test_each_its_gpu_and_nccl(
    engines: Any,
    cuda: FakeCuda,
    nccl: FakeNccl,
    settings: Any,
    reach: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="kvstore_hvd")
    cuda.peers = lambda own, other: reach
    made = make_all(engines(3), [0, 1, 2])
    assert {type(one) for one in made} == {SplitExecutor if reach else NcclExecutor}
    assert "reduced by NCCL 2.99.0" in caplog.text
    close_all(made)
    assert (cuda.memory, cuda.events, cuda.streams) == ({}, {}, {})


@pytest.fixture
def unmapped(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return what the thread of each rank calls first: rank 1 cannot map the others' memory."""
    original = ring.PeerMemory

    def refuse_on_one(exported: str) -> Any:
        if threading.current_thread().name == "rank 1":
            raise TransportError("CUDA failed to map memory: cudaErrorInvalidValue.")
        return original(exported)

    def begin(rank: int) -> None:
        threading.current_thread().name = f"rank {rank}"

    monkeypatch.setattr(ring, "PeerMemory", refuse_on_one)
    return begin


@pytest.mark.parametrize(("ordinals", "kind"), [([0, 1], NcclExecutor), ([0, 0], StagedExecutor)])
def test_memory_that_cannot_be_mapped_on_one_worker_changes_the_way_of_all(
    engines: Any,
    cuda: FakeCuda,
    nccl: FakeNccl,
    settings: Any,
    unmapped: Callable[[int], None],
    ordinals: list[int],
    kind: Any,
) -> None:
    world = engines(2)

    def make(rank: int) -> Executor:
        unmapped(rank)
        return create_executor(world.of(rank), world.topology(rank), ordinals[rank])

    made = on_ranks(2, make)
    assert {type(one) for one in made} == {kind}
    close_all(made)
    assert (cuda.memory, cuda.events, cuda.streams) == ({}, {}, {})


def test_kernels_that_the_user_demands_are_not_replaced(
    engines: Any, cuda: FakeCuda, nccl: FakeNccl, settings: Any, unmapped: Callable[[int], None]
) -> None:
    settings(KVHVD_GPU_PATH="kernels")
    world = engines(2)

    def work(rank: int) -> None:
        unmapped(rank)
        with pytest.raises(LaunchError, match="rank 1 cannot use memory of the GPUs together"):
            create_executor(world.of(rank), world.topology(rank), rank)

    on_ranks(2, work)
    assert (cuda.memory, cuda.events, cuda.streams) == ({}, {}, {})


def test_small_messages_by_our_kernels_large_ones_by_nccl(
    engines: Any, cuda: FakeCuda, nccl: FakeNccl, settings: Any
) -> None:
    made = make_all(engines(2), [0, 1])
    counts = (100, 1 << 20, 16 << 10, (16 << 10) + 1, 3)
    given = [[samples(rank, count, "float32", n) for n, count in enumerate(counts)] for rank in range(2)]

    def work(rank: int) -> Any:
        arrays = [raw.copy() for raw in given[rank]]
        under_way = [
            made[rank].allreduce([device_operation([array.ctypes.data], [array.ctypes.data], count)])
            for array, count in zip(arrays, counts)
        ]
        for completion in under_way:
            finish(completion)
        return arrays

    for result in on_ranks(2, work):
        for n, array in enumerate(result):
            np.testing.assert_array_equal(array, combined([each[n] for each in given], "float32", "sum"))
    assert nccl.names().count("ncclAllReduce") == 2
    assert nccl.names().count("ncclAllGather") == 2
    assert sorted(set(cuda.launches())) == ["kvhvd_copy", "kvhvd_oneshot_float32_sum"]
    assert cuda.launches().count("kvhvd_oneshot_float32_sum") == 2 * 4
    close_all(made)


def test_one_gpu_together(engines: Any, cuda: FakeCuda, nccl: FakeNccl, settings: Any) -> None:
    made = make_all(engines(2), [0, 0])
    assert {type(one) for one in made} == {RingExecutor}
    assert "ncclCommInitRankConfig" not in nccl.names()
    close_all(made)


def test_without_nccl_our_kernels(engines: Any, cuda: FakeCuda, settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executors, "library", refuse)
    made = make_all(engines(2), [0, 1])
    assert {type(one) for one in made} == {RingExecutor}
    close_all(made)


def test_without_both_by_the_host_which_is_said_once(
    engines: Any, cuda: FakeCuda, settings: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(executors, "library", refuse)
    cuda.peers = lambda own, other: False
    made = make_all(engines(2), [0, 1])
    assert {type(one) for one in made} == {StagedExecutor}
    said = [record.getMessage() for record in caplog.records if "copied to the host" in record.getMessage()]
    (text,) = said
    assert "no NCCL 2.18" in text
    assert "not all GPUs reach each other's memory" in text
    close_all(made)


@pytest.mark.parametrize("wish", ["auto", "kernels", "staged"])
def test_alone(cuda: FakeCuda, nccl: FakeNccl, settings: Any, wish: str) -> None:
    settings(KVHVD_GPU_PATH=wish)
    topology = Topology.of(0, [Host("here", "here")], source="single")
    executor = create_executor(None, topology, 0)
    assert isinstance(executor, RingExecutor)
    array = samples(0, 100, "float32").copy()
    result = np.zeros_like(array)
    finish(executor.allreduce([device_operation([array.ctypes.data], [result.ctypes.data], 100)]))
    np.testing.assert_array_equal(array, result)
    executor.close()
    assert not cuda.memory


def test_a_worker_without_a_gpu_fails_all_alike(engines: Any, cuda: FakeCuda, nccl: FakeNccl, settings: Any) -> None:
    cuda.devices[1] = FakeDevice(b"x" * 16, "Old GPU", (5, 2))
    world = engines(3)

    def make(rank: int) -> str:
        with pytest.raises(LaunchError) as error:
            create_executor(world.of(rank), world.topology(rank), rank)
        return str(error.value)

    for rank, text in enumerate(on_ranks(3, make)):
        assert text.startswith(f"[rank {rank}/3] rank 1 cannot use the GPU.\n  rank 1:\n  Old GPU")


def test_a_chosen_nccl_that_is_none_fails_all_alike(
    engines: Any, cuda: FakeCuda, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_library, "_found", None)
    settings(KVHVD_NCCL_LIBRARY="/nonsense")
    world = engines(2)

    def make(rank: int) -> str:
        with pytest.raises(LaunchError) as error:
            create_executor(world.of(rank), world.topology(rank), rank)
        return str(error.value)

    for text in on_ranks(2, make):
        assert "ranks 0-1 cannot use the GPU.\n  ranks 0-1:\n  KVHVD_NCCL_LIBRARY=/nonsense cannot be used" in text


def test_nccl_that_fails_on_one_fails_all_alike(
    engines: Any, cuda: FakeCuda, nccl: FakeNccl, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = engines(2)
    original = nccl.call

    def call(name: str, *arguments: Any) -> int:
        if name == "ncclCommInitRankConfig" and arguments[3] == 1:
            original(name, *arguments)
            return 5
        return original(name, *arguments)

    monkeypatch.setattr(nccl, "call", call)

    def make(rank: int) -> str:
        with pytest.raises(LaunchError) as error:
            create_executor(world.of(rank), world.topology(rank), rank)
        return str(error.value)

    for text in on_ranks(2, make):
        assert "cannot join the others by NCCL" in text
        assert "planted error 5" in text
    assert not cuda.memory


@pytest.mark.parametrize(
    ("wish", "kind"), [("kernels", RingExecutor), ("staged", StagedExecutor), ("nccl", NcclExecutor)]
)
def test_the_user_decides(
    engines: Any, cuda: FakeCuda, nccl: FakeNccl, settings: Any, wish: str, kind: type[Executor]
) -> None:
    settings(KVHVD_GPU_PATH=wish)
    made = make_all(engines(2), [0, 1])
    assert {type(one) for one in made} == {kind}
    close_all(made)


def test_settings_are_checked(settings: Any) -> None:
    with pytest.raises(ConfigError, match="KVHVD_GPU_PATH: 'rdma' is not one of auto, nccl, kernels, staged"):
        settings(KVHVD_GPU_PATH="rdma")
    with pytest.raises(ConfigError, match="KVHVD_GPU_STAGING_MIB: '1' is not a whole number, 2 to 4096"):
        settings(KVHVD_GPU_PATH="auto", KVHVD_GPU_STAGING_MIB="1")
    settings(KVHVD_GPU_STAGING_MIB="2")
    assert OLDEST == 21800


# -- By way of the host -----------------------------------------------------------------------------------------------


@pytest.fixture
def staged(engines: Any, cuda: FakeCuda, nccl: FakeNccl, settings: Any) -> Iterator[Callable[[int], list[Executor]]]:
    settings(KVHVD_GPU_PATH="staged")
    made: list[list[Executor]] = []

    def make(size: int) -> list[Executor]:
        made.append(make_all(engines(size), list(range(size))))
        return made[-1]

    yield make
    for each in made:
        close_all(each)
    assert not cuda.memory
    assert not cuda.events


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8"])
@pytest.mark.parametrize(("op", "scales"), [("sum", (1.0, 1.0)), ("average", (1.0, 1 / 3)), ("max", (2.0, 0.5))])
def test_staged_allreduce(staged: Any, dtype: str, op: str, scales: tuple[float, float]) -> None:
    counts = (1, 0, 1000)
    given = [[samples(rank, count, dtype, n) for n, count in enumerate(counts)] for rank in range(3)]
    made = staged(3)

    def work(rank: int) -> Any:
        arrays = [raw.copy() for raw in given[rank]]
        others = [np.zeros_like(raw) for raw in arrays]
        for _ in range(2):  # the second time in memory of the first
            for array, raw in zip(arrays, given[rank]):
                array[:] = raw
            batch = [
                device_operation([a.ctypes.data], [a.ctypes.data, b.ctypes.data], count, dtype, op, *scales)
                for a, b, count in zip(arrays, others, counts)
            ]
            finish(made[rank].allreduce(batch))
        for a, b in zip(arrays, others):
            np.testing.assert_array_equal(a, b)
        return arrays

    for result in on_ranks(3, work):
        for n, raw in enumerate(result):
            expected = combined([each[n] for each in given], dtype, op, *scales)
            np.testing.assert_array_equal(raw, expected)


def test_staged_as_half(staged: Any) -> None:
    given = [samples(rank, 1000, "float32") for rank in range(2)]
    made = staged(2)

    def work(rank: int) -> Any:
        array = given[rank].copy()
        finish(made[rank].allreduce([device_operation([array.ctypes.data], [array.ctypes.data], 1000, as_half=True)]))
        return array

    halves = [raw.view(np.float32).astype(np.float16).astype(np.float32) for raw in given]
    expected = (halves[0] + halves[1]).astype(np.float16).astype(np.float32)
    for result in on_ranks(2, work):
        np.testing.assert_array_equal(result.view(np.float32), expected)


def test_staged_broadcast_exchange_and_reducescatter(staged: Any) -> None:
    made = staged(2)
    given = [samples(rank, 64, "float32") for rank in range(2)]
    total = combined(given, "float32", "sum")

    def work(rank: int) -> None:
        array, result = given[rank].copy(), np.full(512, 0xCC, np.uint8)
        place = [array.ctypes.data], [result.ctypes.data]
        finish(made[rank].broadcast([device_operation(*place, 64, root=1)]))
        np.testing.assert_array_equal(result[:256], given[1])
        # Each takes a part of either, with a gap between, which stays as it is.
        result[:] = 0xCC
        parts = [(0, 4 * rank, 8, 0), (1, 16, 12, 20)]
        finish(made[rank].exchange([device_operation(*place, 64, parts=parts, contributed=64)]))
        np.testing.assert_array_equal(result[:8], given[0][4 * rank :][:8])
        np.testing.assert_array_equal(result[20:32], given[1][16:28])
        assert (result[8:20] == 0xCC).all()
        assert (result[32:] == 0xCC).all()
        start, nbytes = (0, 100) if rank == 0 else (100, 156)
        finish(made[rank].reducescatter([device_operation(*place, 64, parts=[(rank, start, nbytes, 0)])]))
        np.testing.assert_array_equal(result[:nbytes], total[start : start + nbytes])

    on_ranks(2, work)


def test_an_error_of_the_engine_is_raised(staged: Any) -> None:
    made = staged(2)

    def work(rank: int) -> None:
        array = np.zeros(8 + rank, np.float32)
        completion = made[rank].allreduce([device_operation([array.ctypes.data], [array.ctypes.data], 8 + rank)])
        with pytest.raises(MismatchError):
            finish(completion)

    on_ranks(2, work)


def test_staged_operations_have_few_names(engines: Any, cuda: FakeCuda, nccl: FakeNccl, settings: Any) -> None:
    """However many batches there are, the engine sees as many names as the largest has operations."""
    settings(KVHVD_GPU_PATH="staged")
    world = engines(2)
    made = make_all(world, [0, 1])
    batches = [1 + number % 3 for number in range(30)]

    def work(rank: int) -> list[list[Any]]:
        results = []
        for number, length in enumerate(batches):
            arrays = [samples(rank, 50 + number, "float32", seed).copy() for seed in range(length)]
            places = [[array.ctypes.data] for array in arrays]
            # Lengths, types and collectives change from one operation of a name to the next.
            batch = [device_operation(place, place, 50 + number, root=number % 2) for place in places]
            finish(made[rank].broadcast(batch) if number % 4 == 3 else made[rank].allreduce(batch))
            results.append(arrays)
        return results

    for result in on_ranks(2, work):
        for number, arrays in enumerate(result):
            for seed, array in enumerate(arrays):
                given = [samples(rank, 50 + number, "float32", seed) for rank in range(2)]
                expected = given[number % 2] if number % 4 == 3 else combined(given, "float32", "sum")
                np.testing.assert_array_equal(array, expected)
    for operations in world.operations():
        staged = {name: count for name, count in operations.items() if name.startswith("gpu/staged/")}
        assert len(staged) == max(batches)
        assert sum(staged.values()) == sum(batches)
    close_all(made)
