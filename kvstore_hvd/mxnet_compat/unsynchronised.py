"""Trainers and Modules whose store stays in this worker: refused beside other workers, unless the script exchanges.

A script may reduce by itself: collectives of its own on the gradients before each update, or on the parameters every
few updates (local SGD). That is recognised by what it does: the collectives tell which arrays they read or wrote
(`note_exchange`), and here is known which arrays a Trainer or Module updates. Of copies one kind is recognised: an
array with as many elements as all gradients, or all parameters, is taken for a flat buffer of these.

=====================================  ===============================================================================
Store asked for                        What happens with several workers
=====================================  ===============================================================================
None                                   never refused; one warning if nothing was exchanged up to the third update
another one, or the default            once a gradient or a parameter was reduced or gathered: nothing;
                                       if the parameters were only broadcast: one warning, refused at the 100th update;
                                       else refused at the first update (with an optimizer that is not MXNet's, and
                                       may exchange as it updates: after it)
=====================================  ===============================================================================

A subclass of Trainer says that it exchanges by ``_kvstore_hvd_synchronised = True``; it is not looked at.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Optional

from kvstore_hvd import log
from kvstore_hvd.config import config
from kvstore_hvd.errors import UnsupportedMethodError, UnsynchronisedTrainerError, message
from kvstore_hvd.mxnet_compat import exchanging
from kvstore_hvd.mxnet_compat.arrays import handle_of, stype_of
from kvstore_hvd.mxnet_compat.parameters import was_broadcast
from kvstore_hvd.mxnet_compat.wrapping import wrap

__all__ = ["note_exchange", "patch"]

WorldSize = Callable[[], Optional[int]]
Arrays = Callable[[Any], Iterator[Any]]
Sizes = Callable[[Any], Iterator[tuple[int, bool]]]
ChunkOf = Callable[[int], int]

# Updates after which a Trainer without a store must have exchanged something, or a warning says that it has not.
_UPDATES_WITHOUT_STORE = 3
# Updates for which it may do with a broadcast: those of local SGD between two exchanges.
_UPDATES_AFTER_BROADCAST = 100

# Of a Trainer: that it has been watched from its beginning.
_WATCHED = "_kvstore_hvd_watched"

_world_size: WorldSize = lambda: None  # noqa: E731
_is_ours: exchanging.IsOurs = lambda kv: False  # noqa: E731
# Those of which it is not known yet whether they train alone.
_watches: weakref.WeakKeyDictionary[Any, _Watch] = weakref.WeakKeyDictionary()
# They by the memory of the arrays that they update, and by the numbers of elements of all of these. None: to be made
# anew.
_by_chunk: Optional[dict[int, list[_Watch]]] = {}
_by_size: dict[int, list[_Watch]] = {}


class _Watch:
    """What is known of one Trainer or Module."""

    def __init__(self, owner: Any, asked: Optional[str], arrays: Arrays, sizes: Sizes, broadcast: bool) -> None:
        self._owner = weakref.ref(owner)
        self._who, self.asked = type(owner).__name__, asked
        self._arrays, self._sizes = arrays, sizes
        self._broadcast = broadcast
        self._updates = 0

    def arrays(self) -> Iterator[Any]:
        """Those of its parameters and gradients, as of now."""
        owner = self._owner()
        if owner is not None:
            yield from self._arrays(owner)

    def flat_sizes(self) -> set[int]:
        """How many elements a copy has of all its gradients, and of all its parameters, in one array."""
        # None where there is but one of them: any other array may have its size.
        owner = self._owner()
        parameters = [] if owner is None else list(self._sizes(owner))
        trained = [size for size, has_gradient in parameters if has_gradient]
        return {sum(sizes) for sizes in (trained, [size for size, _ in parameters]) if len(sizes) > 1}

    def note(self, chunk: int, chunk_of: ChunkOf, reduces: bool) -> None:
        """A collective has read or written memory that was that of one of these."""
        if self._broadcast and not reduces:
            return
        if not any(chunk_of(handle_of(each)) == chunk for each in self.arrays()):
            return  # of another array, which has got the memory of one that is gone
        self._broadcast = True
        if reduces:
            self.forget()

    def forget(self) -> None:
        """Look no further."""
        global _by_chunk
        _watches.pop(self._owner(), None)
        _by_chunk = None if _watches else {}

    def begin_update(self, size: int, optimizer: Any) -> None:
        """Raise before an update of one that trains alone."""
        if self.asked is None:
            return
        if config().allow_local_trainer:
            self.forget()
        elif self._broadcast and self._updates < _UPDATES_AFTER_BROADCAST:
            log.once(
                "broadcast-only",
                logging.WARNING,
                "%s has kvstore '%s', which stays in this worker, and so far its parameters were only broadcast. If the"
                " script exchanges them every few updates (local SGD), pass kvstore=None; if not, pass"
                " kvstore='horovod': it raises after %d updates without an exchange.",
                self._who,
                self.asked,
                _UPDATES_AFTER_BROADCAST,
            )
        elif self._broadcast or self._updates or not _is_own(optimizer):
            self._refuse(size)

    def end_update(self, size: int) -> None:
        """Count an update; raise after one whose optimizer might have exchanged, and has not."""
        self._updates += 1
        if self.asked is None:
            if self._updates == _UPDATES_WITHOUT_STORE:
                if not self._broadcast:
                    fact = f"none of its gradients or parameters was exchanged in its first {self._updates} updates"
                    _warn_without_store(self._who, fact, size)
                self.forget()
        elif not self._broadcast:
            self._refuse(size)

    def _refuse(self, size: int) -> None:
        raise UnsynchronisedTrainerError(_refusal(self._who, str(self.asked), size))


def _warn_without_store(who: str, fact: str, size: int) -> None:
    """Say once that somebody seems to train alone."""
    log.once(
        "without-store",
        logging.WARNING,
        "%s has no kvstore, and %s: each of the %d workers trains a model of its own. If that is not on purpose, pass"
        " kvstore='horovod'.",
        who,
        fact,
        size,
    )


def _refusal(who: str, asked: str, size: int) -> str:
    return message(
        f"{who} has kvstore '{asked}', but there are {size} workers: each of them would train a model of its own.",
        details=[
            "Neither its gradients nor its parameters were exchanged by anything else.",
            "Independent trainings on purpose, or an exchange that cannot be seen (of copies): kvstore=None.",
        ],
        fix="pass kvstore='horovod', or the store that mx.kv.create('horovod') returned.",
    )


def note_exchange(arrays: Iterable[Any], chunk_of: ChunkOf, reduces: bool = True) -> None:
    """Told by every collective of the user's which arrays it reads and writes."""
    if _by_chunk is None:
        _index(chunk_of)
    elif not _by_chunk:
        return
    for array in arrays:
        chunk = chunk_of(handle_of(array))
        for watch in (_by_chunk or {}).get(chunk, ()):
            watch.note(chunk, chunk_of, reduces)
        # A row_sparse array has no size.
        if reduces and _by_size and stype_of(array) == "default":
            for watch in _by_size.get(array.size, ()):
                watch.forget()


def _index(chunk_of: ChunkOf) -> None:
    """Find the watches anew by what collectives may have of them."""
    global _by_chunk
    _by_chunk = {}
    _by_size.clear()
    for watch in list(_watches.values()):
        for array in watch.arrays():
            _by_chunk.setdefault(chunk_of(handle_of(array)), []).append(watch)
        for size in watch.flat_sizes():
            _by_size.setdefault(size, []).append(watch)


def _watch(owner: Any, asked: Optional[str], arrays: Arrays, sizes: Sizes, broadcast: bool = False) -> None:
    global _by_chunk
    _watches[owner] = _Watch(owner, asked, arrays, sizes, broadcast)
    _by_chunk = None


def _forget(owner: Any) -> None:
    if owner in _watches:
        _watches[owner].forget()


def _arrays_changed() -> None:
    """Parameters have got other arrays."""
    global _by_chunk
    if _watches:
        _by_chunk = None


def _is_local(kv: Any) -> bool:
    """Whether no store, or one of MXNet's that stays in this process. What others registered is taken at its word."""
    return kv is None or (isinstance(kv, sys.modules["mxnet"].kvstore.KVStore) and "dist" not in kv.type)


def _name_of(asked: Any) -> Optional[str]:
    # MXNet creates no store, whatever was asked for, where one device has nobody to exchange anything with.
    return asked if asked is None or isinstance(asked, str) else getattr(asked, "type", type(asked).__name__)


def _is_own(optimizer: Any) -> bool:
    """Whether it is not one of MXNet's, and may exchange gradients as it updates."""
    return not isinstance(optimizer, str) and type(optimizer).__module__.partition(".")[0] != "mxnet"


def _undecided(owner: Any) -> Optional[_Watch]:
    """What is known of somebody who may train alone beside other workers."""
    watch = _watches.get(owner)
    return None if watch is None or _size() == 1 else watch


def _size() -> int:
    return _world_size() or 1


def _updating(original: Callable[..., Any]) -> Callable[..., Any]:
    def update(self: Any, *args: Any, **kwargs: Any) -> None:
        watch = _undecided(self)
        if watch is not None:
            watch.begin_update(_size(), self._optimizer)
        original(self, *args, **kwargs)
        watch = _undecided(self)  # the update may have exchanged something
        if watch is not None:
            watch.end_update(_size())

    return update


def patch(mxnet: Any, world_size: WorldSize, is_ours: exchanging.IsOurs) -> None:
    """Make the changes to MXNet."""
    global _world_size, _is_ours
    _world_size, _is_ours = world_size, is_ours
    _patch_trainer(mxnet)
    if hasattr(mxnet, "mod"):  # only MXNet 1 has it
        _patch_module(mxnet.mod.Module)
    if hasattr(mxnet.model, "FeedForward"):
        wrap(mxnet.model.FeedForward, "fit", _refusing)


# -- Trainer ------------------------------------------------------------------------------------------------------


def _patch_trainer(mxnet: Any) -> None:
    def constructing(original: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            _watch_trainer(self)

        return init

    def starting(original: Callable[..., Any]) -> Callable[..., Any]:
        def init_kvstore(self: Any) -> None:
            original(self)
            if _WATCHED not in vars(self):
                _watch_trainer(self)  # it was made before MXNet was changed
            if not _is_local(self._kvstore) or _is_synchronised(self, self._optimizer):
                _forget(self)
            watch = _undecided(self)
            if watch is not None and self._update_on_kvstore:
                # The store is about to update as it sums the gradients of several devices.
                try:
                    watch.begin_update(_size(), self._optimizer)
                except UnsynchronisedTrainerError:
                    # Whoever catches this and steps again must not get through.
                    self._kv_initialized = False
                    raise

        return init_kvstore

    def changing(original: Callable[..., Any]) -> Callable[..., Any]:
        def change(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            _arrays_changed()

        return change

    wrap(mxnet.gluon.Trainer, "__init__", constructing)
    wrap(mxnet.gluon.Trainer, "_init_kvstore", starting)
    wrap(mxnet.gluon.Trainer, "_update", _updating)
    wrap(mxnet.gluon.Parameter, "_init_grad", changing)
    wrap(mxnet.gluon.Parameter, "cast", changing)


def _watch_trainer(trainer: Any) -> None:
    asked = trainer._kvstore_params["kvstore"]
    setattr(trainer, _WATCHED, True)
    if not _is_ours(asked) and not _is_synchronised(trainer, trainer._optimizer):
        # Parameters are usually broadcast before they get a Trainer.
        broadcast = any(map(was_broadcast, trainer._params))
        _watch(trainer, _name_of(asked), _arrays_of_trainer, _sizes_of_trainer, broadcast)


def _is_synchronised(trainer: Any, optimizer: Any) -> bool:
    return getattr(trainer, exchanging.SYNCHRONISED, False) or exchanging.optimizer_in(optimizer) is not None


def _arrays_of_trainer(trainer: Any) -> Iterator[Any]:
    for parameter in trainer._params:
        for arrays in (parameter._data, parameter._grad):
            yield from arrays or ()


def _sizes_of_trainer(trainer: Any) -> Iterator[tuple[int, bool]]:
    for parameter in trainer._params:
        if parameter._data:
            yield parameter._data[0].size, parameter._grad is not None


# -- Module -------------------------------------------------------------------------------------------------------


def _patch_module(module: type) -> None:
    def optimizing(original: Callable[..., Any]) -> Callable[..., Any]:
        def init_optimizer(self: Any, kvstore: Any = "local", *args: Any, **kwargs: Any) -> None:
            before = self._optimizer
            original(self, kvstore, *args, **kwargs)
            is_new = self._optimizer is not before  # an optimizer that is there already stays
            if is_new and _is_local(self._kvstore) and not _is_synchronised(self, self._optimizer):
                _watch(self, _name_of(kvstore), _arrays_of_module, _sizes_of_module)

        return init_optimizer

    def borrowing(original: Callable[..., Any]) -> Callable[..., Any]:
        def borrow_optimizer(self: Any, shared_module: Any) -> None:
            original(self, shared_module)
            if shared_module in _watches:
                _watch(self, _watches[shared_module].asked, _arrays_of_module, _sizes_of_module)

        return borrow_optimizer

    wrap(module, "init_optimizer", optimizing)
    wrap(module, "borrow_optimizer", borrowing)
    wrap(module, "update", _updating)


def _arrays_of_module(module: Any) -> Iterator[Any]:
    group = module._exec_group
    for arrays in (*group.param_arrays, *group.grad_arrays):
        yield from (array for array in arrays if array is not None)


def _sizes_of_module(module: Any) -> Iterator[tuple[int, bool]]:
    group = module._exec_group
    for arrays, gradients in zip(group.param_arrays, group.grad_arrays):
        yield arrays[0].size, gradients[0] is not None


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        kvstore = kwargs.get("kvstore", args[6] if len(args) > 6 else "local")
        if _is_ours(kvstore) or (_size() > 1 and kvstore is not None):
            raise UnsupportedMethodError(message("FeedForward trains on one worker only.", fix="use mx.mod.Module."))
        return original(self, *args, **kwargs)

    return fit
