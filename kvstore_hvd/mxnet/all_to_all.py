"""Alltoall: every worker sends each of them some rows. It waits for its input and the result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import numpy as np

from kvstore_hvd import mxnet_compat
from kvstore_hvd.errors import InvalidRequestError, InvalidTypeError
from kvstore_hvd.mxnet import gradients
from kvstore_hvd.mxnet.calls import check_name, make_call, names_for
from kvstore_hvd.mxnet.gathers import exchange, refusal_of
from kvstore_hvd.mxnet.process_sets import ProcessSet, global_process_set
from kvstore_hvd.mxnet.shapes import exchange_shapes
from kvstore_hvd.store.keys import Call, priority_of
from kvstore_hvd.world.member import Member


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: Optional[str] = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send a part of this worker's rows to each worker, and receive a part from each. Waits for the result.

    Rank r gets the r-th part of every worker's array.

    Parameters
    ----------
    tensor : NDArray
        Of equal dtype and shape on all workers, but for the length of the first dimension. Dtypes as `allreduce`.
    splits : NDArray or numpy.ndarray of int32, or sequence of int, optional
        How many rows each worker gets, in the order of ranks; together all rows. By default all get equally many.
    name, priority, process_set
        As `allgather`.

    Returns
    -------
    NDArray, or tuple of two NDArray
        The received rows, in the order of the ranks that sent them. With `splits` also how many came from each, as
        int32.

    Raises
    ------
    KVHvdError, InvalidTypeError
        As `allgather`.
    """
    world = process_set.world("alltoall")
    call = make_call(world, "alltoall")
    priority = priority_of(call, priority)
    size = world.topology.size
    check_name(call, name)
    refusal, rows = refusal_of(call, world, tensor, name), []
    if refusal is None:
        try:
            rows = _rows_to_send(call, name, tensor, splits, size)
        except Exception as error:  # noqa: BLE001 - what was to compute the splits may have failed with anything
            refusal = error
    tape = gradients.tape(call, world, name, priority)
    with world.submitting():
        (key,) = names_for(call, world, name, 1)
        output, received = _send(call, world, key, tensor, rows, priority, refusal)

    def back(name: str, gradient: Any) -> Any:
        with world.submitting():
            return _send(call, world, name, gradient, received, priority)[0]

    if tape is not None:
        output = tape.exchange(key, tensor, output, back)
    if splits is None:
        return output
    like = splits if mxnet_compat.is_ndarray(splits) else tensor
    return output, _int32_like(like, received)


def _send(
    call: Call,
    world: Member,
    name: str,
    tensor: Any,
    rows: Sequence[int],
    priority: int,
    refusal: Optional[Exception] = None,
) -> tuple[Any, list[int]]:
    """What the others sent, and how many rows came from each."""
    shapes = exchange_shapes(call, world, "alltoall", name, tensor, details=rows, refusal=refusal)
    rank = world.topology.rank
    received = [details[rank] for details in shapes.details]
    starts = [sum(details[:rank]) for details in shapes.details]
    return exchange(call, world, name, tensor, shapes, starts, received, priority), received


def _rows_to_send(call: Call, name: Optional[str], tensor: Any, splits: Any, size: int) -> list[int]:
    shown, length = name or call.operation, tensor.shape[0]
    if splits is None:
        if length % size:
            fact, fix = f"{length} rows cannot be divided by {size} workers.", "pass splits."
            raise InvalidRequestError(call.message(shown, fact, fix))
        return [length // size] * size
    fix = f"pass {size} non-negative numbers as int32, which make {length} together."
    if hasattr(splits, "asnumpy"):
        splits = splits.asnumpy()
    if isinstance(splits, np.ndarray):
        if splits.dtype != np.int32:
            raise InvalidRequestError(call.message(shown, f"splits has dtype {splits.dtype.name}.", fix))
        splits = splits.tolist() if splits.ndim == 1 else [splits.tolist()]
    if not isinstance(splits, (list, tuple)) or not all(type(each) is int for each in splits):
        raise InvalidTypeError(call.message(shown, f"splits is {splits!r}.", fix))
    if len(splits) != size or any(each < 0 for each in splits) or sum(splits) != length:
        raise InvalidRequestError(call.message(shown, f"splits is {list(splits)}, for {length} rows.", fix))
    return list(splits)


def _int32_like(array: Any, numbers: Sequence[int]) -> Any:
    mx = mxnet_compat.require_mxnet()

    kind = mx.np if mxnet_compat.is_np_ndarray(array) else mx.nd
    return kind.array(np.array(numbers, np.int32), dtype="int32")
