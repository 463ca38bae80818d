"""The executor of a worker's operations on arrays of its GPU, and the thread that calls it.

The engine matches and orders the operations of all workers, so that the executor of every worker gets the same batches
in the same order. One thread of a worker, the device's, takes the batches and calls the executor.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from kvstore_hvd import errors, log, native
from kvstore_hvd.base.cores import Deadline
from kvstore_hvd.errors import HorovodInternalError, InvalidRequestError, KVHvdError, TransportError, message
from kvstore_hvd.gpu.kernels import Segment
from kvstore_hvd.gpu.launcher import Launcher
from kvstore_hvd.gpu.runtime import activate, checked, close_all, cupy
from kvstore_hvd.gpu.streams import Event, Stream
from kvstore_hvd.native import ITEM_BYTES, DeviceOperation

#: Seconds that a device may take to end after an abort.
END_S = 10.0
#: Alignment of pieces in a buffer, in bytes.
ALIGNMENT = 16
# Bits of an address within 2 MiB: memory of two devices never shares such a page.
_PAGE_BITS = 21
# Seconds between two looks at the device, which does not report its end.
_LOOK_S = 50e-6
# Seconds between two looks at the world without work on the device.
_IDLE_S = 0.5
# Seconds that the thread may take to end; the limits of its own steps are shorter together.
_STOP_S = 60.0

#: Requests of one kind, dtype, op, scales and root; carried out together.
Batch = Sequence[DeviceOperation]
#: Operations under way: a step looks once, without waiting. It ends when all outputs are written, or raises a failure.
Steps = Iterator[None]


class Executor(ABC):
    """One worker's end of a world whose arrays lie on GPUs; for one device, which its methods make current.

    An error of a method has lost the world: the caller aborts the world on every worker.
    """

    def __init__(self, ordinal: int, timeout_s: float, stream: Stream | None = None) -> None:
        activate(ordinal)
        self.ordinal, self.timeout_s = ordinal, timeout_s
        self.stream = Stream() if stream is None else stream
        # Functions that free memory and handles; `close` calls the last one first.
        self._closes: list[Callable[[], None]] = [self.stream.close] if stream is None else []

    @abstractmethod
    def start(self, collective: str, batch: Batch) -> Steps:
        """Enqueue a batch.

        ``allreduce``: reduce every request's input over all workers into its outputs. ``broadcast``: copy the root's
        inputs to all workers' outputs. ``exchange``: copy this worker's `parts` (see `native.Request`) of all workers'
        inputs. ``reducescatter``: reduce, and receive the one part of this worker.
        """

    @abstractmethod
    def abort(self) -> None:
        """Make all enqueued work end soon, on every worker; from any thread, any number of times. Returns at once."""

    def end(self, limit_s: float) -> bool:
        """Abort, and wait until the device touches no array any more; False if it still may after `limit_s` seconds."""
        self.abort()
        return self.stream.drain(limit_s)

    def close(self) -> None:
        """Free everything, after all work is done or aborted; the last call."""
        activate(self.ordinal)
        # If the work does not end, the memory stays: CUDA would wait for the work without a limit.
        if self.end(END_S):
            close_all(*reversed(self._closes))


class DeviceExecutor(Executor):
    """An executor whose work is all on the device: a method for each collective enqueues a batch on the stream."""

    _launcher: Launcher

    def __init__(self, ordinal: int, timeout_s: float, stream: Stream | None = None) -> None:
        super().__init__(ordinal, timeout_s, stream)
        self._pages: set[int] = set()  # on the device

    def start(self, collective: str, batch: Batch) -> Steps:
        activate(self.ordinal)
        for request in batch:
            for address in (*request.inputs, *request.outputs):
                if not address or address >> _PAGE_BITS in self._pages:  # an empty array has address 0
                    continue
                with checked("ask where an array lies"):
                    found = int(cupy().cuda.runtime.pointerGetAttributes(address).device)
                if found != self.ordinal:
                    place = f"GPU {found}" if found >= 0 else "the CPU"
                    fact = f"an array is on {place}, but this worker's operations are on GPU {self.ordinal}."
                    fix = "use one GPU in each worker, and start a worker for each GPU."
                    raise InvalidRequestError(message(fact, fix=fix))
                self._pages.add(address >> _PAGE_BITS)
        getattr(self, collective)(batch)
        return self._steps(Event().record(self.stream))

    def check(self) -> None:
        """Raise why enqueued work has failed, on this rank or another."""
        self._launcher.check()

    def abort(self) -> None:
        self._launcher.abort()

    def copy_to_others(self, request: DeviceOperation) -> None:
        """Enqueue copies of a request's first output to its other outputs."""
        for other in request.outputs[1:]:
            self.stream.copy(other, request.outputs[0], request.count * ITEM_BYTES[request.dtype])

    def _steps(self, event: Event) -> Steps:
        """Wait for an event of the stream. After a failure, abort and raise it when the device is idle."""
        failure, deadline = None, Deadline(self.timeout_s)
        while True:
            has_ended = event.done()
            if failure is None:
                try:
                    # An ended kernel is checked, too: after an abort it ends without writing its outputs.
                    self.check()
                    if not has_ended and deadline.left() < 0:
                        fact = f"operations on the GPUs have not ended within {self.timeout_s:g} s."
                        fix = "see whether a worker, or its GPU, is stuck; KVHVD_TIMEOUT sets the limit."
                        raise errors.TimeoutError(message(fact, fix=fix))
                except HorovodInternalError as error:
                    failure, deadline = error, Deadline(END_S)
                    self.abort()
            if has_ended or (failure is not None and deadline.left() <= 0):
                break
            yield
        if failure is not None:
            close_all(event.close)
            raise failure
        event.close()


# -- The thread of the device ------------------------------------------------------------------------------------------


class DeviceThread:
    """The thread that calls the executor. It begins with the first operation on a device, and ends with the world."""

    def __init__(
        self, engine: native.Engine, make_executor: Callable[[int], Executor], prefix: dict[str, Any] | None = None
    ) -> None:
        self._engine, self._make_executor = engine, make_executor
        self._prefix = prefix or {}
        self._device = 0
        self._executor: Executor | None = None
        self._under_way: deque[tuple[int, Steps]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def start(self, device: int) -> None:
        """Start the thread at the first call."""
        with self._lock:
            if self._stop.is_set():
                return  # the next request fails
            if self._thread is not None and device != self._device:
                fact = f"an array is on GPU {device}, but this worker's operations take place on GPU {self._device}."
                fix = "keep all arrays of a worker on one GPU: that of its local_rank."
                raise InvalidRequestError(message(fact, fix=fix, **self._prefix))
            if self._thread is None:
                self._device = device
                self._thread = threading.Thread(target=self._run, name="kvstore_hvd-device", daemon=True)
                self._thread.start()
                threading.Thread(target=self._watch, name="kvstore_hvd-device-watch", daemon=True).start()

    def stop(self) -> None:
        """End the thread, after the engine has left its world."""
        with self._lock:
            self._stop.set()
        # A forked child has no such thread, and the executor is the parent's.
        if self._thread is None or not self._thread.is_alive():
            return
        if self._engine.health() is not None:
            self._abort()
        self._thread.join(_STOP_S)
        if self._thread.is_alive():
            log.logger.warning("the thread of GPU %d does not end; it is left behind", self._device)

    def _run(self) -> None:
        while not self._stop.is_set():
            taken = self._engine.take_batch(_LOOK_S if self._under_way else _IDLE_S)
            if taken is not None:
                self._begin(*taken)
            self._finish()
            if self._engine.health() is not None:
                self._end_all()
        if self._executor is not None:
            if self._under_way:
                self._abort()
            try:
                self._executor.close()
            except Exception as error:  # noqa: BLE001 - of a failed device, whose failure has been reported
                log.logger.debug("GPU %d is not given back: %s", self._device, error)

    def _watch(self) -> None:
        """After the loss of the world, end the thread's own wait for a worker that does not come."""
        while not self._stop.wait(_IDLE_S):
            if self._executor is not None and self._engine.health() is not None:
                self._abort()
                return

    def _abort(self) -> None:
        if self._executor is not None:
            with contextlib.suppress(Exception):  # of a failed device: the world has a cause already
                self._executor.abort()

    def _begin(self, number: int, collective: str, operations: list[DeviceOperation]) -> None:
        try:
            if any(len(operation.inputs) != 1 for operation in operations):
                fact = "an operation on a GPU has several inputs."
                raise InvalidRequestError(message(fact, fix="add those of this worker first."))
            if self._executor is None:
                self._executor = self._make_executor(self._device)
            self._under_way.append((number, self._executor.start(collective, operations)))
        except BaseException as error:  # noqa: BLE001 - whatever it is, the other workers wait for this one
            if self._executor is not None:
                # A part of the batch may be enqueued; the caller gets its arrays back when the device is idle.
                with contextlib.suppress(Exception):
                    self._executor.end(END_S)
            self._engine.end_batch(number, _loss(error))

    def _finish(self) -> None:
        while self._under_way:
            number, steps = self._under_way[0]
            failure = None
            try:
                if next(steps, True) is None:
                    return
            except BaseException as error:  # noqa: BLE001 - as above
                failure = _loss(error)
            self._under_way.popleft()
            self._engine.end_batch(number, failure)

    def _end_all(self) -> None:
        """End all batches of a lost world: no array is written after its caller has learnt of the loss."""
        self._abort()
        end = Deadline(END_S)  # of all batches together: the engine waits no longer, either
        while self._under_way:
            number, steps = self._under_way.popleft()
            with contextlib.suppress(Exception):  # the world has an older cause
                while next(steps, True) is None and end.left() > 0:
                    time.sleep(_LOOK_S)
            self._engine.end_batch(number, TransportError("its batch was ended"))
        self._stop.wait()


def _loss(error: BaseException) -> KVHvdError:
    """The error for the other workers: its text becomes the fact of an error that has a fix of its own."""
    text = str(error) if isinstance(error, KVHvdError) else f"{type(error).__name__}: {error}"
    fact = "; ".join(part.rstrip(".") for part in text.split("\n  Fix: "))
    kind = type(error) if isinstance(error, HorovodInternalError) else TransportError
    return kind(fact)


# -- Rounds: the parts of a batch's tensors that each fit into a buffer; the same on all ranks -------------------------


class Piece(NamedTuple):
    """Elements `start` to ``start + length`` of a batch's request, and their place in the buffer, in bytes."""

    request: int
    start: int
    length: int
    offset: int

    def parts(self, parts: Sequence[tuple[int, int, int, int]], unit: int = 1) -> Iterator[tuple[int, int, int, int]]:
        """The overlaps with `parts` (elements: `unit` bytes): rank, place in the buffer, bytes, place in the output."""
        begin, end = self.start * unit, (self.start + self.length) * unit
        for rank, start, nbytes, place in parts:
            low, high = max(begin, start), min(end, start + nbytes)
            if low < high:
                yield rank, self.offset + low - begin, high - low, place + low - start


def rounds(counts: Sequence[int], item_bytes: int, capacity: int, most: int) -> list[list[Piece]]:
    """Place tensors one after the other; cut a tensor only if it is larger than a buffer."""
    capacity -= capacity % ALIGNMENT
    made: list[list[Piece]] = []
    used = 0
    for request, count in enumerate(counts):
        start = 0
        while start < count:
            rest = (count - start) * item_bytes
            is_full = not made or len(made[-1]) == most or used == capacity
            if is_full or (used + rest > capacity >= rest):
                made.append([])
                used = 0
            taken = min(rest, capacity - used) // item_bytes
            made[-1].append(Piece(request, start, taken, used))
            used = buffer_bytes(made[-1], item_bytes)
            start += taken
    return made


def buffer_bytes(pieces: Sequence[Piece], item_bytes: int) -> int:
    """Bytes of the buffer that a round takes."""
    end = pieces[-1].offset + pieces[-1].length * item_bytes
    return -(-end // ALIGNMENT) * ALIGNMENT


def segments(batch: Batch, pieces: Sequence[Piece], unit: int, size_unit: int) -> tuple[list[Segment], list[Segment]]:
    """The inputs and outputs of a round; elements have `unit` bytes, sizes count `size_unit` for an element."""
    inputs: list[Segment] = []
    outputs: list[Segment] = []
    for request, start, length, offset in pieces:
        for found, addresses in ((inputs, batch[request].inputs), (outputs, batch[request].outputs)):
            found += [Segment(address + start * unit, offset, length * size_unit) for address in addresses]
    return inputs, outputs
