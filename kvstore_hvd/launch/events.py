"""The event log of an elastic job: one JSON object a line, for programs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

from kvstore_hvd.errors import LaunchError, message
from kvstore_hvd.launcher.writer import Writer

__all__ = ["EventLog"]

# Events that come while more than this waits to be written are left out. An event takes some hundred bytes.
_MAX_PENDING = 1 << 22


class EventLog:
    """Writes events to a file, which is emptied first; without a file, nowhere. Use as a context manager."""

    # Each line has ``time`` (seconds since 1970), ``monotonic`` (seconds of ``time.monotonic()`` of this host),
    # ``event`` and the fields of that event. Nobody waits for a disk that stalls, or for the reader of a pipe that
    # stands still: events are kept in memory meanwhile, and beyond 4 MiB they are counted and left out. The event
    # ``events_lost`` says later how many there were.

    def __init__(self, path: str | None) -> None:
        self._fd = -1
        self._writer = Writer()
        self._left_out = 0
        self._lost: list[str] = []
        if path is not None:
            # Not to wait here for somebody who reads a pipe.
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
            try:
                self._fd = os.open(path, flags, 0o666)
            except OSError as error:
                raise LaunchError(
                    message(f"--event-log: '{path}' cannot be made: {error.strerror}.", fix="name another file.")
                ) from None
            os.set_blocking(self._fd, True)

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self._writer.close()
        if self._fd >= 0 and self._writer.is_idle:
            os.close(self._fd)
        self._fd = -1

    def write(self, event: str, fields: Mapping[str, Any]) -> None:
        """Have one event written."""
        if self._fd < 0:
            return
        if self._writer.pending > _MAX_PENDING:
            if not self._left_out:
                self._lost.append("the event log is not written, and too much waits for it: what follows is left out.")
            self._left_out += 1
            return
        if self._left_out:
            left_out, self._left_out = self._left_out, 0
            self._put("events_lost", {"count": left_out})
        self._put(event, fields)

    @property
    def pending(self) -> bool:
        """Whether anything waits to be written."""
        return self._writer.pending > 0

    def finish(self, limit_s: float = 0.0) -> None:
        """Nothing follows: wait so many seconds at most, and give up what is not written then."""
        if not self._writer.wait(limit_s):
            self._writer.drop()
            self._lost.append("the event log is not complete: its end could not be written in time.")

    def take_lost(self) -> list[str]:
        """Why events were lost, if some were; each reason is told once."""
        failed = [
            f"the event log cannot be written: {error.strerror}. What follows is lost there."
            for _, error in self._writer.take_lost()
        ]
        lost, self._lost = [*failed, *self._lost], []
        return lost

    def _put(self, event: str, fields: Mapping[str, Any]) -> None:
        head = {"time": round(time.time(), 6), "monotonic": round(time.monotonic(), 6), "event": event}
        self._writer.put(self._fd, json.dumps({**head, **fields}).encode() + b"\n")
