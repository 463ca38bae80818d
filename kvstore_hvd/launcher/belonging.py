"""Which processes belong to a job, and signals for those alone.

What a worker starts inherits two marks of the job: a variable in its environment, and a limit that nothing enforces and
whose value is the job's own. A program may clear its environment, but nobody changes that limit.

A process id proves nothing: the process that it named may have ended, and the number be another's. So a process that
is to get a signal is held by a pidfd first, and looked at then: the signal goes to what was looked at, or to nobody.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import signal
import time
from collections.abc import Callable, Iterable, Iterator

from kvstore_hvd.base.clocks import RunningClock

__all__ = ["LEFT_GRACE_S", "Remains", "group_has_members", "mark_of", "mark_this_process"]

#: Seconds between SIGTERM and SIGKILL for what workers leave behind: enough for Python's resource tracker, which
#: outlives its program to remove what that has left in /dev/shm, and needs the others of its program to be gone.
LEFT_GRACE_S = 1.0

# "Max file locks": unused since Linux 2.4.25. The resource module does not name it; its number is this on every
# architecture.
_RLIMIT_LOCKS = 10
_LIMIT_LINE = b"Max file locks"
_FIRST_LOOK_S, _LAST_LOOK_S = 0.005, 0.1
# What the kernel does not end although it has been killed (a process that waits for a dead file system) is left alone.
_KILLED_S = 2.0
_DEAD = (b"Z", b"X")
# Fields of /proc/PID/stat, counted from the state.
_PARENT, _STARTED = 1, 19


def mark_of(variable: bytes) -> int:
    """The limit that marks the processes of the job with this variable: below infinity, and unique."""
    return int.from_bytes(hashlib.sha256(variable).digest()[:8], "big") >> 2 | 1 << 61


def mark_this_process(mark: int) -> None:
    """Mark the calling process, and all that it will start, by `mark_of`. For a child, between fork and exec."""
    with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it: the environment remains
        _, hard = resource.getrlimit(_RLIMIT_LOCKS)
        resource.setrlimit(_RLIMIT_LOCKS, (mark, hard))


def _stat(pid: int) -> list[bytes]:
    """Fields of ``/proc/PID/stat`` from the state on. Raises OSError when there is no such process."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()  # the name stands in parentheses and may contain anything


def _all_processes() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def group_has_members(group: int) -> bool:
    """Whether any process of this group runs; zombies do not count."""
    for pid in _all_processes():
        with contextlib.suppress(OSError):
            state, _, of_process = _stat(pid)[:3]
            if int(of_process) == group and state not in _DEAD:
                return True
    return False


class Remains:
    """The processes of a job that are to end: SIGTERM first, SIGKILL after the grace, until there is none."""

    def __init__(
        self, variable: bytes, grace_s: float, parent: int = 0, spare: Callable[[], Iterable[int]] = tuple
    ) -> None:
        self._variable = variable
        self._limit = str(mark_of(variable)).encode()
        self._grace_s = grace_s
        self._parent = parent
        self._spare = spare
        self._earlier = set(self._children())
        self._told: set[int] = set()
        self._kill_at: float | None = None  # None: not begun
        self._pause_s = _FIRST_LOOK_S
        self.look_at: float | None = (
            None  # when `step` has something to do; None: before the first time, and at the end
        )
        self.done = False

    def find(self) -> list[int]:
        """Process ids of those that run."""
        return [pid for pid in _all_processes() if self._has(pid)]

    def step(self, now: float) -> bool:
        """Do what is due; returns whether nothing is left. Does not wait: call it again at `look_at`."""
        if self.done or (self.look_at is not None and now < self.look_at):
            return self.done
        if self._kill_at is None:
            self._kill_at = now + self._grace_s
        found = self.find()
        if not found or now >= self._kill_at + _KILLED_S:
            self.done, self.look_at = True, None
            return True
        for pid in found:
            if now >= self._kill_at:
                self._signal(pid, signal.SIGKILL)
            elif pid not in self._told:
                self._told.add(pid)
                self._signal(pid, signal.SIGTERM)
        if now < self._kill_at:
            self.look_at = min(now + self._pause_s, self._kill_at)
            self._pause_s = min(2 * self._pause_s, _LAST_LOOK_S)
        else:
            self.look_at = now + _FIRST_LOOK_S  # they may fork while they are being killed
        return False

    def finish(self) -> None:
        """Do all of it, and wait; what `step` has begun begins anew, by a clock of its own."""
        clock = RunningClock()  # a process that was stopped meanwhile has yet to kill what is left
        self._kill_at, self.look_at = None, clock.now()
        while not self.step(now := clock.now()):
            time.sleep(max(0.0, self.look_at - now))

    def _children(self) -> Iterator[tuple[int, bytes]]:
        """The children that there are, each with the time at which it started."""
        for pid in _all_processes() if self._parent else ():
            with contextlib.suppress(OSError):
                stat = _stat(pid)
                if int(stat[_PARENT]) == self._parent:
                    yield pid, stat[_STARTED]

    def _has(self, pid: int) -> bool:
        """Whether the process that has this id now is one of the job, and runs."""
        if pid == os.getpid() or pid in self._spare():
            return False
        try:
            stat = _stat(pid)
            if stat[0] in _DEAD:
                return False
            if self._parent and int(stat[_PARENT]) == self._parent and (pid, stat[_STARTED]) not in self._earlier:
                return True
            with open(f"/proc/{pid}/limits", "rb") as file:
                limits = next((line for line in file if line.startswith(_LIMIT_LINE)), b"")
            if self._limit in limits.split():
                return True
            with open(f"/proc/{pid}/environ", "rb") as file:
                return self._variable in file.read().split(b"\0")
        except OSError:
            return False  # it has ended, or belongs to another user

    def _signal(self, pid: int, number: int) -> None:
        try:
            held = os.pidfd_open(pid) if hasattr(signal, "pidfd_send_signal") else None
        except ProcessLookupError:
            return
        except (OSError, AttributeError):
            held = None  # before Linux 5.3, or no descriptor is left: a reuse within microseconds remains possible
        try:
            if self._has(pid):
                with contextlib.suppress(OSError):  # it has ended, or changed its user
                    if held is None:
                        os.kill(pid, number)
                    else:
                        signal.pidfd_send_signal(held, number)
        finally:
            if held is not None:
                os.close(held)
