"""Our kernels on one device: compiled by NVRTC at the first use, cached on disk, loaded as a CuPy RawModule, launched.

CuPy's own compilation is not used: it adds ``-ftz=true``, which flushes denormals, and needs a device. NVRTC does not,
so that tests compile the kernels on any machine.

The cache serves many workers that start at once, on a file system that several machines may share. A file is written
under a temporary name and then renamed, and its name ends with a digest of its content. Kernels whose file cannot be
read or written are compiled again.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from kvstore_hvd import log
from kvstore_hvd.config import cache_folder
from kvstore_hvd.errors import KVHvdError, LaunchError, message
from kvstore_hvd.gpu import kernels
from kvstore_hvd.gpu.runtime import checked, cupy, nvrtc_library
from kvstore_hvd.gpu.streams import Stream

# Architectures for PTX, newest first: a driver compiles it for a device that this NVRTC does not know.
_VIRTUAL = (120, 100, 90, 89, 86, 80, 75, 70)
_INVALID_OPTION = 5  # NVRTC_ERROR_INVALID_OPTION


class Kernels:
    """The kernels of one device, which every caller has made current."""

    def __init__(self, capability: tuple[int, int], multiprocessors: int, sharers: int = 1) -> None:
        self._architecture = capability[0] * 10 + capability[1]
        self._multiprocessors = multiprocessors
        self._sharers = sharers
        self._modules: dict[str, Any] = {}
        self._functions: dict[tuple[str, str], Any] = {}
        self._limits: dict[tuple[str, str], kernels.Limits] = {}

    def limits(self, name: str, dtype: str) -> kernels.Limits:
        """What limits the blocks of a kernel here."""
        if (name, dtype) not in self._limits:
            function = self._function(name, dtype)
            with checked(f"ask how many blocks of {name} fit"):
                blocks = cupy().cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(function.ptr, kernels.THREADS, 0)
            self._limits[name, dtype] = kernels.Limits(self._multiprocessors, int(blocks), self._sharers)
        return self._limits[name, dtype]

    def launch(
        self,
        name: str,
        dtype: str,
        blocks: int,
        arguments: tuple[Any, ...],
        stream: Stream,
        waits: bool = False,
        players: int = 1,
    ) -> None:
        """Enqueue a kernel."""
        function, grid, threads = self._function(name, dtype), (blocks, players, 1), (kernels.THREADS, 1, 1)
        with checked(f"launch {name}"):
            function(grid, threads, arguments, stream=stream, enable_cooperative_groups=waits)

    def _function(self, name: str, dtype: str) -> Any:
        if (name, dtype) not in self._functions:
            if dtype not in self._modules:
                self._modules[dtype] = _load(dtype, self._architecture)
            with checked(f"find the kernel {name}"):
                self._functions[name, dtype] = self._modules[dtype].get_function(name).kernel
        return self._functions[name, dtype]


def compile_kernels(dtype: str, architecture: int) -> bytes:
    """Compile the kernels of one element type: a CUBIN, or PTX for an architecture that this NVRTC does not know."""
    nvrtc = nvrtc_library()
    virtual = (f"compute_{known}" for known in _VIRTUAL if known <= architecture)
    for target in (f"sm_{architecture}", *virtual):
        result = nvrtc.getCUBIN if target.startswith("sm_") else nvrtc.getPTX
        try:
            made = _compile(nvrtc, (f"--gpu-architecture={target}", *kernels.options(dtype)), result)
            return made.encode() if isinstance(made, str) else bytes(made)
        except nvrtc.NVRTCError as error:
            if error.status != _INVALID_OPTION:
                lines = str(getattr(error, "log", "") or error).strip().splitlines()
                fact, fix = "NVRTC cannot compile our kernels.", "report this, with the version of CuPy."
                raise LaunchError(message(fact, details=lines[:10], fix=fix)) from None
    version = ".".join(map(str, nvrtc.getVersion()))
    fact = f"NVRTC {version} compiles nothing for a device of compute capability {architecture / 10:.1f}."
    raise LaunchError(message(fact, fix="install the extra of a newer CUDA: gpu-cu12 or gpu-cu13."))


def _load(dtype: str, architecture: int) -> Any:
    nvrtc, library = nvrtc_library(), cupy()
    parts = _source(), kernels.options(dtype), architecture, library.__version__, nvrtc.getVersion()
    key = _digest("\0".join(map(str, parts)).encode())

    def make() -> bytes:
        log.logger.info("compiling the kernels for %s, once on this machine", dtype)
        return compile_kernels(dtype, architecture)

    with cached(key, make) as path, checked("load our kernels"):
        module = library.RawModule(path=str(path))
        module.compile()
        _check_sizes(module)
    return module


def _check_sizes(module: Any) -> None:
    """Compare the layout that the compiler chose with that of our structures."""
    limits = kernels.MAX_RANKS, kernels.MAX_CHANNELS, kernels.SLOTS, kernels.TILE_BYTES, kernels.TILE_ELEMENTS
    expected = [*kernels.STRUCTURES.values(), *limits]
    sizes = cupy().zeros(len(expected), np.uint32)
    module.get_function(kernels.SIZES_KERNEL)((1,), (1,), (sizes,))
    found = [int(size) for size in sizes.get()]
    if found != expected:
        fact = f"the kernels were compiled with structures of {found} bytes, but {expected} are expected."
        fix = "reinstall kvstore_hvd: its Python files and its kernels are of different versions."
        raise KVHvdError(message(fact, fix=fix))


@functools.lru_cache(maxsize=1)
def _source() -> str:
    return kernels.source()


def _compile(nvrtc: Any, options: tuple[str, ...], result: Any) -> Any:
    program = nvrtc.createProgram(_source(), "kvstore_hvd.cu", (), ())
    try:
        try:
            with same_locale():
                nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            error.log = nvrtc.getProgramLog(program)
            raise
        return result(program)
    finally:
        nvrtc.destroyProgram(program)


@contextlib.contextmanager
def same_locale() -> Iterator[None]:
    """Restore the thread's locale: NVRTC of CUDA 11 leaves "C", in which Python reads text files as ASCII."""
    uselocale = ctypes.CDLL(None).uselocale
    uselocale.argtypes, uselocale.restype = [ctypes.c_void_p], ctypes.c_void_p
    before = uselocale(None)
    try:
        yield
    finally:
        uselocale(before)


# -- The cache on disk -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def cached(key: str, make: Callable[[], bytes], folder: str = "") -> Iterator[Path]:
    """A file with the result of `make`, of now or of an earlier start; it exists inside the context."""
    place = Path(folder or cache_folder())
    found = _find(place, key)
    if found is not None:
        yield found
        return
    content = make()
    try:
        place.mkdir(parents=True, exist_ok=True)
        path = place / f"{key}-{_digest(content)}.bin"
        _write(path, content)
    except OSError as error:
        text = "compiled kernels cannot be kept in %s (%s): every start compiles them anew"
        log.once("gpu-cache", logging.INFO, text, place, error.strerror)
        with tempfile.NamedTemporaryFile(suffix=".bin") as file:
            file.write(content)
            file.flush()
            yield Path(file.name)
        return
    yield path


def _find(place: Path, key: str) -> Path | None:
    with contextlib.suppress(OSError):
        for path in sorted(place.glob(f"{key}-*.bin")):
            if path.stem == f"{key}-{_digest(path.read_bytes())}":
                return path
            path.unlink()
    return None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _write(path: Path, content: bytes) -> None:
    number, name = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        with os.fdopen(number, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
