"""Finding NCCL, and its functions with their types. Nothing is linked: the library is loaded when it is needed."""

from __future__ import annotations

import ctypes
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

from kvstore_hvd.config import config
from kvstore_hvd.errors import ConfigError, LaunchError, message
from kvstore_hvd.gpu.runtime import EXTRAS, driver_version

#: Since 2.18 communicators that never block can be made, used and given back.
OLDEST = 21800
SUCCESS, IN_PROGRESS = 0, 7
#: What a field of `Config` has when NCCL shall choose.
UNDEFINED = -(2**31)


def version_text(version: int) -> str:
    """``22304`` as ``'2.23.4'``."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


class UniqueId(ctypes.Structure):
    """What the ranks of one communicator have in common (``ncclUniqueId``)."""

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

    @classmethod
    def non_blocking(cls) -> Config:
        """A communicator whose calls all return at once."""
        return cls(
            size=ctypes.sizeof(cls),
            magic=0xCAFEBEEF,
            version=OLDEST,
            blocking=0,
            cga_cluster_size=UNDEFINED,
            min_ctas=UNDEFINED,
            max_ctas=UNDEFINED,
            net_name=None,
            split_share=UNDEFINED,
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
        # RTLD_LOCAL: another package of this process may have loaded another version for itself.
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
        #: As 22304 for 2.23.4.
        self.version = version.value
        if self.version < OLDEST:
            raise LaunchError(message(f"NCCL {self.version_text} ({path}) is older than 2.18.", fix=_FIX))

    @property
    def version_text(self) -> str:
        """See the function of this name."""
        return version_text(self.version)

    def call(self, name: str, *arguments: object) -> int:
        """Call a function; its result as NCCL gives it. Releases the GIL."""
        return int(getattr(self._library, name)(*arguments))

    def describe(self, result: int) -> str:
        """What NCCL says about a result that is no success, and about the last error of this process."""
        said = [self._library.ncclGetErrorString(result), self._library.ncclGetLastError(None)]
        return "; ".join(text.decode(errors="replace").strip() for text in said if text and text.strip())

    def unique_id(self) -> str:
        """A fresh one, in hexadecimal: one rank asks, and tells the others."""
        made = UniqueId()
        result = self.call("ncclGetUniqueId", ctypes.byref(made))
        if result != SUCCESS:
            raise LaunchError(
                message(
                    f"NCCL cannot begin a communicator: {self.describe(result)}.",
                    fix="set NCCL_DEBUG=INFO to see why, and NCCL_SOCKET_IFNAME to the interface to use.",
                )
            )
        return bytes(memoryview(made)).hex()


_FIX = (
    "pip install nvidia-nccl-cu12 (cu11, cu13: as the driver's CUDA), or set KVHVD_NCCL_LIBRARY to the libnccl.so.2 "
    "to use."
)
_found: NcclLibrary | None = None


def library() -> NcclLibrary:
    """The NCCL of this process, found at the first call."""
    global _found
    if _found is None:
        _found = _find()
    return _found


def _find() -> NcclLibrary:
    chosen = config().nccl_library
    if chosen:
        try:
            return NcclLibrary(chosen)
        except (OSError, LaunchError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
            raise ConfigError(
                message(f"KVHVD_NCCL_LIBRARY={chosen} cannot be used: {reason}.", fix="correct or unset it.")
            ) from None
    reasons = []
    for path in _candidates():
        try:
            return NcclLibrary(path)
        except (OSError, LaunchError) as error:
            reasons.append(str(error).splitlines()[0])
    raise LaunchError(message("NCCL (libnccl.so.2) is not found.", details=reasons, fix=_FIX))


def _candidates() -> Iterator[str]:
    """Paths in the order of preference: what pip installed, what CuPy's installer put away, the system's."""
    newest = (driver_version() or max(EXTRAS) * 1000) // 1000
    for major in sorted(EXTRAS, reverse=True):
        # A library for a newer CUDA than the driver's cannot run; for an older one it can.
        if major <= newest:
            yield from _in_wheel(f"nvidia-nccl-cu{major}")
    for path in sorted(Path.home().glob(".cupy/cuda_lib/*/nccl/*/lib*/libnccl.so.2*"), reverse=True):
        yield str(path)
    yield "libnccl.so.2"


def _in_wheel(name: str) -> Iterator[str]:
    try:
        files = importlib.metadata.files(name) or ()
    except importlib.metadata.PackageNotFoundError:
        return
    for file in files:
        if file.name == "libnccl.so.2":
            yield str(Path(str(file.locate())).resolve())
