"""Collect children that have ended, and end what is left of the groups of workers."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

from kvstore_hvd.base.clocks import RunningClock
from kvstore_hvd.launcher.belonging import LEFT_GRACE_S, group_has_members

__all__ = ["Reaper", "reap"]

_LOOK_S = 0.05


def reap() -> Iterator[tuple[int, int]]:
    """Collect every child that has ended, adopted orphans too."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, os.waitstatus_to_exitcode(status)


class Reaper:
    """Collects children, of whom some lead groups of their own."""

    # A leader that has ended stays unreaped until the others of its group are gone: until then the kernel gives its
    # number to nobody else, and a signal to the group cannot hit a stranger. The others get SIGTERM at once, and
    # SIGKILL after the grace.

    def __init__(self, grace_s: float = LEFT_GRACE_S) -> None:
        self._grace_s = grace_s
        self._clock = RunningClock()
        self._leaders: set[int] = set()  # that run
        self._ended: set[int] = set()  # leaders, unreaped
        self._kill_at: dict[int, float] = {}  # when the groups of leaders that have ended, or been killed, are killed

    def add(self, leader: int) -> None:
        """Take a child that has just been started, and leads a group."""
        self._leaders.add(leader)

    def signal(self, leader: int, number: int) -> None:
        """Send a signal to the group of a leader, as a terminal would; SIGKILL to the others after the grace only."""
        if leader not in self._leaders:
            return
        with contextlib.suppress(OSError):
            if number != signal.SIGKILL:
                os.killpg(leader, number)
                return
            os.kill(leader, number)
        self._end_group(leader)

    def reap(self) -> list[tuple[int, int]]:
        """Every child that has ended since the last call: process id, and exit code, or minus the signal's number."""
        # While a group is waited for, only leaders are looked at.
        ended = []
        while True:
            for leader in list(self._leaders):
                code = _look(os.P_PID, leader)
                if code is not None:
                    self._leaders.remove(leader)
                    self._ended.add(leader)
                    self._end_group(leader)
                    ended.append(code)
            self._act_on_time()
            if self._ended:
                return ended
            other = _look(os.P_ALL, 0)
            if other is None:
                return ended
            if other[0] not in self._leaders:
                os.waitpid(other[0], 0)
                ended.append(other)

    def wait_s(self) -> float | None:
        """Seconds until `reap` has something to do even if no child ends; None: that it never has."""
        if self._ended:
            return _LOOK_S
        return max(0.0, min(self._kill_at.values()) - self._clock.now()) if self._kill_at else None

    def _end_group(self, leader: int) -> None:
        if leader not in self._kill_at:
            self._kill_at[leader] = self._clock.now() + self._grace_s
            with contextlib.suppress(OSError):
                os.killpg(leader, signal.SIGTERM)

    def _act_on_time(self) -> None:
        now = self._clock.now()
        for leader, kill_at in list(self._kill_at.items()):
            is_over = leader in self._ended and not group_has_members(leader)
            if now >= kill_at and not is_over:
                with contextlib.suppress(OSError):
                    os.killpg(leader, signal.SIGKILL)
                self._kill_at[leader] = now + self._grace_s
            if is_over or (now >= kill_at and leader in self._ended):
                os.waitpid(leader, 0)
                self._ended.remove(leader)
                del self._kill_at[leader]


def _look(kind: int, pid: int) -> tuple[int, int] | None:
    """A child that has ended, and how; it is not reaped."""
    try:
        info = os.waitid(kind, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if info is None:
        return None
    return info.si_pid, info.si_status if info.si_code == os.CLD_EXITED else -info.si_status
