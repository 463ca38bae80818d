"""Gradients through collectives.

Every worker calls ``backward`` for its own loss; gradients are those of the sum of all workers' losses. A collective of
a backward pass is an operation with a name of its own, derived from the name of the forward call. So its order may
differ between workers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

from kvstore_hvd import mxnet_compat
from kvstore_hvd.errors import InvalidRequestError
from kvstore_hvd.mxnet.calls import NAMESPACE, unnamed
from kvstore_hvd.store.arrays import buffer_like
from kvstore_hvd.store.keys import SUM, Call, Group, Reduction
from kvstore_hvd.store.operations import Operations
from kvstore_hvd.world.member import Member


class Tape:
    """Records the results of one call for its backward pass."""

    def __init__(self, call: Call, world: Member, is_named: bool, priority: int) -> None:
        self._call = call
        self._world = world
        self._is_named = is_named
        self._priority = priority
        self._generation = world.topology.generation

    def allreduce(self, key: str, array: Any, result: Any, how: Reduction) -> Any:
        """The result as part of the graph: its gradient is reduced as the array was."""
        name = self._name(key)
        return mxnet_compat.differentiable(array, result, lambda given: self._reduced(name, given, how))

    def broadcast(self, key: str, array: Any, result: Any, root: int) -> Any:
        """The result as part of the graph: the root's array has the sum of all gradients, the others have none."""
        name, is_root = self._name(key), self._world.topology.rank == root

        def gradient(given: Any) -> Any:
            total = self._reduced(name, given, SUM)
            if not is_root:
                total[...] = 0  # after the reduction
            return total

        return mxnet_compat.differentiable(array, result, gradient)

    def allgather(self, key: str, array: Any, result: Any, first: int) -> Any:
        """The result as part of the graph: this worker's rows of the sum of all gradients, from the `first` one on."""
        name, rows = self._name(key), array.shape[0]

        def gradient(given: Any) -> Any:
            total = self._reduced(name, given, SUM)
            if not rows:
                total.wait_to_read()  # nothing that is returned depends on it
            return total[first : first + rows]

        return mxnet_compat.differentiable(array, result, gradient)

    def reducescatter(self, key: str, array: Any, result: Any, how: Reduction, first: int) -> Any:
        """The result as part of the graph: all workers' gradients one after the other, scaled as the array was."""
        name, shape, rows = self._name(key), array.shape, result.shape[0]

        def gradient(given: Any) -> Any:
            mine = buffer_like(given, context=mxnet_compat.context_of(given), shape=shape)
            mine[...] = 0
            if rows:
                mine[first : first + rows] = given
            return self._reduced(name, mine, how)

        return mxnet_compat.differentiable(array, result, gradient)

    def exchange(self, key: str, array: Any, result: Any, back: Callable[[str, Any], Any]) -> Any:
        """The result as part of the graph: `back` sends its gradient back, under the name that it is given."""
        name = self._name(key)

        def gradient(given: Any) -> Any:
            self._check_world(name)
            return back(name, given)

        return mxnet_compat.differentiable(array, result, gradient)

    def _name(self, key: str) -> str:
        name = f"{key}.gradient"
        return unnamed(self._world, name) if self._is_named else name

    def _reduced(self, name: str, array: Any, how: Reduction) -> Any:
        self._check_world(name)
        total = buffer_like(array, context=mxnet_compat.context_of(array))
        # Not inside `submitting`: it raises unread errors, which are for the program's thread. A lost world fails the
        # result.
        groups = [Group(name, [array], [total])]
        Operations(self._world, NAMESPACE).pushpull(self._call, groups, self._priority, how)
        return total

    def _check_world(self, name: str) -> None:
        if self._world.topology.generation != self._generation:
            present = self._world.topology.generation
            fact = f"the forward pass was in generation {self._generation} of the world; this is generation {present}."
            raise InvalidRequestError(self._call.message(name, fact, "do the forward pass again."))


def tape(call: Call, world: Member, name: Optional[str], priority: int) -> Optional[Tape]:
    """The tape of a call; None outside of ``autograd.record()``."""
    return Tape(call, world, name is not None, priority) if mxnet_compat.is_recording() else None


def refuse_in_graph(call: Call, name: Optional[str], array: Any, fact: str, fix: str) -> None:
    """Raise InvalidRequestError if gradients may flow to the array: they would be wrong."""
    if mxnet_compat.is_recording() and mxnet_compat.is_in_graph(array):
        raise InvalidRequestError(call.message(name or call.operation, fact, fix))


def refuse_in_place(call: Call, name: Optional[str], array: Any) -> None:
    """Raise InvalidRequestError if gradients may flow to an array that is to be overwritten."""
    fact = "an array that is being recorded cannot be overwritten."
    fix = f"use hvd.{call.operation}, or call it within mx.autograd.pause()."
    refuse_in_graph(call, name, array, fact, fix)
