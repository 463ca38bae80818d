"""The workers of a job: which of them run, how the others ended, and which failure came first."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvstore_hvd.launcher.guard import Guard
from kvstore_hvd.launcher.output import Tail
from kvstore_hvd.launcher.reaper import Reaper

__all__ = ["Worker", "Workers", "exit_code", "first_culprit", "how_it_ended"]

_W = TypeVar("_W")

# Not the first cause of a failure: a worker that ends with it tells of another's end.
_SECONDARY = b"PeerLostError"


def exit_code(code: int) -> int:
    """The exit code as a shell gives it: 128 + n when signal n killed a process, which is -n here."""
    return code if code >= 0 else 128 - code


def how_it_ended(code: int) -> str:
    """How a process with this exit code (or -signal) ended, as the end of a sentence."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def first_culprit(failed: Sequence[_W], last_lines: Callable[[_W], Iterable[bytes]]) -> _W | None:
    """The first of those that failed, in the order of their ends, whose last lines do not tell of another's end."""
    for worker in failed:
        if not any(_SECONDARY in line for line in last_lines(worker)):
            return worker
    return failed[0] if failed else None


@dataclass
class Worker:
    """One started worker; its process id is also that of its group and session."""

    rank: int
    pid: int = 0
    code: int | None = None  # exit code, or -signal; None while it runs
    ended_by_us: bool = False
    tail: Tail = field(default_factory=Tail)  # of its stderr

    @property
    def exit_code(self) -> int:
        """The exit code as a shell gives it."""
        return exit_code(self.code or 0)

    @property
    def ending(self) -> str:
        """How it ended, as the end of a sentence."""
        return how_it_ended(self.code or 0)


class Workers:
    """All workers that have been started."""

    def __init__(self, guard: Guard, grace_s: float) -> None:
        self._guard = guard
        self._reaper = Reaper(grace_s)
        self._running: dict[int, Worker] = {}
        self._ended: list[Worker] = []  # in the order in which they ended

    @property
    def running(self) -> bool:
        """Whether any of them still runs, as far as `reap` has seen."""
        return bool(self._running)

    def add(self, worker: Worker) -> None:
        """Take a worker that has just been started."""
        self._running[worker.pid] = worker
        self._reaper.add(worker.pid)

    def reap(self) -> list[Worker]:
        """Collect every child that has ended, adopted orphans too; returns the workers among them."""
        # What a worker has left behind, which may hold locks, ports, or the pipes that we read, is ended.
        ended = []
        for pid, code in self._reaper.reap():
            self._guard.replace(pid)
            worker = self._running.pop(pid, None)
            if worker is not None:
                worker.code = code
                ended.append(worker)
        self._ended += ended
        return ended

    def wait_s(self) -> float | None:
        """Seconds until `reap` has something to do even if nobody ends; None: that it never has."""
        return self._reaper.wait_s()

    def signal(self, number: int, *, by_us: bool = False) -> None:
        """Send a signal to the groups of all workers that still run, as a terminal would."""
        # With `by_us`, how they end from now on is our doing, and not counted as their failure.
        for worker in self._running.values():
            worker.ended_by_us = worker.ended_by_us or by_us
            self._reaper.signal(worker.pid, number)

    def culprit(self) -> Worker | None:
        """The worker whose failure came first, not counting those that failed because another did."""
        failed = [worker for worker in self._ended if worker.code and not worker.ended_by_us]
        return first_culprit(failed, lambda worker: worker.tail.lines())
