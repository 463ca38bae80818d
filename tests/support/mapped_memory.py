"""Memory that other processes map by a handle, as that of a GPU by CUDA IPC; it is gone with the last of them."""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from typing import Any

__all__ = ["MappedMemory"]

_HANDLE = struct.Struct("<QQQ")
HANDLE_BYTES = 64


class MappedMemory:
    """A piece of it.

    Parameters
    ----------
    nbytes : int
    fill : int
        What every byte is.
    """

    def __init__(self, nbytes: int, fill: int) -> None:
        self._fd = os.memfd_create("kvstore_hvd-test")
        os.ftruncate(self._fd, nbytes)
        self._map(nbytes)
        ctypes.memset(self.address, fill, nbytes)

    @classmethod
    def of(cls, handle: bytes) -> MappedMemory:
        """That of another process."""
        pid, number, nbytes = _HANDLE.unpack_from(handle)
        self = cls.__new__(cls)
        self._fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        self._map(nbytes)
        return self

    @property
    def handle(self) -> bytes:
        """For other processes, as long as this one lives."""
        return _HANDLE.pack(os.getpid(), self._fd, self._nbytes).ljust(HANDLE_BYTES, b"\0")

    def close(self) -> None:
        """Unmap it."""
        self._bytes: Any = None
        os.close(self._fd)

    def _map(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._bytes = (ctypes.c_char * nbytes).from_buffer(mmap.mmap(self._fd, nbytes))
        self.address = ctypes.addressof(self._bytes)
