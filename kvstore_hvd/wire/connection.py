"""One connection: its handshake, and the messages in both directions."""

from __future__ import annotations

import contextlib
import hmac
import json
import math
import secrets
import socket
import struct
from typing import Any

from kvstore_hvd.errors import KVHvdError
from kvstore_hvd.wire.authentication import MAC_BYTES, NONCE_BYTES, mac, peer_process

__all__ = ["MAX_MESSAGE", "Connection", "WireError"]

MAX_MESSAGE = 1 << 20  # bytes of JSON

_MAGIC = b"KVHVD-WIRE\x01"
_GREETING = len(_MAGIC) + NONCE_BYTES
_LENGTH = struct.Struct("!I")  # of the body
_HEAD = _LENGTH.size + MAC_BYTES
_COUNT = struct.Struct("!Q")
# What a stranger may make us hold.
_MAX_HELLO = 4096
_CHUNK = 1 << 16
# A peer that leaves this much unread is given up.
_MAX_UNREAD = 16 << 20
# Digits. Turning a megabyte of them into a number takes seconds.
_LONGEST_NUMBER = 20


class WireError(KVHvdError):
    """A connection has ended, or its other side did what the protocol does not allow. It is of no more use."""


# -- JSON ---------------------------------------------------------------------------------------------------------


def _encode(message: dict[str, Any]) -> bytes:
    try:
        return json.dumps(message, allow_nan=False, separators=(",", ":")).encode("ascii")
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(f"a message cannot be sent: {error}.") from None


def _whole(text: str) -> int:
    if len(text) > _LONGEST_NUMBER:
        raise ValueError("a number is too long")
    return int(text)


def _real(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number is not finite")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Two readers could take different ones.
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a name stands twice in an object")
    return dict(pairs)


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_int=_whole, parse_float=_real, parse_constant=_real)


def _decode(body: bytes) -> dict[str, Any]:
    try:
        message = _DECODER.decode(body.decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise WireError(f"a message is not the JSON that is expected: {error}.") from None
    if not isinstance(message, dict):
        raise WireError("a message is not a JSON object.")
    return message


# -- One connection -----------------------------------------------------------------------------------------------


class Connection:
    """One side of a connection. Made by `connect` and `Listener`; they return it once it is authenticated."""

    # One thread may receive while another sends or flushes; more than one of a kind need a lock.

    def __init__(self, connected: socket.socket, secret: bytes, role: str, identity: dict[str, Any]) -> None:
        self._socket = connected
        self._socket.setblocking(False)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._secret = secret
        self._is_server = role == "server"
        self._own_identity = _encode(identity)
        if len(self._own_identity) > _MAX_HELLO - NONCE_BYTES:
            raise WireError(f"an identity of {len(self._own_identity)} bytes is too long.")
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._peer_nonce = b""
        self._receive_key = self._send_key = b""
        self._received_count = self._sent_count = 0
        self._received = bytearray()
        self._unsent = bytearray()
        self._fault = ""
        self.identity: dict[str, Any] | None = None
        if self._is_server:
            self._unsent += _MAGIC + self._nonce
            self.flush()

    @property
    def is_authenticated(self) -> bool:
        """Whether the other side has proved that it knows the secret."""
        return self.identity is not None

    @property
    def wants_to_write(self) -> bool:
        """Whether something waits until the socket can be written; then call `flush`."""
        return bool(self._unsent)

    @property
    def peer_pid(self) -> int:
        """Process id of the other side of a Unix socket, from the kernel; 0 for TCP."""
        return peer_process(self._socket)[0] if self._socket.family == socket.AF_UNIX else 0

    def fileno(self) -> int:
        """The descriptor, for selectors; -1 once closed."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the socket; what has not been written is dropped. May be called again."""
        self._socket.close()

    def finish(self) -> None:
        """Say nothing more. Who closes at once may tear away what the other side has not read yet."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    # -- Receiving

    def receive(self) -> list[dict[str, Any]]:
        """Read what is there, without waiting."""
        if not self._fault:
            try:
                return self._receive()
            except WireError as error:
                self._fault = str(error)
        raise WireError(self._fault)

    def _receive(self) -> list[dict[str, Any]]:
        try:
            # A handshake reads no further than its end: the caller of `receive` is to find what follows.
            data = self._socket.recv(_CHUNK if self.is_authenticated else self._missing())
        except BlockingIOError:
            return []
        except ConnectionResetError:
            data = b""  # it was closed before the other side had read everything
        except OSError as error:
            raise WireError(f"the connection broke: {error.strerror or error}.") from None
        if not data:
            raise WireError(f"the other side closed the connection{' within a message' if self._received else ''}.")
        self._received += data
        if not self.is_authenticated:
            self._shake_hands()
            return []
        messages = []
        while (frame := self._take(MAX_MESSAGE)) is not None:
            messages.append(_decode(self._verified(*frame)))
        return messages

    def _missing(self) -> int:
        """Bytes until the end of what the handshake expects next, as far as its length is known yet."""
        if self._awaits_greeting:
            end = _GREETING
        elif len(self._received) < _LENGTH.size:
            end = _LENGTH.size
        else:
            end = _HEAD + self._announced(_MAX_HELLO)
        return end - len(self._received)

    def _announced(self, limit: int) -> int:
        """Length of the body of the message that is being received."""
        (length,) = _LENGTH.unpack_from(self._received)
        if length > limit:
            raise WireError(f"a message of {length} bytes was announced; at most {limit} are allowed.")
        return int(length)

    def _take(self, limit: int) -> tuple[bytes, bytes] | None:
        """Proof and body of the next message, once it is complete."""
        if len(self._received) < _LENGTH.size:
            return None
        end = _HEAD + self._announced(limit)
        if len(self._received) < end:
            return None
        proof, body = bytes(self._received[_LENGTH.size : _HEAD]), bytes(self._received[_HEAD:end])
        del self._received[:end]
        return proof, body

    def _verified(self, proof: bytes, body: bytes) -> bytes:
        """`body`, if it is the next message of the other side."""
        _compare(proof, mac(self._receive_key, _COUNT.pack(self._received_count), body))
        self._received_count += 1
        return body

    # -- The handshake

    @property
    def _awaits_greeting(self) -> bool:
        return not self._is_server and not self._peer_nonce

    def _shake_hands(self) -> None:
        if self._awaits_greeting:
            if len(self._received) == _GREETING:
                self._answer()
            return
        frame = self._take(_MAX_HELLO)
        if frame is None:
            return
        if not self._is_server:
            self.identity = _decode(self._verified(*frame))
            return
        proof, body = frame
        _compare(proof, mac(self._secret, _MAGIC, b"hello", self._nonce, body))
        if len(body) < NONCE_BYTES:
            raise WireError("a handshake is too short.")
        identity = _decode(body[NONCE_BYTES:])
        self._peer_nonce = body[:NONCE_BYTES]
        self._make_keys(self._nonce, self._peer_nonce)
        self._send_body(self._own_identity)
        self.identity = identity

    def _answer(self) -> None:
        """Prove to a server that has greeted us who we are."""
        if not self._received.startswith(_MAGIC):
            raise WireError("the other side does not speak this protocol, or not this version of it.")
        self._peer_nonce = bytes(self._received[len(_MAGIC) :])
        self._received.clear()
        body = self._nonce + self._own_identity
        self._queue(mac(self._secret, _MAGIC, b"hello", self._peer_nonce, body), body)
        self._make_keys(self._peer_nonce, self._nonce)

    def _make_keys(self, of_server: bytes, of_client: bytes) -> None:
        keys = [mac(self._secret, _MAGIC, name, of_server, of_client) for name in (b"from client", b"from server")]
        self._receive_key, self._send_key = keys if self._is_server else reversed(keys)

    # -- Sending

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; what the socket does not take now is kept for `flush`."""
        # If the connection has been lost, `receive` tells, after everything that had still arrived.
        if not self.is_authenticated or self.fileno() < 0:
            raise WireError("a message cannot be sent: the connection is not open.")
        body = _encode(message)
        if len(body) > MAX_MESSAGE:
            raise WireError(f"a message of {len(body)} bytes cannot be sent; at most {MAX_MESSAGE} are allowed.")
        self._send_body(body)

    def flush(self) -> None:
        """Write what waits, as far as the socket takes it now."""
        try:
            while self._unsent:
                # Copied: a view would forbid to shorten the buffer.
                del self._unsent[: self._socket.send(bytes(self._unsent[:_CHUNK]))]
        except BlockingIOError:
            if len(self._unsent) > _MAX_UNREAD:
                self._fault = f"the other side has left {len(self._unsent)} bytes unread."
                self._unsent.clear()
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)  # wakes who waits to receive
        except OSError:
            self._unsent.clear()  # `receive` finds the same

    def _send_body(self, body: bytes) -> None:
        proof = mac(self._send_key, _COUNT.pack(self._sent_count), body)
        self._sent_count += 1
        self._queue(proof, body)

    def _queue(self, proof: bytes, body: bytes) -> None:
        self._unsent += _LENGTH.pack(len(body)) + proof + body
        self.flush()


def _compare(proof: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(proof, expected):
        raise WireError("a message does not verify.")
