"""The parts that the collectives of the Horovod API have in common: ops, names, checks of arguments, and shapes."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from kvstore_hvd import mxnet_compat, native
from kvstore_hvd.errors import InvalidRequestError, InvalidTypeError, fault_of_text
from kvstore_hvd.mxnet.process_sets import ProcessSet
from kvstore_hvd.store.keys import Call, Reduction, reject_array, wire_name
from kvstore_hvd.world.member import Member

#: Begins the names of all operations here; stores have others.
NAMESPACE = "hvd"


class ReduceOp(enum.IntEnum):
    """The ops, with Horovod's numbers."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT
_OPS = (Average, Sum, Min, Max, Product)


def reduction(call: Call, op: Any, prescale: Any, postscale: Any, allowed: Sequence[ReduceOp] = ()) -> Reduction:
    """The reduction of an op and two factors; `allowed`: the ops to choose from, by default all but Adasum."""
    try:
        chosen = ReduceOp(op)
    except ValueError:
        raise InvalidRequestError(call.message(None, f"there is no op {op!r}.", _use_one_of(allowed))) from None
    if chosen not in (allowed or _OPS):
        fact = f"op {chosen.name.capitalize()} is not supported."
        raise InvalidRequestError(call.message(None, fact, _use_one_of(allowed)))
    factors = []
    for role, factor in (("prescale_factor", prescale), ("postscale_factor", postscale)):
        try:
            factors.append(float(factor))
        except (TypeError, ValueError):
            raise InvalidTypeError(call.message(None, f"{role} is {factor!r}.", "pass a number.")) from None
    return Reduction(chosen.name.lower(), prescale=factors[0], postscale=factors[1])


def _use_one_of(allowed: Sequence[ReduceOp]) -> str:
    return f"use one of {', '.join(f'hvd.{each.name.capitalize()}' for each in allowed or _OPS)}."


# -- Arguments --------------------------------------------------------------------------------------------------------


def check_name(call: Call, name: Optional[str]) -> None:
    """Raise InvalidTypeError unless it is a str or None, InvalidRequestError if it cannot be written down."""
    if name is not None and not isinstance(name, str):
        raise InvalidTypeError(call.message(None, f"name is {name!r} ({type(name).__name__}).", "pass a str."))
    if name and not name.isascii() and (fault := fault_of_text(name)):
        fix = "use a name that can be written as UTF-8 text."
        raise InvalidRequestError(call.message(None, f"the name {fault}", fix))


def check_list(call: Call, tensors: Any) -> None:
    """Raise InvalidTypeError unless it is a list or tuple."""
    if not isinstance(tensors, (list, tuple)):
        fact = f"tensors is a {type(tensors).__name__}, not a list."
        raise InvalidTypeError(call.message(None, fact, "pass a list of arrays."))


def check_array(call: Call, tensor: Any, name: Optional[str]) -> None:
    """Raise unless it is an array of MXNet (InvalidTypeError) with values (InvalidRequestError)."""
    if not mxnet_compat.is_ndarray(tensor):
        reject_array(call, name, tensor, "tensor")
    if mxnet_compat.is_tracing():
        fact, fix = "it is called while a block is being hybridized.", "do not hybridize the block that calls it."
        raise InvalidRequestError(call.message(name or call.operation, fact, fix))


def names_for(call: Call, world: Member, name: Optional[str], count: int = 0) -> list[str]:
    """Names for `count` tensors of one call; call it only when nothing can be refused any more on this worker alone."""
    # Without a name they have numbers that are equal on all workers when these make the same calls.
    if name is None:
        name = unnamed(world, call.operation)
    return [name] if count == 1 and not call.operation.startswith("grouped") else [f"{name}.{i}" for i in range(count)]


def unnamed(world: Member, kind: str) -> str:
    """A name that no call had in this world."""
    return f"{kind}.noname.{world.next_number(kind)}"


def root_in(call: Call, root_rank: Any, process_set: ProcessSet) -> int:
    """The root's rank within a process set."""
    ranks = process_set.ranks or []
    if isinstance(root_rank, bool) or root_rank not in ranks:
        shown = ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]} to {ranks[-1]}"
        fact = f"there is no rank {root_rank!r}" + ("." if not process_set.process_set_id else f" in {process_set}.")
        raise InvalidRequestError(call.message(None, fact, f"pass one of these as root_rank: {shown}."))
    return ranks.index(root_rank)


# -- Shapes -----------------------------------------------------------------------------------------------------------
#
# The output of some collectives depends on all workers' arrays. Every worker puts the dtype and shape of its array into
# one row of a table that all receive, and all judge the same table: either none raises or all do.

_KINDS = ("allgather", "alltoall", "reducescatter", "object")
_DTYPES = list(native.DTYPES)
# MXNet's own limit of dimensions.
_MAX_NDIM = 32
_FIX = "call it with arrays that fit together on every rank; nothing was exchanged."
# Length of a row's head: kind, whether this worker refuses the call, number of tensors, dtype, number of dimensions.
_HEAD = 5


@dataclass(frozen=True)
class Shapes:
    """The arrays of one collective, by rank."""

    call: Call
    world: Member
    name: str
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
        return self.row_elements * native.ITEM_BYTES[self.dtype]


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
    """The arrays of all workers; waits for them. With a `refusal` it raises that here, and an error on the others."""
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
    return Shapes(call, world, name, _DTYPES[table[0][3]], shapes, [tuple(each[-size:].tolist()) for each in table])
