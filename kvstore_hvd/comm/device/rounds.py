"""Cutting the tensors of a batch into rounds that each fit into a buffer; the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["ALIGNMENT", "Piece", "buffer_bytes", "rounds"]

#: Where pieces begin in the buffer, in bytes.
ALIGNMENT = 16


class Piece(NamedTuple):
    """Elements `start` to ``start + length`` of a batch's request, and where in the buffer, in bytes, they go."""

    request: int
    start: int
    length: int
    offset: int


def rounds(counts: Sequence[int], item_bytes: int, capacity: int, most: int) -> list[list[Piece]]:
    """Place tensors one after the other; those that do not fit whole into a buffer are cut."""
    capacity -= capacity % ALIGNMENT
    made: list[list[Piece]] = []
    used = 0
    for request, count in enumerate(counts):
        start = 0
        while start < count:
            rest = (count - start) * item_bytes
            is_full = not made or len(made[-1]) == most or used == capacity
            if is_full or (used + rest > capacity >= rest):
                made.append([])
                used = 0
            taken = min(rest, capacity - used) // item_bytes
            made[-1].append(Piece(request, start, taken, used))
            used += _aligned(taken * item_bytes)
            start += taken
    return made


def buffer_bytes(pieces: Sequence[Piece], item_bytes: int) -> int:
    """Bytes of the buffer that a round takes."""
    last = pieces[-1]
    return _aligned(last.offset + last.length * item_bytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
