"""A stand-in for CuPy, for tests on machines without a GPU: memory of the host, streams that are threads.

Only the calls that this package makes exist, with CUDA's own order: what is enqueued on a stream runs later, one after
another, and copies and kernels of different streams overlap. Kernels are the real ones, which g++ compiles for this
machine: see `host_kernels`. Every call of the runtime is recorded. Several ranks are threads of the test, each with a
current device of its own.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore_hvd.gpu import kernels, runtime
from support.gpu_claims import OnGPU

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which(os.environ.get("CXX", "g++"))

# Carries a kernel out: its name, arguments and grid; inside of `host_kernels` only.
run_kernel: Callable[[str, list[Any], tuple[int, ...]], None] | None = None
NOT_READY = 600
_GARBAGE = 0xA5  # in fresh memory


class CUDARuntimeError(RuntimeError):
    """As CuPy's: only its module tells whose it is."""

    __module__ = "cupy_backends.cuda.api.runtime"


@dataclass(frozen=True)
class FakeDevice:
    uuid: bytes
    name: str = "Fake GPU"
    capability: tuple[int, int] = (9, 0)
    multiprocessors: int = 4


@dataclass
class FakeCuda:
    devices: list[FakeDevice] = field(default_factory=lambda: [FakeDevice(bytes([n]) * 16) for n in range(8)])
    peers: Callable[[int, int], bool] = lambda a, b: True
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    failures: dict[str, Exception] = field(default_factory=dict)
    memory: dict[int, Any] = field(default_factory=dict)
    streams: dict[int, _Stream] = field(default_factory=dict)
    events: dict[int, tuple[int, threading.Event]] = field(default_factory=dict)  # with their devices
    places: dict[int, int] = field(default_factory=dict)  # the devices of addresses, where not the current one
    _default: dict[tuple[int, int], _Stream] = field(default_factory=dict)
    fresh: Callable[[], int] = field(default_factory=lambda: itertools.count(1001).__next__)  # an address
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _thread: threading.local = field(default_factory=threading.local)

    def called(self, name: str, *arguments: Any) -> None:
        with self._lock:
            self.calls.append((name, *arguments))
        if name in self.failures:
            raise self.failures[name]

    def stream_at(self, address: int) -> _Stream:
        with self._lock:
            if address not in (0, 1, 2):
                return self.streams[address]
            place = self.current, address
            if place not in self._default:
                self._default[place] = _Stream(self.current)
            return self._default[place]

    @property
    def current(self) -> int:
        return getattr(self._thread, "device", 0)

    def set_device(self, number: int) -> None:
        self.called("setDevice", number)
        self._thread.device = number

    def allocate(self, name: str, nbytes: int) -> int:
        self.called(name, nbytes)
        # Aligned as CUDA's is.
        raw = np.full(nbytes + 512, _GARBAGE, np.uint8)
        address = -(-raw.ctypes.data // 512) * 512
        with self._lock:
            self.memory[address] = raw
        return address

    def free(self, address: int) -> None:
        self.called("free", address)
        with self._lock:
            del self.memory[address]


class _Stream:
    def __init__(self, device: int) -> None:
        self.device = device
        self._queue: queue.Queue[Callable[[], object] | None] = queue.Queue()
        self.push, self.synchronize = self._queue.put, self._queue.join
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            run = self._queue.get()
            try:
                if run is None:
                    return
                run()
            finally:
                self._queue.task_done()


class _Runtime(SimpleNamespace):
    eventDisableTiming = 2  # noqa: N815 - CUDA's names
    streamNonBlocking = 1  # noqa: N815
    memcpyDefault = 4  # noqa: N815
    hostAllocPortable = 1  # noqa: N815
    cudaIpcMemLazyEnablePeerAccess = 1  # noqa: N815
    is_hip = False

    def __init__(self, cuda: FakeCuda) -> None:
        def told(name: str, answer: Callable[..., Any] = lambda *arguments: None) -> Callable[..., Any]:
            def call(*arguments: Any) -> Any:
                cuda.called(name, *arguments)
                return answer(*arguments)

            return call

        super().__init__(
            getDeviceCount=told("getDeviceCount", lambda: len(cuda.devices)),
            getDevice=lambda: cuda.current,
            setDevice=cuda.set_device,
            deviceSynchronize=told("deviceSynchronize"),
            malloc=lambda nbytes: cuda.allocate("malloc", nbytes),
            free=cuda.free,
            hostAlloc=lambda nbytes, flags: cuda.allocate("hostAlloc", nbytes),
            freeHost=cuda.free,
            memset=ctypes.memset,
            ipcOpenMemHandle=told("ipcOpenMemHandle", lambda handle, flags: int.from_bytes(handle, "little")),
            ipcCloseMemHandle=told("ipcCloseMemHandle"),
            streamSynchronize=told("streamSynchronize", lambda stream: cuda.stream_at(stream).synchronize()),
            streamDestroy=lambda stream: cuda.streams.pop(stream).push(None),
            eventDestroy=cuda.events.pop,
            eventQuery=lambda address: 0 if cuda.events[address][1].is_set() else NOT_READY,
            pointerGetAttributes=told(
                "pointerGetAttributes", lambda address: SimpleNamespace(device=cuda.places.get(address, cuda.current))
            ),
        )
        self._cuda = cuda

    def deviceCanAccessPeer(self, own: int, other: int) -> bool:
        return self._cuda.peers(own, other)

    def getDeviceProperties(self, number: int) -> dict[str, Any]:
        device = self._cuda.devices[number]
        major, minor = device.capability
        name, count = device.name.encode(), device.multiprocessors
        return {"name": name, "major": major, "minor": minor, "multiProcessorCount": count}

    def memcpyAsync(self, target: int, source: int, nbytes: int, kind: int, stream: int) -> None:
        self._cuda.called("memcpyAsync", target, source, nbytes, stream)
        assert kind == self.memcpyDefault
        self._cuda.stream_at(stream).push(lambda: ctypes.memmove(target, source, nbytes))

    def ipcGetMemHandle(self, address: int) -> bytes:
        self._cuda.called("ipcGetMemHandle", address)
        assert address in self._cuda.memory, "only whole allocations are shared"
        return address.to_bytes(64, "little")

    def eventCreateWithFlags(self, flags: int) -> int:
        address, done = self._cuda.fresh(), threading.Event()
        done.set()
        self._cuda.events[address] = self._cuda.current, done
        return address

    def eventRecord(self, address: int, stream: int) -> None:
        device, done = self._cuda.events[address][0], threading.Event()
        assert self._cuda.stream_at(stream).device == device, "an event of another device than the stream's"
        self._cuda.events[address] = device, done
        self._cuda.stream_at(stream).push(done.set)

    def streamCreateWithPriority(self, flags: int, priority: int) -> int:
        self._cuda.called("streamCreateWithPriority", flags, priority)
        address = self._cuda.fresh()
        self._cuda.streams[address] = _Stream(self._cuda.current)
        return address


class _Function:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self._cuda, self.name, self.ptr = cuda, name, cuda.fresh()

    def __call__(
        self, grid: Any, block: Any, arguments: Any, stream: Any = None, enable_cooperative_groups: bool = False
    ) -> None:
        self._cuda.called("launch", self.name, grid, enable_cooperative_groups)
        assert self._cuda.stream_at(stream.ptr).device == self._cuda.current, "a stream of another device"
        copies = [np.array(argument) for argument in arguments]  # by value: read now
        run = run_kernel
        assert run is not None, f"{self.name} is launched outside of host_kernels"
        self._cuda.stream_at(stream.ptr).push(lambda: run(self.name, copies, grid))


class _RawKernel:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.kernel = _Function(cuda, name)

    def __call__(self, grid: Any, block: Any, arguments: Any) -> None:
        assert self.kernel.name == "kvhvd_sizes"
        limits = kernels.MAX_RANKS, kernels.MAX_CHANNELS, kernels.SLOTS, kernels.TILE_BYTES, kernels.TILE_ELEMENTS
        arguments[0].array[:] = [*kernels.STRUCTURES.values(), *limits]


def _module(cuda: FakeCuda) -> Any:
    module: Any = ModuleType("cupy")
    module.__version__ = "14.2.0"

    class RawModule:
        def __init__(self, *, path: str) -> None:
            with open(path, "rb") as file:
                self.content = file.read()

        def compile(self) -> None:
            cuda.called("load", self.content)

        def get_function(self, name: str) -> _RawKernel:
            return _RawKernel(cuda, name)

    def zeros(shape: int, dtype: Any) -> Any:
        array = np.zeros(shape, dtype)
        return SimpleNamespace(array=array, get=lambda: array)

    module.RawModule, module.zeros = RawModule, zeros
    module.empty = lambda shape, dtype: OnGPU(np.empty(shape, dtype))
    nvrtc = SimpleNamespace(  # whose programs are what was asked for
        getVersion=lambda: (12, 9),
        createProgram=lambda source, name, headers, names: [],
        compileProgram=lambda program, options: program.extend(options),
        getCUBIN=lambda program: b"cubin " + " ".join(program).encode(),
        getPTX=lambda program: b"ptx " + " ".join(program).encode(),
        destroyProgram=lambda program: program.clear(),
    )
    driver = SimpleNamespace(
        occupancyMaxActiveBlocksPerMultiprocessor=lambda pointer, threads, shared: 2,
        funcGetAttribute=lambda attribute, pointer: 0,
    )
    module.cuda = SimpleNamespace(runtime=_Runtime(cuda), nvrtc=nvrtc, driver=driver)
    return module


@contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """Let the package find this CUDA instead of the machine's, inside; and a folder for what it compiles."""
    machine = FakeCuda()
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setenv("XDG_CACHE_HOME", folder)
        patch.setitem(sys.modules, "cupy", _module(machine))
        runtime.cupy.cache_clear()
        patch.setattr(runtime, "driver_version", lambda: 13000)
        patch.setattr(runtime, "device_uuid", lambda ordinal: machine.devices[ordinal].uuid.hex())
        yield machine
        for stream in (*machine.streams.values(), *machine._default.values()):
            stream.push(None)
        runtime.cupy.cache_clear()


@functools.cache
def _library() -> Any:
    """The kernels, compiled once for each state of their sources."""
    source = ROOT / "tests" / "support" / "host_kernels.cpp"
    folders = [ROOT / each for each in ("native/cuda", "native", "tests/native/cuda")]
    files = sorted({source, *(file for folder in folders for file in folder.rglob("*.[ch][pu]*"))})
    digest = hashlib.sha256(b"".join(map(Path.read_bytes, files))).hexdigest()
    path = ROOT / "build" / f"kernels-{digest[:16]}.so"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        flags = ["-std=c++17", "-O0", "-ffp-contract=off", "-fPIC", "-shared", "-pthread"]
        includes, made = [f"-I{folder}" for folder in folders], f"{path}.{os.getpid()}"
        subprocess.run([str(COMPILER), *flags, *includes, "-o", made, str(source)], check=True)
        os.replace(made, path)
    library = ctypes.CDLL(str(path))
    library.run_kernel.argtypes = [ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p]
    return library


@contextmanager
def host_kernels() -> Iterator[None]:
    """Let the stand-in launch the real kernels inside."""
    library = _library()

    def run(name: str, arguments: list[Any], grid: tuple[int, ...]) -> None:
        world = int(arguments[0]) if len(arguments) == 2 else None
        library.run_kernel(ctypes.cast(library[name], ctypes.c_void_p), *grid[:2], world, arguments[-1].ctypes.data)

    # Tiles are small there, so that small arrays have many.
    sizes = (ctypes.c_uint * 2)()
    library.constants(ctypes.byref(sizes, 0), ctypes.byref(sizes, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "TILE_BYTES", sizes[0])
        patch.setattr(kernels, "TILE_ELEMENTS", sizes[1])
        patch.setattr(sys.modules[__name__], "run_kernel", run)
        yield
