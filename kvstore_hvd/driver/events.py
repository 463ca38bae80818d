"""The event log of an elastic job: one JSON object a line, for programs."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from typing import Any

from kvstore_hvd.errors import LaunchError, message

__all__ = ["EventLog"]


class EventLog:
    """Writes events to a file, which is emptied first; without a file, nowhere. Use as a context manager.

    Each line has ``time`` (seconds since 1970), ``monotonic`` (seconds of ``time.monotonic()`` of this host), ``event``
    and the fields of that event.

    Raises
    ------
    LaunchError
        The file cannot be made.
    """

    def __init__(self, path: str | None) -> None:
        self._fd = -1
        self.lost = ""  # why events can be written no longer
        if path is not None:
            # Who reads a pipe must not hold us up: daemons end the job when the launcher says nothing for two seconds.
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
            try:
                self._fd = os.open(path, flags, 0o666)
            except OSError as error:
                raise LaunchError(
                    message(f"--event-log: '{path}' cannot be made: {error.strerror}.", fix="name another file.")
                ) from None

    def __enter__(self) -> EventLog:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def write(self, event: str, fields: Mapping[str, Any]) -> None:
        """Write one event."""
        if self._fd < 0:
            return
        head = {"time": round(time.time(), 6), "monotonic": round(time.monotonic(), 6), "event": event}
        data = json.dumps({**head, **fields}).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            self.lost = f"the event log cannot be written: {error.strerror}. What follows is lost there."
            self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
