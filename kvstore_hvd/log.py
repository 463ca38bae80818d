"""Diagnostics for people: one logger, messages that appear once, and the rank at the start of each line.

Lines go to the handlers of the root logger, and to stderr if it has none. The level is ``KVHVD_LOG_LEVEL``.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time

logger: logging.Logger = logging.getLogger("kvstore_hvd")

_logged: set[str] = set()
_lock = threading.Lock()
_rank_text = ""
#: Whether lines begin with the time of day.
with_time = False


class _StderrHandler(logging.Handler):
    """Writes to the present sys.stderr, unless the application has its own handlers."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers or sys.stderr is None:
            return
        try:
            clock = time.strftime("%H:%M:%S ", time.localtime(record.created)) if with_time else ""
            sys.stderr.write(f"{clock}{_rank_text}kvstore_hvd {record.levelname.lower()}: {record.getMessage()}\n")
            sys.stderr.flush()
        except Exception:  # noqa: BLE001 - a closed stderr must not end the training
            with contextlib.suppress(ValueError):  # it tells of errors on stderr
                self.handleError(record)


if not any(isinstance(handler, _StderrHandler) for handler in logger.handlers):
    logger.addHandler(_StderrHandler())
logger.setLevel(logging.WARNING)


def set_rank(rank: int, size: int) -> None:
    """Show ``[rank r/size]`` at the start of later lines, unless there is one worker."""
    global _rank_text
    _rank_text = f"[rank {rank}/{size}] " if size > 1 else ""


def once(key: str, level: int, msg: str, *args: object) -> None:
    """Log `msg` with `args` at `level`, as `logging` does, at the first use of `key` in this process."""
    with _lock:
        if key in _logged:
            return
        _logged.add(key)
    logger.log(level, msg, *args)
