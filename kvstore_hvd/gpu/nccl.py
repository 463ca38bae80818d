"""NCCL: the library, which is loaded when it is needed, and one rank's end of a communicator that never blocks.

Every wait for NCCL has a limit, and `NcclCommunicator.abort` works at any time.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from kvstore_hvd import errors
from kvstore_hvd.base.cores import RunningClock
from kvstore_hvd.config import config
from kvstore_hvd.errors import ConfigError, KVHvdError, LaunchError, TransportError, message
from kvstore_hvd.gpu.runtime import EXTRAS, driver_version

#: The oldest version whose communicators never block, as NCCL writes it: 2.18.
OLDEST = 21800
_SUCCESS, _IN_PROGRESS = 0, 7
#: Codes of NCCL (ncclDataType_t).
DTYPES = {"int8": 0, "uint8": 1, "int32": 2, "int64": 4, "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
# Codes of NCCL (ncclRedOp_t). An average is a sum: the caller applies the factor, which depends on workers' weights.
OPS = {"sum": 0, "average": 0, "product": 1, "max": 2, "min": 3}
#: Types whose inputs NCCL multiplies by a factor as exactly as our kernels do.
PREMULTIPLIED = {"float32": np.float32, "float64": np.float64}
_HOST_IMMEDIATE = 1  # ncclScalarHostImmediate: the factor is read during the call
# Value of a field of `Config` that leaves the choice to NCCL.
_UNDEFINED = -(2**31)
# Seconds without a pause between queries of NCCL's state, and seconds of the later pauses.
_SPIN_S = 0.001
_PAUSE_S = 0.0002
# Seconds that a worker that leaves waits for an abort, which frees memory and ends threads of NCCL.
_ABORT_S = 10.0
_FIX = (
    "pip install nvidia-nccl-cu12 (cu11, cu13: as the driver's CUDA), or set KVHVD_NCCL_LIBRARY to the libnccl.so.2 "
    "to use."
)


def version_text(version: int) -> str:
    """``22304`` as ``'2.23.4'``."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


class UniqueId(ctypes.Structure):
    """The common key of a communicator's ranks (``ncclUniqueId``)."""

    _fields_ = (("internal", ctypes.c_char * 128),)


class Config(ctypes.Structure):
    """``ncclConfig_t`` as of NCCL 2.18; newer libraries take it by its size and version."""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cga_cluster_size", ctypes.c_int),
        ("min_ctas", ctypes.c_int),
        ("max_ctas", ctypes.c_int),
        ("net_name", ctypes.c_char_p),
        ("split_share", ctypes.c_int),
    )


_P, _I, _Z = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
_TYPES = {
    "ncclGetVersion": (ctypes.POINTER(_I),),
    "ncclGetUniqueId": (ctypes.POINTER(UniqueId),),
    "ncclCommInitRankConfig": (ctypes.POINTER(_P), _I, UniqueId, _I, ctypes.POINTER(Config)),
    "ncclCommFinalize": (_P,),
    "ncclCommDestroy": (_P,),
    "ncclCommAbort": (_P,),
    "ncclCommGetAsyncError": (_P, ctypes.POINTER(_I)),
    "ncclRedOpCreatePreMulSum": (ctypes.POINTER(_I), _P, _I, _I, _P),
    "ncclRedOpDestroy": (_I, _P),
    "ncclAllReduce": (_P, _P, _Z, _I, _I, _P, _P),
    "ncclBroadcast": (_P, _P, _Z, _I, _I, _P, _P),
    "ncclReduce": (_P, _P, _Z, _I, _I, _I, _P, _P),
    "ncclReduceScatter": (_P, _P, _Z, _I, _I, _P, _P),
    "ncclAllGather": (_P, _P, _Z, _I, _P, _P),
    "ncclSend": (_P, _Z, _I, _I, _P, _P),
    "ncclRecv": (_P, _Z, _I, _I, _P, _P),
    "ncclGroupStart": (),
    "ncclGroupEnd": (),
}


class NcclLibrary:
    """A loaded libnccl."""

    def __init__(self, path: str) -> None:
        self.path = path
        # RTLD_LOCAL: another package of this process may have loaded another version.
        self._library = ctypes.CDLL(path, mode=ctypes.RTLD_LOCAL)
        try:
            for name, types in _TYPES.items():
                function = getattr(self._library, name)
                function.argtypes, function.restype = types, _I
            for name, argument in (("ncclGetErrorString", _I), ("ncclGetLastError", _P)):
                function = getattr(self._library, name)
                function.argtypes, function.restype = (argument,), ctypes.c_char_p
        except AttributeError as error:
            raise LaunchError(message(f"{path} is too old, or not NCCL: {error}.", fix=_FIX)) from None
        version = _I()
        self.call("ncclGetVersion", ctypes.byref(version))
        self.version = version.value
        self.version_text = version_text(self.version)
        if self.version < OLDEST:
            raise LaunchError(message(f"NCCL {self.version_text} ({path}) is older than 2.18.", fix=_FIX))

    def call(self, name: str, *arguments: object) -> int:
        """Call a function without the GIL; returns NCCL's result."""
        return int(getattr(self._library, name)(*arguments))

    def describe(self, result: int) -> str:
        """NCCL's texts about a result that is no success, and about the last error of this process."""
        texts = [self._library.ncclGetErrorString(result), self._library.ncclGetLastError(None)]
        return "; ".join(text.decode(errors="replace").strip() for text in texts if text and text.strip())

    def unique_id(self) -> str:
        """A new communicator's key in hexadecimal, which one rank gives to the others."""
        made = UniqueId()
        result = self.call("ncclGetUniqueId", ctypes.byref(made))
        if result != _SUCCESS:
            fix = "set NCCL_DEBUG=INFO to see why, and NCCL_SOCKET_IFNAME to the interface to use."
            raise LaunchError(message(f"NCCL cannot begin a communicator: {self.describe(result)}.", fix=fix))
        return bytes(memoryview(made)).hex()


@functools.lru_cache(maxsize=1)
def library() -> NcclLibrary:
    """The NCCL of this process, found at the first call."""
    chosen = config().nccl_library
    reasons = []
    for path in [chosen] if chosen else _candidates():
        try:
            return NcclLibrary(path)
        except (OSError, LaunchError) as error:
            reasons.append(str(error).splitlines()[0])
    if chosen:
        fact = f"KVHVD_NCCL_LIBRARY={chosen} cannot be used: {reasons[0].rstrip('.')}."
        raise ConfigError(message(fact, fix="correct or unset it."))
    raise LaunchError(message("NCCL (libnccl.so.2) is not found.", details=reasons, fix=_FIX))


def _candidates() -> Iterator[str]:
    """Paths in the order of preference: of pip's wheels, of CuPy's installer, of the system."""
    newest = (driver_version() or max(EXTRAS) * 1000) // 1000
    for major in sorted(EXTRAS, reverse=True):
        # The driver runs libraries for its own CUDA and older ones.
        if major <= newest:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                for file in importlib.metadata.files(f"nvidia-nccl-cu{major}") or ():
                    if file.name == "libnccl.so.2":
                        yield str(Path(str(file.locate())).resolve())
    for path in sorted(Path.home().glob(".cupy/cuda_lib/*/nccl/*/lib*/libnccl.so.2*"), reverse=True):
        yield str(path)
    yield "libnccl.so.2"


class NcclCommunicator:
    """This rank's end of a communicator, whose work is enqueued on one stream (an address).

    Collective: returns when all ranks have come. One thread calls all methods but `abort`, in the same order on all
    ranks.
    """

    def __init__(
        self, library: NcclLibrary, unique_id: str, rank: int, size: int, stream: int, timeout_s: float
    ) -> None:
        self._library, self._stream = library, stream
        #: Limit of every later call, in seconds.
        self.timeout_s = timeout_s
        self._lock = threading.RLock()  # protects _handle: abort frees its memory
        self._handle = ctypes.c_void_p()
        self._is_grouping = False
        # An abort may wait for kernels and for NCCL's own threads, without a limit. Its thread starts now and sleeps,
        # because Python starts no threads while it ends.
        self._over, self._to_abort = threading.Event(), ctypes.c_void_p()
        self._aborting = threading.Thread(target=self._abort_when_over, name="kvstore_hvd-nccl-abort", daemon=True)
        self._aborting.start()
        # No call blocks: each returns at once.
        undefined = dict.fromkeys(("cga_cluster_size", "min_ctas", "max_ctas", "split_share"), _UNDEFINED)
        settings = Config(size=ctypes.sizeof(Config), magic=0xCAFEBEEF, version=OLDEST, blocking=0, **undefined)
        key = UniqueId.from_buffer_copy(bytes.fromhex(unique_id))
        begin = "ncclCommInitRankConfig", ctypes.byref(self._handle), size, key, rank, ctypes.byref(settings)
        result = library.call(*begin)
        try:
            self._is_idle("the ranks cannot meet", result)
            self._settle("the ranks' meeting")
        except TransportError as error:
            self.abort()
            fix = "set NCCL_DEBUG=WARN to see what NCCL complains about, or KVHVD_GPU_PATH=staged to do without it."
            raise LaunchError(message(str(error).splitlines()[0], fix=fix)) from None
        except KVHvdError:
            self.abort()
            raise

    # -- Operations to enqueue -----------------------------------------------------------------------------------------

    def allreduce(self, source: int, target: int, count: int, dtype: str, op: str, factor: float = 1.0) -> None:
        """Reduce over all ranks into every `target`, which may be the `source`; `factor` multiplies the sources."""
        if factor == 1.0:
            self._enqueue("ncclAllReduce", source, target, count, DTYPES[dtype], OPS[op])
            return
        code, value = ctypes.c_int(), np.array([factor], PREMULTIPLIED[dtype])
        arguments = value.ctypes.data, DTYPES[dtype], _HOST_IMMEDIATE, self._handle
        self._call("ncclRedOpCreatePreMulSum", ctypes.byref(code), *arguments)
        try:
            self._enqueue("ncclAllReduce", source, target, count, DTYPES[dtype], code.value)
        finally:
            # Enqueued operations keep what they need of it.
            with self._lock:
                if self._handle:
                    self._library.call("ncclRedOpDestroy", code, self._handle)

    def reduce(self, source: int, target: int, count: int, dtype: str, op: str, root: int) -> None:
        """As `allreduce`, but only `root` receives the result."""
        self._enqueue("ncclReduce", source, target, count, DTYPES[dtype], OPS[op], root)

    def reduce_scatter(self, source: int, target: int, count: int, dtype: str, op: str) -> None:
        """Reduce ``count * size`` elements; rank r receives the r-th `count` of the result."""
        self._enqueue("ncclReduceScatter", source, target, count, DTYPES[dtype], OPS[op])

    def all_gather(self, source: int, target: int, nbytes: int) -> None:
        """Put `nbytes` bytes of every rank, in their order, into every `target`."""
        self._enqueue("ncclAllGather", source, target, nbytes, DTYPES["uint8"])

    def broadcast(self, source: int, target: int, nbytes: int, root: int) -> None:
        """Copy `root`'s `source` to every `target`."""
        self._enqueue("ncclBroadcast", source, target, nbytes, DTYPES["uint8"], root)

    def send(self, source: int, nbytes: int, peer: int) -> None:
        """Send bytes to a rank that receives as many; in one `group` with the other ranks' operations."""
        self._enqueue("ncclSend", source, nbytes, DTYPES["uint8"], peer)

    def receive(self, target: int, nbytes: int, peer: int) -> None:
        self._enqueue("ncclRecv", target, nbytes, DTYPES["uint8"], peer)

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Make one operation of those enqueued inside: none of them waits for another."""
        self._call("ncclGroupStart")
        self._is_grouping = True
        try:
            yield
        finally:
            # Also after an error: NCCL counts starts and ends in each thread.
            self._is_grouping = False
            self._call("ncclGroupEnd")
        self._settle("ncclGroupEnd")

    # -- State and end -------------------------------------------------------------------------------------------------

    def check(self, fault: str = "operations of the GPUs failed") -> bool:
        """Whether NCCL accepts the next call. Raises the communicator's asynchronous error, of this rank or another."""
        state = ctypes.c_int()
        with self._lock:
            self._check_handle()
            result = self._library.call("ncclCommGetAsyncError", self._handle, ctypes.byref(state))
        return self._is_idle(fault, state.value if result == _SUCCESS else result)

    def abort(self) -> None:
        """End all enqueued work soon, undone; from any thread, any number of times. Returns at once."""
        # The operations of the other ranks end by their own aborts.
        with self._lock:
            if self._handle:
                self._to_abort, self._handle = self._handle, ctypes.c_void_p()
            self._over.set()

    def close(self) -> None:
        """Free everything after all work; collective, with an abort if it takes too long."""
        # A rank that has aborted never comes.
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

    def _abort_when_over(self) -> None:
        self._over.wait()
        if self._to_abort:
            self._library.call("ncclCommAbort", self._to_abort)

    def _enqueue(self, name: str, *arguments: object) -> None:
        self._call(name, *arguments, self._handle, self._stream)
        if not self._is_grouping:
            self._settle(name)

    def _call(self, name: str, *arguments: object) -> None:
        with self._lock:
            self._check_handle()
            result = self._library.call(name, *arguments)
        self._is_idle(f"{name} failed", result)

    def _check_handle(self) -> None:
        if not self._handle:
            raise TransportError(message("the GPUs' communicator was aborted."))

    def _settle(self, what: str) -> None:
        """Wait until NCCL accepts the next call; no call is allowed before."""
        clock = RunningClock()
        while not self.check(f"{what} failed"):
            waited = clock.elapsed()
            if waited > self.timeout_s:
                self.abort()
                fact = f"NCCL has not finished {what} within {self.timeout_s:g} s; the communicator is aborted."
                raise errors.TimeoutError(message(fact, fix="set NCCL_DEBUG=INFO to see whom it waits for."))
            time.sleep(0 if waited < _SPIN_S else _PAUSE_S)

    def _is_idle(self, fault: str, result: int) -> bool:
        """Whether NCCL has finished; raises a fault that a `result` reports."""
        if result in (_SUCCESS, _IN_PROGRESS):
            return result == _SUCCESS
        fact = f"NCCL {self._library.version_text}: {fault}: {self._library.describe(result)}."
        raise TransportError(message(fact, fix="set NCCL_DEBUG=WARN to see more, and restart the workers."))
