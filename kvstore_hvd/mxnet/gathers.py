"""Allgather, reducescatter, alltoall: outputs depend on all workers' arrays, so they wait for input and result.

First the workers exchange their shapes in one table. Then each makes its output, which one request fills.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Optional

import numpy as np

from kvstore_hvd import mxnet_compat, native
from kvstore_hvd.errors import InvalidTypeError
from kvstore_hvd.mxnet.calls import NAMESPACE, Average, Collective, ReduceOp, Shapes, Sum, exchange_shapes
from kvstore_hvd.mxnet.process_sets import ProcessSet, global_process_set
from kvstore_hvd.store.arrays import buffer_like, copy, scaled
from kvstore_hvd.store.keys import Group, Reduction, check_group, wire_name
from kvstore_hvd.store.operations import gpu_of
from kvstore_hvd.world.member import Member


def allgather(
    tensor: Any, name: Optional[str] = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenate the arrays of all workers along their first dimension, in the order of ranks. Waits for the result.

    Within ``mx.autograd.record()`` the gradient of this worker's array is the sum of all workers' gradients of its
    rows.

    Parameters
    ----------
    tensor : NDArray
        Of equal dtype and shape on all workers, but for the length of the first dimension, which may be zero. Dtypes as
        `allreduce`.
    name, priority, process_set
        As `allreduce`.

    Returns
    -------
    NDArray
        Of the tensor's class, on its device.

    Raises
    ------
    MismatchError
        The workers disagree; raised on all of them.
    TypeError, InvalidRequestError, UnsupportedDtypeError, NotInitializedError
        An argument is wrong here or on another worker, or this worker is not a member of the set.
    HorovodInternalError
        The world is lost.
    """
    return _for_each(Collective("allgather", process_set, name, priority), [tensor], _gathered)[0]


def grouped_allgather(
    tensors: Sequence[Any], name: Optional[str] = None, priority: int = 0, process_set: ProcessSet = global_process_set
) -> Sequence[Any]:
    """`allgather` of several arrays: all of them, or none. An empty list is returned itself."""
    return _for_each(Collective("grouped_allgather", process_set, name, priority), tensors, _gathered)


def reducescatter(
    tensor: Any,
    op: ReduceOp = Average,
    name: Optional[str] = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce an array over the workers, and give each its share of the rows. Waits for the result.

    Exceptions as `allgather`; the other parameters as `allreduce`.

    Parameters
    ----------
    tensor : NDArray
        Of equal dtype and shape on all workers, with at least one dimension.
    op : ReduceOp
        `Average` or `Sum`.

    Returns
    -------
    NDArray
        The rows of this worker: equally many for all, and one more for the first ones when they do not divide evenly.
    """
    one = Collective("reducescatter", process_set, name, priority)
    how = one.reduction(op, prescale_factor, postscale_factor, (Average, Sum))
    return _for_each(one, [tensor], functools.partial(_scattered, how=how))[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    op: ReduceOp = Average,
    name: Optional[str] = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Sequence[Any]:
    """`reducescatter` of several arrays: all of them, or none. An empty list is returned itself."""
    one = Collective("grouped_reducescatter", process_set, name, priority)
    how = one.reduction(op, prescale_factor, postscale_factor, (Average, Sum))
    return _for_each(one, tensors, functools.partial(_scattered, how=how))


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: Optional[str] = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send a part of this worker's rows to each worker, and receive a part from each. Waits for the result.

    Rank r gets the r-th part of every worker's array. Exceptions as `allgather`; the other parameters as `allreduce`.

    Parameters
    ----------
    tensor : NDArray
        Of equal dtype and shape on all workers, but for the length of the first dimension.
    splits : NDArray or numpy.ndarray of int32, or sequence of int, optional
        How many rows each worker gets, in the order of ranks; together all rows. By default all get equally many.

    Returns
    -------
    NDArray, or tuple of two NDArray
        The received rows, in the order of the ranks that sent them. With `splits` also how many came from each, as
        int32.
    """
    one = Collective("alltoall", process_set, name, priority)
    rows: list[int] = []
    refusal = _refusal_of(one, tensor)
    if refusal is None:
        try:
            rows = _rows_to_send(one, tensor, splits)
        except Exception as error:  # noqa: BLE001 - any operator may have failed
            refusal = error
    with one.world.submitting():
        (key,) = one.names()
        output, received = _send(one, key, tensor, rows, refusal)

    def back(name: str, given: Any) -> Any:
        with one.world.submitting():
            return _send(one, name, given, received)[0]

    output = one.differentiable(key, tensor, output, back)
    if splits is None:
        return output
    mx, like = mxnet_compat.require_mxnet(), splits if mxnet_compat.is_ndarray(splits) else tensor
    numbers = np.array(received, np.int32)
    return output, (mx.np if mxnet_compat.is_np_ndarray(like) else mx.nd).array(numbers, dtype="int32")


def gather_bytes(one: Collective, name: str, data: bytes, refusal: Optional[Exception]) -> list[bytes]:
    """The bytes of all workers, in the order of ranks; waits for them, inside ``world.submitting()``.

    With a `refusal` it raises that here, and InvalidRequestError on the others; else as `allgather`.
    """
    mine = np.frombuffer(data, np.uint8)
    shapes = exchange_shapes(one, name, mine, refusal)
    if one.world.is_alone:
        return [data]
    rows = shapes.rows
    out, parts = np.empty(sum(rows), np.uint8), _parts(shapes, [0] * len(rows), rows)
    if out.size:
        _run("exchange", shapes, mine.ctypes.data if data else 0, out.ctypes.data, **parts)
    return [out[end - count : end].tobytes() for end, count in zip(np.cumsum(rows), rows)]


def _for_each(one: Collective, tensors: Sequence[Any], output_of: Callable[[Any, Shapes], Any]) -> Sequence[Any]:
    """The outputs of arrays, which are all checked, here and with the other workers, before anything is exchanged."""
    one.check_list(tensors)
    if not tensors:
        return tensors
    with one.world.submitting():
        refusals = [_refusal_of(one, tensor) for tensor in tensors]
        refusal = next(filter(None, refusals), None)
        names = one.names(len(tensors))
        agreed = [exchange_shapes(one, name, each, refusal, len(tensors)) for name, each in zip(names, tensors)]
        return list(map(output_of, tensors, agreed))


def _refusal_of(one: Collective, tensor: Any) -> Optional[Exception]:
    """The error to raise if the array cannot take part; waits until it is computed, and until its device is ready."""
    try:
        one.check_array(tensor)
        check_group(one.call, Group(one.shown, [tensor], [tensor]))
        mxnet_compat.collectives.counts.reductions += 1
        if not tensor.shape:
            one.refuse("tensor has no dimensions to take rows from.", "reshape it to (1,).", one.shown)
        place = None if one.world.is_alone else gpu_of(one.world, mxnet_compat.context_of(tensor))
        if place is not None:
            one.world.start_device(place.device_id)
        tensor.wait_to_read()
    except Exception as error:  # noqa: BLE001 - any operator may have failed
        return error
    return None


def _gathered(tensor: Any, shapes: Shapes) -> Any:
    """The rows of all workers; the gradient is this worker's rows of the sum of all gradients."""
    one, rows = shapes.collective, shapes.rows
    output = _exchange(shapes, tensor, [0] * len(rows), rows)
    first, count = sum(rows[: one.world.topology.rank]), tensor.shape[0]

    def gradient(name: str, given: Any) -> Any:
        total = one.reduced(name, given)
        if not count:
            total.wait_to_read()  # nothing that is returned depends on it
        return total[first : first + count]

    return one.differentiable(shapes.name, tensor, output, gradient)


def _scattered(tensor: Any, shapes: Shapes, how: Reduction) -> Any:
    """This worker's rows of the reduced array; the gradient is those of all workers one after the other, scaled too."""
    one, shape = shapes.collective, tensor.shape
    topology, context = one.world.topology, mxnet_compat.context_of(tensor)
    share, rest = divmod(shape[0], topology.size)
    first, rows = share * topology.rank + min(topology.rank, rest), share + (topology.rank < rest)
    if one.world.is_alone and how.is_scaled:
        output = scaled(tensor, how.prescale, how.postscale)
    else:
        output = buffer_like(tensor, context=context, shape=(rows, *shape[1:]))
        if one.world.is_alone:
            copy(tensor, output)
        elif 0 not in shape:
            parts = [(topology.rank, first * shapes.row_bytes, rows * shapes.row_bytes, 0)]
            factors = {"op": how.op, "prescale": how.prescale, "postscale": how.postscale}
            _fill(output, tensor, "reducescatter", shapes, shape=shape, dtype=shapes.dtype, parts=parts, **factors)

    def gradient(name: str, given: Any) -> Any:
        mine = buffer_like(given, context=mxnet_compat.context_of(given), shape=shape)
        mine[...] = 0
        if rows:
            mine[first : first + rows] = given
        return one.reduced(name, mine, how)

    return one.differentiable(shapes.name, tensor, output, gradient)


def _exchange(shapes: Shapes, tensor: Any, starts: Sequence[int], rows: Sequence[int]) -> Any:
    """A new array of some rows of each worker's array; waits for it, inside ``world.submitting()``."""
    # By rank: the first row to take and how many; the same numbers at both ends.
    context = mxnet_compat.context_of(tensor)
    output = buffer_like(tensor, context=context, shape=(sum(rows), *shapes.shapes[0][1:]))
    if shapes.collective.world.is_alone:
        copy(tensor, output)
    elif max(shapes.rows) * shapes.row_elements:  # else no worker has anything
        _fill(output, tensor, "exchange", shapes, **_parts(shapes, starts, rows))
    return output


def _parts(shapes: Shapes, starts: Sequence[int], rows: Sequence[int]) -> dict[str, Any]:
    """The arguments of an exchange's request: the bytes that come from each rank, and how many elements go out."""
    unit, parts, place = shapes.row_bytes, [], 0
    for rank, (start, count) in enumerate(zip(starts, rows)):
        if count * unit:
            parts.append((rank, start * unit, count * unit, place))
        place += count * unit
    contributed = shapes.rows[shapes.collective.world.topology.rank] * shapes.row_elements
    extent = (max(shapes.rows) * shapes.row_elements,)
    return {"shape": extent, "dtype": shapes.dtype, "parts": parts, "contributed": contributed}


def _fill(output: Any, tensor: Any, operation: str, shapes: Shapes, **arguments: Any) -> None:
    """Run one operation of the engine from an array into another one, both through staging copies where necessary."""
    one = shapes.collective
    place = gpu_of(one.world, mxnet_compat.context_of(tensor))
    source, start = _memory(one.world, tensor, place, is_input=True)
    target, end = _memory(one.world, output, place, is_input=False)
    _run(operation, shapes, start, end, priority=one.priority, on_device=place is not None, **arguments)
    if target is not output:
        copy(target, output)
    del source  # alive until here


def _run(operation: str, shapes: Shapes, start: int, end: int, **arguments: Any) -> None:
    """Run one operation of the engine from one address to another."""
    # The name itself is that of the table of shapes, where one worker's allgather meets another one's broadcast.
    one, name = shapes.collective, wire_name(NAMESPACE, f"{shapes.name}/rows")
    one.world.engine().run(native.Request(operation, name, one.call.label(shapes.name), [start], [end], **arguments))


def _memory(world: Member, array: Any, place: Any, is_input: bool) -> tuple[Any, int]:
    """An array at `place` whose elements lie one after the other, and where: itself or a staging copy."""
    adapter, handle = world.mxnet_adapter(), mxnet_compat.handle_of(array)
    if place is not None:
        is_fit = mxnet_compat.context_of(array) == place and adapter.is_dense(handle)
    else:
        # An input always goes through a copy: another reader may have oneDNN change its layout meanwhile.
        is_fit = not is_input and mxnet_compat.context_of(array).device_type.startswith("cpu")
        if is_fit:
            array.wait_to_read()
            is_fit = 0 in array.shape or adapter.is_plain(handle)
    address = mxnet_compat.address_of(array) if is_fit else None
    if address is not None:
        return array, address
    staging = buffer_like(array, context=place)
    if is_input:
        copy(array, staging)
    return staging, mxnet_compat.address_of(staging) or 0


def _send(
    one: Collective, name: str, tensor: Any, rows: Sequence[int], refusal: Optional[Exception] = None
) -> tuple[Any, list[int]]:
    """The rows of the other workers, and how many came from each."""
    shapes = exchange_shapes(one, name, tensor, refusal, details=rows)
    rank = one.world.topology.rank
    received = [details[rank] for details in shapes.details]
    starts = [sum(details[:rank]) for details in shapes.details]
    return _exchange(shapes, tensor, starts, received), received


def _rows_to_send(one: Collective, tensor: Any, splits: Any) -> list[int]:
    size, length = one.world.topology.size, tensor.shape[0]
    if splits is None:
        if length % size:
            one.refuse(f"{length} rows cannot be divided by {size} workers.", "pass splits.", one.shown)
        return [length // size] * size
    fix = f"pass {size} non-negative numbers as int32, which make {length} together."
    if hasattr(splits, "asnumpy"):
        splits = splits.asnumpy()
    if isinstance(splits, np.ndarray):
        if splits.dtype != np.int32:
            one.refuse(f"splits has dtype {splits.dtype.name}.", fix, one.shown)
        splits = splits.tolist() if splits.ndim == 1 else [splits.tolist()]
    if not isinstance(splits, (list, tuple)) or not all(type(each) is int for each in splits):
        raise InvalidTypeError(one.call.message(one.shown, f"splits is {splits!r}.", fix))
    if len(splits) != size or any(each < 0 for each in splits) or sum(splits) != length:
        one.refuse(f"splits is {list(splits)}, for {length} rows.", fix, one.shown)
    return list(splits)
