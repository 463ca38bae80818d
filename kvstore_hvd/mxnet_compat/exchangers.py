"""Who exchanges gradients where no store of ours does: the optimizer, the script itself, or nobody.

Optimizers such as `DistributedOptimizer` exchange gradients by themselves. A store that exchanges them as well would
sum them twice: the update would be as many times too large as there are workers. So a Trainer or a Module with such an
optimizer gets no store of ours, whatever it asks for, as MXNet creates none for one device. All workers still begin
with the parameters of the first one, which the optimizer's own store broadcasts. The gradients of several devices are
first summed by a store of MXNet's. Such an optimizer updates in Python, not in the callback of a store: ctypes prints
an exception of a callback and goes on, so the loss of the world would pass unnoticed.

An optimizer says that it is one by an attribute ``_kvstore_hvd_synchronised = True``. It may have
``_kvstore_hvd_store``, its store, one of ours; and, with an optimizer inside it, ``_unwrap()`` and
``_kvstore_hvd_adopt(other)``.

A Trainer or Module whose store stays in this worker is refused beside other workers, unless the script exchanges:
gradients before each update, or parameters every few updates (local SGD). So the script's collectives are counted, but
not the exchanges of other Trainers. Without a collective since the Trainer or Module was made, its third update is
refused. With broadcasts only, it warns, and the 100th update is refused. With ``kvstore=None`` it warns at most. After
a collective that combines data of the workers, the watch ends.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Optional

from kvstore_hvd import log
from kvstore_hvd.config import config
from kvstore_hvd.errors import UnsynchronisedTrainerError, message
from kvstore_hvd.mxnet_compat import hooks
from kvstore_hvd.mxnet_compat.hooks import holding, surround, wrap

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
    """For which parameters an Updater of MXNet's has states, as numbers in order."""
    # Of a ShardedUpdater the workers have different ones.
    shared = vars(updater).get("_kvstore_hvd_shares") or {}
    return sorted({*shared, *(index for index, state in updater.states.items() if state is not None)})


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

    def get_states(original: Callable[..., Any], self: Any, dump_optimizer: bool = False) -> Any:
        optimizer = self.optimizer
        if exchanging_in(optimizer) is not optimizer or not hasattr(optimizer, "_kvstore_hvd_adopt"):
            return original(self, dump_optimizer)
        with holding(self, optimizer=optimizer._unwrap()):
            return original(self, dump_optimizer)

    def set_states(original: Callable[..., Any], self: Any, states: Any) -> None:
        optimizer = self.optimizer
        original(self, states)
        # Else this worker would train alone from now on.
        if self.optimizer is not optimizer and hasattr(optimizer, "_kvstore_hvd_adopt"):
            optimizer._kvstore_hvd_adopt(self.optimizer)
            self.optimizer = optimizer

    wrap(mxnet.optimizer.Updater, "__call__", calling)
    surround(mxnet.optimizer.Updater, "get_states", get_states)
    surround(mxnet.optimizer.Updater, "set_states", set_states)


# -- Those that nobody exchanges for -----------------------------------------------------------------------------------

# Updates before which a Trainer or Module is looked at.
_FIRST_LOOK, _LAST_LOOK = 3, 100


@dataclass
class _Counts:
    broadcasts: int = 0
    reductions: int = 0


class _Collectives(threading.local):
    counts = _Counts()  # of this process


#: The collectives of the program, by kind: each operation adds itself to ``collectives.counts``.
collectives = _Collectives()


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Count no collective of this thread: what a Trainer exchanges for itself says nothing of others."""
    collectives.counts = _Counts()
    try:
        yield
    finally:
        del collectives.counts


class Watch:
    """Looks at the updates of a Trainer or Module that has no store of ours."""

    def __init__(self, asked: Any) -> None:
        # MXNet creates no store for one device, whatever the Trainer asks for.
        self.asked = asked if asked is None or isinstance(asked, str) else getattr(asked, "type", type(asked).__name__)
        self.updates, self.before = 0, replace(_Collectives.counts)

    def look(self, who: Any) -> Optional[Watch]:
        """Raise before an update of one that trains alone; None when later updates need no look."""
        workers = hooks.workers()
        if workers == 1:
            return self
        counts = _Collectives.counts
        if counts.reductions > self.before.reductions or not _is_local(who._kvstore) or config().allow_local_trainer:
            return None
        self.updates += 1
        has_broadcast, name = counts.broadcasts > self.before.broadcasts, type(who).__name__
        if self.updates < _FIRST_LOOK:
            return self
        if self.asked is None:
            text = (
                "%s has no kvstore, and nothing was exchanged by its third update: each of the %d workers trains a "
                "model of its own. If that is not on purpose, pass kvstore='horovod'."
            )
            if not counts.broadcasts:  # local SGD begins with one, often before the Trainer is made
                log.once("without-store", logging.WARNING, text, name, workers)
            return None
        if self.updates < _LAST_LOOK and has_broadcast:
            text = (
                "%s has kvstore '%s', which stays in this worker, and so far there were only broadcasts. If the script "
                "exchanges parameters every few updates (local SGD), pass kvstore=None; if not, pass kvstore='horovod':"
                " it raises in update %d if nothing else was exchanged."
            )
            log.once("broadcast-only", logging.WARNING, text, name, self.asked, _LAST_LOOK)
            return self
        fact = (
            f"{name} has kvstore '{self.asked}', but there are {workers} workers: each would train a model of its own."
        )
        details = [f"{'Nothing but broadcasts' if has_broadcast else 'Nothing'} was exchanged since it was made."]
        fix = "pass kvstore='horovod', or the store that mx.kv.create('horovod') returned.\n"
        fix += "    If workers train independently, or exchange parameters later (local SGD): kvstore=None."
        raise UnsynchronisedTrainerError(message(fact, details=details, fix=fix))


def watch_of(asked: Any) -> Optional[Watch]:
    """What looks at a Trainer or Module that has asked for this store; None if it is ours."""
    return None if hooks.asks_for_ours(asked) else Watch(asked)


def _is_local(kv: Any) -> bool:
    """Whether there is no store, or one of MXNet's within this process; third-party stores are assumed to exchange."""
    return kv is None or (isinstance(kv, sys.modules["mxnet"].kvstore.KVStore) and "dist" not in kv.type)
