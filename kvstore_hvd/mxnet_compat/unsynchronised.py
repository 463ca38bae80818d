"""Trainers and Modules whose store stays in this worker: refused beside other workers, unless the script exchanges.

A script may reduce by itself: gradients before each update, or parameters every few updates (local SGD). So its
collectives are counted, but not the exchanges of other Trainers. Without a collective since the Trainer or Module was
made, its third update is refused. With broadcasts only, it warns, and the 100th update is refused. With
``kvstore=None`` it warns at most. After a collective that combines data of the workers, the watch ends.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Optional

from kvstore_hvd import log
from kvstore_hvd.config import config
from kvstore_hvd.errors import UnsynchronisedTrainerError, message
from kvstore_hvd.mxnet_compat import hooks

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
        number, has_broadcast, name = self.updates + 1, counts.broadcasts > self.before.broadcasts, type(who).__name__
        if number < _FIRST_LOOK:
            self.updates = number
            return self
        if self.asked is None:
            has_broadcast = counts.broadcasts > 0  # local SGD begins with one, often before the Trainer is made
            text = (
                "%s has no kvstore, and nothing was exchanged by its third update: each of the %d workers trains a "
                "model of its own. If that is not on purpose, pass kvstore='horovod'."
            )
            if not has_broadcast:
                log.once("without-store", logging.WARNING, text, name, workers)
            return None
        if number < _LAST_LOOK and has_broadcast:
            text = (
                "%s has kvstore '%s', which stays in this worker, and so far there were only broadcasts. If the script "
                "exchanges parameters every few updates (local SGD), pass kvstore=None; if not, pass kvstore='horovod':"
                " it raises in update %d if nothing else was exchanged."
            )
            log.once("broadcast-only", logging.WARNING, text, name, self.asked, _LAST_LOOK)
            self.updates = number
            return self
        fact = (
            f"{name} has kvstore '{self.asked}', but there are {workers} workers: each would train a model of its own."
        )
        details = [
            f"{'Nothing but broadcasts' if has_broadcast else 'Nothing'} was exchanged since it was made.",
            "Exchanges that come later (local SGD) or by other means, and independent trainings: kvstore=None.",
        ]
        fix = "pass kvstore='horovod', or the store that mx.kv.create('horovod') returned."
        raise UnsynchronisedTrainerError(message(fact, details=details, fix=fix))


def watch_of(asked: Any) -> Optional[Watch]:
    """What looks at a Trainer or Module that has asked for this store; None if it is ours."""
    return None if hooks.asks_for_ours(asked) else Watch(asked)


def _is_local(kv: Any) -> bool:
    """Whether there is no store, or one of MXNet's within this process; third-party stores are assumed to exchange."""
    return kv is None or (isinstance(kv, sys.modules["mxnet"].kvstore.KVStore) and "dist" not in kv.type)
