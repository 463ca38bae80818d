"""Executors on GPUs that are not there: what ranks get, what is enqueued, and how failures end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from kvstore_hvd import errors
from kvstore_hvd.comm.executor import Executor
from kvstore_hvd.comm.nccl import NcclExecutor
from kvstore_hvd.comm.ring import RingExecutor
from kvstore_hvd.errors import InvalidRequestError, LaunchError, TransportError
from kvstore_hvd.gpu import kernels
from kvstore_hvd.gpu.devices import Device
from support.fake_cuda import FakeCuda, fake_cuda
from support.fake_nccl import FakeNccl
from support.gpu_ranks import DeviceRequest, Exchange, combined, finish, memory_of, on_ranks, samples

STAGING = 2 << 20
HALF = STAGING // 2
Make = Callable[[int], Executor]


@pytest.fixture
def cuda(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with fake_cuda() as machine:
        yield machine


class Ranks:
    """Executors of one kind for some ranks, and the arrays that they work on."""

    def __init__(
        self,
        cuda: FakeCuda,
        kind: str,
        size: int,
        shared: bool = False,
        timeout_s: float = 30.0,
        staging: int = STAGING,
    ) -> None:
        self.cuda, self.size, self.nccl = cuda, size, FakeNccl(cuda)
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

    def run(self, work: Callable[[int, Executor], Any]) -> list[Any]:
        return on_ranks(self.size, lambda rank: work(rank, self.executors[rank]))

    def close(self) -> None:
        on_ranks(self.size, lambda rank: self.executors[rank].close())


@pytest.fixture
def ranks(cuda: FakeCuda) -> Iterator[Callable[..., Ranks]]:
    made: list[Ranks] = []

    def make(kind: str, size: int, **options: Any) -> Ranks:
        made.append(Ranks(cuda, kind, size, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


class Array:
    """Memory with room before and behind, to see what is written beside it."""

    def __init__(self, raw: Any, shift: int = 0) -> None:
        self.nbytes, self._shift = len(raw), 64 + shift
        self.whole = np.full(len(raw) + 192, 0xEE, np.uint8)
        self._start = -self.whole.ctypes.data % 64 + self._shift
        self.whole[self._start : self._start + len(raw)] = raw

    @property
    def address(self) -> int:
        return self.whole.ctypes.data + self._start

    @property
    def content(self) -> Any:
        before, behind = self.whole[: self._start], self.whole[self._start + self.nbytes :]
        assert (before == 0xEE).all()
        assert (behind == 0xEE).all(), "written beside the array"
        return self.whole[self._start : self._start + self.nbytes]


def empty(nbytes: int, shift: int = 0) -> Array:
    return Array(np.full(nbytes, 0xDD, np.uint8), shift)


KINDS = ("kernels", "nccl")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", sorted(kernels.DTYPES))
def test_allreduce_of_a_batch(ranks: Callable[..., Ranks], kind: str, size: int, dtype: str) -> None:
    counts = [1, 0, 7, 4099, 64]
    unit = kernels.ITEM_BYTES[dtype]
    given = [[samples(rank, count, dtype, n) for n, count in enumerate(counts)] for rank in range(size)]
    world = ranks(kind, size)

    def work(rank: int, executor: Executor) -> list[Any]:
        inputs = [Array(raw) for raw in given[rank]]
        outputs = [empty(count * unit) for count in counts]
        batch = [DeviceRequest([a.address], [b.address], count, dtype) for a, b, count in zip(inputs, outputs, counts)]
        finish(executor.allreduce(batch))
        for array, raw in zip(inputs, given[rank]):
            np.testing.assert_array_equal(array.content, raw)
        return [array.content.copy() for array in outputs]

    for result in world.run(work):
        for n, raw in enumerate(result):
            expected = combined([given[rank][n] for rank in range(size)], dtype, "sum")
            np.testing.assert_array_equal(raw, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", ["sum", "average", "min", "max", "product"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "int32"])
@pytest.mark.parametrize(
    ("scales", "count"), [((1.0, 1.0), 33), ((0.5, 0.25), 33), ((0.5, 0.25), 100_000), ((2.0, 4.0), 100_000)]
)
def test_ops_and_scales(
    ranks: Callable[..., Ranks], kind: str, op: str, dtype: str, scales: tuple[float, float], count: int
) -> None:
    size = 2
    given = [samples(rank, count, dtype) for rank in range(size)]
    if dtype == "int32":
        given = [(raw.view(np.int32) % 1000).view(np.uint8) for raw in given]
    world = ranks(kind, size)

    def work(rank: int, executor: Executor) -> Any:
        array = Array(given[rank])
        request = DeviceRequest([array.address], [array.address], count, dtype, op, *scales)
        finish(executor.allreduce([request]))
        return array.content.copy()

    expected = combined(given, dtype, op, *scales)
    for result in world.run(work):
        if dtype == "float16" and kind == "nccl":
            # Rounded on the way, too.
            found, wanted = result.view(np.float16).astype(float), expected.view(np.float16).astype(float)
            np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-3)
        else:
            np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_larger_than_the_staging_memory(ranks: Callable[..., Ranks], kind: str) -> None:
    counts = [5, 3 * STAGING // 4 + 11, 1000]
    given = [[samples(rank, count, "float32", n) for n, count in enumerate(counts)] for rank in range(3)]
    world = ranks(kind, 3)

    def work(rank: int, executor: Executor) -> list[Any]:
        arrays = [Array(raw) for raw in given[rank]]
        more = [empty(count * 4) for count in counts]
        batch = [DeviceRequest([a.address], [a.address, b.address], a.nbytes // 4) for a, b in zip(arrays, more)]
        finish(executor.allreduce(batch))
        for a, b in zip(arrays, more):
            np.testing.assert_array_equal(a.content, b.content)
        return [array.content.copy() for array in arrays]

    for result in world.run(work):
        for n, raw in enumerate(result):
            np.testing.assert_array_equal(raw, combined([each[n] for each in given], "float32", "sum"))


@pytest.mark.parametrize("shared", [False, True])
def test_a_large_tensor_goes_around_a_ring_unless_a_gpu_is_shared(ranks: Callable[..., Ranks], shared: bool) -> None:
    count = STAGING
    given = [samples(rank, count, "float32") for rank in range(2)]
    world = ranks("kernels", 2, shared=shared)

    def work(rank: int, executor: Executor) -> Any:
        array, other = Array(given[rank]), empty(count * 4)
        finish(executor.allreduce([DeviceRequest([array.address], [array.address, other.address], count)]))
        np.testing.assert_array_equal(array.content, other.content)
        return array.content.copy()

    for result in world.run(work):
        np.testing.assert_array_equal(result, combined(given, "float32", "sum"))
    launched = set(world.cuda.launches())
    assert launched == ({"kvhvd_twoshot_float32_sum_2"} if shared else {"kvhvd_ring_float32_sum"})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize("count", [1, 5000, STAGING + 3])
def test_broadcast(ranks: Callable[..., Ranks], kind: str, root: int, count: int) -> None:
    given = samples(root, count, "uint8")
    world = ranks(kind, 3)

    def work(rank: int, executor: Executor) -> Any:
        outputs = [empty(count, 1), empty(count)]
        small = Array(np.array([7 + rank], np.uint8))
        source = Array(given, 3)
        inputs = [source.address] if rank == root else [0]
        batch = [
            DeviceRequest(inputs, [each.address for each in outputs], count, "uint8", root=root),
            DeviceRequest([small.address], [small.address], 1, "uint8", root=root),
        ]
        finish(executor.broadcast(batch))
        assert small.content[0] == 7 + root
        return [array.content.copy() for array in outputs]

    for result in world.run(work):
        for raw in result:
            np.testing.assert_array_equal(raw, given)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unit_count", [3, 90_001])
def test_exchange_of_uneven_parts(ranks: Callable[..., Ranks], kind: str, unit_count: int) -> None:
    """As alltoall: rank r sends ``(r + s) % 3`` units of some bytes to rank s."""
    size = 3
    units = [[(r + s) % 3 * unit_count for s in range(size)] for r in range(size)]
    counts = [sum(row) for row in units]
    given = [samples(rank, counts[rank], "uint8") for rank in range(size)]
    world = ranks(kind, size)

    def work(rank: int, executor: Executor) -> Any:
        parts, place = [], 0
        for r in range(size):
            parts.append((r, sum(units[r][:rank]), units[r][rank], place))
            place += units[r][rank]
        source, target = Array(given[rank], 5), empty(place, 1)
        request = DeviceRequest(
            [source.address], [target.address], max(counts), "uint8", parts=parts, contributed=counts[rank]
        )
        finish(executor.exchange([request, request]))
        return target.content.copy()

    for rank, result in enumerate(world.run(work)):
        pieces = [given[r][sum(units[r][:rank]) :][: units[r][rank]] for r in range(size)]
        np.testing.assert_array_equal(result, np.concatenate(pieces))


@pytest.mark.parametrize("kind", KINDS)
def test_exchange_with_more_parts_than_ranks(ranks: Callable[..., Ranks], kind: str) -> None:
    given = [samples(rank, 64, "uint8") for rank in range(2)]
    world = ranks(kind, 2)

    def work(rank: int, executor: Executor) -> Any:
        many = 9 if rank == 0 else 1
        parts = [(1 - rank, 3 * n, 2, 2 * n) for n in range(many)]
        source, target = Array(given[rank]), empty(2 * many)
        finish(
            executor.exchange(
                [DeviceRequest([source.address], [target.address], 64, "uint8", parts=parts, contributed=64)]
            )
        )
        return target.content.copy()

    first, second = world.run(work)
    np.testing.assert_array_equal(first, np.concatenate([given[1][3 * n : 3 * n + 2] for n in range(9)]))
    np.testing.assert_array_equal(second, given[0][:2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("op", ["sum", "max"])
@pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 2.0)])
@pytest.mark.parametrize("counts", [(4, 4, 4), (3, 5, 0), (300_001, 200_000, 99_999)])
def test_reducescatter(
    ranks: Callable[..., Ranks], kind: str, op: str, scales: tuple[float, float], counts: Sequence[int]
) -> None:
    total = sum(counts)
    given = [samples(rank, total, "float32") for rank in range(3)]
    world = ranks(kind, 3)

    def work(rank: int, executor: Executor) -> Any:
        start = 4 * sum(counts[:rank])
        source, target = Array(given[rank]), empty(4 * counts[rank])
        parts = [(rank, start, 4 * counts[rank], 0)]
        request = DeviceRequest([source.address], [target.address], total, "float32", op, *scales, parts=parts)
        finish(executor.reducescatter([request]))
        return target.content.copy()

    expected = combined(given, "float32", op, *scales)
    np.testing.assert_array_equal(np.concatenate(world.run(work)), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [9, 300_000])
def test_as_half(ranks: Callable[..., Ranks], kind: str, count: int) -> None:
    given = [samples(rank, count, "float32") for rank in range(2)]
    world = ranks(kind, 2)

    def work(rank: int, executor: Executor) -> Any:
        array = Array(given[rank])
        finish(executor.allreduce([DeviceRequest([array.address], [array.address], count, as_half=True)]))
        return array.content.copy()

    halves = [raw.view(np.float32).astype(np.float16).astype(np.float32) for raw in given]
    expected = (halves[0] + halves[1]).astype(np.float16).astype(np.float32)
    for result in world.run(work):
        np.testing.assert_array_equal(result.view(np.float32), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_minimum_keeps_nan(ranks: Callable[..., Ranks], kind: str) -> None:
    world = ranks(kind, 2)

    def work(rank: int, executor: Executor) -> Any:
        values = np.full(100_000, float(rank), np.float32)
        values[0] = np.nan if rank == 1 else 0
        array = Array(values.view(np.uint8))
        finish(executor.allreduce([DeviceRequest([array.address], [array.address], 100_000, op="min")]))
        return array.content.view(np.float32).copy()

    for result in world.run(work):
        assert np.isnan(result[0])
        assert (result[1:] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_half_sums_that_would_overflow_on_the_way_do_not(ranks: Callable[..., Ranks], kind: str) -> None:
    world = ranks(kind, 4)

    def work(rank: int, executor: Executor) -> Any:
        array = Array(np.full(200_000, 60_000, np.float16).view(np.uint8))
        request = DeviceRequest([array.address], [array.address], 200_000, "float16", "average", 1.0, 0.25)
        finish(executor.allreduce([request]))
        return array.content.view(np.float16).copy()

    for result in world.run(work):
        assert (result == 60_000).all()


def test_nccl_reduces_large_tensors_where_they_lie(ranks: Callable[..., Ranks]) -> None:
    count = 1 << 19
    world = ranks("nccl", 2)
    arrays = [[Array(samples(rank, count, "float32", n)) for n in range(2)] for rank in range(2)]

    def work(rank: int, executor: Executor) -> None:
        batch = [DeviceRequest([a.address], [a.address], count, "float32", "average", 1.0, 0.5) for a in arrays[rank]]
        finish(executor.allreduce(batch))

    world.run(work)
    assert world.cuda.launches() == []
    reduced = [call for call in world.nccl.calls if call[0] == "ncclAllReduce"]
    assert {call[1] for call in reduced} == {array.address for each in arrays for array in each}
    # The factor is NCCL's business here, and its operator is given back.
    assert world.nccl.names().count("ncclRedOpCreatePreMulSum") == world.nccl.names().count("ncclRedOpDestroy") == 4


def test_nccl_packs_small_tensors(ranks: Callable[..., Ranks]) -> None:
    world = ranks("nccl", 2)
    arrays = [[Array(samples(rank, 9000, "float32", n)) for n in range(20)] for rank in range(2)]

    def work(rank: int, executor: Executor) -> None:
        finish(executor.allreduce([DeviceRequest([a.address], [a.address], 9000) for a in arrays[rank]]))

    world.run(work)
    assert world.nccl.names().count("ncclAllReduce") == 2  # one of each rank
    assert world.cuda.launches() == ["kvhvd_copy"] * 4


@pytest.mark.parametrize("shared", [False, True])
def test_kernels_that_meet_are_launched_cooperatively(ranks: Callable[..., Ranks], shared: bool) -> None:
    world = ranks("kernels", 2, shared=shared)

    def work(rank: int, executor: Executor) -> None:
        array = Array(samples(rank, 100, "float32"))
        finish(executor.allreduce([DeviceRequest([array.address], [array.address], 100)]))

    world.run(work)
    launched = [call for call in world.cuda.calls if call[0] == "launch"]
    assert launched == [("launch", "kvhvd_oneshot_float32_sum", (1, 1, 1), not shared)] * 2


def test_only_whole_allocations_are_shared_and_all_is_given_back(cuda: FakeCuda) -> None:
    world = Ranks(cuda, "kernels", 2, shared=True)
    assert cuda.names().count("ipcGetMemHandle") == 2
    assert "ipcOpenMemHandle" not in cuda.names(), "one process: the memory is there already"
    world.close()
    assert not cuda.memory
    assert all(event.done.is_set() for event in cuda.events.values())
    assert not cuda.events
    assert not cuda.streams


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_left_after_nccl_either(cuda: FakeCuda, kind: str) -> None:
    world = Ranks(cuda, kind, 2)

    def work(rank: int, executor: Executor) -> None:
        array = Array(samples(rank, 100, "float32"))
        finish(executor.allreduce([DeviceRequest([array.address], [array.address], 100, op="max")]))

    world.run(work)
    world.close()
    assert (cuda.memory, cuda.events, cuda.streams) == ({}, {}, {})


@pytest.mark.parametrize("kind", KINDS)
def test_abort_ends_what_waits_on_every_rank(ranks: Callable[..., Ranks], kind: str) -> None:
    world = ranks(kind, 3)
    are_waiting = threading.Barrier(3)

    def work(rank: int, executor: Executor) -> Any:
        if rank == 2:
            are_waiting.wait(30)
            executor.abort()
            return None
        array = Array(samples(rank, 100_000, "float32"))
        completion = executor.allreduce([DeviceRequest([array.address], [array.address], 100_000)])
        assert not completion.done()
        are_waiting.wait(30)
        # Every worker aborts when it hears that the world is lost.
        executor.abort()
        with pytest.raises(TransportError):
            finish(completion)
        return True

    world.run(work)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_does_not_come_is_a_timeout(ranks: Callable[..., Ranks], kind: str) -> None:
    world = ranks(kind, 2, timeout_s=0.3)
    array = Array(samples(0, 100_000, "float32"))
    start = time.monotonic()
    completion = world.executors[0].allreduce([DeviceRequest([array.address], [array.address], 100_000)])
    with pytest.raises(errors.TimeoutError) as error:
        finish(completion)
    assert time.monotonic() - start < 20
    if kind == "kernels":
        assert "rank 0 waited 0.3 s for rank 1's GPU" in str(error.value)
    for executor in world.executors:
        executor.abort()


def test_several_inputs_are_refused(ranks: Callable[..., Ranks]) -> None:
    world = ranks("kernels", 1)
    array = Array(samples(0, 10, "float32"))
    with pytest.raises(InvalidRequestError, match="2 inputs"):
        world.executors[0].allreduce([DeviceRequest([array.address] * 2, [array.address], 10)])


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


def test_a_failed_kernel_of_the_program_is_a_lost_world(ranks: Callable[..., Ranks], cuda: FakeCuda) -> None:
    world = ranks("kernels", 1)
    array = Array(samples(0, 10, "float32"))
    completion = world.executors[0].allreduce([DeviceRequest([array.address], [array.address], 10)])
    cuda.status_of_events = 700
    with pytest.raises(TransportError, match="cudaError 700"):
        finish(completion)
    cuda.status_of_events = 0


def test_an_error_of_nccl_is_a_lost_world(ranks: Callable[..., Ranks]) -> None:
    world = ranks("nccl", 1)
    array = Array(samples(0, 100_000, "float32"))
    completion = world.executors[0].allreduce([DeviceRequest([array.address], [array.address], 100_000)])
    world.nccl.state = 6
    with pytest.raises(TransportError, match="planted error 6"):
        finish(completion)


def test_memory_helper_reads_what_is_there() -> None:
    array = Array(np.arange(5, dtype=np.uint8))
    assert memory_of(array.address, 5).tolist() == [0, 1, 2, 3, 4]
