"""Trainers and Modules whose store stays in this worker: refused beside other workers, unless the script exchanges.

A script may reduce by itself: gradients before each update, or parameters every few updates (local SGD). So the
collectives that it calls are counted, whatever they are of, but not what other Trainers exchange for themselves.
Without any since the Trainer or Module was made, its third update is refused; with broadcasts only it warns, and the
100th one is refused. With ``kvstore=None`` it warns at most. After a collective that combines data of the workers
nothing happens, and nobody looks again.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, Optional

from kvstore_hvd import log
from kvstore_hvd.config import config
from kvstore_hvd.errors import UnsupportedMethodError, UnsynchronisedTrainerError, message
from kvstore_hvd.mxnet_compat.exchanging import IsOurs
from kvstore_hvd.mxnet_compat.wrapping import wrap

__all__ = ["note_collective", "patch"]

WorldSize = Callable[[], Optional[int]]
_FIRST_LOOK, _LAST_LOOK = 3, 100  # updates
_WATCH = "_kvstore_hvd_watch"  # of a Trainer or Module: None once there is nothing to look at

_world_size: WorldSize = lambda: None  # noqa: E731
_is_ours: IsOurs = lambda kv: False  # noqa: E731
_broadcasts = _reductions = 0  # of this process
_own = threading.local()  # whether this thread is in a Trainer's own exchange


def note_collective(reduces: bool = True) -> None:
    """Count a collective of the program's; False: a broadcast."""
    global _broadcasts, _reductions
    if vars(_own):
        return
    if reduces:
        _reductions += 1
    else:
        _broadcasts += 1


@contextlib.contextmanager
def uncounted() -> Iterator[None]:
    """Count no collective of this thread: what a Trainer exchanges for itself says nothing of others."""
    _own.exchanges = True
    try:
        yield
    finally:
        del _own.exchanges


class _Watch:
    """What a Trainer or Module has asked for, and what was counted when it was made."""

    def __init__(self, asked: Any) -> None:
        # MXNet creates no store, whatever was asked for, where one device has nobody to exchange anything with.
        self.asked = asked if asked is None or isinstance(asked, str) else getattr(asked, "type", type(asked).__name__)
        self.updates, self.broadcasts, self.reductions = 0, _broadcasts, _reductions


def _look(watch: _Watch, who: Any, workers: int) -> bool:
    """Whether later updates have to be looked at, too. Raises before an update of one that trains alone."""
    if _reductions > watch.reductions or not _is_local(who._kvstore) or config().allow_local_trainer:
        return False
    number, has_broadcast, name = watch.updates + 1, _broadcasts > watch.broadcasts, type(who).__name__
    if number < _FIRST_LOOK:
        watch.updates = number
        return True
    if watch.asked is None:
        has_broadcast = _broadcasts > 0  # local SGD begins with one, often before the Trainer is made
        text = (
            "%s has no kvstore, and nothing was exchanged by its third update: each of the %d workers trains a model "
            "of its own. If that is not on purpose, pass kvstore='horovod'."
        )
        if not has_broadcast:
            log.once("without-store", logging.WARNING, text, name, workers)
        return False
    if number < _LAST_LOOK and has_broadcast:
        text = (
            "%s has kvstore '%s', which stays in this worker, and so far there were only broadcasts. If the script "
            "exchanges parameters every few updates (local SGD), pass kvstore=None; if not, pass kvstore='horovod': it "
            "raises in update %d if nothing else was exchanged."
        )
        log.once("broadcast-only", logging.WARNING, text, name, watch.asked, _LAST_LOOK)
        watch.updates = number
        return True
    fact = f"{name} has kvstore '{watch.asked}', but there are {workers} workers: each would train a model of its own."
    details = [
        f"{'Nothing but broadcasts' if has_broadcast else 'Nothing'} was exchanged since it was made.",
        "Exchanges that come later (local SGD) or by other means, and independent trainings: kvstore=None.",
    ]
    fix = "pass kvstore='horovod', or the store that mx.kv.create('horovod') returned."
    raise UnsynchronisedTrainerError(message(fact, details=details, fix=fix))


def patch(mxnet: Any, world_size: WorldSize, is_ours: IsOurs) -> None:
    """Make the changes to MXNet."""
    global _world_size, _is_ours
    _world_size, _is_ours = world_size, is_ours
    wrap(mxnet.gluon.Trainer, "__init__", _constructing)
    wrap(mxnet.gluon.Trainer, "_update", _updating)
    if hasattr(mxnet, "mod"):  # only MXNet 1 has these
        wrap(mxnet.mod.Module, "init_optimizer", _optimizing)
        wrap(mxnet.mod.Module, "borrow_optimizer", _borrowing)
        wrap(mxnet.mod.Module, "update", _updating)
        wrap(mxnet.model.FeedForward, "fit", _refusing)


def _is_local(kv: Any) -> bool:
    """Whether no store, or one of MXNet's that stays in this process. What others registered is taken at its word."""
    return kv is None or (isinstance(kv, sys.modules["mxnet"].kvstore.KVStore) and "dist" not in kv.type)


def _watch(owner: Any, asked: Any) -> None:
    vars(owner)[_WATCH] = None if _is_ours(asked) else _Watch(asked)


def _constructing(original: Callable[..., Any]) -> Callable[..., Any]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        _watch(self, self._kvstore_params["kvstore"])

    return init


def _optimizing(original: Callable[..., Any]) -> Callable[..., Any]:
    def init_optimizer(self: Any, kvstore: Any = "local", *args: Any, **kwargs: Any) -> None:
        before = self._optimizer
        original(self, kvstore, *args, **kwargs)
        if self._optimizer is not before:  # an optimizer that is there already stays
            _watch(self, kvstore)

    return init_optimizer


def _borrowing(original: Callable[..., Any]) -> Callable[..., Any]:
    def borrow_optimizer(self: Any, shared_module: Any) -> None:
        original(self, shared_module)
        vars(self)[_WATCH] = vars(shared_module).get(_WATCH)

    return borrow_optimizer


def _updating(original: Callable[..., Any]) -> Callable[..., Any]:
    def update(self: Any, *args: Any, **kwargs: Any) -> None:
        watch, workers = vars(self).get(_WATCH), _world_size() or 1
        if watch is not None and workers > 1 and not _look(watch, self, workers):
            vars(self)[_WATCH] = None
        original(self, *args, **kwargs)

    return update


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        kvstore = kwargs.get("kvstore", args[6] if len(args) > 6 else "local")
        if _is_ours(kvstore) or ((_world_size() or 1) > 1 and kvstore is not None):
            raise UnsupportedMethodError(message("FeedForward trains on one worker only.", fix="use mx.mod.Module."))
        return original(self, *args, **kwargs)

    return fit
