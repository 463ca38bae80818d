"""Where the output of a job goes: to the program's ``sys.stdout`` and ``sys.stderr``, whatever these are.

A text file with a descriptor is inherited by the launcher. What a notebook or a test has put in its place is written
to by the program itself, which reads the launcher's output from a pipe.
"""

from __future__ import annotations

import codecs
import io
import os
import subprocess
from typing import Any

__all__ = ["OutputStream"]

_CHUNK = 1 << 16


class OutputStream:
    """One of the two streams."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._reader, self._writer = -1, -1
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.inherited = subprocess.DEVNULL if stream is None else _descriptor(stream)
        if self.inherited is None:
            self._reader, self._writer = os.pipe()
            self.inherited = self._writer

    def fileno(self) -> int:
        """The descriptor that can be read when there is output to pass on; -1 while and where there is none."""
        return self._reader

    def given(self) -> None:
        """The launcher has its end: this process closes its own."""
        if self._writer >= 0:
            os.close(self._writer)
            self._writer = -1

    def pass_on(self) -> None:
        """Pass on what can be read now; waits if that is nothing. Raises whatever the stream raises."""
        data = os.read(self._reader, _CHUNK)
        if not data:
            self._close_reader()
        text = self._decoder.decode(data, final=not data)
        if text and self._stream is not None:
            self._stream.write(text)
            self._stream.flush()

    def drop(self) -> None:
        """Pass nothing on any more: the stream cannot be written."""
        self._stream = None

    def close(self) -> None:
        """Let go of the pipe."""
        self.given()
        self._close_reader()

    def _close_reader(self) -> None:
        if self._reader >= 0:
            os.close(self._reader)
            self._reader = -1


def _descriptor(stream: Any) -> int | None:
    # Not whatever has a fileno(): that of a notebook's stream is the terminal in which the notebook was started.
    if not isinstance(stream, io.TextIOWrapper):
        return None
    try:
        fd = stream.fileno()
        stream.flush()  # what was printed before the call comes first
    except (OSError, ValueError):
        return None
    return fd
