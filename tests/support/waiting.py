"""Children of a rank, and conditions that become true by themselves."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from support.patience import patient

__all__ = ["in_child", "wait_until"]


def wait_until(condition: Callable[[], Any], what: Callable[[], str] = str, seconds: float = 30) -> None:
    """Wait for a condition; fails after a time with what is missing."""
    deadline = time.monotonic() + patient(seconds)
    while not condition():
        assert time.monotonic() < deadline, what() or "it never came"
        time.sleep(0.001)


def in_child(work: Callable[[], Any]) -> None:
    """Fork, have the child do `work`, and fail unless it comes to its end."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            work()
        except BaseException as error:
            print(f"child: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
