"""What every way of communicating offers, and what a request is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore_hvd import native
from kvstore_hvd.errors import HorovodInternalError, InvalidRequestError, KVHvdError, message
from kvstore_hvd.native.records import EngineStatistics, Missed, TimelineEvent, Waiting

__all__ = ["PATIENT", "Communicator", "Request"]

#: What the names of requests begin with that have no timeout and are in no stall report (see request.hpp).
PATIENT = "~"


@dataclass(frozen=True)
class Request:
    """A collective operation on raw memory, as one worker submits it."""

    collective: str
    name: str
    label: str
    inputs: Sequence[int]
    outputs: Sequence[int]
    shape: Sequence[int]
    dtype: str
    op: str = "sum"
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = 0
    priority: int = 0
    parts: Sequence[tuple[int, int, int, int]] = ()
    contributed: int = 0
    weight: float = 1.0
    as_half: bool = False
    group: int = 0
    on_device: bool = False
    failure: str = ""

    @property
    def count(self) -> int:
        """Number of elements."""
        count = 1
        for length in self.shape:
            count *= length
        return count


class Communicator(ABC):
    """One worker's end of a world of workers, from joining it to leaving it. Never used again after `shutdown`."""

    @abstractmethod
    def submit(self, request: Request) -> native.Work:
        """Submit `request` and return at once."""

    @abstractmethod
    def run(self, request: Request) -> None:
        """Carry out `request` and wait for it."""

    @abstractmethod
    def prepare(self, request: Request, result: Any, owner: Any) -> Callable[[], Any]:
        """A function that does the same, any number of times, at the least cost."""
        # It returns `result`, and keeps that and `owner` alive. Errors of MXNet's arrays that nobody has read are left
        # for others to raise.

    @abstractmethod
    def wait(self, work: native.Work) -> None:
        """Wait for `work`, bounded by the configured timeout; raises as `run`."""

    @abstractmethod
    def wait_for_all(self) -> bool:
        """Wait until nothing of this worker is pending; False when something still is after the configured timeout."""
        # A signal's exception, like Ctrl-C's, fails the world first.

    @abstractmethod
    def health(self) -> HorovodInternalError | KVHvdError | None:
        """The failure that every later operation will raise, or None."""

    @abstractmethod
    def abort(self, text: str) -> None:
        """Fail the pending and later operations of all workers, with this text."""

    @abstractmethod
    def shutdown(self, reason: str = "") -> None:
        """Leave the world. Waits for this worker's pending operations, unless a reason for leaving early is given."""
        # Its descriptors and its memory are given back at once; of the arena when no array lies in it any more.

    def start_device(self, device: int) -> None:
        """Be ready for operations on arrays of a GPU, before the first one is submitted."""
        fact, fix = "arrays on GPUs cannot be sent in this kind of world.", "copy them to the CPU."
        raise InvalidRequestError(message(fact, fix=fix))

    @property
    def arena(self) -> native.Arena | None:
        """Memory for arrays that the other workers of the host reduce in place; None where there is none."""
        return None

    @property
    def bytes_in_place(self) -> int:
        """Bytes of this worker's arrays that were reduced where they lie, without staging memory."""
        return 0

    def report(self) -> EngineStatistics:
        """What was measured of the operations: nothing in this kind of world."""
        return EngineStatistics()

    def start_timeline(self, capacity: int) -> None:  # noqa: B027 - what cannot record, does not
        """Record operations, see `native.Engine`: there is nothing to record in this kind of world."""

    def stop_timeline(self) -> None:  # noqa: B027
        """Record nothing more."""

    def take_timeline(self) -> tuple[list[TimelineEvent], int]:
        """What was recorded since the last call, and how many operations found no room. Also after `shutdown`."""
        return [], 0

    def waiting(self, age_s: float) -> list[Waiting] | None:
        """What this worker has waited for, for at least `age_s` seconds; None when nobody can tell just now."""
        return []

    def missed(self, most: int, described: bool = False) -> list[Missed] | None:
        """What others have submitted and this worker has not, up to `most`; None when nobody can tell just now."""
        # `described`: with what they announced. Then no other thread may submit anything at this time.
        return []

    def is_met(self, work: native.Work) -> bool:
        """Whether all workers have submitted `work`; so if `missed` shows what another one submitted after it."""
        return work.done

    def process(self, rank: int) -> tuple[int, str]:
        """The process id of a worker on this host, else 0; and how errors name that worker."""
        return 0, f"rank {rank}"

    @abstractmethod
    def mxnet_adapter(self, library_path: str, naive: bool) -> native.MXNetAdapter:
        """The adapter that submits arrays of the MXNet at `library_path`; `naive`: that MXNet runs NaiveEngine."""
