"""How much the GPU kernels are launched with: blocks, tables of segments, memory; and which of them. Needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import numpy as np
from numpy.typing import NDArray

from kvstore_hvd.gpu.kernels import MAX_CHANNELS, SEGMENT, SLOTS, TILE_BYTES, VECTOR_BYTES

__all__ = ["Limits", "choose", "copy_blocks", "direct_blocks", "fifo_bytes", "ring_channels", "segments"]


class Limits(NamedTuple):
    """What limits a launch.

    Attributes
    ----------
    multiprocessors : int
        Of the device.
    blocks_per_multiprocessor : int
        How many blocks of `THREADS` threads of the kernel fit on one, as the driver reports.
    sharers : int
        Ranks whose waiting kernels run on this device at the same time, in one launch or in several.
    """

    multiprocessors: int
    blocks_per_multiprocessor: int
    sharers: int = 1

    @property
    def resident(self) -> int:
        """Blocks that one rank may have on the device at once; at least 1."""
        return max(1, self.multiprocessors * self.blocks_per_multiprocessor // max(1, self.sharers))


def segments(
    pointers: Sequence[int],
    offsets: Sequence[int],
    counts: Sequence[int],
    *,
    tile: int = TILE_BYTES,
    ranks: Optional[Sequence[int]] = None,
) -> tuple[NDArray[Any], int]:
    """Make a table of segments.

    Parameters
    ----------
    pointers : sequence of int
        Device addresses, aligned to the element type.
    offsets, counts : sequence of int
        Bytes; elements for the copies that convert. Offsets are multiples of 16 bytes for oneshot and for copies that
        convert; the others take any.
    tile : int
        `TILE_BYTES`, or `TILE_ELEMENTS` when counts are elements.
    ranks : sequence of int, optional
        Exchange only: from whom each is taken.

    Returns
    -------
    table : ndarray of SEGMENT
        To be copied to memory that the device sees.
    tiles : int
        For `copy_blocks` and `direct_blocks`.
    """
    table = np.zeros(len(pointers), SEGMENT)
    table["pointer"], table["offset"], table["count"] = pointers, offsets, counts
    tiles = -(-table["count"].astype(np.int64) // tile)
    ends = np.cumsum(tiles)
    table["first_tile"] = ends - tiles
    if ranks is not None:
        table["rank"] = ranks
    return table, int(ends[-1]) if len(ends) else 0


def fifo_bytes(channels: int, slot_vectors: int) -> int:
    """Return the bytes of a rank's FIFO memory: ``[channels][SLOTS][slot_vectors]`` vectors.

    ``slot_vectors`` is a multiple of 8, and like the number of channels the same on all ranks.
    """
    return channels * SLOTS * slot_vectors * VECTOR_BYTES


def ring_channels(nbytes: int, slot_vectors: int, limits: Limits) -> int:
    """Return the number of blocks of a ring, each of which is a ring of its own (``grid.x``); the same on all ranks.

    Parameters
    ----------
    nbytes : int
        Of the array.
    slot_vectors : int
        Of a FIFO slot.
    limits : Limits
        Those of the most limited device of all ranks.
    """
    slots = -(-nbytes // (slot_vectors * VECTOR_BYTES))
    return max(1, min(MAX_CHANNELS, limits.resident, slots))


def direct_blocks(tiles: int, limits: Limits) -> int:
    """Return the blocks of a oneshot, twoshot or exchange that meets (``grid.x``); ranks may differ.

    Parameters
    ----------
    tiles : int
        The most tiles of `TILE_BYTES` that one step handles: of the inputs, the outputs, or the fused buffer.
    limits : Limits
        Of this rank's device.
    """
    return max(1, min(limits.resident, tiles))


def copy_blocks(tiles: int, limits: Limits) -> int:
    """Return the blocks of a copy, or of a kernel that does not meet (``grid.x``)."""
    return max(1, min(tiles, limits.multiprocessors * limits.blocks_per_multiprocessor))


def choose(ranks: int, nbytes: int, staging_bytes: int) -> str:
    """Return the algorithm of an allreduce that is expected to be fastest; the same on all ranks.

    Parameters
    ----------
    ranks : int
        How many take part.
    nbytes : int
        Of the fused buffer.
    staging_bytes : int
        That a launch may use of the staging memory: half of it.
    """
    if nbytes > staging_bytes:
        return "ring"
    # A one-shot reads the buffer of every rank, a two-shot a part of each, after a second meeting that costs about as
    # much as the transfer of this many bytes.
    return "oneshot" if nbytes * ranks <= 1 << 20 else "twoshot"
