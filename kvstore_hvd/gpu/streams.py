"""Streams and events of CUDA, which the host polls; memory on a device and how other processes map it; pinned memory.

Other processes get whole allocations that were made here: a handle of CUDA names the allocation, not an address in it,
and the rest of an allocation of a memory pool or of MXNet may hold anything.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import logging
import secrets
import time
from typing import Any

import numpy as np

from kvstore_hvd import log
from kvstore_hvd.base.cores import Deadline
from kvstore_hvd.errors import TransportError, message
from kvstore_hvd.gpu.runtime import checked, cupy

# Lower numbers are more urgent; CUDA clamps the number to the device's range.
_HIGHEST = -100
# Seconds between two queries of an event while a stream drains.
_PAUSE_S = 0.0002
_DONE, _NOT_READY = 0, 600  # cudaSuccess, cudaErrorNotReady
# The driver rounds allocations up to this many bytes.
_GRANULE = 2 << 20


class _Handle:
    """An object of CUDA, by its address."""

    address = 0
    _function = _action = ""  # of the runtime, to destroy it; for errors

    def close(self) -> None:
        """Destroy the object; a second call does nothing."""
        if self.address:
            address, self.address = self.address, 0
            with checked(self._action):
                getattr(cupy().cuda.runtime, self._function)(address)


class Event(_Handle):
    """A place in a stream, on the device that is current when the event is made."""

    _function, _action = "eventDestroy", "destroy an event"

    def __init__(self) -> None:
        runtime = cupy().cuda.runtime
        with checked("create an event"):
            self.address = int(runtime.eventCreateWithFlags(runtime.eventDisableTiming))

    def record(self, stream: Stream) -> Event:
        """Move the event behind all work of the stream; returns itself."""
        with checked("record an event"):
            cupy().cuda.runtime.eventRecord(self.address, stream.address)
        return self

    def done(self) -> bool:
        """Whether all work before the event is done; True before `record`."""
        with checked("ask whether operations on the device are done"):
            status = int(cupy().cuda.runtime.eventQuery(self.address))
        if status not in (_DONE, _NOT_READY):
            fix = "look for a failed kernel of the program itself: CUDA_LAUNCH_BLOCKING=1 names it."
            raise TransportError(message(f"operations on the device failed (cudaError {status}).", fix=fix))
        return status == _DONE


class Stream(_Handle):
    """A stream of the highest priority on the current device; it does not wait for the default stream.

    Its work still runs after `close`.
    """

    _function, _action = "streamDestroy", "destroy a stream"

    def __init__(self) -> None:
        runtime = cupy().cuda.runtime
        with checked("create a stream"):
            if hasattr(runtime, "streamCreateWithPriority"):
                self.address = int(runtime.streamCreateWithPriority(runtime.streamNonBlocking, _HIGHEST))
            else:
                self.address = _by_the_driver(runtime)
        self.ptr = self.address  # for CuPy's launches

    def copy(self, destination: int, source: int, count: int) -> None:
        """Enqueue a copy of `count` bytes between two addresses of devices or pinned memory."""
        if count and destination != source:
            runtime = cupy().cuda.runtime
            with checked("copy"):
                runtime.memcpyAsync(destination, source, count, runtime.memcpyDefault, self.address)

    def synchronize(self) -> None:
        """Wait for all work of the stream, which must not wait for another worker."""
        with checked("wait for a stream"):
            cupy().cuda.runtime.streamSynchronize(self.address)

    def drain(self, limit_s: float) -> bool:
        """Wait until all work of the stream is done or has failed; False if it still runs after `limit_s` seconds."""
        end = Deadline(limit_s)
        try:
            event = Event().record(self)
            while not event.done():
                if end.left() < 0:
                    log.logger.warning("a GPU has not ended what it was given within %g s after an abort", limit_s)
                    return False
                time.sleep(_PAUSE_S)
            event.close()
        except TransportError as error:
            # A failed device runs no work of this process any more.
            log.logger.debug("%s", error)
        return True


def _by_the_driver(runtime: Any) -> int:
    """A stream of high priority from the driver: CuPy 13 has no call for it, and both kinds of streams are the same."""
    runtime.deviceSynchronize()  # creates the device's context, which the driver needs
    made, flags = ctypes.c_void_p(), ctypes.c_uint(runtime.streamNonBlocking)
    with contextlib.suppress(OSError, AttributeError):
        create = ctypes.CDLL("libcuda.so.1").cuStreamCreateWithPriority
        if create(ctypes.byref(made), flags, ctypes.c_int(_HIGHEST)) == 0 and made.value:
            return made.value
    log.once("stream-priority", logging.INFO, "operations on GPUs have no higher priority than the program's kernels")
    return int(runtime.streamCreateWithFlags(runtime.streamNonBlocking))


# -- Memory ------------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _this_process() -> str:
    """A name of this process; process ids repeat in containers that share a GPU."""
    return secrets.token_hex(8)


class DeviceMemory(_Handle):
    """Zeroed memory on the current device. It is closed after all its `PeerMemory`."""

    _function, _action = "free", "free memory of the GPU"

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(1, -(-nbytes // _GRANULE)) * _GRANULE
        runtime = cupy().cuda.runtime
        with checked(f"allocate {self.nbytes >> 20} MiB on the GPU"):
            self.address = int(runtime.malloc(self.nbytes))
            runtime.memset(self.address, 0, self.nbytes)
            # Other streams and processes do not wait for the default stream, which zeroes the memory. A wait for the
            # whole device could deadlock: its kernels may wait for this thread.
            runtime.streamSynchronize(0)

    def export(self) -> str:
        """The argument of a `PeerMemory`, of this process only where CUDA cannot share memory."""
        exported: dict[str, Any] = {"process": _this_process(), "address": self.address}
        try:
            with checked("share memory of the GPU with other processes"):
                exported["handle"] = bytes(cupy().cuda.runtime.ipcGetMemHandle(self.address)).hex()
        except TransportError as error:
            exported["fault"] = str(error)
        return json.dumps(exported)


class PeerMemory(_Handle):
    """Another worker's `DeviceMemory`, mapped for the current device."""

    _function, _action = "ipcCloseMemHandle", "unmap memory of another worker's GPU"

    def __init__(self, exported: str) -> None:
        fields = json.loads(exported)
        # CUDA refuses to map memory in the process that exported it.
        self._is_mapped = fields["process"] != _this_process()
        if not self._is_mapped:
            self.address = int(fields["address"])
            return
        if "fault" in fields:
            raise TransportError(fields["fault"])
        runtime, handle = cupy().cuda.runtime, bytes.fromhex(fields["handle"])
        with checked("map memory of another worker's GPU"):
            self.address = int(runtime.ipcOpenMemHandle(handle, runtime.cudaIpcMemLazyEnablePeerAccess))

    def close(self) -> None:
        if self._is_mapped:
            super().close()


class PinnedMemory(_Handle):
    """Memory of the host that devices copy to and from asynchronously. It is closed after all copies."""

    _function, _action = "freeHost", "free pinned memory"

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        runtime = cupy().cuda.runtime
        with checked(f"allocate {nbytes} bytes of pinned memory"):
            self.address = int(runtime.hostAlloc(nbytes, runtime.hostAllocPortable))

    def view(self, dtype: Any = np.uint8) -> Any:
        """The memory as a NumPy array, valid until `close`."""
        raw = (ctypes.c_char * self.nbytes).from_address(self.address)
        return np.frombuffer(memoryview(raw), dtype)
