"""What a Trainer exchanges in each step, collected once: it stays the same as long as its parameters' gradients do.

MXNet makes a new list whenever it replaces the gradients of a parameter (``cast``, ``reset_ctx``, ``grad_req``,
``initialize``), so that takes two comparisons of identities for each parameter to find out.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from kvstore_hvd.mxnet_compat.gradients import set_to_zero
from kvstore_hvd.mxnet_compat.trainers import key_of

__all__ = ["Collected", "MakeStep", "collect", "share_freshness"]

#: Makes a store's step of (key, array, priority) for each gradient; None when they are none that it can sum in one go.
MakeStep = Callable[[Sequence["tuple[int, Any, int]"]], Any]

#: Tells a worker that waits alone what the others have not passed.
_FRESHNESS = "fresh gradients (ignore_stale_grad=True)"

_list_of = operator.attrgetter("_grad")
_first_of = operator.itemgetter(0)


def share_freshness(trainer: Any, store: Any, exchanged: bool = False) -> tuple[list[int], list[Any]]:
    """Make stale gradients zero that are fresh on another worker, unless they are `exchanged` already.

    Returns the keys of those that are stale on all workers, and the arrays whose gradients count as fresh in the update
    that follows. Waits for the others.
    """
    fresh = [each._grad is not None and any(array._fresh_grad for array in each._data) for each in trainer._params]
    stale, refreshed = [], []
    for parameter, is_fresh in zip(trainer._params, store._anywhere(fresh, _FRESHNESS)):
        if parameter._grad is None:
            continue
        if not is_fresh:
            stale.append(key_of(trainer, parameter))
            continue
        for array, gradient in zip(parameter._data, parameter._grad):
            if not (array._fresh_grad or exchanged):
                set_to_zero(gradient)
            refreshed.append(array)
    return stale, refreshed


class Collected:
    """The gradients of a Trainer as they were when all of them were looked at, and what its store made of them."""

    def __init__(self, trainer: Any, arena: object, step: object) -> None:
        self.step = step
        self._store = trainer._kvstore
        # Weakly: Trainers outlive worlds.
        self._arena: Callable[[], object] = (lambda: None) if arena is None else weakref.ref(arena)
        self._lists = [param._grad for param in trainer._params]
        self._filled = [each for each in self._lists if each is not None]
        self._arrays = [each[0] for each in self._filled]

    def is_current(self, trainer: Any, arena: object) -> bool:
        """Whether there is nothing to move to the arena, and the same to exchange on the same store."""
        params = trainer._params
        return (
            trainer._kvstore is self._store
            and self._arena() is arena
            and len(params) == len(self._lists)
            and all(map(operator.is_, map(_list_of, params), self._lists))
            and all(map(operator.is_, map(_first_of, self._filled), self._arrays))
        )


def collect(trainer: Any, arena: object, make_step: MakeStep) -> Collected | None:
    """Look at all gradients of a Trainer."""
    import mxnet

    if trainer._update_on_kvstore:
        return None
    stock = mxnet.gluon.Parameter
    gradients = []
    for place, param in enumerate(trainer._params):
        kind, arrays = type(param), param._grad
        if kind is mxnet.gluon.Constant and arrays is None:
            continue
        # Subclasses may say something else each time.
        if kind.grad_req is not stock.grad_req or kind.list_grad is not stock.list_grad:
            return None
        if param._data is None or (arrays is None) != (param.grad_req == "null"):
            return None
        if arrays is None:
            continue
        if len(arrays) != 1:
            return None
        key = trainer._param2idx[param._uuid] if hasattr(param, "_uuid") else place  # MXNet 2, MXNet 1
        gradients.append((key, arrays[0], -place))
    step = make_step(gradients)
    return None if step is None else Collected(trainer, arena, step)
