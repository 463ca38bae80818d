"""Allgather, reducescatter, alltoall: outputs depend on all workers' arrays, so they wait for input and result.

First the workers exchange their shapes in one table. Then each makes its output, which one request fills.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import numpy as np

from kvstore_hvd import mxnet_compat, native
from kvstore_hvd.errors import InvalidRequestError, InvalidTypeError
from kvstore_hvd.mxnet import gradients
from kvstore_hvd.mxnet.calls import (
    NAMESPACE,
    Average,
    ReduceOp,
    Shapes,
    Sum,
    check_array,
    check_list,
    check_name,
    exchange_shapes,
    names_for,
    reduction,
)
from kvstore_hvd.mxnet.process_sets import ProcessSet, global_process_set
from kvstore_hvd.store.arrays import buffer_like, copy, scaled
from kvstore_hvd.store.keys import Call, Group, Reduction, check_group, priority_of, wire_name
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
    name : str, optional
        Matches the call with those of the other workers. By default the n-th call without a name is matched with the
        n-th such call of the others.
    priority : int
        Higher ones are executed first.
    process_set : ProcessSet
        Who takes part.

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
    return _allgather("allgather", [tensor], name, priority, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Any],
    name: Optional[str] = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Sequence[Any]:
    """`allgather` of several arrays: all of them, or none. An empty list is returned itself."""
    return _allgather("grouped_allgather", tensors, name, priority, process_set)


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

    Parameters
    ----------
    tensor : NDArray
        Of equal dtype and shape on all workers, with at least one dimension. Dtypes as `allreduce`.
    op : ReduceOp
        `Average` or `Sum`.
    name, priority, process_set
        As `allgather`.
    prescale_factor, postscale_factor : float
        As `allreduce`.

    Returns
    -------
    NDArray
        The rows of this worker: equally many for all, and one more for the first ones when they do not divide evenly.

    Raises
    ------
    KVHvdError, TypeError
        As `allgather`.
    """
    factors = prescale_factor, postscale_factor
    return _reducescatter("reducescatter", [tensor], op, name, priority, factors, process_set)[0]


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
    factors = prescale_factor, postscale_factor
    return _reducescatter("grouped_reducescatter", tensors, op, name, priority, factors, process_set)


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
    call = Call("alltoall", world.topology)
    priority = priority_of(call, priority)
    size = world.topology.size
    check_name(call, name)
    refusal, rows = _refusal_of(call, world, tensor, name), []
    if refusal is None:
        try:
            rows = _rows_to_send(call, name, tensor, splits, size)
        except Exception as error:  # noqa: BLE001 - any operator may have failed
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


def gather_bytes(call: Call, world: Member, name: str, data: bytes, refusal: Optional[Exception]) -> list[bytes]:
    """The bytes of all workers, in the order of ranks; waits for them, inside ``world.submitting()``.

    With a `refusal` it raises that here, and InvalidRequestError on the others; else as `allgather`.
    """
    mine = np.frombuffer(data, np.uint8)
    shapes = exchange_shapes(call, world, "object", name, mine, refusal=refusal)
    if world.is_alone:
        return [data]
    out, starts = np.empty(sum(shapes.rows), np.uint8), [0] * len(shapes.rows)
    if out.size:
        addresses = [mine.ctypes.data if data else 0], [out.ctypes.data]
        request = native.Request(
            "exchange", _data_name(shapes), call.label(name), *addresses, **_parts(shapes, starts, shapes.rows)
        )
        world.engine().run(request)
    ends = np.cumsum(shapes.rows)
    return [out[end - rows : end].tobytes() for end, rows in zip(ends, shapes.rows)]


def _allgather(
    operation: str, tensors: Sequence[Any], name: Optional[str], priority: int, process_set: ProcessSet
) -> Sequence[Any]:
    world = process_set.world(operation)
    call = Call(operation, world.topology)
    priority = priority_of(call, priority)
    check_name(call, name)
    check_list(call, tensors)
    if not tensors:
        return tensors
    tape, outputs, rank = gradients.tape(call, world, name, priority), [], world.topology.rank
    with world.submitting():
        for tensor, shapes in _agree(call, world, "allgather", name, tensors):
            output = _exchange(shapes, tensor, [0] * len(shapes.rows), shapes.rows, priority)
            if tape is not None:
                output = tape.allgather(shapes.name, tensor, output, sum(shapes.rows[:rank]))
            outputs.append(output)
    return outputs


def _reducescatter(
    operation: str,
    tensors: Sequence[Any],
    op: ReduceOp,
    name: Optional[str],
    priority: int,
    factors: tuple[float, float],
    process_set: ProcessSet,
) -> Sequence[Any]:
    world = process_set.world(operation)
    call = Call(operation, world.topology)
    priority = priority_of(call, priority)
    reduce = reduction(call, op, *factors, (Average, Sum))
    check_name(call, name)
    check_list(call, tensors)
    if not tensors:
        return tensors
    tape, outputs = gradients.tape(call, world, name, priority), []
    rank, size = world.topology.rank, world.topology.size
    with world.submitting():
        for tensor, shapes in _agree(call, world, "reducescatter", name, tensors):
            share, rest = divmod(tensor.shape[0], size)
            first, rows = share * rank + min(rank, rest), share + (rank < rest)
            output = _reduce_rows(shapes, tensor, reduce, first, rows, priority)
            if tape is not None:
                output = tape.reducescatter(shapes.name, tensor, output, reduce, first)
            outputs.append(output)
    return outputs


def _agree(
    call: Call, world: Member, kind: str, name: Optional[str], tensors: Sequence[Any]
) -> list[tuple[Any, Shapes]]:
    """Check all arrays, here and with the other workers, before anything is exchanged."""
    refusals = [_refusal_of(call, world, tensor, name) for tensor in tensors]
    refusal = next((error for error in refusals if error is not None), None)
    return [
        (tensor, exchange_shapes(call, world, kind, each, tensor, tensors=len(tensors), refusal=refusal))
        for each, tensor in zip(names_for(call, world, name, len(tensors)), tensors)
    ]


def _refusal_of(call: Call, world: Member, tensor: Any, name: Optional[str]) -> Optional[Exception]:
    """The error to raise if the array cannot take part; waits until it is computed, and until its device is ready."""
    shown = name or call.operation
    try:
        check_array(call, tensor, name)
        check_group(call, Group(shown, [tensor], [tensor]))
        mxnet_compat.collectives.counts.reductions += 1
        if not tensor.shape:
            fix = "reshape it to (1,)."
            raise InvalidRequestError(call.message(shown, "tensor has no dimensions to take rows from.", fix))
        place = None if world.is_alone else gpu_of(world, mxnet_compat.context_of(tensor))
        if place is not None:
            world.start_device(place.device_id)
        tensor.wait_to_read()
    except Exception as error:  # noqa: BLE001 - any operator may have failed
        return error
    return None


def _exchange(shapes: Shapes, tensor: Any, starts: Sequence[int], rows: Sequence[int], priority: int) -> Any:
    """A new array of some rows of each worker's array; waits for it, inside ``world.submitting()``."""
    # By rank: the first row to take and how many; the same numbers at both ends.
    context = mxnet_compat.context_of(tensor)
    output = buffer_like(tensor, context=context, shape=(sum(rows), *shapes.shapes[0][1:]))
    if shapes.world.is_alone:
        copy(tensor, output)
    elif max(shapes.rows) * shapes.row_elements:  # else no worker has anything
        _fill(output, tensor, shapes, "exchange", priority, **_parts(shapes, starts, rows))
    return output


def _parts(shapes: Shapes, starts: Sequence[int], rows: Sequence[int]) -> dict[str, Any]:
    """The arguments of an exchange's request: the bytes that come from each rank, and how many elements go out."""
    unit, parts, place = shapes.row_bytes, [], 0
    for rank, (start, count) in enumerate(zip(starts, rows)):
        if count * unit:
            parts.append((rank, start * unit, count * unit, place))
        place += count * unit
    contributed = shapes.rows[shapes.world.topology.rank] * shapes.row_elements
    extent = (max(shapes.rows) * shapes.row_elements,)
    return {"shape": extent, "dtype": shapes.dtype, "parts": parts, "contributed": contributed}


def _reduce_rows(shapes: Shapes, tensor: Any, how: Reduction, first: int, rows: int, priority: int) -> Any:
    """This worker's rows of the reduced array; waits for them, inside ``world.submitting()``."""
    context, shape, world = mxnet_compat.context_of(tensor), shapes.shapes[0], shapes.world
    if world.is_alone and how.is_scaled:
        return scaled(tensor, how.prescale, how.postscale)
    output = buffer_like(tensor, context=context, shape=(rows, *shape[1:]))
    if world.is_alone:
        copy(tensor, output)
    elif 0 not in shape:
        parts = [(world.topology.rank, first * shapes.row_bytes, rows * shapes.row_bytes, 0)]
        reduction = {"op": how.op, "prescale": how.prescale, "postscale": how.postscale}
        arguments = {"shape": shape, "dtype": shapes.dtype, "parts": parts, **reduction}
        _fill(output, tensor, shapes, "reducescatter", priority, **arguments)
    return output


def _fill(output: Any, tensor: Any, shapes: Shapes, operation: str, priority: int, **arguments: Any) -> None:
    """Run one operation of the engine from an array into another one, both through staging copies where necessary."""
    world, place = shapes.world, gpu_of(shapes.world, mxnet_compat.context_of(tensor))
    source, start = _memory(world, tensor, place, is_input=True)
    target, end = _memory(world, output, place, is_input=False)
    request = native.Request(
        operation,
        _data_name(shapes),
        shapes.call.label(shapes.name),
        [start],
        [end],
        priority=priority,
        on_device=place is not None,
        **arguments,
    )
    world.engine().run(request)
    if target is not output:
        copy(target, output)
    del source  # alive until here


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


def _data_name(shapes: Shapes) -> str:
    # The name itself is that of the table of shapes, where one worker's allgather meets another one's broadcast.
    return wire_name(NAMESPACE, f"{shapes.name}/rows")


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
    return _exchange(shapes, tensor, starts, received, priority), received


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
