"""Optimizers that exchange gradients by themselves, such as `DistributedOptimizer`: what stands beside them.

A store that exchanges them as well would sum them twice: the update would be as many times too large as there are
workers. So a Trainer or a Module with such an optimizer gets no store of ours, whatever it asks for, as
MXNet creates none for one device. All workers still begin with the parameters of the first one, which the
optimizer's own store broadcasts. The gradients of several devices are first summed by a store of MXNet's.

Such an optimizer updates in Python, not in the callback of a store: ctypes prints an exception of a callback and goes
on, so the loss of the world would pass unnoticed.

An optimizer says that it is one by an attribute ``_kvstore_hvd_synchronised = True``. It may have
``_kvstore_hvd_store``, its store, one of ours; and, with an optimizer inside it, ``unwrap()`` and
``_kvstore_hvd_adopt(other)``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Optional

from kvstore_hvd import log
from kvstore_hvd.mxnet_compat.hooks import wrap

#: Of an Updater: the topology of the world in which its states were compared.
COMPARED = "_kvstore_hvd_compared"


def exchanging_in(optimizer: Any) -> Any:
    """The optimizer that exchanges gradients: this one, or one inside it, as SVRG's has; None if there is none."""
    for each in (optimizer, *getattr(optimizer, "__dict__", {}).values()):
        if getattr(each, "_kvstore_hvd_synchronised", False) is True:
            return each
    return None


def store_of(optimizer: Any) -> Any:
    """The store of an optimizer that exchanges gradients; None if it has none, or exchanges nothing."""
    return getattr(optimizer, "_kvstore_hvd_store", None)


def set_store_aside(optimizer: Any, asked: Any, devices: int) -> Optional[str]:
    """What a store of ours is replaced with beside such an optimizer; says so in the log, once."""
    log.once(
        "exchanging-optimizer",
        logging.WARNING,
        "kvstore '%s' exchanges no gradients here: the optimizer, a %s, does so itself.%s",
        asked if isinstance(asked, str) else asked.type,
        type(optimizer).__name__,
        " Only the initial parameters are broadcast." if store_of(optimizer) is not None else "",
    )
    return None if devices == 1 else "device"


def states_of(updater: Any) -> list[int]:
    """For which parameters MXNet's Updater has states, as numbers in order."""
    return sorted(index for index, state in updater.states.items() if state is not None)


def new_states(updater: Any, store: Any) -> list[int]:
    """What the workers compare in the first exchange in a world: a number of updates, and `states_of`; [] if none."""
    # Later exchanges, for which `COMPARED` is set, need no comparison: the same updates have changed all workers.
    setattr(updater, COMPARED, store._member.topology)
    states, optimizer = states_of(updater), updater.optimizer
    # Without states the number matters to a schedule only; newcomers of an elastic job may have another one.
    return [optimizer.num_update, *states] if states or (optimizer.lr_scheduler and optimizer.num_update) else []


def patch(mxnet: Any) -> None:
    """Have states saved with the optimizer inside, loaded into it, and compared in the first update in a world."""

    def calling(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, index: Any, grad: Any, weight: Any) -> None:
            store = store_of(self.optimizer)
            if store is None or vars(self).get(COMPARED) is store._member.topology:
                original(self, index, grad, weight)
                return
            with store._comparing_states(new_states(self, store)):
                original(self, index, grad, weight)

        return call

    def getting(original: Callable[..., Any]) -> Callable[..., Any]:
        def get_states(self: Any, dump_optimizer: bool = False) -> Any:
            optimizer = self.optimizer
            if exchanging_in(optimizer) is not optimizer or not hasattr(optimizer, "_kvstore_hvd_adopt"):
                return original(self, dump_optimizer)
            self.optimizer = optimizer.unwrap()
            try:
                return original(self, dump_optimizer)
            finally:
                self.optimizer = optimizer

        return get_states

    def setting(original: Callable[..., Any]) -> Callable[..., Any]:
        def set_states(self: Any, states: Any) -> None:
            optimizer = self.optimizer
            original(self, states)
            # Else this worker would train alone from now on.
            if self.optimizer is not optimizer and hasattr(optimizer, "_kvstore_hvd_adopt"):
                optimizer._kvstore_hvd_adopt(self.optimizer)
                self.optimizer = optimizer

        return set_states

    wrap(mxnet.optimizer.Updater, "__call__", calling)
    wrap(mxnet.optimizer.Updater, "get_states", getting)
    wrap(mxnet.optimizer.Updater, "set_states", setting)
