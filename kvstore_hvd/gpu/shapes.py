"""How much the GPU kernels are launched with: blocks, tables of segments, memory; and which of them. Needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional, Union

import numpy as np
from numpy.typing import NDArray

from kvstore_hvd.gpu.kernels import MAX_CHANNELS, SEGMENT, SLOTS, TILE_BYTES, VECTOR_BYTES

_Column = Union[Sequence[int], NDArray[Any]]


class Limits(NamedTuple):
    """What limits a launch."""

    multiprocessors: int
    blocks_per_multiprocessor: int
    sharers: int = 1

    @property
    def resident(self) -> int:
        """Blocks that one rank may have on the device at once; at least 1."""
        return max(1, self.multiprocessors * self.blocks_per_multiprocessor // max(1, self.sharers))


def segments(
    pointers: _Column,
    offsets: _Column,
    counts: _Column,
    *,
    tile: int = TILE_BYTES,
    ranks: Optional[_Column] = None,
) -> tuple[NDArray[Any], int]:
    """Make a table of segments."""
    table = np.zeros(len(pointers), SEGMENT)
    table["pointer"], table["offset"], table["count"] = pointers, offsets, counts
    tiles = -(-table["count"].astype(np.int64) // tile)
    ends = np.cumsum(tiles)
    table["first_tile"] = ends - tiles
    if ranks is not None:
        table["rank"] = ranks
    return table, int(ends[-1]) if len(ends) else 0


def fifo_bytes(channels: int, slot_vectors: int) -> int:
    """Return the bytes of a rank's FIFO memory: ``[channels][SLOTS][slot_vectors]`` vectors."""
    # ``slot_vectors`` is a multiple of 8, and like the number of channels the same on all ranks.
    return channels * SLOTS * slot_vectors * VECTOR_BYTES


def ring_channels(nbytes: int, slot_vectors: int, limits: Limits) -> int:
    """Return the number of blocks of a ring, each of which is a ring of its own (``grid.x``); the same on all ranks."""
    slots = -(-nbytes // (slot_vectors * VECTOR_BYTES))
    return max(1, min(MAX_CHANNELS, limits.resident, slots))


def direct_blocks(tiles: int, limits: Limits) -> int:
    """Return the blocks of a oneshot, twoshot or exchange that meets (``grid.x``); ranks may differ."""
    return max(1, min(limits.resident, tiles))


def copy_blocks(tiles: int, limits: Limits) -> int:
    """Return the blocks of a copy, or of a kernel that does not meet (``grid.x``)."""
    return max(1, min(tiles, limits.multiprocessors * limits.blocks_per_multiprocessor))


def choose(ranks: int, nbytes: int, staging_bytes: int) -> str:
    """Return the algorithm of an allreduce that is expected to be fastest; the same on all ranks."""
    if nbytes > staging_bytes:
        return "ring"
    # A one-shot reads the buffer of every rank, a two-shot a part of each, after a second meeting that costs about as
    # much as the transfer of this many bytes.
    return "oneshot" if nbytes * ranks <= 1 << 20 else "twoshot"
