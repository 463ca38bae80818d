"""What carries out operations on arrays of a GPU, and what such an operation is there.

The engine has matched and ordered what all workers have submitted, so that every worker's executor gets the same
batches in the same order. One thread of a worker, the device's, calls its executor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvstore_hvd import errors
from kvstore_hvd.base.clocks import Deadline
from kvstore_hvd.errors import HorovodInternalError, InvalidRequestError, message
from kvstore_hvd.gpu.runtime import close_all
from kvstore_hvd.gpu.streams import Event, Stream
from kvstore_hvd.native import ITEM_BYTES
from kvstore_hvd.native.records import DeviceOperation

#: Seconds that a device may take to end after an abort.
END_S = 10.0

#: Requests of one kind, dtype, op, scales and root; carried out together.
Batch = Sequence[DeviceOperation]


class Completion(ABC):
    """Operations under way."""

    @abstractmethod
    def done(self) -> bool:
        """Whether all outputs are written; called again and again until it is so, by the thread of the executor."""


class Executor(ABC):
    """One worker's end of a world whose arrays lie on GPUs; for arrays of one device, which its methods make current.

    What raises has lost the world: the caller aborts it on every worker.
    """

    @abstractmethod
    def allreduce(self, batch: Batch) -> Completion:
        """Enqueue the reduction of every request's input over all workers into its outputs."""

    @abstractmethod
    def broadcast(self, batch: Batch) -> Completion:
        """Enqueue copies of the root's inputs to all workers' outputs."""

    @abstractmethod
    def exchange(self, batch: Batch) -> Completion:
        """Enqueue copies of what this worker takes of all workers' inputs (`parts`, see `native.Request`)."""

    @abstractmethod
    def reducescatter(self, batch: Batch) -> Completion:
        """Enqueue reductions of which this worker receives the one part that it asks for."""

    @abstractmethod
    def abort(self) -> None:
        """Have what is enqueued end soon, on every worker; from any thread, any number of times. Returns at once."""

    @abstractmethod
    def end(self, limit_s: float) -> bool:
        """Abort, and wait until the device touches no array any more; False when it may after `limit_s` seconds."""

    @abstractmethod
    def close(self) -> None:
        """Give everything back. What is under way is done, or was aborted; never used again."""


class EventCompletion(Completion):
    """Done when the stream has come so far."""

    # Once something has failed it aborts, and says so only when the device touches the arrays no more.

    def __init__(self, stream: Stream, check: Callable[[], None], abort: Callable[[], None], timeout_s: float) -> None:
        self._event = Event().record(stream)
        self._check, self._abort, self._timeout_s = check, abort, timeout_s
        self._deadline = Deadline(timeout_s)
        self._failure: HorovodInternalError | None = None
        self._is_done = False

    def done(self) -> bool:
        """See `Completion.done`."""
        if self._is_done:
            return True
        has_ended = self._event.done()
        if self._failure is None:
            try:
                # Also when it has ended: a kernel that was told to end leaves its outputs unwritten, and ends, too.
                self._check()
                self._check_time(has_ended)
            except HorovodInternalError as error:
                self._failure = error
                self._deadline = Deadline(END_S)
                self._abort()
        if self._failure is not None:
            if not has_ended and self._deadline.left() > 0:
                return False
            close_all(self._event.close)
            raise self._failure
        if has_ended:
            self._event.close()
            self._is_done = True
        return self._is_done

    def _check_time(self, has_ended: bool) -> None:
        if not has_ended and self._deadline.left() < 0:
            raise errors.TimeoutError(
                message(
                    f"operations on the GPUs have not ended within {self._timeout_s:g} s.",
                    fix="see whether a worker, or its GPU, is stuck; KVHVD_TIMEOUT sets the limit.",
                )
            )


def input_of(request: DeviceOperation) -> int:
    """The address of a request's only input."""
    if len(request.inputs) != 1:
        raise InvalidRequestError(
            message(f"an operation on a GPU has {len(request.inputs)} inputs.", fix="add those of this worker first.")
        )
    return request.inputs[0]


class SplitExecutor(Executor):
    """Our kernels for what is small, NCCL for what is large, by the size of a batch: the same on all workers."""

    # Both enqueue on one stream, in the same order on all workers: kernels of the one never wait beside the other's.

    def __init__(self, small: Executor, large: Executor, limit: int) -> None:
        self._small, self._large, self._limit = small, large, limit

    def allreduce(self, batch: Batch) -> Completion:
        """See `Executor.allreduce`."""
        return self._for(batch).allreduce(batch)

    def broadcast(self, batch: Batch) -> Completion:
        """See `Executor.broadcast`."""
        return self._for(batch).broadcast(batch)

    def exchange(self, batch: Batch) -> Completion:
        """See `Executor.exchange`."""
        return self._for(batch).exchange(batch)

    def reducescatter(self, batch: Batch) -> Completion:
        """See `Executor.reducescatter`."""
        return self._for(batch).reducescatter(batch)

    def abort(self) -> None:
        """See `Executor.abort`."""
        self._small.abort()
        self._large.abort()

    def end(self, limit_s: float) -> bool:
        """See `Executor.end`."""
        self._small.abort()
        return self._large.end(limit_s)

    def close(self) -> None:
        """See `Executor.close`."""
        # What both have enqueued ends with the stream, which the second one gives back.
        self._small.close()
        self._large.close()

    def _for(self, batch: Batch) -> Executor:
        nbytes = sum(request.count * ITEM_BYTES[request.dtype] for request in batch)
        return self._small if nbytes <= self._limit else self._large


# -- Rounds: cutting the tensors of a batch into parts that each fit into a buffer; the same on all ranks --------------

#: Where pieces begin in the buffer, in bytes.
ALIGNMENT = 16


class Piece(NamedTuple):
    """Elements `start` to ``start + length`` of a batch's request, and where in the buffer, in bytes, they go."""

    request: int
    start: int
    length: int
    offset: int


def rounds(counts: Sequence[int], item_bytes: int, capacity: int, most: int) -> list[list[Piece]]:
    """Place tensors one after the other; those that do not fit whole into a buffer are cut."""
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
            used += _aligned(taken * item_bytes)
            start += taken
    return made


def buffer_bytes(pieces: Sequence[Piece], item_bytes: int) -> int:
    """Bytes of the buffer that a round takes."""
    last = pieces[-1]
    return _aligned(last.offset + last.length * item_bytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
