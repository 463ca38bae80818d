"""Our kernels on one device: compiled by NVRTC at the first use, cached on disk, and launched on one stream.

A launch reads tables of segments, which the host writes to pinned memory and copies to the device. The tables of the
last launches stay in slots that are reused in turn, each behind an event.

NVRTC is called without CuPy, which would add ``-ftz=true``, which flushes denormals, and needs a device.

The cache serves many workers that start at once, on a file system that several machines may share. A file is written
under a temporary name and then renamed, and its name ends with a digest of its content. Kernels whose file cannot be
read or written are compiled again.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvstore_hvd import errors, log
from kvstore_hvd.base import files
from kvstore_hvd.base.cores import Deadline
from kvstore_hvd.config import cache_folder
from kvstore_hvd.errors import KVHvdError, LaunchError, TransportError, message
from kvstore_hvd.gpu import kernels
from kvstore_hvd.gpu.kernels import Segment
from kvstore_hvd.gpu.runtime import checked, close_all, cupy, nvrtc_library
from kvstore_hvd.gpu.streams import DeviceMemory, Event, PinnedMemory, Stream
from kvstore_hvd.native import ITEM_BYTES, OPS, DeviceOperation

# Architectures for PTX, newest first: a driver compiles it for a device that this NVRTC does not know.
_VIRTUAL = (120, 100, 90, 89, 86, 80, 75, 70)
_INVALID_OPTION = 5  # NVRTC_ERROR_INVALID_OPTION
# Places of the two words that host and kernels share, and bytes of their memory.
_ABORT, _STATUS, _WORDS_BYTES = 0, 64, 128
#: Seconds that the host waits longer than the kernels.
GRACE_S = 5.0
# Seconds between two queries of an event.
_PAUSE_S = 0.00002
# Number and bytes of the structures `kernels.WORLD` of a launcher: one for each power of 2 up to the staging memory.
_WORLDS, _WORLD_BYTES = 64, 1024
#: Segments that the tables of one launch may have together.
ENTRIES = 4096
# Launches whose tables are kept.
_SLOTS = 16
_SLOT_BYTES = ENTRIES * kernels.SEGMENT.itemsize


class Launcher:
    """Launches on one stream of the device that is current."""

    def __init__(self, modules: Kernels, stream: Stream, timeout_s: float, is_shared: bool = False) -> None:
        self.stream, self._modules = stream, modules
        self._timeout_s, self._is_shared = timeout_s, is_shared
        self._words_memory = PinnedMemory(_WORDS_BYTES)
        self._words = self._words_memory.view(np.uint32)
        self._words[:] = 0
        self._worlds = DeviceMemory(_WORLDS * _WORLD_BYTES)
        self._n_worlds = 0
        self._lock = threading.Lock()  # protects _words: other threads call abort
        self._device_tables, self._host_tables = DeviceMemory(_SLOTS * _SLOT_BYTES), PinnedMemory(_SLOTS * _SLOT_BYTES)
        self._tables = self._host_tables.view()
        self._events = [Event() for _ in range(_SLOTS)]
        self._slot = 0

    # -- Launches ------------------------------------------------------------------------------------------------------

    def world(
        self,
        rank: int,
        staging: Sequence[int],
        control: Sequence[int] = (),
        fifo: Sequence[int] = (),
        slot_vectors: int = 0,
    ) -> int:
        """Put every rank's addresses on the device, for `collective`; returns the address there."""
        table = np.zeros(1, kernels.WORLD)
        table["rank"], table["ranks"], table["slot_vectors"] = rank, len(staging), slot_vectors
        for field, addresses in (("staging", staging), ("control", control), ("fifo", fifo)):
            table[field][0, : len(addresses)] = addresses
        table["abort"] = self._words_memory.address + _ABORT
        table["status"] = self._words_memory.address + _STATUS
        place = self._worlds.address + self._n_worlds * _WORLD_BYTES
        self._n_worlds += 1
        source = PinnedMemory(table.nbytes)
        source.view()[:] = table.view(np.uint8)
        self.stream.copy(place, source.address, table.nbytes)
        copied = Event().record(self.stream)
        self.wait(copied)
        close_all(copied.close, source.close)
        return place

    def copy(
        self,
        segments: Sequence[Segment],
        buffer: int,
        into_buffer: bool,
        dtype: str,
        buffer_dtype: str = "",
        scale: float = 1.0,
    ) -> None:
        """Pack segments into a buffer, or unpack them."""
        if not segments:
            return
        buffer_dtype = buffer_dtype or dtype
        if buffer_dtype == dtype and scale == 1.0:
            name = kernels.copy_kernel()
            table, tiles = kernels.table(segments, kernels.TILE_BYTES, size_unit=ITEM_BYTES[dtype])
        else:
            # These kernels count elements in the buffer, too.
            name = kernels.copy_kernel(dtype, buffer_dtype)
            table, tiles = kernels.table(segments, kernels.TILE_ELEMENTS, offset_unit=ITEM_BYTES[buffer_dtype])
        (address,) = self._put([table])
        arguments = np.zeros(1, kernels.COPY)
        arguments["segments"], arguments["buffer"], arguments["n_segments"] = address, buffer, len(table)
        arguments["scale"] = arguments["scale32"] = scale
        arguments["into_buffer"] = into_buffer
        blocks = self._modules.limits(name, dtype).blocks(tiles, meet=False)
        self._launch(name, dtype, blocks, (arguments,))

    def collective(
        self,
        name: str,
        world: int,
        operation: DeviceOperation,
        inputs: Sequence[Segment],
        outputs: Sequence[Segment],
        nbytes: int,
        staging_offset: int = 0,
        meet: bool = True,
        blocks: int = 0,
    ) -> None:
        """Launch a kernel of an allreduce or an exchange with the dtype, op and scales of an operation."""
        tables, tiles = zip(*(kernels.table(segments, kernels.TILE_BYTES) for segments in (inputs, outputs)))
        launch = np.zeros(1, kernels.LAUNCH)
        launch["inputs"], launch["outputs"] = self._put(tables)
        launch["n_inputs"], launch["n_outputs"] = len(inputs), len(outputs)
        launch["bytes"], launch["staging_offset"] = nbytes, staging_offset
        launch["timeout_ns"] = int(self._timeout_s * 1e9)
        launch["prescale"] = launch["prescale32"] = operation.prescale
        launch["postscale"] = launch["postscale32"] = operation.postscale
        launch["op"], launch["meet"] = OPS[operation.op], meet
        if not blocks:
            fused = -(-nbytes // kernels.TILE_BYTES)
            blocks = self._modules.limits(name, operation.dtype).blocks(max(*tiles, fused), meet)
        self._launch(name, operation.dtype, blocks, (np.uint64(world), launch), waits=meet and not self._is_shared)

    def _put(self, tables: Sequence[Any]) -> list[int]:
        """Enqueue copies of tables for the next launch; their addresses on the device, 0 for an empty one."""
        if sum(map(len, tables)) > ENTRIES:
            raise ValueError(f"{sum(map(len, tables))} segments in one launch; at most {ENTRIES} have room")
        # This waits when the device is many launches behind.
        self.wait(self._events[self._slot])
        start = end = self._slot * _SLOT_BYTES
        addresses = []
        for table in tables:
            addresses.append(self._device_tables.address + end if len(table) else 0)
            self._tables[end : end + table.nbytes] = table.view(np.uint8)
            end += table.nbytes
        self.stream.copy(self._device_tables.address + start, self._host_tables.address + start, end - start)
        return addresses

    def _launch(self, name: str, dtype: str, blocks: int, arguments: tuple[Any, ...], waits: bool = False) -> None:
        """Launch a kernel that reads the tables of the last `_put`."""
        self._modules.launch(name, dtype, blocks, arguments, self.stream, waits)
        self._events[self._slot].record(self.stream)
        self._slot = (self._slot + 1) % _SLOTS

    # -- Ends of launches ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise why a kernel has ended early, on this rank or another."""
        stop = kernels.Stop.of(int(self._words[_STATUS // 4]))
        if stop is None:
            return
        if stop.cause == "timeout":
            fact = f"rank {stop.rank} waited {self._timeout_s:g} s for rank {stop.awaited}'s GPU ({stop.place})."
            fix = "see whether that rank, or its GPU, is stuck; KVHVD_TIMEOUT sets the limit."
            raise errors.TimeoutError(message(fact, fix=fix))
        raise TransportError(message(f"the GPUs' kernels were ended by rank {stop.rank} ({stop.cause})."))

    def wait(self, event: Event, check: Callable[[], object] | None = None) -> None:
        """Wait for an event of this stream, at most as long as kernels may wait."""
        deadline = Deadline(self._timeout_s + GRACE_S)
        while not event.done():
            self.check()
            if check is not None:
                check()
            if deadline.left() < 0:
                fact = f"the GPU has not finished its operations within {self._timeout_s:g} s."
                fix = "see whether a kernel of the program itself is stuck; KVHVD_TIMEOUT sets the limit."
                raise errors.TimeoutError(message(fact, fix=fix))
            time.sleep(_PAUSE_S)

    def abort(self) -> None:
        """End the kernels that wait, on every rank; from any thread, any number of times."""
        with self._lock:
            if self._words is not None:
                self._words[_ABORT // 4] = 1

    def close(self) -> None:
        """Free everything but the stream, whose work is done."""
        with self._lock:
            self._words = None
        self._tables = None
        memories = self._host_tables, self._device_tables, self._worlds, self._words_memory
        close_all(*(event.close for event in self._events), *(memory.close for memory in memories))


# -- Kernels, and their cache on disk ----------------------------------------------------------------------------------


class Kernels:
    """The kernels of one device, which every caller has made current."""

    def __init__(self, capability: tuple[int, int], multiprocessors: int, sharers: int = 1) -> None:
        self._architecture = capability[0] * 10 + capability[1]
        self._multiprocessors, self._sharers = multiprocessors, sharers
        self._modules: dict[str, Any] = {}
        self._loaded: dict[tuple[str, str], tuple[Any, kernels.Limits]] = {}

    def limits(self, name: str, dtype: str) -> kernels.Limits:
        """What limits the blocks of a kernel here."""
        return self._load(name, dtype)[1]

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
        grid, threads = (blocks, players, 1), (kernels.THREADS, 1, 1)
        function, _ = self._load(name, dtype)
        with checked(f"launch {name}"):
            function(grid, threads, arguments, stream=stream, enable_cooperative_groups=waits)

    def _load(self, name: str, dtype: str) -> tuple[Any, kernels.Limits]:
        if (name, dtype) not in self._loaded:
            if dtype not in self._modules:
                self._modules[dtype] = _load(dtype, self._architecture)
            with checked(f"find the kernel {name}"):
                function = self._modules[dtype].get_function(name).kernel
            with checked(f"ask how many blocks of {name} fit"):
                blocks = cupy().cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor(function.ptr, kernels.THREADS, 0)
            limits = kernels.Limits(self._multiprocessors, int(blocks), self._sharers)
            self._loaded[name, dtype] = function, limits
        return self._loaded[name, dtype]


def compile_kernels(dtype: str, architecture: int) -> bytes:
    """Compile the kernels of one element type: a CUBIN, or PTX for an architecture that this NVRTC does not know."""
    nvrtc = nvrtc_library()
    virtual = (f"compute_{known}" for known in _VIRTUAL if known <= architecture)
    for target in (f"sm_{architecture}", *virtual):
        program = nvrtc.createProgram(kernels.source(), "kvstore_hvd.cu", (), ())
        try:
            with same_locale():
                nvrtc.compileProgram(program, (f"--gpu-architecture={target}", *kernels.options(dtype)))
            made = (nvrtc.getCUBIN if target.startswith("sm_") else nvrtc.getPTX)(program)
            return made.encode() if isinstance(made, str) else bytes(made)
        except nvrtc.NVRTCError as error:
            if error.status != _INVALID_OPTION:
                lines = str(nvrtc.getProgramLog(program) or error).strip().splitlines()
                fact, fix = "NVRTC cannot compile our kernels.", "report this, with the version of CuPy."
                raise LaunchError(message(fact, details=lines[:10], fix=fix)) from None
        finally:
            nvrtc.destroyProgram(program)
    version = ".".join(map(str, nvrtc.getVersion()))
    fact = f"NVRTC {version} compiles nothing for a device of compute capability {architecture / 10:.1f}."
    raise LaunchError(message(fact, fix="install the extra of a newer CUDA: gpu-cu12 or gpu-cu13."))


def _load(dtype: str, architecture: int) -> Any:
    nvrtc, library = nvrtc_library(), cupy()
    parts = kernels.source(), kernels.options(dtype), architecture, library.__version__, nvrtc.getVersion()
    key = _digest("\0".join(map(str, parts)).encode())

    def make() -> bytes:
        log.logger.info("compiling the kernels for %s, once on this machine", dtype)
        return compile_kernels(dtype, architecture)

    # The layout that the compiler chose must be that of our structures.
    limits = kernels.MAX_RANKS, kernels.MAX_CHANNELS, kernels.SLOTS, kernels.TILE_BYTES, kernels.TILE_ELEMENTS
    expected = [*kernels.STRUCTURES.values(), *limits]
    with cached(key, make) as path, checked("load our kernels"):
        module = library.RawModule(path=str(path))
        module.compile()
        sizes = library.zeros(len(expected), np.uint32)
        module.get_function(kernels.SIZES_KERNEL)((1,), (1,), (sizes,))
        found = [int(size) for size in sizes.get()]
    if found != expected:
        fact = f"the kernels were compiled with structures of {found} bytes, but {expected} are expected."
        fix = "reinstall kvstore_hvd: its Python files and its kernels are of different versions."
        raise KVHvdError(message(fact, fix=fix))
    return module


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
        files.replace(str(path), content)
    except OSError as error:
        text = "compiled kernels cannot be kept in %s (%s): every start compiles them anew"
        log.once("gpu-cache", logging.INFO, text, place, error.strerror)
        with tempfile.NamedTemporaryFile(suffix=".bin") as other:
            other.write(content)
            other.flush()
            yield Path(other.name)
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
