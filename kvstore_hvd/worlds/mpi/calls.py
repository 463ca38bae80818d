"""Calls that MPI may block, and how long the caller waits for them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from kvstore_hvd.base.clocks import RunningClock

__all__ = ["call_within"]

Result = TypeVar("Result")

_LOOK_S = 0.05


def call_within(limit_s: float, function: Callable[[], Result], look: Callable[[], None] = lambda: None) -> Result:
    """Call `function` in a thread of its own, which is left behind if it takes longer than `limit_s` seconds."""
    # Calls `look` again and again meanwhile. MPI has to be used with MPI_THREAD_MULTIPLE.
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

    clock = RunningClock()
    threading.Thread(target=call, name="kvstore_hvd-mpi", daemon=True).start()
    while not done.wait(_LOOK_S):
        look()
        if clock.elapsed() > limit_s:
            raise TimeoutError
    if failures:
        raise failures[0]
    return results[0]
