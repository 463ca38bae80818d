"""Our kernels on one device: compiled by NVRTC at the first use, kept on disk, loaded as a CuPy RawModule, launched.

CuPy's own compilation is not used: it adds ``-ftz=true``, which flushes denormals, and needs a device. NVRTC needs
none, so that `compile_kernels` is tested on any machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvstore_hvd import log
from kvstore_hvd.errors import KVHvdError, LaunchError, message
from kvstore_hvd.gpu import cache, kernels, shapes
from kvstore_hvd.gpu.runtime import checked, cupy, nvrtc_library
from kvstore_hvd.gpu.streams import Stream

# For devices that this NVRTC does not know: the driver compiles what it emits for the newest of these.
_VIRTUAL = (120, 100, 90, 89, 86, 80, 75, 70)
_INVALID_OPTION = 5  # NVRTC_ERROR_INVALID_OPTION


class Kernels:
    """The kernels of one device, which is current when anything is called."""

    def __init__(self, capability: tuple[int, int], multiprocessors: int, sharers: int = 1) -> None:
        self._architecture = capability[0] * 10 + capability[1]
        self._multiprocessors = multiprocessors
        self._sharers = sharers
        self._modules: dict[str, Any] = {}
        self._functions: dict[tuple[str, str], Any] = {}
        self._limits: dict[tuple[str, str], shapes.Limits] = {}

    def limits(self, name: str, dtype: str) -> shapes.Limits:
        """What bounds launches of a kernel here."""
        limits = self._limits.get((name, dtype))
        if limits is None:
            function = self._function(name, dtype)
            with checked(f"ask how many blocks of {name} fit"):
                blocks = cupy().cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(function.ptr, kernels.THREADS, 0)
            limits = shapes.Limits(self._multiprocessors, int(blocks), self._sharers)
            self._limits[name, dtype] = limits
        return limits

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
        function = self._function(name, dtype)
        with checked(f"launch {name}"):
            function(
                (blocks, players, 1), (kernels.THREADS, 1, 1), arguments, stream=stream, enable_cooperative_groups=waits
            )

    def _function(self, name: str, dtype: str) -> Any:
        function = self._functions.get((name, dtype))
        if function is None:
            module = self._modules.get(dtype)
            if module is None:
                module = self._modules[dtype] = _load(dtype, self._architecture)
            with checked(f"find the kernel {name}"):
                function = module.get_function(name).kernel
            self._functions[name, dtype] = function
        return function


def compile_kernels(dtype: str, architecture: int) -> bytes:
    """Compile the kernels of one element type; needs no GPU."""
    nvrtc = nvrtc_library()
    options = kernels.options(dtype)
    try:
        return bytes(_compile(nvrtc, (f"--gpu-architecture=sm_{architecture}", *options), nvrtc.getCUBIN))
    except nvrtc.NVRTCError as error:
        if error.status != _INVALID_OPTION:
            raise _compile_failure(error) from None
    for virtual in (known for known in _VIRTUAL if known <= architecture):
        try:
            ptx = _compile(nvrtc, (f"--gpu-architecture=compute_{virtual}", *options), nvrtc.getPTX)
            return ptx if isinstance(ptx, bytes) else ptx.encode()
        except nvrtc.NVRTCError as error:
            if error.status != _INVALID_OPTION:
                raise _compile_failure(error) from None
    version = ".".join(map(str, nvrtc.getVersion()))
    raise LaunchError(
        message(
            f"NVRTC {version} compiles nothing for a device of compute capability {architecture / 10:.1f}.",
            fix="install the extra of a newer CUDA: gpu-cu12 or gpu-cu13.",
        )
    )


def _load(dtype: str, architecture: int) -> Any:
    nvrtc, library = nvrtc_library(), cupy()
    source = _source()
    key = cache.key_of(source, kernels.options(dtype), architecture, library.__version__, nvrtc.getVersion())

    def make() -> bytes:
        log.logger.info("compiling the kernels for %s, once on this machine", dtype)
        return compile_kernels(dtype, architecture)

    with cache.stored(key, make) as path, checked("load our kernels"):
        module = library.RawModule(path=str(path))
        module.compile()
        _check_sizes(module)
    return module


def _check_sizes(module: Any) -> None:
    """Compare the layout that the compiler chose with that of our structures."""
    library = cupy()
    expected = [
        *kernels.STRUCTURES.values(),
        kernels.MAX_RANKS,
        kernels.MAX_CHANNELS,
        kernels.SLOTS,
        kernels.TILE_BYTES,
        kernels.TILE_ELEMENTS,
    ]
    told = library.zeros(len(expected), np.uint32)
    module.get_function(kernels.SIZES_KERNEL)((1,), (1,), (told,))
    found = [int(size) for size in told.get()]
    if found != expected:
        raise KVHvdError(
            message(
                f"the kernels were compiled with structures of {found} bytes, but {expected} are expected.",
                fix="reinstall kvstore_hvd: its Python files and its kernels are of different versions.",
            )
        )


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
    """Keep the thread's locale: NVRTC of CUDA 11 leaves "C", where Python takes text files for ASCII."""
    uselocale = ctypes.CDLL(None).uselocale
    uselocale.argtypes, uselocale.restype = [ctypes.c_void_p], ctypes.c_void_p
    before = uselocale(None)
    try:
        yield
    finally:
        uselocale(before)


def _compile_failure(error: Any) -> LaunchError:
    lines = str(getattr(error, "log", "") or error).strip().splitlines()
    return LaunchError(
        message("NVRTC cannot compile our kernels.", details=lines[:10], fix="report this, with the version of CuPy.")
    )
