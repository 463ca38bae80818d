"""What carries out operations on arrays of a GPU, and what such an operation is there.

The engine has matched and ordered what all workers have submitted, so that every worker's executor gets the same
batches in the same order. One thread of a worker, the device's, calls its executor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from kvstore_hvd import errors
from kvstore_hvd.base.clocks import Deadline
from kvstore_hvd.errors import HorovodInternalError, InvalidRequestError, message
from kvstore_hvd.gpu.runtime import close_all
from kvstore_hvd.gpu.streams import Event, Stream
from kvstore_hvd.native.records import DeviceOperation

__all__ = ["END_S", "Batch", "Completion", "EventCompletion", "Executor", "input_of"]


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
        """Enqueue copies of what this worker takes of all workers' inputs (`parts`, see `comm.base.Request`)."""

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
