"""The GPU kernels as data: sources, names, argument structures and launch sizes. Needs no GPU and no CuPy.

The sources are ``native/cuda``, installed as ``kvstore_hvd/gpu/cuda``. Copies take ``(Copy copy)``, all other kernels
``(const World* worlds, Launch launch)``; structures are passed by value, pointers have 8 bytes. ``blockIdx.y`` chooses
the world: a launch of ``(blocks, 1)`` is one rank; a launch of ``(blocks, n)`` is n ranks, with ``worlds`` and both
tables of segments for one rank after another (equally long; a segment of 0 bytes does nothing). Kernels that wait for
other ranks need all their blocks on the device at once, which a cooperative launch ensures.

Other ranks see three memories of a rank, each aligned to 128 bytes: ``staging`` (any size), ``control``
(`CONTROL_BYTES`) and ``fifo`` (`fifo_bytes`). The control memory holds all counters. It is zeroed on all ranks before
the first launch of any rank. After a kernel has written a word to ``status`` the counters of the ranks differ: wait for
the streams of all ranks, zero the control memory of all ranks, then launch again.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np

from kvstore_hvd.native import DTYPES, OPS

#: Limits that ``native/cuda/layout.cuh`` has too; `SIZES_KERNEL` reports those of the compiled kernels.
MAX_RANKS = 16
MAX_CHANNELS = 64
SLOTS = 4
VECTOR_BYTES = 16
TILE_BYTES = 32768
TILE_ELEMENTS = 8192
#: Threads of a block, for every kernel.
THREADS = 512

# Other types than its own that tensors of a type can be packed as.
_CASTS = {
    "float16": ("float32", "float64"),
    "bfloat16": ("float32",),
    "float32": ("float16", "bfloat16"),
    "float64": ("float16",),
}
# Types with a kernel for sums alone; a kernel of another type reads the operation from the launch.
_FAST = ("float16", "bfloat16", "float32")
# Numbers of ranks for which the two-shot sum of these types is unrolled.
_UNROLLED = (2, 4, 8)


def _structure(fields: str) -> Any:
    """A structure as C has it, of fields ``name:type``."""
    return np.dtype([(name, kind) for name, kind in (field.split(":") for field in fields.split())], align=True)


#: A tensor, or a part of one, and its place in a fused buffer. ``count`` and ``offset`` (from the start of the buffer)
#: are bytes, or elements for kernels that convert; ``first_tile`` is the number of tiles of the segments before it; the
#: exchange copies from the staging memory of ``rank``.
SEGMENT = _structure("pointer:u8 offset:u8 count:u8 first_tile:u4 rank:u4")
#: One rank's constants of all launches, in device memory. ``staging``, ``fifo`` and ``control`` hold the addresses of
#: every rank's memory in this process. ``abort`` points to a 32-bit word that the host sets to 1 to end the kernels,
#: ``status`` to one that is 0 until a failing kernel writes it (see `Stop`); both may be pinned host memory.
WORLD = _structure(
    f"rank:u4 ranks:u4 slot_vectors:u4 padding:u4 staging:{MAX_RANKS}u8 fifo:{MAX_RANKS}u8 control:{MAX_RANKS}u8 "
    "abort:u8 status:u8"
)
#: Arguments of one launch; by value. ``bytes`` is the length of the fused buffer (two-shot, ring). ``staging_offset``,
#: a multiple of 128, is the buffer's place in the staging memory of all ranks; it alternates between two halves, since
#: ranks may still read the half of the launch before. ``meet`` is 1 when the kernel waits for the other ranks itself, 0
#: when the host has ordered all work with events. The scales are float64 and, rounded by the host, float32.
LAUNCH = _structure(
    "inputs:u8 outputs:u8 bytes:u8 staging_offset:u8 timeout_ns:u8 prescale:f8 postscale:f8 prescale32:f4 "
    "postscale32:f4 n_inputs:u4 n_outputs:u4 op:u4 meet:u4"
)
#: Arguments of the copies; by value. ``into_buffer``: 1 packs the segments into the buffer, 0 unpacks.
COPY = _structure("segments:u8 buffer:u8 scale:f8 scale32:f4 n_segments:u4 into_buffer:u4 padding:u4")
#: Of one rank: lines of 128 bytes for three counters of every channel, the ranks' flags and four words.
CONTROL_BYTES = 128 * (3 * MAX_CHANNELS + MAX_RANKS + 4)
#: ``kvhvd_sizes(unsigned* out)`` writes the sizes of these, in this order, in bytes, then `MAX_RANKS`, `MAX_CHANNELS`,
#: `SLOTS`, `TILE_BYTES`, `TILE_ELEMENTS`.
SIZES_KERNEL = "kvhvd_sizes"
STRUCTURES = {
    "Segment": SEGMENT.itemsize,
    "World": WORLD.itemsize,
    "Launch": LAUNCH.itemsize,
    "Copy": COPY.itemsize,
    "Control": CONTROL_BYTES,
}
#: The kernel of broadcast, allgather and alltoall, for all types. It copies the segments ``inputs`` into this rank's
#: staging memory, meets the other ranks, and copies each of ``outputs`` from the staging memory of its ``rank``.
#: Without ``meet`` it does the last step only.
EXCHANGE_KERNEL = "kvhvd_exchange"


class Stop(NamedTuple):
    """Why a kernel ended early: which rank stopped waiting for which, and where."""

    cause: str
    rank: int
    awaited: int
    place: str

    @classmethod
    def of(cls, word: int) -> Optional[Stop]:
        """Read a status word; None if no kernel ended early."""
        if word == 0:
            return None
        cause = {1: "timeout", 2: "abort"}.get(word & 0xFF, f"code {word & 0xFF}")
        places = {1: "the start of an operation", 2: "the end of an operation", 3: "a filled slot", 4: "a free slot"}
        return cls(cause, word >> 8 & 0xFF, word >> 16 & 0xFF, places.get(word >> 24, "?"))


# -- Sources and names -------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def source() -> str:
    """All kernels as one text for NVRTC, which reads no headers."""
    folder = Path(__file__).with_name("cuda")
    seen: set[str] = set()

    def lines_of(name: str) -> str:
        seen.add(name)
        text = [f'#line 1 "{name}"']
        for number, line in enumerate((folder / name).read_text().splitlines(), 1):
            included = re.match(r'\s*#include "(\w+\.cuh)"', line)
            if not included:
                if line.strip() != "#pragma once":
                    text.append(line)
            elif included[1] not in seen:
                text += [lines_of(included[1]), f'#line {number + 1} "{name}"']
        return "\n".join(text)

    return lines_of("kernels.cu") + "\n"


def options(dtype: Optional[str] = None) -> tuple[str, ...]:
    """The options for the compiler, apart from the architecture."""
    only = () if dtype is None else (f"-DKVHVD_ONLY={DTYPES[dtype]}",)
    # Contraction would round differently from the CPU engine.
    return ("--std=c++17", "--fmad=false", *only)


def packed_dtype(dtype: str, op: str, as_half: bool) -> str:
    """The type in which elements are added: float16 for ``as_half``."""
    return "float16" if as_half and op in ("sum", "average") and dtype in ("float32", "float64") else dtype


def allreduce_kernel(algorithm: str, dtype: str, op: str, *, as_half: bool = False, ranks: int = 0) -> str:
    """The name of the kernel of an allreduce or a reduce-scatter."""
    if packed_dtype(dtype, op, as_half) != dtype:
        return f"kvhvd_{algorithm}_{dtype}_as_half"
    if dtype not in _FAST:
        return f"kvhvd_{algorithm}_{dtype}"
    if op not in ("sum", "average"):
        return f"kvhvd_{algorithm}_{dtype}_other"
    unrolled = f"_{ranks}" if algorithm == "twoshot" and ranks in _UNROLLED else ""
    return f"kvhvd_{algorithm}_{dtype}_sum{unrolled}"


def copy_kernel(tensor_dtype: str = "", buffer_dtype: str = "") -> str:
    """The name of the kernel that packs or unpacks segments with ``scale``; by default bytewise."""
    return f"kvhvd_copy_{tensor_dtype}_{buffer_dtype}" if tensor_dtype else "kvhvd_copy"


def casts(dtype: str) -> tuple[str, ...]:
    """The types that tensors of a type can be packed as, its own first."""
    return (dtype, *_CASTS.get(dtype, ()))


def kernel_names(dtype: Optional[str] = None) -> list[str]:
    """The names of all kernels of a compilation with ``options(dtype)``."""
    names = [SIZES_KERNEL, copy_kernel(), EXCHANGE_KERNEL]
    for one in DTYPES if dtype is None else (dtype,):
        names += [copy_kernel(one, there) for there in casts(one)]
        for algorithm in ("oneshot", "twoshot", "ring"):
            names += [allreduce_kernel(algorithm, one, op) for op in OPS]
            names += [allreduce_kernel(algorithm, one, "sum", as_half=True)]
            names += [allreduce_kernel(algorithm, one, "sum", ranks=ranks) for ranks in _UNROLLED]
    return list(dict.fromkeys(names))


# -- Sizes of launches -------------------------------------------------------------------------------------------------


class Limits(NamedTuple):
    """What limits the blocks of a launch."""

    multiprocessors: int
    blocks_per_multiprocessor: int
    sharers: int = 1  # ranks on the device

    def blocks(self, most: int, meet: bool = True) -> int:
        """The blocks of a launch (``grid.x``), all on the device at once: with those of all sharers if ranks `meet`."""
        resident = self.multiprocessors * self.blocks_per_multiprocessor // (self.sharers if meet else 1)
        return max(1, min(most, resident))


class Segment(NamedTuple):
    """A part of a tensor and its place in a buffer, in bytes (elements where a copy converts them)."""

    pointer: int
    offset: int
    size: int
    rank: int = 0  # exchange: the rank of the buffer


def table(segments: Sequence[Segment], tile: int, size_unit: int = 1, offset_unit: int = 1) -> tuple[Any, int]:
    """A table of `SEGMENT`, and its number of tiles."""
    pointers, offsets, sizes, ranks = np.array(segments, np.int64).reshape(-1, 4).T
    made = np.zeros(len(segments), SEGMENT)
    made["pointer"], made["offset"], made["count"] = pointers, offsets // offset_unit, sizes * size_unit
    made["rank"] = ranks
    tiles = -(-sizes * size_unit // tile)
    ends = np.cumsum(tiles)
    made["first_tile"] = ends - tiles
    return made, int(tiles.sum())


def fifo_bytes(slot_vectors: int) -> int:
    """Bytes of a rank's FIFO memory: ``[MAX_CHANNELS][SLOTS][slot_vectors]`` vectors."""
    # ``slot_vectors`` is a multiple of 8, and the same on all ranks.
    return MAX_CHANNELS * SLOTS * slot_vectors * VECTOR_BYTES


def ring_channels(nbytes: int, slot_vectors: int, limits: Limits) -> int:
    """The blocks of a ring (``grid.x``), each a ring of its own; the same number on all ranks."""
    return limits.blocks(min(MAX_CHANNELS, -(-nbytes // (slot_vectors * VECTOR_BYTES))))
