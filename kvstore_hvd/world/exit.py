"""How a process ends: why, and within what time."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from kvstore_hvd import log
from kvstore_hvd.base.clocks import Deadline
from kvstore_hvd.errors import KVHvdError
from kvstore_hvd.mxnet_compat.engine_errors import in_one_line

_MAX_REASON = 500


def early_end(who: str = "") -> str:
    """Why the program ends early, for an exit handler: ``'ValueError: ...'``, or '' when it ends in good order."""
    # With `who`, this worker's name, a second line says what to do about an error of the program: ``' Fix: ...'``.
    # Knows unhandled exceptions of the main thread (Ctrl-C among them). An interactive session goes on after those, and
    # ``sys.exit(1)`` leaves no trace that an exit handler could see.
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return ""
    # last_exc came with Python 3.12; older ones have last_value only.
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    if error is None:
        return ""
    reason = in_one_line(error)[:_MAX_REASON]
    if not who or not isinstance(error, Exception) or isinstance(error, KVHvdError):
        return reason
    return f"{reason}\n  Fix: correct the {type(error).__name__} on {who}"


# What is left when even a lost world does not let the process go: MXNet itself does not finish.
_LAST_RESORT_S = 5.0
# The reader of the output may stand still.
_LAST_WORDS_S = 1.0


def end_by_force(text: str) -> NoReturn:
    """End this process with code 1, and with an error in the log if that can be written within a second."""

    def say() -> None:
        log.logger.error(text)
        sys.stdout.flush()

    speaker = threading.Thread(target=say, name="kvstore_hvd-last-words", daemon=True)
    with contextlib.suppress(RuntimeError):  # no more threads
        speaker.start()
        speaker.join(_LAST_WORDS_S)
    os._exit(1)


# Between two looks at how far a process that leaves has come.
_LOOK_S = 0.1


class ExitWatchdog:
    """Calls `on_expiry` when leaving makes no progress within the limit, and ends the process 5 s later."""

    # The thread is started beforehand and sleeps until then, because Python starts no threads once it ends.

    def __init__(self) -> None:
        self._limit_s = 0.0
        self._on_expiry: Callable[[], None] = lambda: None
        self._progress: Callable[[], object] = lambda: None
        self._leaving = threading.Event()
        self._left = threading.Event()
        threading.Thread(target=self._watch, name="kvstore_hvd-exit", daemon=True).start()

    def leaving(self, limit_s: float, on_expiry: Callable[[], None], progress: Callable[[], object]) -> None:
        """The process begins to leave: the time runs, and begins anew when `progress` returns something else."""
        self._limit_s, self._on_expiry, self._progress = limit_s, on_expiry, progress
        self._leaving.set()

    def left(self) -> None:
        """The process has left: nothing will be called."""
        self._left.set()

    def _watch(self) -> None:
        self._leaving.wait()
        if self._has_left_within(self._limit_s, self._progress):
            return
        self._on_expiry()
        if not self._has_left_within(_LAST_RESORT_S, lambda: None):
            end_by_force("this worker cannot end: an operation of MXNet does not finish. Ending it by force.")

    def _has_left_within(self, limit_s: float, progress: Callable[[], object]) -> bool:
        deadline, before = Deadline(limit_s), progress()
        while not self._left.wait(min(deadline.wait_s(), _LOOK_S)):
            now = progress()
            if now != before:
                deadline, before = Deadline(limit_s), now
            elif deadline.left() <= 0:
                return False
        return True
