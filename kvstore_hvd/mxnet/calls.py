"""What every collective of the Horovod API begins with: who calls, names, and checks of single arguments."""

from __future__ import annotations

from typing import Any, Optional

from kvstore_hvd import mxnet_compat
from kvstore_hvd.errors import InvalidRequestError, InvalidTypeError, fault_of_text
from kvstore_hvd.mxnet.process_sets import ProcessSet
from kvstore_hvd.store.keys import Call, reject_array
from kvstore_hvd.store.operations import Operations
from kvstore_hvd.world.member import Member

#: What the names of all operations here begin with; stores have others.
NAMESPACE = "hvd"


def make_call(world: Member, operation: str) -> Call:
    """The call, for messages."""
    return Call(operation, world.topology, {}, mxnet_compat.is_ndarray)


def operations(world: Member, namespace: str = NAMESPACE) -> Operations:
    """What carries out asynchronous calls in this world."""
    return Operations(world, namespace, lambda operation, key, count: None)


def check_name(call: Call, name: Optional[str]) -> None:
    """Raise InvalidTypeError unless it is a str or None, InvalidRequestError if it cannot be written down."""
    if name is not None and not isinstance(name, str):
        raise InvalidTypeError(call.message(None, f"name is {name!r} ({type(name).__name__}).", "pass a str."))
    fault = fault_of_text(name or "")
    if fault:
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
