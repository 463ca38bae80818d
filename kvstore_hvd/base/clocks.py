"""Clocks for limits on waits, which stand still while this process does not run.

A process may be stopped (SIGSTOP, a frozen container, a suspended machine) or get no core for seconds, often together
with the processes that it waits for. That time does not count as a wait.
"""

from __future__ import annotations

import time

# Longest time in seconds between two readings of a clock during a wait.
LOOK_S = 0.5
# Seconds between two readings from which on the process counts as stopped in between.
_LONGEST_S = 2 * LOOK_S
# Seconds that the clock advances by for such a pair of readings.
_MOMENT_S = 0.1


class RunningClock:
    """``time.monotonic()`` without the time in which the process was stopped.

    For one thread, which reads the clock at least every `LOOK_S`.
    """

    def __init__(self) -> None:
        self._read_at = self._now = self._begun_at = time.monotonic()

    def elapsed(self) -> float:
        """Seconds since the clock was made."""
        return self.now() - self._begun_at

    def now(self) -> float:
        read_at = time.monotonic()
        gap_s = read_at - self._read_at
        self._now += gap_s if gap_s <= _LONGEST_S else _MOMENT_S
        self._read_at = read_at
        return self._now


class Deadline:
    """A limit in seconds of a `RunningClock`, from now on. For one thread, which looks at least every `LOOK_S`."""

    # A wait for an earlier limit reads that limit only, and the clock of the later one would count the process as
    # stopped. Therefore `within` makes the earlier limit, with the same clock.

    def __init__(self, limit_s: float, clock: RunningClock | None = None) -> None:
        self._clock = clock or RunningClock()
        self._end = self._clock.now() + limit_s

    def within(self, limit_s: float) -> Deadline:
        """A deadline in `limit_s` seconds, or that of this one if it is sooner."""
        return Deadline(min(limit_s, self.left()), self._clock)

    def left(self) -> float:
        """Seconds until the deadline; 0 or less after it."""
        return self._end - self._clock.now()

    def wait_s(self, longest_s: float = LOOK_S) -> float:
        """Seconds to wait before the next reading; 0 after the deadline."""
        return max(0.0, min(self.left(), longest_s, LOOK_S))
