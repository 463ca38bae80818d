"""Streams and events of CUDA that are polled, never waited for on the host."""

from __future__ import annotations

import ctypes
import logging
import time
from typing import Any

from kvstore_hvd import log
from kvstore_hvd.base.clocks import Deadline
from kvstore_hvd.errors import TransportError, message
from kvstore_hvd.gpu.runtime import checked, cupy

# Lower numbers are more urgent; what is beyond the device's range counts as its end.
_HIGHEST = -100
_PAUSE_S = 0.0002
_DONE, _NOT_READY = 0, 600  # cudaSuccess, cudaErrorNotReady


class Event:
    """A place in a stream; belongs to the device that is current when it is made."""

    def __init__(self) -> None:
        runtime = cupy().cuda.runtime
        with checked("create an event"):
            self.address = int(runtime.eventCreateWithFlags(runtime.eventDisableTiming))

    def record(self, stream: Stream | int) -> Event:
        """Put it behind what the stream has now, instead of where it was; returns itself."""
        with checked("record an event"):
            cupy().cuda.runtime.eventRecord(self.address, address_of(stream))
        return self

    def done(self) -> bool:
        """Whether all before it is done; True for one that was never recorded."""
        with checked("ask whether operations on the device are done"):
            status = int(cupy().cuda.runtime.eventQuery(self.address))
        if status not in (_DONE, _NOT_READY):
            raise TransportError(
                message(
                    f"operations on the device failed (cudaError {status}).",
                    fix="look for a failed kernel of the program itself: CUDA_LAUNCH_BLOCKING=1 names it.",
                )
            )
        return status == _DONE

    def close(self) -> None:
        """Give it back; never used again."""
        if self.address:
            address, self.address = self.address, 0
            with checked("destroy an event"):
                cupy().cuda.runtime.eventDestroy(address)


class Stream:
    """A stream of the highest priority that does not wait for the default stream, on the device that is current."""

    def __init__(self) -> None:
        runtime = cupy().cuda.runtime
        with checked("create a stream"):
            if hasattr(runtime, "streamCreateWithPriority"):
                self.address = int(runtime.streamCreateWithPriority(runtime.streamNonBlocking, _HIGHEST))
            else:
                self.address = _by_the_driver(runtime)

    @property
    def ptr(self) -> int:
        """The address, by the name that CuPy's launches ask for."""
        return self.address

    def copy(self, destination: int, source: int, count: int) -> None:
        """Enqueue a copy of `count` bytes between any two addresses, of devices or pinned memory."""
        if count and destination != source:
            runtime = cupy().cuda.runtime
            with checked("copy"):
                runtime.memcpyAsync(destination, source, count, runtime.memcpyDefault, self.address)

    def synchronize(self) -> None:
        """Wait until all that was enqueued is done. Only where nothing in it waits for another worker."""
        with checked("wait for a stream"):
            cupy().cuda.runtime.streamSynchronize(self.address)

    def drain(self, limit_s: float) -> bool:
        """Wait until all that was enqueued is done, or has failed; False when it is not so after `limit_s` seconds."""
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
            # The device has failed, and runs nothing of this process any more.
            log.logger.debug("%s", error)
        return True

    def close(self) -> None:
        """Give it back; what is enqueued still runs."""
        if self.address:
            address, self.address = self.address, 0
            with checked("destroy a stream"):
                cupy().cuda.runtime.streamDestroy(address)


def _by_the_driver(runtime: Any) -> int:
    """A stream of high priority with CuPy 13, which has no call for it; the driver's streams are the runtime's, too."""
    runtime.deviceSynchronize()  # makes the device's context, which the driver asks for
    made = ctypes.c_void_p()
    try:
        status = ctypes.CDLL("libcuda.so.1").cuStreamCreateWithPriority(
            ctypes.byref(made), ctypes.c_uint(runtime.streamNonBlocking), ctypes.c_int(_HIGHEST)
        )
    except (OSError, AttributeError):
        status = 1
    if status == 0 and made.value:
        return made.value
    log.once("stream-priority", logging.INFO, "operations on GPUs have no higher priority than the program's kernels")
    return int(runtime.streamCreateWithFlags(runtime.streamNonBlocking))


def address_of(stream: Any) -> int:
    """That of a `Stream`; an address is one already."""
    return stream.address if isinstance(stream, Stream) else int(stream)
