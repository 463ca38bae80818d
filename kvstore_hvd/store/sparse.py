"""Sums of row_sparse arrays, over the rows that any worker has.

1. The workers compare their arrays by one table.
2. They exchange the numbers of their rows.
3. They reduce the rows of all as one small dense array: each row has the bits of a dense reduction.

The size of the result is unknown when MXNet's engine would need it. So the caller's thread waits in each of the three.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore_hvd import log, mxnet_compat, native
from kvstore_hvd.errors import InvalidRequestError, KVHvdError, MismatchError
from kvstore_hvd.store.keys import STATES, STATES_FIX, Call, Group, Reduction, unique
from kvstore_hvd.world.member import Member

_DTYPES = list(native.DTYPES)
_OPS = list(native.OPS)
_MAX_NDIM = 32  # MXNet's own limit
_FIX = "use equal row_sparse arrays and arguments on every rank; nothing was changed."
#: Columns of the table: whether the worker refuses, its number of rows, and the first value that all must share.
_REFUSES, _ROWS, _COMMON = 0, 1, 2

_GROUP = "what is in the group"
#: The values that all workers must share, and how messages show their numbers.
_SHOWN: dict[str, Callable[[int], Any]] = {
    "dtype": lambda number: _DTYPES[number],
    "op": lambda number: _OPS[number],
    "prescale_factor": lambda number: float(np.int64(number).view(np.float64)),
    "postscale_factor": lambda number: float(np.int64(number).view(np.float64)),
    "compression": lambda number: "fp16" if number else "none",
    _GROUP: lambda number: hex(number & (2**64 - 1)),
    "the number of dimensions": int,
}


@dataclass
class _Rows:
    """The rows of this worker under one key."""

    name: str
    group: Group
    ids: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    counts: Any = None

    @property
    def all_ids(self) -> Any:
        """The numbers of all rows of this worker, sorted."""
        return np.unique(np.concatenate(self.ids))


def pushpull(
    world: Member, call: Call, names: Sequence[str], groups: Sequence[Group], priority: int, how: Reduction
) -> list[int]:
    """Reduce the row_sparse values of each group over the group and all workers, into all outs of the group."""
    # Waits for the other workers. The results are row_sparse.
    if how.op not in ("sum", "average"):
        fact = f"op {how.op.capitalize()} is not supported for row_sparse arrays."
        fix = "use Sum or Average, or convert with .tostype('default')."
        raise InvalidRequestError(call.message(groups[0].key, fact, fix))
    if not world.is_alone:
        text = "row_sparse arrays are exchanged while the caller waits; sparse_as_dense=True avoids it."
        log.once("row-sparse", logging.INFO, text)
    # The exchange of one key must not depend on other keys, which other workers may not have passed.
    agreed, failures = [], []
    for one in map(_Rows, names, groups):
        try:
            _agree(world, call, one, how)
            agreed.append(one)
        except KVHvdError as error:
            failures.append(error)
    if not (failures and how.group):
        for one in agreed:
            try:
                _reduce(world, call, one, priority, how)
            except KVHvdError as error:
                failures.append(error)
    if failures:
        raise failures[0]
    return [sum(ids.nbytes + rows.nbytes for ids, rows in zip(one.ids, one.values)) for one in agreed]


def _agree(world: Member, call: Call, one: _Rows, how: Reduction) -> None:
    """Read this worker's rows, and compare them with those of the other workers."""
    group, first, refusal = one.group, one.group.values[0], None
    row = np.zeros(_COMMON + len(_SHOWN) + _MAX_NDIM, np.int64)
    try:
        for value in group.values:
            ids, rows = _read(call, group, value)
            one.ids.append(ids)
            one.values.append(rows)
    except Exception as error:  # noqa: BLE001 - any operator may have failed
        refusal = error
        row[_REFUSES] = 1
    else:
        factors = np.array([how.prescale, how.postscale]).view(np.int64)
        dtype, tied = mxnet_compat.dtype_name(first), np.uint64(how.group).astype(np.int64)
        row[_ROWS] = one.all_ids.size
        common = [_DTYPES.index(dtype), _OPS.index(how.op), *factors, how.as_half, tied, len(first.shape), *first.shape]
        row[_COMMON : _COMMON + len(common)] = common
    try:
        table = world.all_rows(call.operation, one.name, call.label(group.key), row)
    except MismatchError as error:
        if refusal is not None:
            raise refusal from None
        fact = "this worker's array is row_sparse, and not all others' are."
        fix = "use one storage type on every rank: the same sparse_grad, or sparse_as_dense=True on all."
        details = tuple(line.strip() for line in str(error).splitlines()[1:-1])
        raise MismatchError(call.message(group.key, fact, f"{fix} Nothing was changed.", details)) from None
    if refusal is not None:
        raise refusal
    refusing = np.flatnonzero(table[:, _REFUSES])
    if refusing.size:
        fact = f"{call.topology.rank_list(refusing.tolist())} refused the call."
        raise InvalidRequestError(call.message(group.key, fact, "see the error there; nothing was changed."))
    for place, (what, shown) in enumerate(_SHOWN.items(), _COMMON):
        numbers = table[:, place].tolist()
        if what == _GROUP and any(number >> 32 == STATES for number in numbers):
            call.compare(group.key, "the states of the optimizer", list(map(hex, numbers)), STATES_FIX)
        call.compare(group.key, what, [shown(number) for number in numbers], _FIX)
    dimensions, shapes = int(table[0, _COMMON + len(_SHOWN) - 1]), table[:, _COMMON + len(_SHOWN) :]
    call.compare(group.key, "shape", [tuple(each[:dimensions].tolist()) for each in shapes], _FIX)
    one.counts = table[:, _ROWS]


def _read(call: Call, group: Group, value: Any) -> tuple[Any, Any]:
    """The row numbers of an array, sorted, and its rows, flattened; waits for it."""
    count = value.shape[0]
    ids, rows = value.indices.asnumpy().astype(np.int64), value.data.asnumpy()
    rows = rows.reshape(ids.size, -1) if ids.size else np.zeros((0, math.prod(value.shape[1:])), rows.dtype)
    if ids.size and not (ids.min() >= 0 and ids.max() < count):
        fact = f"the array has {count} rows, and its indices go from {ids.min()} to {ids.max()}."
        raise InvalidRequestError(call.message(group.key, fact, "make it with indices of its rows."))
    found, places = np.unique(ids, return_inverse=True)
    if found.size < ids.size:
        merged = np.zeros((found.size, rows.shape[1]), rows.dtype)
        np.add.at(merged, places, rows)
        return found, merged
    return found, rows if np.array_equal(found, ids) else rows[np.argsort(ids)]


def _reduce(world: Member, call: Call, one: _Rows, priority: int, how: Reduction) -> None:
    group = one.group
    ids = _ids_of_all(world, call, one, priority)
    width, dtype = math.prod(group.values[0].shape[1:]), one.values[0].dtype
    blocks = []
    for mine, rows in zip(one.ids, one.values):
        block = np.zeros((ids.size, width), dtype)
        block[np.searchsorted(ids, mine)] = rows
        blocks.append(block)
    result = np.empty((ids.size, width), dtype)
    if result.size:
        _reduce_blocks(world, call, one, blocks, result, priority, how)
    for out in unique(group.outs):
        _write(result, ids, out)


def _ids_of_all(world: Member, call: Call, one: _Rows, priority: int) -> Any:
    """The numbers of the rows that any worker has, sorted; waits for them."""
    mine, counts = one.all_ids, one.counts.tolist()
    if world.is_alone or not any(counts):
        return mine
    found, label = np.empty(sum(counts), np.int64), call.label(one.group.key)
    starts, size = itertools.accumulate(counts, initial=0), mine.itemsize
    parts = [(rank, 0, n * size, start * size) for rank, (n, start) in enumerate(zip(counts, starts)) if n]
    arrays = [mine.ctypes.data if mine.size else 0], [found.ctypes.data], (max(counts),), "int64"
    how: dict[str, Any] = {"priority": priority, "parts": parts, "contributed": mine.size}
    world.engine().run(native.Request("exchange", f"{one.name}/row ids", label, *arrays, **how))
    return np.unique(found)


def _reduce_blocks(
    world: Member, call: Call, one: _Rows, blocks: Sequence[Any], result: Any, priority: int, how: Reduction
) -> None:
    dtype = mxnet_compat.dtype_name(one.group.values[0])
    if world.is_alone:
        wide = blocks[0].astype(np.float32 if dtype == "float16" else dtype)
        for block in blocks[1:]:
            wide += block
        result[...] = wide
        if how.is_scaled:
            native.scale(dtype, result.ctypes.data, result.ctypes.data, result.size, how.prescale, how.postscale)
        return
    arrays = [block.ctypes.data for block in blocks], [result.ctypes.data], result.shape, dtype
    reduction = how.op, how.prescale, how.postscale
    more: dict[str, Any] = {"priority": priority, "as_half": how.as_half, "weight": how.weight}
    name, label = f"{one.name}/rows", call.label(one.group.key)
    world.engine().run(native.Request("allreduce", name, label, *arrays, *reduction, **more))


def _write(rows: Any, ids: Any, out: Any) -> None:
    """Give a row_sparse array these rows and no others."""
    import mxnet as mx

    context = mxnet_compat.context_of(out)
    with mx.autograd.pause():
        new = mx.nd.sparse.zeros("row_sparse", out.shape, context, out.dtype)
        if ids.size:
            parts = (rows.reshape(ids.size, *out.shape[1:]).astype(out.dtype), ids)
            new = mx.nd.sparse.row_sparse_array(parts, shape=out.shape, ctx=context, dtype=out.dtype)
        new.copyto(out)
