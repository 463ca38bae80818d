"""What every executor must do, on a real GPU and on what stands in for one. A module of tests derives from
`ExecutorCases` and has the fixtures ``ranks`` and ``new``."""

# ruff: noqa: B023 - on_ranks returns before the next turn of the loop
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvstore_hvd import native
from kvstore_hvd.errors import TransportError
from kvstore_hvd.gpu.executor import Executor
from kvstore_hvd.gpu.launcher import ENTRIES
from support.gpu_ranks import combined, device_operation, finish, on_ranks, samples
from support.patience import patient

#: Bytes of staging memory that the executors have.
STAGING = 2 << 20


class Ranks:
    kind: str
    size: int
    executors: list[Executor]

    def run(self, work: Callable[[int, Executor], Any]) -> list[Any]:
        return on_ranks(self.size, lambda rank: work(rank, self.executors[rank]))

    def close(self) -> None:
        on_ranks(self.size, lambda rank: self.executors[rank].close())


Make = Callable[..., Any]  # (size) -> Ranks; skips the test where there cannot be so many
New = Callable[..., Any]  # (bytes, shift) -> array that begins `shift` bytes after an aligned address


def empty(new: New, nbytes: int, shift: int = 0) -> Any:
    """An array with something else in it than what it shall have."""
    return new(np.full(nbytes, 0xDD, np.uint8), shift)


def in_place(world: Ranks, new: New, given: list[Any], count: int, *how: Any, **more: Any) -> list[Any]:
    def work(rank: int, executor: Executor) -> Any:
        array = new(given[rank])
        finish(executor.start("allreduce", [device_operation([array.address], [array.address], count, *how, **more)]))
        return array.content.copy()

    return world.run(work)


class ExecutorCases:
    many = 3

    @pytest.mark.parametrize("size", [1, 3])
    def test_allreduce_of_a_batch(self, ranks: Make, new: New, size: int) -> None:
        """One array into two others, one of which is larger than the staging memory."""
        world = ranks(size)
        for dtype, unit in native.ITEM_BYTES.items():
            counts = [1, 0, 7, 4099, 64, *([3 * STAGING // 4 + 11] if dtype == "float32" else [])]
            given = [[samples(rank, count, dtype, n) for n, count in enumerate(counts)] for rank in range(size)]

            def work(rank: int, executor: Executor) -> list[Any]:
                inputs = [new(raw) for raw in given[rank]]
                outputs = [(empty(new, count * unit), empty(new, count * unit)) for count in counts]
                places = zip(inputs, outputs, counts)
                batch = [device_operation([a.address], [b.address, c.address], n, dtype) for a, (b, c), n in places]
                finish(executor.start("allreduce", batch))
                for array, raw, (one, other) in zip(inputs, given[rank], outputs):
                    np.testing.assert_array_equal(array.content, raw)
                    np.testing.assert_array_equal(one.content, other.content)
                return [one.content.copy() for one, _ in outputs]

            for result in world.run(work):
                for n, raw in enumerate(result):
                    np.testing.assert_array_equal(raw, combined([each[n] for each in given], dtype, "sum"), dtype)

    @pytest.mark.parametrize("size", [1, 2])
    @pytest.mark.parametrize("dtype", ["float16", "float32", "int32"])
    def test_ops_and_scales(self, ranks: Make, new: New, dtype: str, size: int) -> None:
        world = ranks(size)
        for op, scales, count in [
            ("average", (0.5, 0.25), 33),
            ("average", (2.0, 4.0), 300_000),
            ("sum", (0.5, 0.25), 600_000),
            ("min", (0.5, 0.25), 100_000),
            ("max", (0.5, 0.25), 33),
            ("product", (2.0, 4.0), 100_000),
        ]:
            given = [samples(rank, count, dtype) for rank in range(size)]
            if dtype == "int32":
                given = [(raw.view(np.int32) % 1000).view(np.uint8) for raw in given]
            expected = combined(given, dtype, op, *scales)
            for result in in_place(world, new, given, count, dtype, op, *scales):
                if dtype == "float16" and world.kind == "nccl":
                    # Rounded on the way, too.
                    found, wanted = result.view(np.float16).astype(float), expected.view(np.float16).astype(float)
                    np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=2e-3)
                else:
                    np.testing.assert_array_equal(result, expected)

    def test_more_arrays_than_one_launch_has_room_for(self, ranks: Make, new: New) -> None:
        count = ENTRIES * 3 // 4  # with an input and an output each
        given = [samples(rank, count, "float32") for rank in range(2)]

        def work(rank: int, executor: Executor) -> Any:
            array = new(given[rank])
            places = [[array.address + 4 * n] for n in range(count)]
            finish(executor.start("allreduce", [device_operation(place, place, 1) for place in places]))
            return array.content.copy()

        for result in ranks(2).run(work):
            np.testing.assert_array_equal(result, combined(given, "float32", "sum"))

    def test_many_batches_under_way(self, ranks: Make, new: New) -> None:
        counts = [1, 33, 5000, 100_000] * 10
        given = [[samples(rank, count, "float32", n) for n, count in enumerate(counts)] for rank in range(self.many)]

        def work(rank: int, executor: Executor) -> list[Any]:
            arrays = [new(raw) for raw in given[rank]]
            batches = [[device_operation([each.address], [each.address], n)] for each, n in zip(arrays, counts)]
            for steps in [executor.start("allreduce", batch) for batch in batches]:
                finish(steps)
            return [each.content.copy() for each in arrays]

        for result in ranks(self.many).run(work):
            for raw, *parts in zip(result, *given):
                np.testing.assert_array_equal(raw, combined(parts, "float32", "sum"))

    def test_broadcast(self, ranks: Make, new: New) -> None:
        world = ranks(3)
        for root, count, dtype in [(0, 1, "uint8"), (2, 5000, "float16"), (1, STAGING + 3, "uint8")]:
            given, unit = samples(root, count, dtype), native.ITEM_BYTES[dtype]

            def work(rank: int, executor: Executor) -> Any:
                outputs = [empty(new, count * unit, 1), empty(new, count * unit)]
                small, source = new(np.full(unit, 7 + rank, np.uint8)), new(given, 3)
                inputs = [source.address] if rank == root else [0]
                batch = [
                    device_operation(inputs, [each.address for each in outputs], count, dtype, root=root),
                    device_operation([small.address], [small.address], 1, dtype, root=root),
                ]
                finish(executor.start("broadcast", batch))
                assert (small.content == 7 + root).all()
                return [array.content.copy() for array in outputs]

            for result in world.run(work):
                for raw in result:
                    np.testing.assert_array_equal(raw, given)

    def test_exchange_of_uneven_parts(self, ranks: Make, new: New) -> None:
        """As alltoall: rank r sends ``(r + s) % 3`` units of some bytes to rank s, each in two parts."""
        world = ranks(3)
        for unit, dtype in ((3, "uint8"), (90_004, "float16")):
            units = [[(r + s) % 3 * unit for s in range(3)] for r in range(3)]
            counts = [sum(row) // native.ITEM_BYTES[dtype] for row in units]
            given = [samples(rank, counts[rank], dtype) for rank in range(3)]

            def work(rank: int, executor: Executor) -> Any:
                parts, place = [], 0
                for r in range(3):
                    start, size = sum(units[r][:rank]), units[r][rank]
                    parts += [(r, start, size // 2, place), (r, start + size // 2, size - size // 2, place + size // 2)]
                    place += size
                source, target = new(given[rank], 5), empty(new, place, 1)
                more: Any = {"parts": parts, "contributed": counts[rank]}
                request = device_operation([source.address], [target.address], max(counts), dtype, **more)
                finish(executor.start("exchange", [request, request]))
                return target.content.copy()

            for rank, result in enumerate(world.run(work)):
                pieces = [given[r][sum(units[r][:rank]) :][: units[r][rank]] for r in range(3)]
                np.testing.assert_array_equal(result, np.concatenate(pieces))

    def test_reducescatter(self, ranks: Make, new: New) -> None:
        world = ranks(3)
        for counts, op, scales in [
            ((3, 5, 0), "sum", (0.5, 2.0)),
            ((4, 4, 4), "sum", (0.5, 4.0)),
            ((4, 4, 4), "sum", (1.0, 1.0)),
            ((3, 6, 3), "max", (1.0, 1.0)),
            ((300_001, 200_000, 99_999), "sum", (1.0, 1.0)),
        ]:
            total = sum(counts)
            given = [samples(rank, total, "float32") for rank in range(3)]

            def work(rank: int, executor: Executor) -> Any:
                source, target = new(given[rank]), empty(new, 4 * (rank + counts[rank]))
                parts = [(rank, 4 * sum(counts[:rank]), 4 * counts[rank], 4 * rank)]
                places = [source.address], [target.address]
                request = device_operation(*places, total, "float32", op, *scales, parts=parts)
                finish(executor.start("reducescatter", [request]))
                return target.content[4 * rank :].copy()

            result = np.concatenate(world.run(work))
            np.testing.assert_array_equal(result, combined(given, "float32", op, *scales))

    def test_as_half_and_sums_that_no_half_has(self, ranks: Make, new: New) -> None:
        world = ranks(2)
        given = [samples(rank, 300_000, "float32") for rank in range(2)]
        halves = [raw.view(np.float32).astype(np.float16).astype(np.float32) for raw in given]
        expected = (halves[0] + halves[1]).astype(np.float16).astype(np.float32)
        for result in in_place(world, new, given, 300_000, as_half=True):
            np.testing.assert_array_equal(result.view(np.float32), expected)
        # The sum itself is more than a half has.
        high = [np.full(200_000, 60_000, np.float16).view(np.uint8)] * 2
        for result in in_place(world, new, high, 200_000, "float16", "average", 1.0, 0.5):
            assert (result.view(np.float16) == 60_000).all()

    def test_abort_ends_what_waits_on_every_rank(self, ranks: Make, new: New) -> None:
        are_waiting = threading.Barrier(3)

        def work(rank: int, executor: Executor) -> None:
            if rank == 2:
                are_waiting.wait(patient(30))
                executor.abort()
                return
            array = new(samples(rank, 100_000, "float32"))
            steps = executor.start("allreduce", [device_operation([array.address], [array.address], 100_000)])
            assert next(steps, True) is None
            are_waiting.wait(patient(30))
            # Every worker aborts when it hears that the world is lost.
            executor.abort()
            executor.stream.synchronize()  # nothing runs any more, but the array has no sum
            with pytest.raises(TransportError):
                finish(steps)

        ranks(3).run(work)
