"""Calls that MPI may block, and how long the caller waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["Clock", "call_within"]

Result = TypeVar("Result")

_LOOK_S = 0.05


class Clock:
    """Seconds in which this process itself has run: if it was stopped, nobody else has kept it waiting."""

    _LONGEST_GAP_S = 0.25

    def __init__(self) -> None:
        self._elapsed, self._last = 0.0, time.monotonic()

    def elapsed(self) -> float:
        """To be asked often."""
        now = time.monotonic()
        self._elapsed += min(now - self._last, self._LONGEST_GAP_S)
        self._last = now
        return self._elapsed


def call_within(limit_s: float, function: Callable[[], Result], look: Callable[[], None] = lambda: None) -> Result:
    """Call `function` in a thread of its own, which is left behind if it takes longer than `limit_s` seconds.

    Calls `look` again and again meanwhile. MPI has to be used with MPI_THREAD_MULTIPLE.

    Raises
    ------
    TimeoutError
        The builtin one: it takes too long.
    Exception
        Whatever the two raise.
    """
    done = threading.Event()
    results: list[Result] = []
    failures: list[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001 - for the thread that waits
            failures.append(error)
        finally:
            done.set()

    clock = Clock()
    threading.Thread(target=call, name="kvstore_hvd-mpi", daemon=True).start()
    while not done.wait(_LOOK_S):
        look()
        if clock.elapsed() > limit_s:
            raise TimeoutError
    if failures:
        raise failures[0]
    return results[0]
