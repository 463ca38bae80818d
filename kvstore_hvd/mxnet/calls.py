"""The parts of the Horovod API that its calls have in common: ops, compression, checks, gradients and shapes."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Optional

import numpy as np

from kvstore_hvd import mxnet_compat, native
from kvstore_hvd.errors import InvalidRequestError, InvalidTypeError, fault_of_text
from kvstore_hvd.mxnet.process_sets import ProcessSet
from kvstore_hvd.store.arrays import buffer_like, copy
from kvstore_hvd.store.keys import SUM, Call, Group, Reduction, priority_of, reject_array, wire_name
from kvstore_hvd.store.operations import Operations

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


# -- Compression of gradients ------------------------------------------------------------------------------------------


class Compressor:
    """Turns an array into one that is exchanged in its place, and back."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """The array to exchange, and the context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The exchanged array in the format of the original."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Leaves arrays as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """See `Compressor.compress`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """See `Compressor.decompress`."""
        return tensor


class FP16Compressor(Compressor):
    """Rounds float32 and float64 to float16, and leaves the rest as it is."""

    _dtype = "float16"

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """See `Compressor.compress`."""
        name = mxnet_compat.dtype_name(tensor)
        return (_cast(tensor, cls._dtype), name) if name in ("float32", "float64") else (tensor, None)

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """See `Compressor.decompress`."""
        return tensor if ctx is None else _cast(tensor, ctx)


class BF16Compressor(FP16Compressor):
    """Rounds float32 and float64 to bfloat16, and leaves the rest as it is."""

    _dtype = "bfloat16"


class Compression:
    """What gradients are rounded to before they are exchanged; pass one of these as ``compression``.

    `none`: nothing. `fp16`, `bf16`: float32 and float64 are rounded to float16 or bfloat16, and the result is cast
    back; other dtypes stay as they are. On one host workers share memory, so this saves no time. For another format
    pass a class with the static methods ``compress(tensor) -> (array to exchange, ctx)`` and
    ``decompress(array, ctx) -> array``.
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


#: What a store's ``set_gradient_compression`` calls the classes whose work it does itself; not so of derived classes.
STORE_TYPES: dict[type, str] = {NoneCompressor: "none", FP16Compressor: "fp16"}


def _cast(tensor: Any, dtype: Any) -> Any:
    result = buffer_like(tensor, dtype, context=mxnet_compat.context_of(tensor))
    copy(tensor, result)
    return result


# -- A call ------------------------------------------------------------------------------------------------------------


class Collective:
    """One call of a collective: its world, name and priority; what it refuses, and the gradients of its results.

    Every worker calls ``backward`` for its own loss; gradients are those of the sum of all workers' losses. A
    collective of a backward pass is an operation with a name of its own, derived from the name of the forward call. So
    its order may differ between workers.
    """

    def __init__(self, operation: str, process_set: ProcessSet, name: Optional[str] = None, priority: Any = 0) -> None:
        self.world = process_set._world(operation)
        topology = self.world.topology
        self.call = Call(operation, topology)
        self.priority = priority_of(self.call, priority)
        self.name = name
        #: What errors about an array of the call name.
        self.shown = name or operation
        self._process_set = process_set
        self._generation = topology.generation
        if name is not None:
            self.check_name(name)

    def refuse(self, fact: str, fix: str, name: Optional[str] = None) -> NoReturn:
        """Raise InvalidRequestError about the operation of this name, None: about the call."""
        raise InvalidRequestError(self.call.message(name, fact, fix))

    def check_name(self, name: Any) -> None:
        """Raise InvalidTypeError unless it is a str, InvalidRequestError if it cannot be written down."""
        if not isinstance(name, str):
            fact = f"name is {name!r} ({type(name).__name__})."
            raise InvalidTypeError(self.call.message(None, fact, "pass a str."))
        if not name.isascii() and (fault := fault_of_text(name)):
            self.refuse(f"the name {fault}", "use a name that can be written as UTF-8 text.")

    def check_list(self, tensors: Any) -> None:
        """Raise InvalidTypeError unless it is a list or tuple."""
        if not isinstance(tensors, (list, tuple)):
            fact = f"tensors is a {type(tensors).__name__}, not a list."
            raise InvalidTypeError(self.call.message(None, fact, "pass a list of arrays."))

    def check_array(self, tensor: Any) -> None:
        """Raise unless it is an array of MXNet (InvalidTypeError) with values (InvalidRequestError)."""
        if not mxnet_compat.is_ndarray(tensor):
            reject_array(self.call, self.name, tensor, "tensor")
        if mxnet_compat.is_tracing():
            fix = "do not hybridize the block that calls it."
            self.refuse("it is called while a block is being hybridized.", fix, self.shown)

    def reduction(
        self, op: Any, prescale: Any, postscale: Any, allowed: Sequence[ReduceOp] = (Average, Sum, Min, Max, Product)
    ) -> Reduction:
        """The reduction of an op, one of those `allowed`, and two factors."""
        try:
            chosen = ReduceOp(op)
            fault = "" if chosen in allowed else f"op {chosen.name.capitalize()} is not supported."
        except ValueError:
            fault = f"there is no op {op!r}."
        if fault:
            self.refuse(fault, f"use one of {', '.join(f'hvd.{each.name.capitalize()}' for each in allowed)}.")
        factors = []
        for role, factor in (("prescale_factor", prescale), ("postscale_factor", postscale)):
            try:
                factors.append(float(factor))
            except (TypeError, ValueError):
                fact = f"{role} is {factor!r}."
                raise InvalidTypeError(self.call.message(None, fact, "pass a number.")) from None
        return Reduction(chosen.name.lower(), factors[0], factors[1])

    def root(self, root_rank: Any) -> int:
        """The root's rank within the process set."""
        ranks = self._process_set.ranks or []
        if isinstance(root_rank, bool) or root_rank not in ranks:
            shown = ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]} to {ranks[-1]}"
            where = f" in {self._process_set}" if self._process_set.process_set_id else ""
            self.refuse(f"there is no rank {root_rank!r}{where}.", f"pass one of these as root_rank: {shown}.")
        return ranks.index(root_rank)

    def names(self, count: int = 1) -> list[str]:
        """Names for so many arrays; call it only when nothing can be refused any more on this worker alone."""
        operation = self.call.operation
        name = self.unnamed(operation) if self.name is None else self.name
        return [name] if count == 1 and not operation.startswith("grouped") else [f"{name}.{i}" for i in range(count)]

    def unnamed(self, kind: str) -> str:
        """A name that no call had in this world, equal on all workers when these make the same calls."""
        return f"{kind}.noname.{self.world.next_number(kind)}"

    # -- Gradients ----------------------------------------------------------------------------------------------------

    def differentiable(self, key: str, array: Any, result: Any, gradient: Callable[[str, Any], Any]) -> Any:
        """The result of this key, within ``autograd.record()`` as part of the graph."""
        # `gradient` computes the array's gradient from the result's; its operation has the name that it is given.
        if not mxnet_compat.is_recording():
            return result
        name = f"{key}.gradient" if self.name is None else self.unnamed(f"{key}.gradient")

        def back(given: Any) -> Any:
            before, present = self._generation, self.world.topology.generation
            if present != before:
                fact = f"the forward pass was in generation {before} of the world; this is generation {present}."
                self.refuse(fact, "do the forward pass again.", name)
            return gradient(name, given)

        return mxnet_compat.differentiable(array, result, back)

    def reduced(self, name: str, array: Any, how: Reduction = SUM) -> Any:
        """A new array, the array reduced over the workers; asynchronous."""
        # Not inside `submitting`: it raises unread errors, which are for the program's thread. A lost world fails the
        # result.
        total = buffer_like(array, context=mxnet_compat.context_of(array))
        self.reduce(name, array, total, how)
        return total

    def reduce(self, name: str, array: Any, out: Any, how: Reduction = SUM) -> None:
        """Reduce an array over the workers into another one, or in place; asynchronous."""
        Operations(self.world, NAMESPACE).pushpull(self.call, [Group(name, [array], [out])], self.priority, how)

    def refuse_in_graph(self, array: Any, fact: str, fix: str) -> None:
        """Raise InvalidRequestError if gradients may flow to the array: they would be wrong."""
        if mxnet_compat.is_recording() and mxnet_compat.is_in_graph(array):
            self.refuse(fact, fix, self.shown)

    def refuse_in_place(self, array: Any) -> None:
        """Raise InvalidRequestError if gradients may flow to an array that is to be overwritten."""
        fix = f"use hvd.{self.call.operation}, or call it within mx.autograd.pause()."
        self.refuse_in_graph(array, "an array that is being recorded cannot be overwritten.", fix)


# -- Shapes -----------------------------------------------------------------------------------------------------------
#
# The output of some collectives depends on all workers' arrays. Every worker puts the dtype and shape of its array into
# one row of a table that all receive, and all judge the same table: either none raises or all do.

_KINDS = ("allgather", "alltoall", "reducescatter", "allgather_object")
_DTYPES = list(native.DTYPES)
# MXNet's own limit of dimensions.
_MAX_NDIM = 32
_FIX = "call it with arrays that fit together on every rank; nothing was exchanged."
# Length of a row's head: kind, whether this worker refuses the call, number of tensors, dtype, number of dimensions.
_HEAD = 5


@dataclass(frozen=True)
class Shapes:
    """The arrays of one operation of a collective, by rank."""

    collective: Collective
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
    one: Collective,
    name: str,
    tensor: Any,
    refusal: Optional[Exception] = None,
    tensors: int = 1,
    details: Sequence[int] = (),
) -> Shapes:
    """The arrays of all workers; waits for them. With a `refusal` it raises that here, and an error on the others."""
    call, world = one.call, one.world
    size, kind = world.topology.size, call.operation.removeprefix("grouped_")
    row = np.zeros(_HEAD + _MAX_NDIM + size, np.int64)
    row[:3] = _KINDS.index(kind), refusal is not None, tensors
    if refusal is None:
        row[3:_HEAD] = _DTYPES.index(mxnet_compat.dtype_name(tensor)), len(tensor.shape)
        row[_HEAD : _HEAD + len(tensor.shape)] = tensor.shape
        if details:
            row[-size:] = details
    table = world.all_rows(call.operation, wire_name(NAMESPACE, name), f"'{name}'", row)
    if refusal is not None:
        raise refusal
    refusing = np.flatnonzero(table[:, 1])
    if refusing.size:
        fact = f"{call.topology.rank_list(refusing.tolist())} refused the call."
        one.refuse(fact, "see the error there; nothing was exchanged.", name)
    shapes = [tuple(each[_HEAD : _HEAD + each[4]].tolist()) for each in table]
    call.compare(name, "the operation", [_KINDS[each[0]] for each in table], _FIX)
    call.compare(name, "the number of tensors", table[:, 2].tolist(), _FIX)
    call.compare(name, "dtype", [_DTYPES[each[3]] for each in table], _FIX)
    if kind == "reducescatter":
        call.compare(name, "shape", shapes, _FIX)
    else:
        call.compare(name, "the number of dimensions", [len(shape) for shape in shapes], _FIX, shapes)
        call.compare(name, "the shape beyond the first dimension", [shape[1:] for shape in shapes], _FIX, shapes)
    return Shapes(one, name, _DTYPES[table[0][3]], shapes, [tuple(each[-size:].tolist()) for each in table])
