"""CuPy, found when the first array on a GPU comes, and what is wrong where it cannot be used.

The only module that imports CuPy. Everything that goes wrong later in CUDA's runtime is turned into this package's
exceptions by `checked`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.metadata
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

from kvstore_hvd import log
from kvstore_hvd.errors import LaunchError, TransportError, message

#: Extra of this package for each major version of CUDA.
EXTRAS = {11: "gpu-cu11", 12: "gpu-cu12", 13: "gpu-cu13"}
# The wheel with NVRTC, for each.
_COMPILERS = {11: "nvidia-cuda-nvrtc-cu11", 12: "nvidia-cuda-nvrtc-cu12", 13: "nvidia-cuda-nvrtc"}
_OLDEST, _BEYOND = (13,), (15,)

_cupy: Any = None


def cupy() -> Any:
    """The CuPy module, once it is sure that it works with this machine's driver."""
    global _cupy
    if _cupy is None:
        _cupy = _import()
    return _cupy


def close_all(*closes: Callable[[], None]) -> None:
    """Call each; what CUDA has against it is left to the log: after a failed kernel it is against everything."""
    for close in closes:
        try:
            close()
        except TransportError as error:
            log.logger.debug("%s", error)


def nvrtc_library() -> Any:
    """CuPy's binding of NVRTC, the compiler; needs neither driver nor GPU."""
    _preload_compiler()
    try:
        nvrtc = importlib.import_module("cupy").cuda.nvrtc
        nvrtc.getVersion()
    except (ImportError, AttributeError, RuntimeError) as error:
        raise LaunchError(
            message(
                f"CuPy finds no compiler for kernels (NVRTC): {error}.",
                fix="pip install 'kvstore-hvd[gpu-cu12]' (cu11, cu13: as the driver's CUDA), which brings it.",
            )
        ) from error
    return nvrtc


def driver_version() -> int | None:
    """The newest CUDA that the driver of this machine serves, as ``12040`` for 12.4; None without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        version = ctypes.c_int()
        # Asks the library only: no device is touched.
        status = library.cuDriverGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return version.value if status == 0 else None


def device_uuid(ordinal: int) -> str:
    """What names a GPU, or a part of one that MIG made, on all machines, in hexadecimal."""
    # Asked of the driver: the bytes that CuPy tells end at the first zero.
    library = ctypes.CDLL("libcuda.so.1")
    device, raw = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    get = getattr(library, "cuDeviceGetUuid_v2", None) or library.cuDeviceGetUuid
    if library.cuInit(0) or library.cuDeviceGet(ctypes.byref(device), ordinal) or get(raw, device):
        raise TransportError(
            message(f"the driver does not tell the UUID of GPU {ordinal}.", fix="see whether nvidia-smi -L works.")
        )
    return bytes(raw).hex()


def version_text(version: int) -> str:
    """``12040`` as ``'12.4'``."""
    return f"{version // 1000}.{version % 1000 // 10}"


@contextlib.contextmanager
def checked(what: str) -> Iterator[None]:
    """Turn errors of CUDA's runtime inside into a `TransportError` that says `what` was being done."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # CUDARuntimeError, CUDADriverError and OutOfMemoryError of CuPy are such; ours pass.
        if type(error).__module__.partition(".")[0] not in ("cupy", "cupy_backends"):
            raise
        raise TransportError(message(f"CUDA failed to {what}: {error}.", fix=_fix_of(str(error)))) from error


def _fix_of(text: str) -> str:
    if "MemoryAllocation" in text or "out of memory" in text.lower():
        return "use a smaller batch, or lower KVHVD_GPU_STAGING_MIB."
    return "look for a failed kernel of the program itself (CUDA_LAUNCH_BLOCKING=1 names it); restart the workers."


def _import() -> Any:
    driver = driver_version()
    if driver is None:
        raise LaunchError(
            message(
                "this array is on a GPU, but this process finds no driver for one (libcuda.so.1).",
                fix="install NVIDIA's driver, or start the container with its GPUs (docker run --gpus all).",
            )
        )
    _preload_compiler()
    try:
        module = importlib.import_module("cupy")
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "cupy"
        fact = "arrays on GPUs need CuPy, which is not installed." if missing else f"CuPy cannot be imported: {error}."
        raise LaunchError(message(fact, fix=f"{_installation(driver)}.")) from error
    _check_version(module, driver)
    _check_devices(module, driver)
    return module


def _preload_compiler() -> None:
    """Load the NVRTC that pip installed: CuPy before 14 asks the system's loader, which does not look there."""
    if "cupy" in sys.modules:
        return
    for major, wheel in _COMPILERS.items():
        try:
            version = importlib.metadata.version(f"cupy-cuda{major}x")
            files = importlib.metadata.files(wheel) or ()
        except importlib.metadata.PackageNotFoundError:
            continue
        if int(version.partition(".")[0]) >= 14:
            continue
        for file in files:
            if file.name.startswith("libnvrtc.so."):
                try:
                    ctypes.CDLL(str(file.locate()))
                except OSError as error:
                    log.logger.debug("NVRTC of %s cannot be loaded: %s", wheel, error)


def _installation(driver: int) -> str:
    major = max((known for known in EXTRAS if known <= driver // 1000), default=min(EXTRAS))
    return f"pip install 'kvstore-hvd[{EXTRAS[major]}]' (this driver serves CUDA up to {version_text(driver)})"


def _check_version(module: Any, driver: int) -> None:
    numbers = tuple(int(part) for part in str(module.__version__).split(".")[:1] if part.isdigit())
    if not _OLDEST <= numbers < _BEYOND:
        log.once(
            "cupy-version",
            logging.WARNING,
            "CuPy %s has not been tried with this version of kvstore_hvd, which asks for 13 or 14",
            module.__version__,
        )
    if getattr(module.cuda.runtime, "is_hip", False):
        raise LaunchError(message("CuPy is built for ROCm; only CUDA is served.", fix=f"{_installation(driver)}."))


def _check_devices(module: Any, driver: int) -> None:
    try:
        count = module.cuda.runtime.getDeviceCount()
    except RuntimeError as error:
        text = str(error)
        if "InsufficientDriver" in text:
            fact = (
                f"CuPy {module.__version__} is built for a newer CUDA than {version_text(driver)}, up to which this "
                "driver serves it."
            )
            raise LaunchError(message(fact, fix=f"{_installation(driver)}, or install a newer driver.")) from error
        raise LaunchError(
            message(f"CUDA cannot be started: {text}.", fix="see whether nvidia-smi works on this machine.")
        ) from error
    if count == 0:
        raise LaunchError(
            message("this process sees no GPU.", fix="see what CUDA_VISIBLE_DEVICES says, and nvidia-smi -L.")
        )
