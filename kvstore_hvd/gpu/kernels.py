"""The GPU kernels as data: sources, names and argument structures. Needs no GPU and no CuPy.

The sources are ``native/cuda``, which the package has as ``kvstore_hvd/gpu/cuda``. Every kernel but the copies takes
``(const World* worlds, Launch launch)``, the copies ``(Copy copy)``; structures are passed by value, pointers are 8
bytes. ``blockIdx.y`` chooses the world: a launch of ``(blocks, n)`` plays n ranks, all in one grid, with ``worlds``
and both tables of segments for one rank after another (equally long; a segment of 0 bytes is nothing); a launch for
one rank has ``(blocks, 1)``. Kernels that wait for other ranks need all their blocks on the device at once: launch them
cooperatively. `gpu.shapes` says how many blocks, and how much memory.

A rank's memory that others see: ``staging`` (any size), ``control`` (`CONTROL_BYTES`) and ``fifo``
(`gpu.shapes.fifo_bytes`), each aligned to 128 bytes. The control memory of all ranks is zeroed before any rank
launches; it holds every counter, so launches need nothing else. After a kernel has left a word in ``status`` the
counters of the ranks differ: wait until the streams of all ranks are empty, zero the control memory of all ranks, then
go on.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple, Optional

import numpy as np

from kvstore_hvd.native import DTYPES, OPS

#: Limits that the sources have too (``native/cuda/layout.cuh``); `SIZES_KERNEL` reports what they were compiled with.
MAX_RANKS = 16
MAX_CHANNELS = 64
SLOTS = 4
VECTOR_BYTES = 16
TILE_BYTES = 32768
TILE_ELEMENTS = 8192
#: Threads of a block, of every kernel: exactly, never fewer.
THREADS = 512

# The other type that tensors of a type can be packed as, besides their own.
_CASTS = (
    ("float32", "float16"),
    ("float64", "float16"),
    ("float16", "float32"),
    ("float16", "float64"),
    ("float32", "bfloat16"),
    ("bfloat16", "float32"),
)
# Types whose sums have kernels of their own; those of the other types choose the operation while they run.
_FAST = ("float16", "bfloat16", "float32")
# Numbers of ranks for which the two-shot sum of these types is unrolled.
_UNROLLED = (2, 4, 8)

#: A tensor, or a part of one, and its place in a fused buffer. ``count`` and ``offset`` (from the start of the buffer)
#: are bytes, for kernels that convert elements; ``first_tile`` is the sum of the tiles of the segments before it;
#: ``rank`` is read by the exchange only: whose staging memory the segment is taken from.
SEGMENT = np.dtype(
    [("pointer", "<u8"), ("offset", "<u8"), ("count", "<u8"), ("first_tile", "<u4"), ("rank", "<u4")], align=True
)
#: What stays the same from launch to launch: in device memory, one for each rank that the launch plays. ``staging``,
#: ``fifo`` and ``control`` hold the addresses of every rank's memory as this process sees them. ``abort`` is a 32-bit
#: word that the host sets to 1 to end the kernels, ``status`` one that a failing kernel writes (see `Stop`), 0 before;
#: both may be pinned host memory that the device sees.
WORLD = np.dtype(
    [
        ("rank", "<u4"),
        ("ranks", "<u4"),
        ("slot_vectors", "<u4"),
        ("padding", "<u4"),
        ("staging", "<u8", (MAX_RANKS,)),
        ("fifo", "<u8", (MAX_RANKS,)),
        ("control", "<u8", (MAX_RANKS,)),
        ("abort", "<u8"),
        ("status", "<u8"),
    ],
    align=True,
)
#: What one launch does; by value. ``bytes`` is the length of the fused buffer (two-shot, ring). ``staging_offset``,
#: a multiple of 128, is where it begins in the staging memory of all ranks, and is another one than in the launch
#: before (two halves in turn): ranks may still read what the launch before left. ``meet`` is 1 when the kernel waits
#: for the other ranks itself, 0 when the host has ordered everything with events (then see `allreduce_kernel`).
#: The scales stand twice: as float64, and rounded to float32 by the host.
LAUNCH = np.dtype(
    [
        ("inputs", "<u8"),
        ("outputs", "<u8"),
        ("bytes", "<u8"),
        ("staging_offset", "<u8"),
        ("timeout_ns", "<u8"),
        ("prescale", "<f8"),
        ("postscale", "<f8"),
        ("prescale32", "<f4"),
        ("postscale32", "<f4"),
        ("n_inputs", "<u4"),
        ("n_outputs", "<u4"),
        ("op", "<u4"),
        ("meet", "<u4"),
    ],
    align=True,
)
#: Arguments of the copies; by value. ``into_buffer``: 1 packs the segments into the buffer, 0 unpacks.
COPY = np.dtype(
    [
        ("segments", "<u8"),
        ("buffer", "<u8"),
        ("scale", "<f8"),
        ("scale32", "<f4"),
        ("n_segments", "<u4"),
        ("into_buffer", "<u4"),
        ("padding", "<u4"),
    ],
    align=True,
)
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

#: Why a kernel ended early, by code.
CAUSES = {1: "timeout", 2: "abort"}


class Stop(NamedTuple):
    """What a kernel that ended early says."""

    cause: str
    rank: int
    awaited: int
    place: str

    @classmethod
    def of(cls, word: int) -> Optional[Stop]:
        """Read a status word; None when it is 0: nothing stopped."""
        if word == 0:
            return None
        places = {1: "the start of an operation", 2: "the end of an operation", 3: "a filled slot", 4: "a free slot"}
        return cls(
            CAUSES.get(word & 0xFF, f"code {word & 0xFF}"),
            word >> 8 & 0xFF,
            word >> 16 & 0xFF,
            places.get(word >> 24, "?"),
        )


# ---- Sources ----


def source() -> str:
    """Return all kernels as one text: the headers put in, for NVRTC without a file system."""
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
    """Return the options for the compiler, apart from the architecture."""
    only = () if dtype is None else (f"-DKVHVD_ONLY={DTYPES[dtype]}",)
    # Contraction would round differently from the CPU engine.
    return ("--std=c++17", "--fmad=false", *only)


# ---- Names ----


def allreduce_kernel(algorithm: str, dtype: str, op: str, *, as_half: bool = False, ranks: int = 0) -> str:
    """Return the name of the kernel of an allreduce or a reduce-scatter."""
    if algorithm not in ("oneshot", "twoshot", "ring") or dtype not in DTYPES or op not in OPS:
        raise ValueError(f"no kernel for {algorithm!r}, {dtype!r}, {op!r}")
    summed = op in ("sum", "average")
    if as_half and summed and dtype in ("float32", "float64"):
        return f"kvhvd_{algorithm}_{dtype}_as_half"
    if dtype not in _FAST:
        return f"kvhvd_{algorithm}_{dtype}"
    if not summed:
        return f"kvhvd_{algorithm}_{dtype}_other"
    unrolled = f"_{ranks}" if algorithm == "twoshot" and ranks in _UNROLLED else ""
    return f"kvhvd_{algorithm}_{dtype}_sum{unrolled}"


def exchange_kernel() -> str:
    """Return the name of the kernel of broadcast, allgather and alltoall; the same for all types."""
    # It copies the segments ``inputs`` into this rank's staging memory, meets the other ranks, and copies each of
    # ``outputs`` from the staging memory of its ``rank``. Without ``meet`` only the latter.
    return "kvhvd_exchange"


def copy_kernel(tensor_dtype: str = "", buffer_dtype: str = "") -> str:
    """Return the name of the kernel that packs segments into a buffer, or unpacks them, with ``scale``."""
    if not tensor_dtype and not buffer_dtype:
        return "kvhvd_copy"
    if buffer_dtype not in casts(tensor_dtype):
        raise ValueError(f"no kernel packs {tensor_dtype!r} as {buffer_dtype!r}")
    return f"kvhvd_copy_{tensor_dtype}_{buffer_dtype}"


def casts(dtype: str) -> tuple[str, ...]:
    """Return the types that tensors of a type can be packed as, its own first."""
    return (dtype, *(there for here, there in _CASTS if here == dtype))


def kernel_names(dtype: Optional[str] = None) -> list[str]:
    """Return the names of all kernels that a compilation with ``options(dtype)`` has."""
    names = [SIZES_KERNEL, copy_kernel(), exchange_kernel()]
    for one in DTYPES if dtype is None else (dtype,):
        names += [copy_kernel(one, there) for there in casts(one)]
        for algorithm in ("oneshot", "twoshot", "ring"):
            found = [allreduce_kernel(algorithm, one, op) for op in OPS]
            found += [allreduce_kernel(algorithm, one, "sum", as_half=True)]
            found += [allreduce_kernel(algorithm, one, "sum", ranks=ranks) for ranks in _UNROLLED]
            names += dict.fromkeys(found)
    return names
