"""Arrays of GPUs by way of the host: where there is no NCCL, and the GPUs do not reach each other's memory.

Each batch is copied into pinned memory, goes through the CPU engine under names of its own, and is copied back. Nothing
waits: a completion moves its requests on, from copy to operation to copy, whenever it is asked.

A request's name is its place in the batch. The device thread asks one completion after the other, so all workers submit
their batches in the same order, and the engine matches the n-th request of a name with the n-th of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore_hvd import errors, native
from kvstore_hvd.base.clocks import Deadline
from kvstore_hvd.errors import message
from kvstore_hvd.gpu.devices import activate
from kvstore_hvd.gpu.executor import END_S, Batch, Completion, Executor, input_of
from kvstore_hvd.gpu.memory import PinnedMemory
from kvstore_hvd.gpu.runtime import close_all
from kvstore_hvd.gpu.streams import Event, Stream
from kvstore_hvd.native import ITEM_BYTES
from kvstore_hvd.native.records import DeviceOperation

_SMALLEST = 4096


class StagedExecutor(Executor):
    """Reduces through the CPU engine."""

    def __init__(self, engine: native.Engine, rank: int, ordinal: int, timeout_s: float) -> None:
        activate(ordinal)
        self._engine, self._rank, self._ordinal = engine, rank, ordinal
        self._timeout_s = timeout_s
        self._stream = Stream()
        self._free: dict[int, list[PinnedMemory]] = {}
        self._all: list[PinnedMemory] = []

    def allreduce(self, batch: Batch) -> Completion:
        """See `Executor.allreduce`."""
        return self._start("allreduce", batch)

    def broadcast(self, batch: Batch) -> Completion:
        """See `Executor.broadcast`."""
        return self._start("broadcast", batch)

    def exchange(self, batch: Batch) -> Completion:
        """See `Executor.exchange`."""
        return self._start("exchange", batch)

    def reducescatter(self, batch: Batch) -> Completion:
        """See `Executor.reducescatter`."""
        return self._start("reducescatter", batch)

    def abort(self) -> None:
        """See `Executor.abort`: only copies are enqueued, and the engine has its own way to end."""

    def end(self, limit_s: float) -> bool:
        """See `Executor.end`."""
        return self._stream.drain(limit_s)

    def close(self) -> None:
        """See `Executor.close`."""
        activate(self._ordinal)
        if self._stream.drain(END_S):
            close_all(*(memory.close for memory in self._all), self._stream.close)

    def _start(self, collective: str, batch: Batch) -> Completion:
        activate(self._ordinal)
        stages = [self._stage(collective, request, f"gpu/staged/{place}") for place, request in enumerate(batch)]
        return _StagedCompletion(self._engine, self._stream, stages, self._timeout_s, self._give_back)

    def _stage(self, collective: str, request: DeviceOperation, name: str) -> _Stage:
        unit = ITEM_BYTES[request.dtype]
        whole = request.count * unit
        read = request.contributed * unit if collective == "exchange" else whole
        # The part of an exchange, or of a reduce-scatter, that this worker receives, from where its output begins.
        written = max((place + nbytes for *_, nbytes, place in request.parts), default=0) if request.parts else whole
        apart = collective in ("exchange", "reducescatter")
        source = self._take(read)
        target = self._take(written) if apart else source
        if collective != "broadcast" or self._rank == request.root:
            self._stream.copy(source.address, input_of(request), read)
        made = native.Request(
            collective,
            name,
            f"'{name}'",
            [source.address],
            [target.address],
            (request.count,),
            request.dtype,
            # Its divisor is in the scale already.
            "sum" if request.op == "average" else request.op,
            request.prescale,
            request.postscale,
            request.root,
            parts=request.parts,
            contributed=request.contributed,
            as_half=request.as_half,
        )
        ranges = [(place, nbytes) for *_, nbytes, place in request.parts] if apart else [(0, whole)]
        return _Stage(made, list(request.outputs), target.address, ranges, [source, *([target] if apart else [])])

    def _take(self, nbytes: int) -> PinnedMemory:
        size = max(_SMALLEST, 1 << max(0, nbytes - 1).bit_length())
        free = self._free.setdefault(size, [])
        if not free:
            memory = PinnedMemory(size)
            self._all.append(memory)
            return memory
        return free.pop()

    def _give_back(self, memories: Sequence[PinnedMemory]) -> None:
        for memory in memories:
            self._free[memory.nbytes].append(memory)


@dataclass
class _Stage:
    """A request on its way."""

    request: native.Request
    outputs: list[int]
    result: int  # address in pinned memory
    ranges: list[tuple[int, int]]  # of the result that is written: start, bytes
    memories: list[PinnedMemory]
    work: Any = field(default=None)


class _StagedCompletion(Completion):
    def __init__(
        self,
        engine: native.Engine,
        stream: Stream,
        stages: list[_Stage],
        timeout_s: float,
        give_back: Callable[[Sequence[PinnedMemory]], None],
    ) -> None:
        self._engine, self._stream, self._stages = engine, stream, stages
        self._timeout_s, self._give_back = timeout_s, give_back
        self._waiting = list(stages)  # for the engine, or to be handed to it
        self._copied = self._mark()
        self._is_submitted = False
        self._failure: errors.KVHvdError | None = None

    def done(self) -> bool:
        """See `Completion.done`."""
        if not self._stages:
            return True
        if not self._is_submitted:
            if not self._passed():
                return False
            for stage in self._stages:
                stage.work = self._engine.submit(stage.request)
            self._is_submitted = True
        if self._waiting:
            self._waiting = [stage for stage in self._waiting if not self._copy_back(stage)]
            if self._waiting and self._failure is None:
                return False
            self._waiting = []
            self._copied = self._mark()
        if not self._passed():
            return False
        if self._failure is not None:
            # Only now does nothing write to the arrays any more.
            raise self._failure
        self._give_back([memory for stage in self._stages for memory in stage.memories])
        self._stages = []
        return True

    def _copy_back(self, stage: _Stage) -> bool:
        if not stage.work.done:
            return False
        if stage.work.error is not None:
            self._failure = stage.work.error
        if self._failure is not None:
            return True
        for output in stage.outputs:
            for start, nbytes in stage.ranges:
                self._stream.copy(output + start, stage.result + start, nbytes)
        return True

    def _mark(self) -> Event:
        self._deadline = Deadline(self._timeout_s)
        return Event().record(self._stream)

    def _passed(self) -> bool:
        if self._copied.done():
            self._copied.close()
            return True
        if self._deadline.left() < 0:
            raise errors.TimeoutError(
                message(
                    f"a copy between the GPU and the host has not ended within {self._timeout_s:g} s.",
                    fix="see whether a kernel of the program itself is stuck; KVHVD_TIMEOUT sets the limit.",
                )
            )
        return False
