"""Messages over a stream socket or a pair of pipes: JSON objects whose ``"t"`` is their type, and bytes before them.

Each ends with the end of a line: srun passes on whole lines only.
Nobody proves here who it is: that is known of a socket before messages pass over it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from typing import Any, Protocol

from kvstore_hvd.base.messages import Kinds, take

_LENGTHS = struct.Struct("!II")  # of the object, and of the bytes before it
_CHUNK = 1 << 18
_MOST_SKIPPED = 1 << 16
_MOST_SHOWN = 1 << 11
_MOST_QUOTED = 80
_MOST_DIGITS = 20


class ChannelError(Exception):
    """The other side is gone, or says what is no message; the text is a sentence."""


class _End(Protocol):
    """A socket, or a file of a pipe."""

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class Channel:
    """One side. Never waits: what cannot be sent at once is kept for `flush`."""

    # A message of more than `longest` bytes is not received, nor one of no kind of `kinds` (None: all are). `writer` is
    # the file to write to where that is another one than `reader`. Bytes that come before the `greeting` are no
    # messages; `skipped` is the end of them. One thread may receive while another sends or flushes; more than one of a
    # kind need a lock.

    def __init__(
        self,
        reader: _End,
        kinds: Kinds | None = None,
        longest: int = 1 << 26,
        *,
        writer: _End | None = None,
        greeting: bytes = b"",
    ) -> None:
        self._ends, self._kinds, self._longest = (reader, writer or reader), kinds, longest
        self._fd, self.write_fd = (end.fileno() for end in self._ends)
        for fd in (self._fd, self.write_fd):
            os.set_blocking(fd, False)
        self._received, self._unsent = bytearray(), bytearray()
        self._greeting, self.skipped = greeting, b""

    @property
    def wants_to_write(self) -> bool:
        """Whether something waits until `write_fd` can be written; then call `flush`."""
        return bool(self._unsent)

    def fileno(self) -> int:
        """The descriptor to read from, for selectors; -1 once closed."""
        return self._fd

    def close(self) -> None:
        """Close both descriptors; what has not been written is dropped. May be called again."""
        self._fd = self.write_fd = -1
        for end in self._ends:
            end.close()

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have come, bytes under ``"raw"``. Raises ChannelError when none will come any more."""
        try:
            data = os.read(self._fd, _CHUNK)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            data = b""  # it was closed before the other side had read everything
        except OSError as error:
            raise ChannelError(f"the connection broke: {error.strerror}.") from None
        if not data:
            is_cut = self._received and not self._greeting
            raise ChannelError(f"the other side closed the connection{' within a message' if is_cut else ''}.")
        self._received += data
        if self._greeting and not self._skip():
            return []
        messages, at = [], 0
        while len(self._received) - at >= _LENGTHS.size:
            length, more = _LENGTHS.unpack_from(self._received, at)
            if length + more > self._longest:
                said = f"a message of {length + more} bytes was announced"
                raise ChannelError(f"{said}; at most {self._longest} are allowed.")
            begin, end = at + _LENGTHS.size, at + _LENGTHS.size + more + length
            if len(self._received) < end:
                break
            messages.append(_message(bytes(self._received[begin + more : end]), self._kinds))
            if more:
                messages[-1]["raw"] = bytes(self._received[begin : begin + more])
            at = end
        del self._received[:at]
        return messages

    def _skip(self) -> bool:
        """Drop what has come before the greeting; whether the greeting has come."""
        before, found, behind = self._received.partition(self._greeting)
        self.skipped = bytes(before[-_MOST_SHOWN:])
        if found:
            self._received, self._greeting = behind, b""
        elif len(before) > _MOST_SKIPPED:
            raise ChannelError("the other side says something else than messages.")
        return bool(found)

    def send(self, message: dict[str, Any], raw: bytes = b"") -> None:
        """Send a message. If the other side is gone, `receive` tells, after everything that had still arrived."""
        body = json.dumps(message).encode("ascii") + b"\n"
        self._unsent += _LENGTHS.pack(len(body), len(raw)) + raw + body
        self.flush()

    def flush(self) -> None:
        """Write what waits, as far as the other side takes it now."""
        try:
            while self._unsent:
                # Copied: a view would forbid to shorten the buffer.
                del self._unsent[: os.write(self.write_fd, bytes(self._unsent[:_CHUNK]))]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()


def _message(body: bytes, kinds: Kinds | None) -> dict[str, Any]:
    message: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        message = json.loads(body, parse_int=_whole)
    if not isinstance(message, dict) or not isinstance(message.get("t"), str):
        raise ChannelError(f"{body[:_MOST_QUOTED]!r} is no message.")
    try:
        return message if kinds is None else take(message, kinds)
    except ValueError as error:
        raise ChannelError(f"{body[:_MOST_QUOTED]!r} is no message: {error}.") from None


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError  # a million digits would take long
    return int(digits)


def peer_process(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id of the other side of a connected Unix socket, from the kernel."""
    pid, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid
