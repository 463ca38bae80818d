"""What every executor must do, whatever machine it runs on: on a real GPU, and on what stands in for one.

A module of tests derives from `ExecutorCases` and has the fixtures ``ranks`` and ``new``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import pytest

from kvstore_hvd import native
from kvstore_hvd.comm.device.executor import Executor
from kvstore_hvd.errors import TransportError
from kvstore_hvd.gpu.tables import ENTRIES
from support.gpu_ranks import combined, device_operation, finish, on_ranks, samples
from support.patience import patient

__all__ = ["STAGING", "ExecutorCases", "Make", "New", "Ranks", "empty"]

#: Bytes of staging memory that the executors have.
STAGING = 2 << 20


class Array(Protocol):
    """Memory of the executor's device, with guards on both sides."""

    nbytes: int

    @property
    def address(self) -> int:
        """Where it is."""
        ...

    @property
    def content(self) -> Any:
        """Its bytes; fails when something beside them was written."""
        ...


class Ranks:
    """Executors of one kind, one for each rank."""

    kind: str
    size: int
    executors: list[Executor]

    def run(self, work: Callable[[int, Executor], Any]) -> list[Any]:
        """What `work` returns on each rank."""
        return on_ranks(self.size, lambda rank: work(rank, self.executors[rank]))

    def close(self) -> None:
        """Close all."""
        on_ranks(self.size, lambda rank: self.executors[rank].close())


Make = Callable[..., Any]  # (size) -> Ranks; skips the test where there cannot be so many
New = Callable[..., Array]  # (bytes, shift) -> array that begins `shift` bytes after an aligned address


def empty(new: New, nbytes: int, shift: int = 0) -> Array:
    """An array with something else in it than what it shall have."""
    return new(np.full(nbytes, 0xDD, np.uint8), shift)


class ExecutorCases:
    """The tests."""

    @pytest.mark.parametrize("size", [1, 2, 3, 4])
    @pytest.mark.parametrize("dtype", sorted(native.DTYPES))
    def test_allreduce_of_a_batch(self, ranks: Make, new: New, size: int, dtype: str) -> None:
        counts = [1, 0, 7, 4099, 64]
        unit = native.ITEM_BYTES[dtype]
        given = [[samples(rank, count, dtype, n) for n, count in enumerate(counts)] for rank in range(size)]
        world = ranks(size)

        def work(rank: int, executor: Executor) -> list[Any]:
            inputs = [new(raw) for raw in given[rank]]
            outputs = [empty(new, count * unit) for count in counts]
            batch = [
                device_operation([a.address], [b.address], count, dtype) for a, b, count in zip(inputs, outputs, counts)
            ]
            finish(executor.allreduce(batch))
            for array, raw in zip(inputs, given[rank]):
                np.testing.assert_array_equal(array.content, raw)
            return [array.content.copy() for array in outputs]

        for result in world.run(work):
            for n, raw in enumerate(result):
                expected = combined([given[rank][n] for rank in range(size)], dtype, "sum")
                np.testing.assert_array_equal(raw, expected)

    @pytest.mark.parametrize("op", ["sum", "average", "min", "max", "product"])
    @pytest.mark.parametrize("dtype", ["float16", "float32", "int32"])
    @pytest.mark.parametrize(
        ("scales", "count"), [((1.0, 1.0), 33), ((0.5, 0.25), 33), ((0.5, 0.25), 100_000), ((2.0, 4.0), 100_000)]
    )
    def test_ops_and_scales(
        self, ranks: Make, new: New, op: str, dtype: str, scales: tuple[float, float], count: int
    ) -> None:
        size = 2
        given = [samples(rank, count, dtype) for rank in range(size)]
        if dtype == "int32":
            given = [(raw.view(np.int32) % 1000).view(np.uint8) for raw in given]
        world = ranks(size)

        def work(rank: int, executor: Executor) -> Any:
            array = new(given[rank])
            request = device_operation([array.address], [array.address], count, dtype, op, *scales)
            finish(executor.allreduce([request]))
            return array.content.copy()

        expected = combined(given, dtype, op, *scales)
        for result in world.run(work):
            if dtype == "float16" and world.kind == "nccl":
                # Rounded on the way, too.
                found, wanted = result.view(np.float16).astype(float), expected.view(np.float16).astype(float)
                np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-3)
            else:
                np.testing.assert_array_equal(result, expected)

    @pytest.mark.parametrize(("dtype", "as_half"), [("float32", False), ("float16", False), ("float32", True)])
    def test_an_average_of_many_arrays(self, ranks: Make, new: New, dtype: str, as_half: bool) -> None:
        size, counts = 2, [7, 40_000, 1, 30_001]
        given = [[np.full(count, 4 * n + 2 * rank, dtype) for n, count in enumerate(counts)] for rank in range(size)]
        world = ranks(size)

        def work(rank: int, executor: Executor) -> list[Any]:
            arrays = [new(values.view(np.uint8)) for values in given[rank]]
            finish(
                executor.allreduce(
                    [
                        device_operation(
                            [array.address], [array.address], count, dtype, "average", 1.0, 0.5, as_half=as_half
                        )
                        for array, count in zip(arrays, counts)
                    ]
                )
            )
            return [array.content.copy() for array in arrays]

        for result in world.run(work):
            for n, raw in enumerate(result):
                np.testing.assert_array_equal(raw.view(dtype), np.full(counts[n], 4 * n + 1, dtype), f"array {n}")

    def test_a_tensor_larger_than_the_staging_memory(self, ranks: Make, new: New) -> None:
        counts = [5, 3 * STAGING // 4 + 11, 1000]
        given = [[samples(rank, count, "float32", n) for n, count in enumerate(counts)] for rank in range(3)]
        world = ranks(3)

        def work(rank: int, executor: Executor) -> list[Any]:
            arrays = [new(raw) for raw in given[rank]]
            more = [empty(new, count * 4) for count in counts]
            batch = [device_operation([a.address], [a.address, b.address], a.nbytes // 4) for a, b in zip(arrays, more)]
            finish(executor.allreduce(batch))
            for a, b in zip(arrays, more):
                np.testing.assert_array_equal(a.content, b.content)
            return [array.content.copy() for array in arrays]

        for result in world.run(work):
            for n, raw in enumerate(result):
                np.testing.assert_array_equal(raw, combined([each[n] for each in given], "float32", "sum"))

    def test_more_arrays_than_one_launch_has_room_for(self, ranks: Make, new: New) -> None:
        count = ENTRIES * 3 // 4  # with an input and an output each
        given = [samples(rank, count, "float32") for rank in range(2)]
        world = ranks(2)

        def work(rank: int, executor: Executor) -> Any:
            array = new(given[rank])
            places = [[array.address + 4 * n] for n in range(count)]
            finish(executor.allreduce([device_operation(place, place, 1) for place in places]))
            return array.content.copy()

        for result in world.run(work):
            np.testing.assert_array_equal(result, combined(given, "float32", "sum"))

    @pytest.mark.parametrize("root", [0, 2])
    @pytest.mark.parametrize("count", [1, 5000, STAGING + 3])
    def test_broadcast(self, ranks: Make, new: New, root: int, count: int) -> None:
        given = samples(root, count, "uint8")
        world = ranks(3)

        def work(rank: int, executor: Executor) -> Any:
            outputs = [empty(new, count, 1), empty(new, count)]
            small = new(np.array([7 + rank], np.uint8))
            source = new(given, 3)
            inputs = [source.address] if rank == root else [0]
            batch = [
                device_operation(inputs, [each.address for each in outputs], count, "uint8", root=root),
                device_operation([small.address], [small.address], 1, "uint8", root=root),
            ]
            finish(executor.broadcast(batch))
            assert small.content[0] == 7 + root
            return [array.content.copy() for array in outputs]

        for result in world.run(work):
            for raw in result:
                np.testing.assert_array_equal(raw, given)

    @pytest.mark.parametrize("unit_count", [3, 90_001])
    def test_exchange_of_uneven_parts(self, ranks: Make, new: New, unit_count: int) -> None:
        """As alltoall: rank r sends ``(r + s) % 3`` units of some bytes to rank s."""
        size = 3
        units = [[(r + s) % 3 * unit_count for s in range(size)] for r in range(size)]
        counts = [sum(row) for row in units]
        given = [samples(rank, counts[rank], "uint8") for rank in range(size)]
        world = ranks(size)

        def work(rank: int, executor: Executor) -> Any:
            parts, place = [], 0
            for r in range(size):
                parts.append((r, sum(units[r][:rank]), units[r][rank], place))
                place += units[r][rank]
            source, target = new(given[rank], 5), empty(new, place, 1)
            request = device_operation(
                [source.address], [target.address], max(counts), "uint8", parts=parts, contributed=counts[rank]
            )
            finish(executor.exchange([request, request]))
            return target.content.copy()

        for rank, result in enumerate(world.run(work)):
            pieces = [given[r][sum(units[r][:rank]) :][: units[r][rank]] for r in range(size)]
            np.testing.assert_array_equal(result, np.concatenate(pieces))

    @pytest.mark.parametrize("most", [3, 9])
    def test_exchange_with_more_parts_than_ranks(self, ranks: Make, new: New, most: int) -> None:
        given = [samples(rank, 64, "uint8") for rank in range(2)]
        world = ranks(2)

        def work(rank: int, executor: Executor) -> Any:
            many = most if rank == 0 else 1
            parts = [(1 - rank, 3 * n, 2, 2 * n) for n in range(many)]
            source, target = new(given[rank]), empty(new, 2 * many)
            finish(
                executor.exchange(
                    [device_operation([source.address], [target.address], 64, "uint8", parts=parts, contributed=64)]
                )
            )
            return target.content.copy()

        first, second = world.run(work)
        np.testing.assert_array_equal(first, np.concatenate([given[1][3 * n : 3 * n + 2] for n in range(most)]))
        np.testing.assert_array_equal(second, given[0][:2])

    @pytest.mark.parametrize("op", ["sum", "max"])
    @pytest.mark.parametrize("scales", [(1.0, 1.0), (0.5, 2.0)])
    @pytest.mark.parametrize("counts", [(4, 4, 4), (3, 5, 0), (300_001, 200_000, 99_999)])
    def test_reducescatter(
        self, ranks: Make, new: New, op: str, scales: tuple[float, float], counts: Sequence[int]
    ) -> None:
        total = sum(counts)
        given = [samples(rank, total, "float32") for rank in range(3)]
        world = ranks(3)

        def work(rank: int, executor: Executor) -> Any:
            start = 4 * sum(counts[:rank])
            source, target = new(given[rank]), empty(new, 4 * counts[rank])
            parts = [(rank, start, 4 * counts[rank], 0)]
            request = device_operation([source.address], [target.address], total, "float32", op, *scales, parts=parts)
            finish(executor.reducescatter([request]))
            return target.content.copy()

        expected = combined(given, "float32", op, *scales)
        np.testing.assert_array_equal(np.concatenate(world.run(work)), expected)

    @pytest.mark.parametrize("count", [9, 300_000])
    def test_as_half(self, ranks: Make, new: New, count: int) -> None:
        given = [samples(rank, count, "float32") for rank in range(2)]
        world = ranks(2)

        def work(rank: int, executor: Executor) -> Any:
            array = new(given[rank])
            finish(executor.allreduce([device_operation([array.address], [array.address], count, as_half=True)]))
            return array.content.copy()

        halves = [raw.view(np.float32).astype(np.float16).astype(np.float32) for raw in given]
        expected = (halves[0] + halves[1]).astype(np.float16).astype(np.float32)
        for result in world.run(work):
            np.testing.assert_array_equal(result.view(np.float32), expected)

    def test_minimum_keeps_nan(self, ranks: Make, new: New) -> None:
        world = ranks(2)

        def work(rank: int, executor: Executor) -> Any:
            values = np.full(100_000, float(rank), np.float32)
            values[0] = np.nan if rank == 1 else 0
            array = new(values.view(np.uint8))
            finish(executor.allreduce([device_operation([array.address], [array.address], 100_000, op="min")]))
            return array.content.view(np.float32).copy()

        for result in world.run(work):
            assert np.isnan(result[0])
            assert (result[1:] == 0).all()

    def test_half_sums_that_would_overflow_on_the_way_do_not(self, ranks: Make, new: New) -> None:
        world = ranks(4)

        def work(rank: int, executor: Executor) -> Any:
            array = new(np.full(200_000, 60_000, np.float16).view(np.uint8))
            request = device_operation([array.address], [array.address], 200_000, "float16", "average", 1.0, 0.25)
            finish(executor.allreduce([request]))
            return array.content.view(np.float16).copy()

        for result in world.run(work):
            assert (result == 60_000).all()

    def test_abort_ends_what_waits_on_every_rank(self, ranks: Make, new: New) -> None:
        world = ranks(3)
        are_waiting = threading.Barrier(3)

        def work(rank: int, executor: Executor) -> Any:
            if rank == 2:
                are_waiting.wait(patient(30))
                executor.abort()
                return None
            array = new(samples(rank, 100_000, "float32"))
            completion = executor.allreduce([device_operation([array.address], [array.address], 100_000)])
            assert not completion.done()
            are_waiting.wait(patient(30))
            # Every worker aborts when it hears that the world is lost.
            executor.abort()
            with pytest.raises(TransportError):
                finish(completion)
            return True

        world.run(work)
