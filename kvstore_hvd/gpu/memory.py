"""Memory of our own: on a device, and how other processes map it; and pinned memory of the host.

Other processes are only ever given whole allocations that were made here: a handle of CUDA's names the allocation, not
the address within it, and a pool or MXNet may put anything into the rest.
"""

from __future__ import annotations

import ctypes
import functools
import json
import secrets
from typing import Any

import numpy as np

from kvstore_hvd.errors import TransportError
from kvstore_hvd.gpu.runtime import checked, cupy

# What the driver takes for an allocation anyway: nothing else lies in ours.
_GRANULE = 2 << 20


@functools.lru_cache(maxsize=1)
def _this_process() -> str:
    """Equal only within one process: process ids repeat in containers that share a GPU."""
    return secrets.token_hex(8)


class DeviceMemory:
    """Memory on the device that is current, all zero."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(1, -(-nbytes // _GRANULE)) * _GRANULE
        runtime = cupy().cuda.runtime
        with checked(f"allocate {self.nbytes >> 20} MiB on the GPU"):
            self.address = int(runtime.malloc(self.nbytes))
            runtime.memset(self.address, 0, self.nbytes)
            # Other streams, and other processes, do not wait for the default stream. The whole device is not waited
            # for: kernels on it may wait for what this thread does next.
            runtime.streamSynchronize(0)

    def export(self) -> str:
        """What another process makes a `PeerMemory` of; where CUDA cannot share memory, only this one."""
        told: dict[str, Any] = {"process": _this_process(), "address": self.address}
        try:
            with checked("share memory of the GPU with other processes"):
                told["handle"] = bytes(cupy().cuda.runtime.ipcGetMemHandle(self.address)).hex()
        except TransportError as error:
            told["fault"] = str(error)
        return json.dumps(told)

    def close(self) -> None:
        """Free it; all who mapped it have closed theirs."""
        if self.address:
            address, self.address = self.address, 0
            with checked("free memory of the GPU"):
                cupy().cuda.runtime.free(address)


class PeerMemory:
    """Memory that another worker has exported, mapped for the device that is current."""

    # Within the process that exported it, it is the memory itself: CUDA refuses to map it there once more.

    def __init__(self, exported: str) -> None:
        told = json.loads(exported)
        self._is_mapped = told["process"] != _this_process()
        if not self._is_mapped:
            self.address = int(told["address"])
            return
        if "fault" in told:
            raise TransportError(told["fault"])
        runtime = cupy().cuda.runtime
        with checked("map memory of another worker's GPU"):
            self.address = int(
                runtime.ipcOpenMemHandle(bytes.fromhex(told["handle"]), runtime.cudaIpcMemLazyEnablePeerAccess)
            )

    def close(self) -> None:
        """Unmap it."""
        if self._is_mapped and self.address:
            address, self.address = self.address, 0
            with checked("unmap memory of another worker's GPU"):
                cupy().cuda.runtime.ipcCloseMemHandle(address)


class PinnedMemory:
    """Memory of the host that devices copy to and from without a stop between."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        runtime = cupy().cuda.runtime
        with checked(f"allocate {nbytes} bytes of pinned memory"):
            self.address = int(runtime.hostAlloc(nbytes, runtime.hostAllocPortable))

    def view(self, dtype: Any = np.uint8) -> Any:
        """The memory as a NumPy array, valid until `close`."""
        raw = (ctypes.c_char * self.nbytes).from_address(self.address)
        return np.frombuffer(memoryview(raw), dtype)

    def close(self) -> None:
        """Give it back; no copy is under way."""
        if self.address:
            address, self.address = self.address, 0
            with checked("free pinned memory"):
                cupy().cuda.runtime.freeHost(address)
