"""The asynchronous collectives on arrays of MXNet: allreduce and broadcast. `gathers` has the collectives that wait.

They are operations of MXNet's engine, like those of the store. Calls of one name keep their order; between names order
does not matter. Within ``mx.autograd.record()`` gradients flow through calls that make new arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import warnings
from collections.abc import Sequence
from typing import Any, Optional, TypeVar

from kvstore_hvd import mxnet_compat
from kvstore_hvd.errors import fault_of_text
from kvstore_hvd.join import following
from kvstore_hvd.join.context import is_uneven
from kvstore_hvd.mxnet import basics as _basics
from kvstore_hvd.mxnet.basics import *
from kvstore_hvd.mxnet.calls import NAMESPACE, Adasum, Average, Collective, Max, Min, Product, ReduceOp, Sum
from kvstore_hvd.mxnet.gathers import allgather, alltoall, grouped_allgather, grouped_reducescatter, reducescatter
from kvstore_hvd.mxnet.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set
from kvstore_hvd.store.arrays import buffer_like
from kvstore_hvd.store.keys import MAX_KEYS, Group, check_group, wire_name
from kvstore_hvd.store.operations import Operations
from kvstore_hvd.world import process

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
    "global_process_set",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "join",
    "reducescatter",
    "remove_process_set",
]
__all__ += _basics.__all__  # as Horovod's module of operations has

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
    factors = prescale_factor, postscale_factor
    reduced: Tensor = _allreduce("allreduce", False, [tensor], average, name, priority, factors, process_set, op)[0]
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
    factors = prescale_factor, postscale_factor
    if process_set is global_process_set and _allreduce_in_place(tensor, name, priority, average, op, *factors):
        return tensor
    reduced: Tensor = _allreduce("allreduce", True, [tensor], average, name, priority, factors, process_set, op)[0]
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
    """`allreduce` of several arrays: all, or none where the workers disagree. An empty list is returned itself."""
    factors = prescale_factor, postscale_factor
    return _allreduce("grouped_allreduce", False, tensors, average, name, priority, factors, process_set, op)


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
    factors = prescale_factor, postscale_factor
    return _allreduce("grouped_allreduce", True, tensors, average, name, priority, factors, process_set, op)


def broadcast(
    tensor: Tensor,
    root_rank: int,
    name: Optional[str] = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Give every worker the root's array, as a new array. Asynchronous. Exceptions as `allreduce`.

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
    """Wait until every member has called it, not for pending operations on arrays. Exceptions as `allreduce`."""
    process_set._world("barrier").barrier("hvd")


def join(device: Any = -1, process_set: ProcessSet = global_process_set) -> int:
    """Wait until all workers have called this; until then, contribute zeros to every allreduce of the others.

    Averages are still divided by the number of all workers; in minima, maxima and products this worker does not count.
    Parameters are not updated here meanwhile: broadcast them afterwards from the rank that is returned, or use
    `kvstore_hvd.join.Join`, which keeps them equal. Other operations than allreduce fail on the workers that call
    them, with InvalidRequestError or InputFailedError, and can be repeated when all have joined.

    Parameters
    ----------
    device : int
        Without effect.

    Returns
    -------
    int
        The rank of the worker that joined last, among all workers; the same on all.

    Raises
    ------
    InvalidRequestError, NotInitializedError
        This worker is not a member of the set, it is within a `Join`, or there is no world.
    MismatchError
        Another worker waits at the end of a `Join`.
    HorovodInternalError
        The world is lost.
    """
    one = Collective("join", process_set)
    if is_uneven() and not one.world.is_alone:
        fact = "it cannot be used within Join, whose workers wait for each other at its end."
        one.refuse(fact, "call it after it.")
    last = following.join(one.world)
    with one.world.submitting():
        one.world.agree_on_numbers()
    return int((process_set.ranks or [])[last])


def _allreduce(
    operation: str,
    in_place: bool,
    tensors: Sequence[Any],
    average: Optional[bool],
    name: Optional[str],
    priority: int,
    factors: tuple[float, float],
    process_set: ProcessSet,
    op: Optional[ReduceOp],
) -> Sequence[Any]:
    one = Collective(operation, process_set, name, priority)
    if average is not None:
        if op is not None:
            one.refuse("both average and op are given.", "pass op only: hvd.Average or hvd.Sum.")
        warnings.warn(_AVERAGE_IS_DEPRECATED, DeprecationWarning, stacklevel=3)
        op = Average if average else Sum
    how = one.reduction(Average if op is None else op, *factors)
    one.check_list(tensors)
    if not tensors:
        return tensors
    for tensor in tensors:
        one.check_array(tensor)
        if in_place:
            one.refuse_in_place(tensor)
        elif how.op not in ("sum", "average"):
            fix = "use Sum or Average, or call it within mx.autograd.pause()."
            one.refuse_in_graph(tensor, f"op {how.op.capitalize()} has no gradient.", fix)
    with one.world.submitting():
        groups = _groups(one, tensors, in_place, allow_rows=True)
        if len(tensors) > 1:
            # The workers compare shapes and dtypes in their order.
            text = repr([(tuple(each.values[0].shape), each.facts[id(each.values[0])].dtype) for each in groups])
            digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
            how = dataclasses.replace(how, group=int.from_bytes(digest, "little"))
        Operations(one.world, NAMESPACE).pushpull(one.call, groups, one.priority, how)
        outs = [group.outs[0] for group in groups]
        if mxnet_compat.is_recording() and not (in_place or groups[0].is_row_sparse):
            back = functools.partial(one.reduced, how=how)
            keys = [str(group.key) for group in groups]
            outs = [one.differentiable(key, each, out, back) for key, each, out in zip(keys, tensors, outs)]
    return outs


def _allreduce_in_place(tensor: Any, *how: Any) -> bool:
    """Submit what a loop over gradients submits, at a fraction of the general case's cost; `how`: see `_in_place`."""
    # Returns False, and has done nothing, when this is not that case or anything is unusual about it.
    world = process.everybody
    adapter = world.current_adapter if world.is_initialized else None
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
    mxnet_compat.collectives.counts.reductions += 1
    return True


@functools.lru_cache(MAX_KEYS, typed=True)
def _in_place(name: Any, priority: Any, average: Any, op: Any, prescale: Any, postscale: Any) -> Optional[_InPlace]:
    """The adapter's arguments for an allreduce in place; None if the call needs a closer look."""
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


def _broadcast(
    tensor: Any, root_rank: int, name: Optional[str], priority: int, process_set: ProcessSet, in_place: bool
) -> Any:
    one = Collective("broadcast", process_set, name, priority)
    root = one.root(root_rank)
    one.check_array(tensor)
    if in_place:
        one.refuse_in_place(tensor)
    with one.world.submitting():
        (group,) = _groups(one, [tensor], in_place)
        Operations(one.world, NAMESPACE).broadcast(one.call, [group], one.priority, root)
        if in_place:
            return tensor

        def gradient(name: str, given: Any) -> Any:
            total = one.reduced(name, given)
            if one.world.topology.rank != root:
                total[()] = 0  # after the reduction; [...] refuses arrays without dimensions
            return total

        return one.differentiable(str(group.key), tensor, group.outs[0], gradient)


def _groups(one: Collective, tensors: Sequence[Any], in_place: bool, allow_rows: bool = False) -> list[Group]:
    """The tensors with the arrays that receive the results, as groups that have been checked."""
    groups, sparse = [], 0
    for tensor in tensors:
        out = tensor if in_place else buffer_like(tensor, context=mxnet_compat.context_of(tensor))
        group = Group(one.shown, [tensor], [out])
        check_group(one.call, group, allow_rows)
        groups.append(group)
        sparse += group.is_row_sparse
    if 0 < sparse < len(groups):
        fact, fix = "the group has dense and row_sparse arrays.", "reduce each kind in a group of its own."
        one.refuse(fact, fix, one.shown)
    for tensor in tensors if sparse and not in_place else ():
        fact, fix = "row_sparse arrays have no gradient here.", "call it within mx.autograd.pause()."
        one.refuse_in_graph(tensor, fact, fix)
    for group, key in zip(groups, one.names(len(tensors))):
        group.key = key
    return groups
