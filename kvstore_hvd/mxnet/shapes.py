"""What all workers know of each other's arrays before a collective whose output depends on them.

Every worker tells its array's dtype and shape in one row of a small table that all receive. All judge the same table,
so either none raises or all do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from kvstore_hvd import mxnet_compat, native
from kvstore_hvd.errors import InvalidRequestError
from kvstore_hvd.mxnet.calls import NAMESPACE
from kvstore_hvd.native import ITEM_BYTES
from kvstore_hvd.store.keys import Call, wire_name
from kvstore_hvd.world.member import Member

_KINDS = ("allgather", "alltoall", "reducescatter", "object")
_DTYPES = list(native.DTYPES)
_MAX_NDIM = 32  # MXNet's own limit
_FIX = "call it with arrays that fit together on every rank; nothing was exchanged."
_HEAD = 5  # kind, whether this worker refuses the call, number of tensors, dtype, number of dimensions


@dataclass(frozen=True)
class Shapes:
    """The arrays of one collective, by rank."""

    dtype: str
    shapes: list[tuple[int, ...]]
    details: list[tuple[int, ...]]

    @property
    def rows(self) -> list[int]:
        """Number of rows of each rank's array."""
        return [shape[0] for shape in self.shapes]

    @property
    def row_elements(self) -> int:
        """Number of elements of one row."""
        return math.prod(self.shapes[0][1:])

    @property
    def row_bytes(self) -> int:
        """Size of one row."""
        return self.row_elements * ITEM_BYTES[self.dtype]


def exchange_shapes(
    call: Call,
    world: Member,
    kind: str,
    name: str,
    tensor: Any,
    *,
    tensors: int = 1,
    details: Optional[Sequence[int]] = None,
    refusal: Optional[Exception] = None,
) -> Shapes:
    """Tell the other workers of this one's array, and learn of theirs; waits for them."""
    size = world.topology.size
    row = np.zeros(_HEAD + _MAX_NDIM + size, np.int64)
    row[:3] = _KINDS.index(kind), refusal is not None, tensors
    if refusal is None:
        row[3:_HEAD] = _DTYPES.index(mxnet_compat.dtype_name(tensor)), len(tensor.shape)
        row[_HEAD : _HEAD + len(tensor.shape)] = tensor.shape
        if details is not None:
            row[-size:] = details
    table = world.all_rows(call.operation, wire_name(NAMESPACE, name), f"'{name}'", row)
    if refusal is not None:
        raise refusal
    refusing = np.flatnonzero(table[:, 1])
    if refusing.size:
        fact = f"{call.topology.rank_list(refusing.tolist())} refused the call."
        raise InvalidRequestError(call.message(name, fact, "see the error there; nothing was exchanged."))
    shapes = [tuple(each[_HEAD : _HEAD + each[4]].tolist()) for each in table]
    call.compare(name, "the operation", [_KINDS[each[0]] for each in table], _FIX)
    call.compare(name, "the number of tensors", table[:, 2].tolist(), _FIX)
    call.compare(name, "dtype", [_DTYPES[each[3]] for each in table], _FIX)
    if kind == "reducescatter":
        call.compare(name, "shape", shapes, _FIX)
    else:
        call.compare(name, "the number of dimensions", [len(shape) for shape in shapes], _FIX, shapes)
        call.compare(name, "the shape beyond the first dimension", [shape[1:] for shape in shapes], _FIX, shapes)
    return Shapes(_DTYPES[table[0][3]], shapes, [tuple(each[-size:].tolist()) for each in table])
