"""CuPy, which is imported for the first array on a GPU, and the GPUs of this process and of the other workers.

This module alone imports CuPy. `checked` turns every later error of CUDA's runtime into an exception of this package.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import importlib
import importlib.metadata
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore_hvd import log
from kvstore_hvd.errors import LaunchError, TransportError, message

#: Extra of this package for each major version of CUDA.
EXTRAS = {11: "gpu-cu11", 12: "gpu-cu12", 13: "gpu-cu13"}
# Wheel with NVRTC for each major version of CUDA.
_COMPILERS = {11: "nvidia-cuda-nvrtc-cu11", 12: "nvidia-cuda-nvrtc-cu12", 13: "nvidia-cuda-nvrtc"}
# Major versions of CuPy.
_CUPY = ("13", "14")
# The oldest compute capability: our kernels order memory by acquire and release.
_OLDEST_CAPABILITY = (7, 0)


@contextlib.contextmanager
def checked(what: str) -> Iterator[None]:
    """Turn an error of CUDA's runtime into a `TransportError` that says which action (`what`) failed."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        # CuPy derives CUDARuntimeError, CUDADriverError and OutOfMemoryError from these.
        if type(error).__module__.partition(".")[0] not in ("cupy", "cupy_backends"):
            raise
        text = str(error)
        fix = "look for a failed kernel of the program itself (CUDA_LAUNCH_BLOCKING=1 names it); restart the workers."
        if "MemoryAllocation" in text or "out of memory" in text.lower():
            fix = "use a smaller batch, or lower KVHVD_GPU_STAGING_MIB."
        raise TransportError(message(f"CUDA failed to {what}: {text}.", fix=fix)) from error


def close_all(*closes: Callable[[], None]) -> None:
    """Call each and log its failure: after a failed kernel CUDA refuses every call."""
    for close in closes:
        try:
            close()
        except TransportError as error:
            log.logger.debug("%s", error)


def nvrtc_library() -> Any:
    """CuPy's binding of the compiler NVRTC, which needs neither driver nor GPU."""
    _preload_compiler()
    try:
        nvrtc = importlib.import_module("cupy").cuda.nvrtc
        nvrtc.getVersion()
    except (ImportError, AttributeError, RuntimeError) as error:
        fix = "pip install 'kvstore-hvd[gpu-cu12]' (cu11, cu13: as the driver's CUDA), which brings it."
        raise LaunchError(message(f"CuPy finds no compiler for kernels (NVRTC): {error}.", fix=fix)) from error
    return nvrtc


def driver_version() -> int | None:
    """The newest CUDA that this machine's driver supports, as ``12040`` for 12.4; None without a driver."""
    version = ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError):
        # This call touches no device.
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)) == 0:
            return version.value
    return None


def device_uuid(ordinal: int) -> str:
    """The UUID of a GPU, or of a MIG instance, in hexadecimal; unique over all hosts."""
    # The driver gives all 16 bytes; CuPy's text ends at the first zero.
    library = ctypes.CDLL("libcuda.so.1")
    device, raw = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    get = getattr(library, "cuDeviceGetUuid_v2", None) or library.cuDeviceGetUuid
    if library.cuInit(0) or library.cuDeviceGet(ctypes.byref(device), ordinal) or get(raw, device):
        fact = f"the driver does not tell the UUID of GPU {ordinal}."
        raise TransportError(message(fact, fix="see whether nvidia-smi -L works."))
    return bytes(raw).hex()


def version_text(version: int) -> str:
    """``12040`` as ``'12.4'``."""
    return f"{version // 1000}.{version % 1000 // 10}"


@functools.lru_cache(maxsize=1)
def cupy() -> Any:
    """The CuPy module, after a check that it works with this machine's driver."""
    driver = driver_version()
    if driver is None:
        fact = "this array is on a GPU, but this process finds no driver for one (libcuda.so.1)."
        fix = "install NVIDIA's driver, or start the container with its GPUs (docker run --gpus all)."
        raise LaunchError(message(fact, fix=fix))
    major = max((known for known in EXTRAS if known <= driver // 1000), default=min(EXTRAS))
    install = f"pip install 'kvstore-hvd[{EXTRAS[major]}]' (this driver serves CUDA up to {version_text(driver)})"
    _preload_compiler()
    try:
        module = importlib.import_module("cupy")
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name == "cupy"
        fact = "arrays on GPUs need CuPy, which is not installed." if missing else f"CuPy cannot be imported: {error}."
        raise LaunchError(message(fact, fix=f"{install}.")) from error
    if str(module.__version__).partition(".")[0] not in _CUPY:
        text = "CuPy %s has not been tried with this version of kvstore_hvd, which asks for 13 or 14"
        log.once("cupy-version", logging.WARNING, text, module.__version__)
    if getattr(module.cuda.runtime, "is_hip", False):
        raise LaunchError(message("CuPy is built for ROCm; only CUDA is served.", fix=f"{install}."))
    try:
        count = module.cuda.runtime.getDeviceCount()
    except RuntimeError as error:
        fact, fix = f"CUDA cannot be started: {error}.", "see whether nvidia-smi works on this machine."
        if "InsufficientDriver" in str(error):
            built = f"CuPy {module.__version__} is built for a newer CUDA than {version_text(driver)}"
            fact, fix = f"{built}, up to which this driver serves it.", f"{install}, or install a newer driver."
        raise LaunchError(message(fact, fix=fix)) from error
    if count == 0:
        fix = "see what CUDA_VISIBLE_DEVICES says, and nvidia-smi -L."
        raise LaunchError(message("this process sees no GPU.", fix=fix))
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
                with contextlib.suppress(OSError):
                    ctypes.CDLL(str(file.locate()))


# -- Devices -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Device:
    """One worker's GPU, as it describes it to the other workers."""

    uuid: str
    name: str
    host: str  # a `topology.Host.identity`: GPUs of equal hosts can map each other's memory
    capability: tuple[int, int]
    multiprocessors: int
    nccl: int = 0  # version of the worker's NCCL, as 22304 for 2.23.4; 0 without NCCL

    @classmethod
    def of(cls, ordinal: int, host: str, nccl: int = 0) -> Device:
        """Ask CUDA about the device of this number."""
        cuda = cupy().cuda.runtime
        with checked("count the GPUs"):
            count = int(cuda.getDeviceCount())
        if not 0 <= ordinal < count:
            fact = f"this process sees {count} GPU{'' if count == 1 else 's'}, but an array is on GPU {ordinal}."
            raise LaunchError(message(fact, fix="see what CUDA_VISIBLE_DEVICES says."))
        with checked(f"ask about GPU {ordinal}"):
            properties = cuda.getDeviceProperties(ordinal)
        name = properties["name"]
        name = name.decode() if isinstance(name, bytes) else str(name)
        major, minor = capability = int(properties["major"]), int(properties["minor"])
        if capability < _OLDEST_CAPABILITY:
            fact = f"{name} (compute capability {major}.{minor}) is too old: 7.0 (Volta) is the oldest that is served."
            raise LaunchError(message(fact, fix="train on the CPU of this machine, or on newer GPUs."))
        return cls(device_uuid(ordinal), name, host, capability, int(properties["multiProcessorCount"]), nccl)

    def to_text(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> Device:
        fields = json.loads(text)
        fields["capability"] = tuple(fields["capability"])
        return cls(**fields)


def activate(ordinal: int) -> None:
    """Make a device this thread's current one."""
    with checked(f"use GPU {ordinal}"):
        cupy().cuda.runtime.setDevice(ordinal)


@contextlib.contextmanager
def active(ordinal: int) -> Iterator[None]:
    """Make a device this thread's current one inside the context."""
    with checked("ask for the current GPU"):
        before = int(cupy().cuda.runtime.getDevice())
    activate(ordinal)
    try:
        yield
    finally:
        activate(before)


def reaches(ordinal: int, devices: Sequence[Device]) -> bool:
    """Whether this device can read and write the memory of all `devices`: on its host, and visible to it."""
    cuda, own = cupy().cuda.runtime, device_uuid(ordinal)
    with checked("ask which GPUs reach each other"):
        visible = {device_uuid(number): number for number in range(cuda.getDeviceCount())}
        others = [visible.get(device.uuid) for device in devices if device.uuid != own]
        return all(number is not None and cuda.deviceCanAccessPeer(ordinal, number) for number in others)


def shared(devices: Sequence[Device]) -> dict[str, list[int]]:
    """The ranks of each GPU that several ranks use, by UUID."""
    ranks: dict[str, list[int]] = {}
    for rank, device in enumerate(devices):
        ranks.setdefault(device.uuid, []).append(rank)
    return {uuid: users for uuid, users in ranks.items() if len(users) > 1}
