"""One generation of an elastic job: the workers that were given a world, and how far they have come with it."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from kvstore_hvd.driver.roster import Worker
from kvstore_hvd.driver.waits import Wait

__all__ = ["ADDED", "REMOVED", "Generation", "Phase"]

# What a worker is told of changes, as bits: Horovod's numbers of a HostUpdateResult.
REMOVED, ADDED = 1, 2

# How long the others may take to say that they wait, too, once one of them has said why: from then on they have been
# told, and nothing but the wait itself can hold them.
_AFTER_TIMEOUT_S = 0.5
_AFTER_MEETING_S = 5.0
# A meeting has a deadline of its own, in the workers. This much later all of them must have said how it went.
_MEETING_EXTRA_S = 10.0


class Phase(enum.Enum):
    """How far a generation has come."""

    MEETING = enum.auto()  # given out, and not all have said that they have met
    TRAINING = enum.auto()
    VOID = enum.auto()  # lost, or not begun: the next one is waited for


class Generation:
    """The number and the members of a generation, in the order of their ranks."""

    def __init__(
        self, number: int, members: Sequence[Worker], now: float, start_timeout_s: float, timeout_s: float
    ) -> None:
        self.number = number
        self.members = list(members)
        self.phase = Phase.MEETING if members else Phase.VOID
        self.told = 0  # of changes, since the generation began
        self.kill_at: float | None = now + start_timeout_s + _MEETING_EXTRA_S if members else None
        self.wait = Wait()  # of workers that are there, for those that are late
        self._joined: set[int] = set()
        self._timeout_s = timeout_s

    @property
    def begun(self) -> bool:
        """Whether this is a generation at all, and not the time before the first one."""
        return self.number >= 0

    def has(self, worker: Worker) -> bool:
        """Whether this worker was given the world."""
        return worker in self.members

    @property
    def left(self) -> list[Worker]:
        """The members that may be in the next world, in the order of their ranks."""
        return [worker for worker in self.members if worker.taking_part]

    def joined(self, worker: Worker) -> bool:
        """Note that this member has met the others; returns whether all have now."""
        self._joined.add(worker.id)
        if any(member.id not in self._joined for member in self.members):
            return False
        self.phase = Phase.TRAINING
        self.wait_no_longer()
        return True

    def void(self, now: float) -> None:
        """The world is lost: its members have until `kill_at` to say that they wait for the next one."""
        if self.phase is Phase.MEETING:
            self.wait_no_longer()
        self.phase = Phase.VOID
        self.expect(now, "lost")

    def expect(self, now: float, cause: str) -> None:
        """A worker waits for its next world, and said why: from now on the others' time runs."""
        limit = {"timeout": _AFTER_TIMEOUT_S, "meeting": _AFTER_MEETING_S}.get(cause, self._timeout_s)
        self.kill_at = now + limit if self.kill_at is None else min(self.kill_at, now + limit)
        self.wait.begin(now)

    def wait_no_longer(self) -> None:
        """Nobody is waited for."""
        self.kill_at = None
        self.wait.end()

    def late(self) -> list[Worker]:
        """The members that hold all others up."""
        if self.phase is Phase.MEETING:
            return [worker for worker in self.left if worker.id not in self._joined]
        return [worker for worker in self.left if not worker.ready]
