"""One rank of an NCCL communicator that never blocks: every wait here ends, and `abort` is always within reach."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator

import numpy as np

from kvstore_hvd import errors
from kvstore_hvd.base.clocks import RunningClock
from kvstore_hvd.errors import KVHvdError, LaunchError, TransportError, message
from kvstore_hvd.gpu.nccl_library import IN_PROGRESS, SUCCESS, Config, NcclLibrary, UniqueId

DTYPES = {
    "int8": 0,
    "uint8": 1,
    "int32": 2,
    "int64": 4,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
# An average is a sum here: the factor, which depends on the workers' weights, is applied by whoever calls.
OPS = {"sum": 0, "average": 0, "product": 1, "max": 2, "min": 3}
#: Types whose inputs NCCL can multiply by a factor that is as exact as ours.
PREMULTIPLIED = {"float32": np.float32, "float64": np.float64}
_HOST_IMMEDIATE = 1  # ncclScalarHostImmediate: the factor is read during the call
# How long to ask again and again before sleeping between.
_SPIN_S = 0.001
_PAUSE_S = 0.0002
# An abort must free memory and end threads of NCCL; a worker that leaves waits this long for it.
_ABORT_S = 10.0


class NcclCommunicator:
    """This rank's end of a communicator. Collective: returns when all ranks have come."""

    # All methods but `abort` are called by one thread, in the same order on all ranks.

    def __init__(self, library: NcclLibrary, unique_id: str, rank: int, size: int, timeout_s: float) -> None:
        self._library = library
        #: Seconds that any call may take from now on.
        self.timeout_s = timeout_s
        self._lock = threading.RLock()  # abort frees what other calls look into
        self._handle = ctypes.c_void_p()
        self._is_grouping = False
        # An abort may wait for kernels and for NCCL's own threads, and nobody here can bound that. Its thread is
        # started beforehand and sleeps until then, because Python starts no threads once it ends.
        self._over, self._to_abort = threading.Event(), ctypes.c_void_p()
        self._aborting = threading.Thread(target=self._abort_when_over, name="kvstore_hvd-nccl-abort", daemon=True)
        self._aborting.start()
        arguments = UniqueId.from_buffer_copy(bytes.fromhex(unique_id)), rank, ctypes.byref(Config.non_blocking())
        result = library.call("ncclCommInitRankConfig", ctypes.byref(self._handle), size, *arguments)
        try:
            if result not in (SUCCESS, IN_PROGRESS):
                raise self._failure("the ranks cannot meet", result)
            self._settle("the ranks' meeting")
        except TransportError as error:
            self.abort()
            fix = "set NCCL_DEBUG=WARN to see what NCCL complains about, or KVHVD_GPU_PATH=staged to do without it."
            raise LaunchError(message(str(error).splitlines()[0], fix=fix)) from None
        except KVHvdError:
            self.abort()
            raise

    # -- What can be enqueued ----------------------------------------------------------------------------------

    def allreduce(
        self, source: int, target: int, count: int, dtype: str, op: str, stream: int, factor: float = 1.0
    ) -> None:
        """Reduce over all ranks into every `target`, which may be the `source`."""
        with self._operation(op, dtype, factor) as code:
            self._enqueue("ncclAllReduce", source, target, count, DTYPES[dtype], code, self._handle, stream)

    def reduce(self, source: int, target: int, count: int, dtype: str, op: str, root: int, stream: int) -> None:
        """As `allreduce`, but only `root` receives the result."""
        self._enqueue("ncclReduce", source, target, count, DTYPES[dtype], OPS[op], root, self._handle, stream)

    def reduce_scatter(self, source: int, target: int, count: int, dtype: str, op: str, stream: int) -> None:
        """Reduce ``count * size`` elements; rank r receives the r-th `count` of the result."""
        self._enqueue("ncclReduceScatter", source, target, count, DTYPES[dtype], OPS[op], self._handle, stream)

    def all_gather(self, source: int, target: int, nbytes: int, stream: int) -> None:
        """Put `nbytes` bytes of every rank, in their order, into every `target`."""
        self._enqueue("ncclAllGather", source, target, nbytes, DTYPES["uint8"], self._handle, stream)

    def broadcast(self, source: int, target: int, nbytes: int, root: int, stream: int) -> None:
        """Copy `root`'s `source` to every `target`."""
        self._enqueue("ncclBroadcast", source, target, nbytes, DTYPES["uint8"], root, self._handle, stream)

    def send(self, source: int, nbytes: int, peer: int, stream: int) -> None:
        """Send bytes to a rank that receives as many; in a `group` with what the others do meanwhile."""
        self._enqueue("ncclSend", source, nbytes, DTYPES["uint8"], peer, self._handle, stream)

    def receive(self, target: int, nbytes: int, peer: int, stream: int) -> None:
        """The other end of `send`."""
        self._enqueue("ncclRecv", target, nbytes, DTYPES["uint8"], peer, self._handle, stream)

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """What is enqueued inside becomes one operation: none of it waits for another."""
        self._call("ncclGroupStart")
        self._is_grouping = True
        try:
            yield
        finally:
            # Also after an error: NCCL counts beginnings and ends in each thread.
            self._is_grouping = False
            self._call("ncclGroupEnd")
        self._settle("ncclGroupEnd")

    # -- How it goes -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what has gone wrong since, on this rank or another."""
        state = self._state()
        if state not in (SUCCESS, IN_PROGRESS):
            raise self._failure("operations of the GPUs failed", state)

    def abort(self) -> None:
        """Let everything that is enqueued end soon, undone; from any thread, any number of times. Returns at once."""
        # The other ranks' operations end when they abort, too.
        with self._lock:
            if self._handle:
                self._to_abort, self._handle = self._handle, ctypes.c_void_p()
            self._over.set()

    def close(self) -> None:
        """Give everything back; all that was enqueued is done, and all ranks do it. Aborts when that takes too long."""
        # A rank that was aborted never comes.
        self.timeout_s = min(self.timeout_s, _ABORT_S)
        with contextlib.suppress(TransportError, errors.TimeoutError):
            if self._handle:
                self._call("ncclCommFinalize", self._handle)
                self._settle("ncclCommFinalize")
                with self._lock:
                    handle, self._handle = self._handle, ctypes.c_void_p()
                    if handle:
                        self._library.call("ncclCommDestroy", handle)
        self.abort()
        self._aborting.join(_ABORT_S)

    # -- Inside ------------------------------------------------------------------------------------------------

    def _abort_when_over(self) -> None:
        self._over.wait()
        if self._to_abort:
            self._library.call("ncclCommAbort", self._to_abort)

    @contextlib.contextmanager
    def _operation(self, op: str, dtype: str, factor: float) -> Iterator[int]:
        if factor == 1.0:
            yield OPS[op]
            return
        code, value = ctypes.c_int(), np.array([factor], PREMULTIPLIED[dtype])
        self._call(
            "ncclRedOpCreatePreMulSum",
            ctypes.byref(code),
            value.ctypes.data,
            DTYPES[dtype],
            _HOST_IMMEDIATE,
            self._handle,
        )
        try:
            yield code.value
        finally:
            # What was enqueued with it keeps what it needs.
            with self._lock:
                if self._handle:
                    self._library.call("ncclRedOpDestroy", code, self._handle)

    def _enqueue(self, name: str, *arguments: object) -> None:
        self._call(name, *arguments)
        if not self._is_grouping:
            self._settle(name)

    def _call(self, name: str, *arguments: object) -> None:
        with self._lock:
            if not self._handle:
                raise TransportError(message("the GPUs' communicator was aborted."))
            result = self._library.call(name, *arguments)
        if result not in (SUCCESS, IN_PROGRESS):
            raise self._failure(f"{name} failed", result)

    def _state(self) -> int:
        state = ctypes.c_int()
        with self._lock:
            if not self._handle:
                raise TransportError(message("the GPUs' communicator was aborted."))
            result = self._library.call("ncclCommGetAsyncError", self._handle, ctypes.byref(state))
        return state.value if result == SUCCESS else result

    def _settle(self, what: str) -> None:
        """Until NCCL takes the next call; no call may be made before."""
        clock = RunningClock()
        while True:
            state = self._state()
            if state == SUCCESS:
                return
            if state != IN_PROGRESS:
                raise self._failure(f"{what} failed", state)
            waited = clock.elapsed()
            if waited > self.timeout_s:
                self.abort()
                raise errors.TimeoutError(
                    message(
                        f"NCCL has not finished {what} within {self.timeout_s:g} s; the communicator is aborted.",
                        fix="set NCCL_DEBUG=INFO to see whom it waits for.",
                    )
                )
            time.sleep(0 if waited < _SPIN_S else _PAUSE_S)

    def _failure(self, what: str, result: int) -> TransportError:
        said = self._library.describe(result)
        return TransportError(
            message(
                f"NCCL {self._library.version_text}: {what}: {said}.",
                fix="set NCCL_DEBUG=WARN to see more, and restart the workers.",
            )
        )
