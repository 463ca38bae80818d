"""Collectives on arrays of MXNet that are asynchronous: allreduce and broadcast; `gathers` has those that wait.

They are operations of MXNet's engine, like those of the store. They keep the order of the calls for each name; between
names order does not matter.

Within ``mx.autograd.record()`` gradients flow through those that make new arrays, see `gradients`.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import warnings
from collections.abc import Sequence
from typing import Any, Optional, TypeVar

from kvstore_hvd import mxnet_compat
from kvstore_hvd.errors import InvalidRequestError, fault_of_text
from kvstore_hvd.mxnet import gradients
from kvstore_hvd.mxnet.all_to_all import alltoall
from kvstore_hvd.mxnet.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from kvstore_hvd.mxnet.calls import (
    NAMESPACE,
    check_array,
    check_list,
    check_name,
    make_call,
    names_for,
    operations,
    root_in,
)
from kvstore_hvd.mxnet.gathers import allgather, grouped_allgather, grouped_reducescatter, reducescatter
from kvstore_hvd.mxnet.joining import join
from kvstore_hvd.mxnet.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from kvstore_hvd.mxnet.reduce_ops import Adasum, Average, Max, Min, Product, ReduceOp, Sum, reduction
from kvstore_hvd.store.arrays import buffer_like, check_group
from kvstore_hvd.store.keys import MAX_KEYS, Call, Group, priority_of, wire_name
from kvstore_hvd.world import process

# As in Horovod, its module of operations has the basics as well.
__all__ = [
    "Adasum",
    "Average",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "allreduce_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]

_AVERAGE_IS_DEPRECATED = "the parameter average is deprecated; pass op=hvd.Average or op=hvd.Sum."
_InPlace = tuple[str, str, int, str, float, float]

#: An array of MXNet: NDArray, or its ndarray of NumPy's interface. The result is of the same class.
Tensor = TypeVar("Tensor")


def allreduce(
    tensor: Tensor,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: Optional[ReduceOp] = None,
) -> Tensor:
    """Reduce an array over the workers, into a new array. Asynchronous.

    Of row_sparse arrays the rows that any worker has are reduced; the call waits for them, and takes `Sum` and
    `Average`.

    Within ``mx.autograd.record()`` the gradient is reduced likewise; `Min`, `Max` and `Product` have none.

    Parameters
    ----------
    tensor : NDArray
        Of equal shape and dtype on all workers. Dtypes: float16, bfloat16, float32, float64, int8, uint8, int32, int64.
    average : bool, optional
        Deprecated: True for `Average`, False for `Sum`.
    name : str, optional
        Matches the call with those of the other workers. By default the n-th call without a name is matched with the
        n-th such call of the others.
    priority : int
        Higher ones are executed first.
    prescale_factor, postscale_factor : float
        Factors for every worker's array, and for the result. Integers scale in float64 and are truncated, float16 and
        bfloat16 scale in float32, and each worker's product is rounded to the array's dtype before the sum.
    process_set : ProcessSet
        Who takes part.
    op : ReduceOp, optional
        `Average` (default; truncated for integers), `Sum`, `Min`, `Max` or `Product`, formed in the order of ranks.

    Returns
    -------
    NDArray
        Of the tensor's class, on its device, with equal bits on all workers.

    Raises
    ------
    TypeError, InvalidRequestError, UnsupportedDtypeError, NotInitializedError
        The arguments are wrong, or this worker is not a member of the set; nothing was submitted.
    MismatchError
        When the result is read, or by the next call: the workers disagree, and nothing was reduced.
    HorovodInternalError
        The world is lost.
    """
    how = ("allreduce", average, op, prescale_factor, postscale_factor)
    reduced: Tensor = _allreduce(how, [tensor], name, priority, process_set, in_place=False)[0]
    return reduced


def allreduce_(
    tensor: Tensor,
    average: Optional[bool] = None,
    name: Optional[str] = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: Optional[ReduceOp] = None,
) -> Tensor:
    """Reduce an array over the workers in place, and return it. Parameters and exceptions as `allreduce`.

    Within ``mx.autograd.record()`` an array of the graph is refused with an InvalidRequestError: use `allreduce`.
    """
    how = ("allreduce", average, op, prescale_factor, postscale_factor)
    if process_set is global_process_set and _allreduce_in_place(
        tensor, name, priority, average, op, prescale_factor, postscale_factor
    ):
        return tensor
    reduced: Tensor = _allreduce(how, [tensor], name, priority, process_set, in_place=True)[0]
    return reduced


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: Optional[bool] = None,
    name: Optional[str] = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: Optional[ReduceOp] = None,
) -> Sequence[Tensor]:
    """Reduce arrays over the workers, into new ones: all, or none where the workers disagree. Asynchronous.

    Parameters
    ----------
    tensors : sequence of NDArray
        An empty one is returned itself.
    average, name, priority, prescale_factor, postscale_factor, process_set, op
        As `allreduce`, for all of them.

    Returns
    -------
    list of NDArray

    Raises
    ------
    KVHvdError, TypeError
        As `allreduce`.
    """
    how = ("grouped_allreduce", average, op, prescale_factor, postscale_factor)
    return _allreduce(how, tensors, name, priority, process_set, in_place=False)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: Optional[bool] = None,
    name: Optional[str] = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: Optional[ReduceOp] = None,
) -> Sequence[Tensor]:
    """Reduce arrays over the workers in place, and return them. Parameters and exceptions as `grouped_allreduce`."""
    how = ("grouped_allreduce", average, op, prescale_factor, postscale_factor)
    return _allreduce(how, tensors, name, priority, process_set, in_place=True)


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: Optional[str] = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Give every worker the root's array, as a new array. Asynchronous.

    Within ``mx.autograd.record()`` the root's array gets the sum of all workers' gradients, the others get zeros.

    Parameters
    ----------
    tensor : NDArray
        Of equal shape and dtype on all workers; its values matter on the root only.
    root_rank : int
        The root's rank among all workers, also where a process set is given.
    name, priority, process_set
        As `allreduce`.

    Returns
    -------
    NDArray
        Of the tensor's class, on its device.

    Raises
    ------
    KVHvdError, TypeError
        As `allreduce`.
    """
    received: Tensor = _broadcast(tensor, root_rank, name, priority, process_set, in_place=False)
    return received


def broadcast_(
    tensor: Tensor,
    root_rank: int,
    name: Optional[str] = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Overwrite an array with the root's, and return it. Parameters and exceptions as `broadcast`."""
    received: Tensor = _broadcast(tensor, root_rank, name, priority, process_set, in_place=True)
    return received


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every member has called it. Does not wait for pending operations on arrays.

    Raises
    ------
    HorovodInternalError
        The world is lost.
    InvalidRequestError, NotInitializedError
        This worker is not a member of the set, or there is no world.
    """
    process_set.world("barrier").barrier("hvd")


def _allreduce(
    how: tuple[str, Optional[bool], Optional[ReduceOp], float, float],
    tensors: Sequence[Any],
    name: Optional[str],
    priority: int,
    process_set: ProcessSet,
    in_place: bool,
) -> Sequence[Any]:
    operation, average, op, prescale, postscale = how
    world = process_set.world(operation)
    call = make_call(world, operation)
    priority = priority_of(call, priority)  # before a call without a name counts
    reduce = reduction(call, _op(call, average, op), prescale, postscale)
    check_name(call, name)
    check_list(call, tensors)
    if not tensors:
        return tensors
    for tensor in tensors:
        check_array(call, tensor, name)
        if in_place:
            gradients.refuse_in_place(call, name, tensor)
        elif reduce.op not in ("sum", "average"):
            fact = f"op {reduce.op.capitalize()} has no gradient."
            gradients.refuse_in_graph(
                call, name, tensor, fact, "use Sum or Average, or call it within mx.autograd.pause()."
            )
    with world.submitting():
        outs = [
            tensor if in_place else buffer_like(tensor, context=mxnet_compat.context_of(tensor)) for tensor in tensors
        ]
        groups = _groups(call, world, name, tensors, outs, allow_rows=True)
        _check_rows(call, groups, in_place)
        if len(tensors) > 1:
            reduce = dataclasses.replace(reduce, group=_hash(tensors))
        operations(world).pushpull(call, groups, priority, reduce)
        tape = None if in_place or groups[0].is_row_sparse else gradients.tape(call, world, name, priority)
        if tape is not None:
            outs = [tape.allreduce(str(one.key), each, out, reduce) for one, each, out in zip(groups, tensors, outs)]
    return outs


def _allreduce_in_place(tensor: Any, *how: Any) -> bool:
    """Submit what a loop over gradients submits, at a fraction of the general case's cost; `how`: see `_in_place`."""
    # Returns False, and has done nothing, when this is not that case or anything is unusual about it.
    world = process.current()
    adapter = world.member.current_adapter if world.is_initialized else None
    if (
        adapter is None
        or not mxnet_compat.is_ndarray(tensor)
        or mxnet_compat.is_recording()
        or mxnet_compat.is_tracing()
    ):
        return False
    try:
        found = _in_place(*how)
    except TypeError:  # an argument that is no key of a cache
        return False
    if found is None:
        return False
    name, label, priority, op, prescale, postscale = found
    handle = mxnet_compat.handle_of(tensor)
    if adapter.pushpull_in_place(name, label, handle, priority, False, op, prescale, postscale) is None:
        return False
    mxnet_compat.note_collective()
    return True


@functools.lru_cache(MAX_KEYS, typed=True)
def _in_place(name: Any, priority: Any, average: Any, op: Any, prescale: Any, postscale: Any) -> Optional[_InPlace]:
    """What the adapter is told of an allreduce in place; None if the call needs a closer look."""
    if average is not None and op is not None:
        return None
    if op is None:
        op = Average if average is None or average else Sum
    if (
        type(op) is not ReduceOp
        or op is Adasum
        or type(name) is not str
        or not name
        or fault_of_text(name)
        or type(priority) is not int
        or not -(2**31) <= priority < 2**31
        or type(prescale) is not float
        or type(postscale) is not float
    ):
        return None
    if average is not None:  # said once for each name
        warnings.warn(_AVERAGE_IS_DEPRECATED, DeprecationWarning, stacklevel=4)
    return wire_name(NAMESPACE, name), f"'{name}'", priority, op.name.lower(), prescale, postscale


def _hash(tensors: Sequence[Any]) -> int:
    """Of shapes and dtypes, in their order."""
    text = repr([(tuple(each.shape), mxnet_compat.dtype_name(each)) for each in tensors])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _broadcast(
    tensor: Any, root_rank: int, name: Optional[str], priority: int, process_set: ProcessSet, in_place: bool
) -> Any:
    world = process_set.world("broadcast")
    call = make_call(world, "broadcast")
    priority = priority_of(call, priority)
    root = root_in(call, root_rank, process_set)
    check_name(call, name)
    check_array(call, tensor, name)
    if in_place:
        gradients.refuse_in_place(call, name, tensor)
    with world.submitting():
        out = tensor if in_place else buffer_like(tensor, context=mxnet_compat.context_of(tensor))
        groups = _groups(call, world, name, [tensor], [out])
        operations(world).broadcast(call, groups, priority, root)
        tape = None if in_place else gradients.tape(call, world, name, priority)
        if tape is not None:
            out = tape.broadcast(str(groups[0].key), tensor, out, root)
    return out


def _check_rows(call: Call, groups: Sequence[Group], in_place: bool) -> None:
    """Raise InvalidRequestError where row_sparse arrays cannot be reduced."""
    rows = [group for group in groups if group.is_row_sparse]
    if not rows:
        return
    if len(rows) < len(groups):
        fact, fix = "the group has dense and row_sparse arrays.", "reduce each kind in a group of its own."
        raise InvalidRequestError(call.message(rows[0].key, fact, fix))
    if not in_place:
        for group in rows:
            fact, fix = "row_sparse arrays have no gradient here.", "call it within mx.autograd.pause()."
            gradients.refuse_in_graph(call, str(group.key), group.values[0], fact, fix)


def _groups(
    call: Call,
    world: Any,
    name: Optional[str],
    tensors: Sequence[Any],
    outs: Sequence[Any],
    allow_rows: bool = False,
) -> list[Group]:
    groups = [Group(name or call.operation, [value], [out]) for value, out in zip(tensors, outs)]
    for group in groups:
        check_group(call, group, allow_rows)
    for group, key in zip(groups, names_for(call, world, name, len(tensors))):
        group.key = key
    return groups


def _op(call: Call, average: Optional[bool], op: Optional[ReduceOp]) -> ReduceOp:
    if average is None:
        return Average if op is None else op
    if op is not None:
        fact = "both average and op are given."
        raise InvalidRequestError(call.message(None, fact, "pass op only: hvd.Average or hvd.Sum."))
    warnings.warn(_AVERAGE_IS_DEPRECATED, DeprecationWarning, stacklevel=4)
    return Average if average else Sum
