"""Arrays on a real GPU, for tests: all from one piece of memory that is there before any kernel runs.

Allocating, and freeing even more so, may wait for the whole device, where kernels of other ranks may wait for this one.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from kvstore_hvd.gpu.runtime import cupy
from kvstore_hvd.gpu.streams import DeviceMemory, Stream

__all__ = ["Arena", "DeviceArray"]

_GUARD = 256
_FILL = 0xEE


class Arena:
    """Memory on the current device for the arrays of one test after the other."""

    def __init__(self, nbytes: int) -> None:
        self._memory, self._used = DeviceMemory(nbytes), 0
        self._lock = threading.Lock()
        # One for all threads, and made before any kernel runs: the device has a few queues for all streams, and what
        # comes in a queue behind a kernel that waits for another rank waits, too.
        self._stream = Stream()

    def reset(self) -> None:
        self._used = 0

    def take(self, nbytes: int) -> int:
        """The address of some memory, aligned to 256 bytes."""
        with self._lock:
            address = self._memory.address + self._used
            self._used += -(-nbytes // 256) * 256
            if self._used > self._memory.nbytes:
                raise MemoryError("the arena of the tests is too small")
        return address

    def write(self, address: int, raw: Any) -> None:
        self._copy(address, raw.ctypes.data, raw.nbytes)

    def read(self, address: int, nbytes: int) -> Any:
        raw = np.empty(nbytes, np.uint8)
        self._copy(raw.ctypes.data, address, nbytes)
        return raw

    def close(self) -> None:
        self._stream.close()
        self._memory.close()

    def _copy(self, target: int, source: int, nbytes: int) -> None:
        runtime = cupy().cuda.runtime
        runtime.memcpyAsync(target, source, nbytes, runtime.memcpyDefault, self._stream.address)
        self._stream.synchronize()


class DeviceArray:
    """An array with guards on both sides."""

    def __init__(self, arena: Arena, raw: Any, shift: int = 0) -> None:
        self.nbytes, self._arena, self._before = len(raw), arena, _GUARD + shift
        whole = np.full(self._before + len(raw) + _GUARD, _FILL, np.uint8)
        whole[self._before : self._before + len(raw)] = raw
        self._start, self._length = arena.take(len(whole)), len(whole)
        arena.write(self._start, whole)
        self.address = self._start + self._before

    @property
    def content(self) -> Any:
        """Its bytes; fails when something beside them was written."""
        whole = self._arena.read(self._start, self._length)
        end = self._before + self.nbytes
        assert (whole[: self._before] == _FILL).all(), "written before the array"
        assert (whole[end:] == _FILL).all(), "written behind the array"
        return whole[self._before : end]
