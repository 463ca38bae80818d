"""Put the output of many workers onto one stream: whole lines, each with the rank in front."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

__all__ = ["LineStream", "Sink", "Tail"]

# A carriage return ends a piece too, so that progress bars move. At the end of the data it may be half of "\r\n".
_END = re.compile(rb"\r\n|\n|\r(?!\Z)")
# A longer line is passed on in parts; nothing is ever held back beyond this.
_MAX_HELD = 1 << 20
_TAIL_LINES = 20
_TAIL_BYTES = 8192
# How Python tells of an exception that it ignores; what follows is as for any other.
_IGNORED = b"Exception ignored in"
_TRACE = b"Traceback (most recent call last):"


class Sink:
    """One output of the launcher, shared by the streams of all workers."""

    # `pending` is what has not been written yet; the owner empties it. Knows whose line was last left open, so that
    # another worker's output starts on a line of its own.

    def __init__(self) -> None:
        self.pending = bytearray()
        self.closed = False  # the reader has gone: everything is dropped
        self._open: LineStream | None = None

    @property
    def within_line(self) -> bool:
        """Whether what was put last left its line open."""
        return self._open is not None

    def put(self, stream: LineStream, prefix: bytes, piece: bytes) -> None:
        """Append one piece of a line: up to and with its end, or an unfinished part."""
        if self.closed:
            return
        if self._open is not None and self._open is not stream:
            self.pending += b"\n"
            self._open = None
        # A piece that goes on where this stream stopped within a line has its prefix already.
        if self._open is None or stream.at_start:
            self.pending += prefix
        self.pending += piece
        stream.at_start = piece.endswith((b"\n", b"\r"))
        self._open = None if piece.endswith(b"\n") else stream


class LineStream:
    """The output of one worker on one of its streams, cut into lines."""

    def __init__(self, sink: Sink, prefix: bytes, *on_line: Callable[[bytes], None]) -> None:
        self.at_start = True
        self._sink = sink
        self._prefix = prefix
        self._held = b""
        self._on_line = on_line

    def feed(self, data: bytes) -> None:
        """Take what the worker wrote, in pieces of any size; pass whole lines on."""
        text = self._held + data
        start = 0
        for match in _END.finditer(text):
            self._pass(text[start : match.end()])
            start = match.end()
        self._held = text[start:]
        if len(self._held) > _MAX_HELD:
            self.flush()

    def flush(self) -> None:
        """Pass an unfinished line on as it is: a prompt, or the last words of a worker that has ended."""
        if self._held:
            piece, self._held = self._held, b""
            self._pass(piece)

    @property
    def holds(self) -> bool:
        """Whether an unfinished line is held back."""
        return bool(self._held)

    def _pass(self, piece: bytes) -> None:
        for tell in self._on_line:
            tell(piece)
        self._sink.put(self, self._prefix, piece)


class Tail:
    """The last lines of a stream, bounded in number and bytes; pieces that a carriage return overwrote are left out."""

    # So are exceptions that Python ignores, as in exit handlers: below the exception that has ended a program, they
    # would pass for the cause.

    def __init__(self) -> None:
        self._is_ignored = self._has_text = False  # such an exception is under way, and its traceback is over
        self._lines: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self._part = b""

    def add(self, piece: bytes) -> None:
        """Take one piece as `LineStream` cuts them."""
        if piece.endswith(b"\n"):
            self._add((self._part + piece.rstrip(b"\r\n"))[-_TAIL_BYTES:])
            self._part = b""
        elif piece.endswith(b"\r"):
            self._part = b""
        else:
            self._part = (self._part + piece)[-_TAIL_BYTES:]

    def _add(self, line: bytes) -> None:
        if line.startswith(_IGNORED):
            self._is_ignored, self._has_text = True, False
        elif self._is_ignored:
            self._is_ignored = not self._has_text or line.startswith(b" ")
            self._has_text = self._has_text or not (line.startswith(b" ") or line.endswith(_TRACE))
        if not self._is_ignored:
            self._lines.append(line)

    def lines(self) -> list[bytes]:
        """The lines, oldest first, without their ends; at most 8 KiB together."""
        kept: list[bytes] = []
        room = _TAIL_BYTES
        for line in reversed([*self._lines, self._part] if self._part else self._lines):
            if len(line) > room and kept:
                break
            kept.append(line)
            room -= len(line)
        return kept[::-1]
