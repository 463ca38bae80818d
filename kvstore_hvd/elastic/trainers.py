"""The handler of Gluon's Trainers: optimizers with their states and counts, and what mixed precision adds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import kvstore_hvd
from kvstore_hvd import mxnet as hvd
from kvstore_hvd import mxnet_compat
from kvstore_hvd.elastic.array_handlers import Arrays, ArraysHandler, Details
from kvstore_hvd.elastic.copies import deep_copy, named_copies
from kvstore_hvd.elastic.images import Spec, spec_of
from kvstore_hvd.errors import InvalidRequestError, message
from kvstore_hvd.mxnet_compat.hooks import ALIAS, NAME
from kvstore_hvd.store.arrays import new_array

STORE_NAMES = (NAME, ALIAS)
# Of the Trainer itself: by what gradients are scaled. In its dictionary, where a DistributedTrainer's say for how many
# workers they are meant: the state may be restored among others.
_ATTRIBUTES = ("_scale", "_amp_original_scale")
# Of the optimizer: its parameters, whose values are no part of it.
_NOT_SAVED = ("param_dict",)


class _Place(NamedTuple):
    """Stands for an array in the states of an optimizer: the number of its values."""

    number: int


class TrainerHandler(ArraysHandler):
    """Handler of a Trainer: all that its updates depend on, but for parameters and gradients."""

    def describe(self) -> tuple[Details, Arrays]:
        """See `ArraysHandler.describe`."""
        trainer = self.value
        _check(trainer)
        found: Arrays = []
        states = [
            {index: _without_arrays(state, index, found) for index, state in updater.states.items()}
            for updater in trainer._updaters
        ]
        optimizer = _innermost(trainer)
        scaler = getattr(trainer, "_amp_loss_scaler", None)
        settings = {key: each for key, each in vars(optimizer).items() if key not in _NOT_SAVED}
        details = {
            "optimizer": named_copies(settings, type(optimizer).__name__),
            "scaler": None if scaler is None else deep_copy(vars(scaler)),
            "trainer": {name: vars(trainer)[name] for name in _ATTRIBUTES if name in vars(trainer)},
            "distributed": isinstance(trainer, hvd.DistributedTrainer),
            "states": states,
            "class": type(optimizer).__name__,
            "parameters": len(trainer._params),
            "deferred": [at for at, each in enumerate(trainer._params) if mxnet_compat.is_deferred(each)],
        }
        return details, found

    def fault(self, details: Details, specs: Sequence[Spec]) -> str:
        """See `ArraysHandler.fault`."""
        trainer = self.value
        kinds = ("Trainer of Gluon", "DistributedTrainer")
        here, there = kinds[isinstance(trainer, hvd.DistributedTrainer)], kinds[details["distributed"]]
        if here != there:
            return f"the Trainer is a {here} here, but a {there} there."
        here, there = type(_innermost(trainer)).__name__, details["class"]
        if here != there:
            return f"the Trainer's optimizer is {here} here, but {there} there."
        if len(trainer._params) != details["parameters"]:
            return f"the Trainer has {len(trainer._params)} parameters here, but {details['parameters']} there."
        if details["scaler"] is not None and getattr(trainer, "_amp_loss_scaler", None) is None:
            return "the Trainer has no loss scaler here: amp.init_trainer() was not called."
        return ""

    def receive(self) -> None:
        """See `StagedHandler.receive`; afterwards the Trainers of all workers agree what they have to broadcast."""
        is_ours = _has_our_store(self.value) or mxnet_compat.broadcasts_parameters(self.value)
        super().receive()
        if is_ours:
            # A Trainer broadcasts its parameters in its first step, which is another one for workers that come later.
            # The state broadcasts those that have values; the others follow in the next step of all workers.
            deferred = set(self._spare.details["deferred"])
            self.value._params_to_init = [each for at, each in enumerate(self.value._params) if at in deferred]

    def own(self) -> dict[str, Any]:
        """See `ArraysHandler.own`: the residuals of 2bit gradient compression."""
        store = self.value._kvstore
        return store._residuals() if isinstance(store, kvstore_hvd.Horovod) else {}

    def restore_own(self, saved: dict[str, Any]) -> None:
        """See `ArraysHandler.restore_own`."""
        store = self.value._kvstore
        if isinstance(store, kvstore_hvd.Horovod):
            store._set_residuals(saved)

    def conform(self, details: Details, specs: Sequence[Spec]) -> Sequence[tuple[Any, int]]:
        """See `ArraysHandler.conform`."""
        trainer = self.value
        _set(_innermost(trainer), details["optimizer"])
        mxnet_compat.count_on_own_devices(trainer)
        vars(trainer).update(details["trainer"])
        scaler = getattr(trainer, "_amp_loss_scaler", None)
        if scaler is not None and details["scaler"] is not None:
            _replace(vars(scaler), details["scaler"])
        targets: list[tuple[Any, int]] = []
        for at, (updater, device) in enumerate(zip(trainer._updaters, mxnet_compat.devices_of(trainer))):
            # On more devices than rank 0 has, the others take the first one's states.
            saved = details["states"][at if at < len(details["states"]) else 0]

            def take(place: _Place, present: Any, device: Any = device) -> Any:
                array = _array(specs[place.number], present, device)
                targets.append((array, place.number))
                return array

            states = {index: _with_arrays(tree, updater.states.get(index), take) for index, tree in saved.items()}
            _replace(updater.states, states)
            _replace(updater.states_synced, dict.fromkeys(states, True))
        return targets


def _check(trainer: Any) -> None:
    if trainer._kvstore and trainer._update_on_kvstore:
        fact = "its parameters are updated by its store, which keeps the states of the optimizer."
        fix = "create it with kvstore='horovod', or with update_on_kvstore=False."
        raise InvalidRequestError(message(fact, operation="state", name="Trainer", fix=fix))


def _innermost(trainer: Any) -> Any:
    """The optimizer that has the settings: a `DistributedOptimizer` hands them on to the one inside it."""
    optimizer = trainer._optimizer
    while isinstance(optimizer, hvd.DistributedOptimizer):
        optimizer = vars(optimizer)["_optimizer"]
    return optimizer


def _has_our_store(trainer: Any) -> bool:
    """Whether it exchanges gradients through a store of ours, which is made now if it is not yet."""
    # Stores are matched by the order in which they are made, and Trainers make theirs in the first step: those of
    # workers that came later might do it in another order.
    import mxnet

    asked = trainer._kvstore_params
    if not trainer._kv_initialized and isinstance(asked["kvstore"], str) and asked["kvstore"].lower() in STORE_NAMES:
        asked["kvstore"] = mxnet.kvstore.create(asked["kvstore"])
    return isinstance(trainer._kvstore if trainer._kv_initialized else asked["kvstore"], kvstore_hvd.Horovod)


# -- Settings; others may hold references to them, so that objects stay the same ----------------------------------


def _set(optimizer: Any, settings: Mapping[str, Any]) -> None:
    scheduler, saved = optimizer.lr_scheduler, settings["lr_scheduler"]
    kept = {key: each for key, each in vars(optimizer).items() if key in _NOT_SAVED}
    _replace(vars(optimizer), {**settings, **kept})
    if type(scheduler) is type(saved) and hasattr(saved, "__dict__"):
        _replace(vars(scheduler), vars(saved))
        optimizer.lr_scheduler = scheduler


def _replace(present: dict[Any, Any], values: Mapping[Any, Any]) -> None:
    present.clear()
    present.update(values)


# -- States of optimizers: trees of tuples and lists with arrays in them -------------------------------------------


def _without_arrays(state: Any, name: object, found: Arrays) -> Any:
    """A copy of a state, with places instead of its arrays, which are added to `found`."""
    if mxnet_compat.is_ndarray(state):
        found.append((name, state))
        return _Place(len(found) - 1)
    if type(state) in (tuple, list):
        return type(state)([_without_arrays(each, name, found) for each in state])
    return None if state is None else deep_copy(state)


def _with_arrays(tree: Any, present: Any, take: Callable[[_Place, Any], Any]) -> Any:
    """The state that `tree` is a copy of, with the arrays of the present one where they fit."""
    if isinstance(tree, _Place):
        return take(tree, present)
    if type(tree) in (tuple, list):
        parts = present if type(present) is type(tree) and len(present) == len(tree) else [None] * len(tree)
        return type(tree)(_with_arrays(each, part, take) for each, part in zip(tree, parts))
    return tree


def _array(spec: Spec, present: Any, device: Any) -> Any:
    """The present array if it looks as it should, else a new one."""
    if mxnet_compat.is_ndarray(present) and spec_of("", present) == spec:
        return present
    return new_array(spec.shape, spec.dtype, device, is_np=spec.is_np)
