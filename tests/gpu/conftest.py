"""Tests that need a GPU: ``pytest -m gpu tests/gpu``.

With KVHVD_TEST_FAKE_GPU=1 they run on the stand-in, to test the tests, with the real kernels, compiled for the CPU.

Ranks are threads of this process, with one GPU for all of them: kernels of one rank wait for those of another, so all
code is loaded at the start, and every stream has a queue of its own.
"""

import os
import threading

import numpy as np
import pytest

os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

from kvstore_hvd.errors import LaunchError
from kvstore_hvd.gpu import runtime
from kvstore_hvd.gpu.runtime import Device, activate
from kvstore_hvd.gpu.streams import DeviceMemory, Stream
from support.fake_cuda import fake_cuda, host_kernels

IS_FAKE = bool(os.environ.get("KVHVD_TEST_FAKE_GPU"))
_GUARD = 256
_FILL = 0xEE


class Arena:
    """Memory on the current device for the arrays of one test after the other, there before any kernel runs.
    Allocating, and freeing even more so, may wait for the whole device, where kernels may wait for this rank."""

    def __init__(self, nbytes):
        self._memory, self._used = DeviceMemory(nbytes), 0
        self._lock = threading.Lock()
        # One for all threads, and made before any kernel runs: the device has a few queues for all streams, and what
        # comes in a queue behind a kernel that waits for another rank waits, too.
        self._stream = Stream()

    def reset(self):
        self._used = 0

    def take(self, nbytes):
        """The address of some memory, aligned to 256 bytes."""
        with self._lock:
            address = self._memory.address + self._used
            self._used += -(-nbytes // 256) * 256
            if self._used > self._memory.nbytes:
                raise MemoryError("the arena of the tests is too small")
        return address

    def write(self, address, raw):
        self._copy(address, raw.ctypes.data, raw.nbytes)

    def read(self, address, nbytes):
        raw = np.empty(nbytes, np.uint8)
        self._copy(raw.ctypes.data, address, nbytes)
        return raw

    def close(self):
        self._stream.close()
        self._memory.close()

    def _copy(self, target, source, nbytes):
        cuda = runtime.cupy().cuda.runtime
        cuda.memcpyAsync(target, source, nbytes, cuda.memcpyDefault, self._stream.address)
        self._stream.synchronize()


class DeviceArray:
    def __init__(self, arena, raw, shift=0):
        self.nbytes, self._arena, self._before = len(raw), arena, _GUARD + shift
        whole = np.full(self._before + len(raw) + _GUARD, _FILL, np.uint8)
        whole[self._before : self._before + len(raw)] = raw
        self._start, self._length = arena.take(len(whole)), len(whole)
        arena.write(self._start, whole)
        self.address = self._start + self._before

    @property
    def content(self):
        """Its bytes; fails when something beside them was written."""
        whole = self._arena.read(self._start, self._length)
        end = self._before + self.nbytes
        assert (whole[: self._before] == _FILL).all(), "written before the array"
        assert (whole[end:] == _FILL).all(), "written behind the array"
        return whole[self._before : end]


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/gpu" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def machine():
    if IS_FAKE:
        with host_kernels(), fake_cuda():
            yield
        return
    try:
        runtime.cupy()
    except LaunchError as error:
        pytest.skip(str(error).splitlines()[0])
    yield


@pytest.fixture(scope="session")
def device(machine):
    activate(0)
    return Device.of(0, "here")


@pytest.fixture(scope="session")
def _arena(device):
    arena = Arena((64 if IS_FAKE else 1024) << 20)
    yield arena
    arena.close()


@pytest.fixture
def arena(_arena):
    activate(0)
    _arena.reset()
    return _arena


@pytest.fixture
def new(arena):
    """Make arrays: from bytes, and how many bytes after an aligned address they begin."""
    return lambda raw, shift=0: DeviceArray(arena, raw, shift)
