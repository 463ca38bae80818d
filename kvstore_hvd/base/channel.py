"""Messages over a stream socket: JSON objects whose ``"t"`` is their type, each with bytes behind it, or without.

Nobody proves here who it is: that is known of a socket before messages pass over it.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
from typing import Any

__all__ = ["Channel", "ChannelError"]

_LENGTHS = struct.Struct("!II")  # of the object, and of the bytes behind it
_CHUNK = 1 << 18


class ChannelError(Exception):
    """The other side is gone, or says what is no message; the text is a sentence."""


class Channel:
    """One side. Never waits: what cannot be sent at once is kept for `flush`."""

    # A message of more than `longest` bytes is not received. One thread may receive while another sends or flushes;
    # more than one of a kind need a lock.

    def __init__(self, connected: socket.socket, longest: int = 1 << 26) -> None:
        self._socket, self._longest = connected, longest
        self._socket.setblocking(False)
        self._received, self._unsent = bytearray(), bytearray()

    @property
    def wants_to_write(self) -> bool:
        """Whether something waits until the socket can be written; then call `flush`."""
        return bool(self._unsent)

    def fileno(self) -> int:
        """The descriptor, for selectors; -1 once closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket; what has not been written is dropped. May be called again."""
        self._socket.close()

    def receive(self) -> list[dict[str, Any]]:
        """The messages that have come, bytes under ``"raw"``. Raises ChannelError when none will come any more."""
        try:
            data = self._socket.recv(_CHUNK)
        except BlockingIOError:
            return []
        except ConnectionResetError:
            data = b""  # it was closed before the other side had read everything
        except OSError as error:
            raise ChannelError(f"the connection broke: {error.strerror}.") from None
        if not data:
            raise ChannelError(f"the other side closed the connection{' within a message' * bool(self._received)}.")
        self._received += data
        messages, at = [], 0
        while len(self._received) - at >= _LENGTHS.size:
            length, more = _LENGTHS.unpack_from(self._received, at)
            if length + more > self._longest:
                said = f"a message of {length + more} bytes was announced"
                raise ChannelError(f"{said}; at most {self._longest} are allowed.")
            begin, end = at + _LENGTHS.size, at + _LENGTHS.size + length
            if len(self._received) < end + more:
                break
            messages.append(_message(bytes(self._received[begin:end])))
            if more:
                messages[-1]["raw"] = bytes(self._received[end : end + more])
            at = end + more
        del self._received[:at]
        return messages

    def send(self, message: dict[str, Any], raw: bytes = b"") -> None:
        """Send a message. If the other side is gone, `receive` tells, after everything that had still arrived."""
        body = json.dumps(message).encode("ascii")
        self._unsent += _LENGTHS.pack(len(body), len(raw)) + body + raw
        self.flush()

    def flush(self) -> None:
        """Write what waits, as far as the socket takes it now."""
        try:
            while self._unsent:
                # Copied: a view would forbid to shorten the buffer.
                del self._unsent[: self._socket.send(bytes(self._unsent[:_CHUNK]))]
        except BlockingIOError:
            pass
        except OSError:
            self._unsent.clear()


def _message(body: bytes) -> dict[str, Any]:
    message: Any = None
    with contextlib.suppress(ValueError, RecursionError):
        message = json.loads(body)
    if not isinstance(message, dict) or not isinstance(message.get("t"), str):
        raise ChannelError(f"{body[:80]!r} is no message.")
    return message
