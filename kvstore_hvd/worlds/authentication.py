"""Who is on the other side of a socket: what the kernel knows, and what a secret proves."""

from __future__ import annotations

import socket
import struct

__all__ = ["MAC_BYTES", "NONCE_BYTES", "mac", "peer_process"]

MAC_BYTES = 32
NONCE_BYTES = 32


def mac(secret: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 over parts, each with its length, so that no two lists of parts have the same text."""
    import hashlib  # OpenSSL, without which the launcher starts
    import hmac

    text = b"".join(struct.pack("!I", len(part)) + part for part in parts)
    return hmac.digest(secret, text, hashlib.sha256)


def peer_process(connection: socket.socket) -> tuple[int, int]:
    """Process id and user id of the other side of a connected Unix socket, from the kernel."""
    pid, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid
