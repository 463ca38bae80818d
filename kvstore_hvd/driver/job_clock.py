"""The time by which the workers of an elastic job are judged."""

from __future__ import annotations

__all__ = ["JobClock"]


class JobClock:
    """A clock that goes on only while all daemons are heard: what a worker has said comes through its daemon."""

    def __init__(self, now: float) -> None:
        self.now = self._read_at = now

    def advance(self, now: float, *, are_heard: bool) -> None:
        """The launcher's clock shows this; `are_heard`: no daemon has missed its beats."""
        if are_heard:
            self.now += now - self._read_at
        self._read_at = now
