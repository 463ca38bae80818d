"""Allgather and reducescatter: their outputs depend on all workers' arrays, so they wait for input and result.

First the workers tell each other their shapes, then the output is made, then one request of the engine fills it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import numpy as np

from kvstore_hvd import mxnet_compat, native
from kvstore_hvd.errors import InvalidRequestError
from kvstore_hvd.mxnet import gradients
from kvstore_hvd.mxnet.calls import NAMESPACE, check_array, check_list, check_name, make_call, names_for
from kvstore_hvd.mxnet.process_sets import ProcessSet, global_process_set
from kvstore_hvd.mxnet.reduce_ops import Average, ReduceOp, Sum, reduction
from kvstore_hvd.mxnet.shapes import Shapes, exchange_shapes
from kvstore_hvd.store.arrays import buffer_like, check_group, copy, scaled
from kvstore_hvd.store.keys import Call, Group, priority_of, wire_name
from kvstore_hvd.store.placement import home_of
from kvstore_hvd.store.reduction import Reduction
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
    how = ("reducescatter", op, prescale_factor, postscale_factor)
    return _reducescatter(how, [tensor], name, priority, process_set)[0]


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
    how = ("grouped_reducescatter", op, prescale_factor, postscale_factor)
    return _reducescatter(how, tensors, name, priority, process_set)


def gather_bytes(call: Call, world: Member, name: str, data: bytes, refusal: Optional[Exception]) -> list[bytes]:
    """The bytes of all workers, in the order of ranks; waits for them, inside ``world.submitting()``.

    With a `refusal` it raises that here, and InvalidRequestError on the others; else as `allgather`.
    """
    mine = np.frombuffer(data, np.uint8)
    shapes = exchange_shapes(call, world, "object", name, mine, refusal=refusal)
    if world.is_alone:
        return [data]
    out = np.empty(sum(shapes.rows), np.uint8)
    ends = np.cumsum(shapes.rows)
    addresses = [mine.ctypes.data if data else 0], [out.ctypes.data if out.size else 0]
    _run_exchange(call, world, name, addresses, shapes, [0] * len(ends), shapes.rows, 0)
    return [out[end - rows : end].tobytes() for end, rows in zip(ends, shapes.rows)]


def _allgather(
    operation: str, tensors: Sequence[Any], name: Optional[str], priority: int, process_set: ProcessSet
) -> Sequence[Any]:
    world = process_set.world(operation)
    call = make_call(world, operation)
    priority = priority_of(call, priority)
    check_name(call, name)
    check_list(call, tensors)
    if not tensors:
        return tensors
    tape, outputs, rank = gradients.tape(call, world, name, priority), [], world.topology.rank
    with world.submitting():
        for each, tensor, shapes in _agree(call, world, "allgather", name, tensors):
            output = exchange(call, world, each, tensor, shapes, [0] * len(shapes.rows), shapes.rows, priority)
            if tape is not None:
                output = tape.allgather(each, tensor, output, sum(shapes.rows[:rank]))
            outputs.append(output)
    return outputs


def _reducescatter(
    how: tuple[str, ReduceOp, float, float],
    tensors: Sequence[Any],
    name: Optional[str],
    priority: int,
    process_set: ProcessSet,
) -> Sequence[Any]:
    operation, op, prescale, postscale = how
    world = process_set.world(operation)
    call = make_call(world, operation)
    priority = priority_of(call, priority)
    reduce = reduction(call, op, prescale, postscale, (Average, Sum))
    check_name(call, name)
    check_list(call, tensors)
    if not tensors:
        return tensors
    tape, outputs = gradients.tape(call, world, name, priority), []
    with world.submitting():
        for each, tensor, shapes in _agree(call, world, "reducescatter", name, tensors):
            first, rows = _share(world, tensor.shape[0])
            output = _reduce_rows(call, world, each, tensor, shapes, reduce, priority, first, rows)
            if tape is not None:
                output = tape.reducescatter(each, tensor, output, reduce, first)
            outputs.append(output)
    return outputs


def _agree(
    call: Call, world: Member, kind: str, name: Optional[str], tensors: Sequence[Any]
) -> list[tuple[str, Any, Shapes]]:
    """Check all arrays, here and with the others, before anything is exchanged."""
    refusals = [refusal_of(call, world, tensor, name) for tensor in tensors]
    refusal = next((error for error in refusals if error is not None), None)
    return [
        (each, tensor, exchange_shapes(call, world, kind, each, tensor, tensors=len(tensors), refusal=refusal))
        for each, tensor in zip(names_for(call, world, name, len(tensors)), tensors)
    ]


def refusal_of(call: Call, world: Member, tensor: Any, name: Optional[str]) -> Optional[Exception]:
    """Why the array cannot take part, as the error to raise (InvalidRequestError and others); the others are told.

    Waits until the array is computed; the device where its operation takes place is ready afterwards.
    """
    shown = name or call.operation
    try:
        check_array(call, tensor, name)
        check_group(call, Group(shown, [tensor], [tensor]))
        mxnet_compat.note_collective()
        if not tensor.shape:
            fix = "reshape it to (1,)."
            raise InvalidRequestError(call.message(shown, "tensor has no dimensions to take rows from.", fix))
        home = home_of(world, tensor)
        if home is not None and not world.is_alone:
            world.start_device(home.device_id)
        tensor.wait_to_read()
    except Exception as error:  # noqa: BLE001 - what was to compute the array may have failed with anything
        return error
    return None


def exchange(
    call: Call,
    world: Member,
    name: str,
    tensor: Any,
    shapes: Shapes,
    starts: Sequence[int],
    rows: Sequence[int],
    priority: int,
) -> Any:
    """A new array of some rows of each worker's array; waits for it, inside ``world.submitting()``.

    Parameters
    ----------
    call, world, name, priority
        Who takes part in what.
    tensor : NDArray
        This worker's array.
    shapes : Shapes
        Of all workers' arrays.
    starts, rows : sequence of int
        By rank, the first row to take and how many; the same numbers at both ends.

    Raises
    ------
    MismatchError, HorovodInternalError
        As `allgather`.
    """
    context = mxnet_compat.context_of(tensor)
    output = buffer_like(tensor, context=context, shape=(sum(rows), *shapes.shapes[0][1:]))
    if world.is_alone:
        copy(tensor, output)
        return output
    home = home_of(world, tensor)
    (source, start), (target, place) = (_memory(world, *end) for end in ((tensor, home, True), (output, home, False)))
    _run_exchange(call, world, name, ([start], [place]), shapes, starts, rows, priority, home is not None)
    if target is not output:
        copy(target, output)
    del source  # alive until here
    return output


def _run_exchange(
    call: Call,
    world: Member,
    name: str,
    addresses: tuple[list[int], list[int]],
    shapes: Shapes,
    starts: Sequence[int],
    rows: Sequence[int],
    priority: int,
    on_device: bool = False,
) -> None:
    unit, parts, place = shapes.row_bytes, [], 0
    for rank, (start, count) in enumerate(zip(starts, rows)):
        if count * unit:
            parts.append((rank, start * unit, count * unit, place))
        place += count * unit
    extent = max(shapes.rows) * shapes.row_elements
    contributed = shapes.rows[world.topology.rank] * shapes.row_elements
    if extent == 0:
        return  # nobody has anything
    request = native.Request(
        "exchange",
        _data_name(name),
        call.label(name),
        *addresses,
        (extent,),
        shapes.dtype,
        priority=priority,
        parts=parts,
        contributed=contributed,
        on_device=on_device,
    )
    world.engine().run(request)


def _share(world: Member, rows: int) -> tuple[int, int]:
    """The first one of this worker's rows, and their number."""
    rank, size = world.topology.rank, world.topology.size
    share, rest = divmod(rows, size)
    return share * rank + min(rank, rest), share + (rank < rest)


def _reduce_rows(
    call: Call,
    world: Member,
    name: str,
    tensor: Any,
    shapes: Shapes,
    how: Reduction,
    priority: int,
    first: int,
    rows: int,
) -> Any:
    context, shape = mxnet_compat.context_of(tensor), shapes.shapes[0]
    if world.is_alone:
        if how.is_scaled:
            return scaled(tensor, how.prescale, how.postscale)
        output = buffer_like(tensor, context=context)
        copy(tensor, output)
        return output
    output = buffer_like(tensor, context=context, shape=(rows, *shape[1:]))
    if 0 in shape:
        return output
    home = home_of(world, tensor)
    (source, start), (target, place) = (_memory(world, *end) for end in ((tensor, home, True), (output, home, False)))
    unit = shapes.row_bytes
    request = native.Request(
        "reducescatter",
        _data_name(name),
        call.label(name),
        [start],
        [place],
        shape,
        shapes.dtype,
        op=how.op,
        prescale=how.prescale,
        postscale=how.postscale,
        priority=priority,
        parts=[(world.topology.rank, first * unit, rows * unit, 0)],
        on_device=home is not None,
    )
    world.engine().run(request)
    if target is not output:
        copy(target, output)
    del source  # alive until here
    return output


def _memory(world: Member, array: Any, home: Any, is_input: bool) -> tuple[Any, int]:
    """An array at `home` whose elements lie one after the other, and where: itself or a stand-in."""
    adapter, handle = world.mxnet_adapter(), mxnet_compat.handle_of(array)
    if home is not None:
        is_fit = mxnet_compat.context_of(array) == home and adapter.is_dense(handle)
    else:
        # An input always goes through a copy: an operation that only reads it, too, may have oneDNN move it meanwhile.
        is_fit = not is_input and mxnet_compat.context_of(array).device_type.startswith("cpu")
        if is_fit:
            array.wait_to_read()
            is_fit = 0 in array.shape or adapter.is_plain(handle)
    address = mxnet_compat.address_of(array) if is_fit else None
    if address is not None:
        return array, address
    stand_in = buffer_like(array, context=home)
    if is_input:
        copy(array, stand_in)
    return stand_in, mxnet_compat.address_of(stand_in) or 0


def _data_name(name: str) -> str:
    # The name itself is that of the table of shapes, where one worker's allgather meets another one's broadcast.
    return wire_name(NAMESPACE, f"{name}/rows")
