"""Time in which this process itself has run: what a limit on others is counted in.

A process may be stopped (SIGSTOP, a frozen container, a suspended machine) or get no core for seconds, often together
with those that it waits for. It has not waited for them meanwhile, so that time does not count.
"""

from __future__ import annotations

import time

# Whoever waits for others looks at its clock at least so often.
LOOK_S = 0.5
# Readings further apart than this show that the process stood still in between.
_LONGEST_S = 2 * LOOK_S
# For how long it may have run before and after that.
_MOMENT_S = 0.1


class RunningClock:
    """A clock that stands still while this process does. For one thread, which reads it at least every `LOOK_S`."""

    # Readings that are more than 2 `LOOK_S` apart mean that the process did not run in between: the clock has gone on
    # by 0.1 s then. At first it shows ``time.monotonic()``.

    def __init__(self) -> None:
        self._read_at = self._now = self._begun_at = time.monotonic()

    def elapsed(self) -> float:
        """Seconds since it was made."""
        return self.now() - self._begun_at

    def now(self) -> float:
        """Seconds."""
        read_at = time.monotonic()
        gap_s = read_at - self._read_at
        self._now += gap_s if gap_s <= _LONGEST_S else _MOMENT_S
        self._read_at = read_at
        return self._now


class Deadline:
    """A limit in seconds of a `RunningClock`, from now on. For one thread, which looks at least every `LOOK_S`."""

    # While whoever waits for an earlier limit looks at that one only, the clock of this one would take it for a process
    # that stands still: the earlier limit is made by `within`, and both have one clock.

    def __init__(self, limit_s: float, clock: RunningClock | None = None) -> None:
        self._clock = clock or RunningClock()
        self._end = self._clock.now() + limit_s

    def within(self, limit_s: float) -> Deadline:
        """Return the deadline that is over after `limit_s` from now, or with this one if that is sooner."""
        return Deadline(min(limit_s, self.left()), self._clock)

    def left(self) -> float:
        """Seconds until then; 0 or less when it is over."""
        return self._end - self._clock.now()

    def wait_s(self, longest_s: float = LOOK_S) -> float:
        """For how long to wait before the next look: 0 when the deadline is over."""
        return max(0.0, min(self.left(), longest_s, LOOK_S))
