"""Arrays of GPUs by way of the host: where there is no NCCL, and the GPUs do not reach each other's memory.

Each batch is copied into pinned memory, goes through the CPU engine under names of its own, and is copied back. No call
waits: every step moves the requests on, from copy to operation to copy.

A request's name is its place in the batch. The device thread asks one batch after the other, so all workers submit
their batches in the same order, and the engine matches the n-th request of a name with the n-th of the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstore_hvd import errors, native
from kvstore_hvd.base.cores import Deadline
from kvstore_hvd.errors import message
from kvstore_hvd.gpu.executor import Batch, Executor, Steps
from kvstore_hvd.gpu.runtime import activate
from kvstore_hvd.gpu.streams import Event, PinnedMemory
from kvstore_hvd.native import ITEM_BYTES, DeviceOperation

# Bytes of the smallest buffer of pinned memory.
_SMALLEST = 4096


class StagedExecutor(Executor):
    """Reduces through the CPU engine."""

    def __init__(self, engine: native.Engine, rank: int, ordinal: int, timeout_s: float) -> None:
        super().__init__(ordinal, timeout_s)
        self._engine, self._rank = engine, rank
        self._free: dict[int, list[PinnedMemory]] = {}

    def start(self, collective: str, batch: Batch) -> Steps:
        activate(self.ordinal)
        stages = [self._stage(collective, request, f"gpu/staged/{place}") for place, request in enumerate(batch)]
        return self._steps(stages, Event().record(self.stream))

    def abort(self) -> None:
        """Nothing: only copies are enqueued, and the engine ends its operations itself."""

    def _stage(self, collective: str, request: DeviceOperation, name: str) -> _Stage:
        unit = ITEM_BYTES[request.dtype]
        whole = request.count * unit
        read = request.contributed * unit if collective == "exchange" else whole
        source = target = self._take(read)
        ranges = [(0, whole)]
        if collective in ("exchange", "reducescatter"):
            ranges = [(place, nbytes) for *_, nbytes, place in request.parts]
            target = self._take(max((start + nbytes for start, nbytes in ranges), default=whole))
        if collective != "broadcast" or self._rank == request.root:
            self.stream.copy(source.address, request.inputs[0], read)
        made = native.Request(
            collective,
            name,
            f"'{name}'",
            [source.address],
            [target.address],
            (request.count,),
            request.dtype,
            # The scale has the divisor of an average.
            "sum" if request.op == "average" else request.op,
            request.prescale,
            request.postscale,
            request.root,
            parts=request.parts,
            contributed=request.contributed,
            as_half=request.as_half,
        )
        return _Stage(made, request.outputs, target.address, ranges, {source, target})

    def _take(self, nbytes: int) -> PinnedMemory:
        size = max(_SMALLEST, 1 << max(0, nbytes - 1).bit_length())
        free = self._free.setdefault(size, [])
        if free:
            return free.pop()
        memory = PinnedMemory(size)
        self._closes.append(memory.close)
        return memory

    def _steps(self, stages: Sequence[_Stage], copied: Event) -> Steps:
        yield from self._wait(copied)
        failure = None
        for stage, work in [(stage, self._engine.submit(stage.request)) for stage in stages]:
            while not work.done:
                yield
            failure = work.error
            if failure is not None:
                break
            for output in stage.outputs:
                for start, nbytes in stage.ranges:
                    self.stream.copy(output + start, stage.result + start, nbytes)
        # The error waits for the copies, which write to the arrays.
        yield from self._wait(Event().record(self.stream))
        if failure is not None:
            raise failure
        for stage in stages:
            for memory in stage.memories:
                self._free[memory.nbytes].append(memory)

    def _wait(self, event: Event) -> Steps:
        deadline = Deadline(self.timeout_s)
        while not event.done():
            if deadline.left() < 0:
                fact = f"a copy between the GPU and the host has not ended within {self.timeout_s:g} s."
                fix = "see whether a kernel of the program itself is stuck; KVHVD_TIMEOUT sets the limit."
                raise errors.TimeoutError(message(fact, fix=fix))
            yield
        event.close()


class _Stage(NamedTuple):
    request: native.Request
    outputs: Sequence[int]
    result: int  # address in pinned memory
    ranges: list[tuple[int, int]]  # start and bytes of the parts of the result
    memories: set[PinnedMemory]
