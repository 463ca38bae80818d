"""A short-lived process whose output is collected without waiting for it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence

from kvstore_hvd.launcher import processes

__all__ = ["Child"]

_MAX_ERRORS = 8192
_CHUNK = 1 << 16  # what a pipe holds


class Child:
    """A running process. Who reaps it sets `code`."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], job: bytes, limit: int) -> None:
        self.code: int | None = None  # exit code, or -signal; None while it runs
        self.output = bytearray()
        self.errors = bytearray()  # the end of what it wrote to standard error
        self.overflown = False
        self._limit = limit
        with contextlib.ExitStack() as ends, contextlib.ExitStack() as on_failure:
            null = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            ends.callback(os.close, null)
            self._output_fd, output = os.pipe()
            ends.callback(os.close, output)
            on_failure.callback(os.close, self._output_fd)
            self._errors_fd, errors = os.pipe()
            ends.callback(os.close, errors)
            on_failure.callback(os.close, self._errors_fd)
            self.pid = processes.spawn(command, environment, null, output, errors, job)
            on_failure.pop_all()
        os.set_blocking(self._output_fd, False)
        os.set_blocking(self._errors_fd, False)

    def read(self) -> None:
        """Take what it has written. Once it has ended, one call takes all that is left."""
        data = _available(self._output_fd)
        room = self._limit - len(self.output)
        self.overflown = self.overflown or len(data) > room
        self.output += data[:room]
        self.errors += _available(self._errors_fd)
        del self.errors[:-_MAX_ERRORS]

    def signal(self, number: int) -> None:
        """Send it, and what it has started, a signal."""
        if self.code is None:  # unreaped, and so its number is its own
            with contextlib.suppress(OSError):
                os.killpg(self.pid, number)

    def close(self) -> None:
        """Let go of what it writes."""
        for fd in (self._output_fd, self._errors_fd):
            os.close(fd)


def _available(fd: int) -> bytes:
    try:
        return os.read(fd, _CHUNK)
    except BlockingIOError:
        return b""
