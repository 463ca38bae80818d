"""The handler of Gluon's Trainers: optimizers with their states and counts, and what mixed precision adds."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import kvstore_hvd
from kvstore_hvd import mxnet as hvd
from kvstore_hvd import mxnet_compat
from kvstore_hvd.elastic.checkpoint import Stored
from kvstore_hvd.elastic.parameters import Arrays, ArraysHandler, Details, Image, Spec
from kvstore_hvd.elastic.state import deep_copy, named_copies
from kvstore_hvd.errors import InvalidRequestError, message
from kvstore_hvd.store.arrays import new_array

# Attributes of the Trainer: factors of gradients. In its dictionary, since those of a DistributedTrainer are divided by
# the number of workers, which may be another one at the restore.
_ATTRIBUTES = ("_scale", "_amp_original_scale")
# Attribute of the optimizer: the parameters, which have a handler of their own.
_NOT_SAVED = "param_dict"


class _Place(NamedTuple):
    """Stands for an array in the saved states of an optimizer."""

    number: int


class TrainerHandler(ArraysHandler):
    """Handler of a Trainer: all that its updates depend on except parameters and gradients."""

    def describe(self) -> tuple[Details, Arrays]:
        trainer = self.value
        if trainer._kvstore and trainer._update_on_kvstore:
            fact = "its parameters are updated by its store, which keeps the states of the optimizer."
            fix = "create it with kvstore='horovod', or with update_on_kvstore=False."
            raise InvalidRequestError(message(fact, operation="state", name="Trainer", fix=fix))
        found: Arrays = []
        states = [
            {index: _without_arrays(state, index, found) for index, state in _states_of(trainer, updater).items()}
            for updater in trainer._updaters
        ]
        optimizer = _innermost(trainer)
        scaler = getattr(trainer, "_amp_loss_scaler", None)
        settings = {key: each for key, each in vars(optimizer).items() if key != _NOT_SAVED}
        details = {
            "optimizer": named_copies(settings, type(optimizer).__name__),
            "scaler": None if scaler is None else deep_copy(vars(scaler)),
            "trainer": {name: vars(trainer)[name] for name in _ATTRIBUTES if name in vars(trainer)},
            "kind": _kind_of(trainer),
            "states": states,
            "class": type(optimizer).__name__,
            "parameters": len(trainer._params),
            "deferred": [at for at, each in enumerate(trainer._params) if mxnet_compat.is_deferred(each)],
        }
        return details, found

    def misfit(self, content: Any) -> str:
        trainer, details = self.value, content[0]
        here, there = _kind_of(trainer), details["kind"]
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
        # Stores are matched by the order in which they are made. A Trainer makes its store in its first step, which is
        # another step for workers that come later: so it is made here.
        store = mxnet_compat.store_in(self.value)
        super().receive()
        if isinstance(store, kvstore_hvd.Horovod) or mxnet_compat.exchange_of(self.value).first_values_by:
            # A Trainer broadcasts its parameters in its first step, too. The state broadcasts the parameters that have
            # values; the others follow in the next step of all workers.
            deferred = set(self._spare.details["deferred"])
            self.value._params_to_init = [each for at, each in enumerate(self.value._params) if at in deferred]

    def _stored(self, image: Image) -> Stored:
        # As save_states() of MXNet: of the first device, which the others equal.
        def array(place: _Place, _: Any) -> Any:
            spec = image.specs[place.number]
            made = new_array(spec.shape, spec.dtype, None, is_np=spec.is_np)
            image.write([(made, place.number)])
            return made

        def parts() -> list[Any]:
            first = image.details["states"][0]
            states = {index: _with_arrays(tree, None, array) for index, tree in first.items()}
            optimizer = copy.copy(_innermost(self.value))
            _replace(vars(optimizer), {**image.details["optimizer"], _NOT_SAVED: {}})
            return [pickle.dumps((states, optimizer))]

        return Stored(".states", parts)

    def _unstore(self, data: bytes, image: Image) -> None:
        found: Arrays = []
        for index, state in pickle.loads(data)[0].items():
            _without_arrays(state, index, found)
        for at in range(len(image.specs)):
            values = found[at % len(found)][1].asnumpy()
            image.values(at)[:] = np.ascontiguousarray(values).view(np.uint8).ravel()

    def reset(self) -> None:
        # What is live was saved or restored before, and belongs to the workers of the world before.
        if isinstance(self.value, hvd.ShardedTrainer) and self.value._updaters[0].is_cut:
            self.restore()

    def own(self) -> dict[str, Any]:
        """The residuals of 2bit gradient compression."""
        store = self._compressing_store()
        return {} if store is None else store._residuals()

    def restore_own(self, saved: dict[str, Any]) -> None:
        store = self._compressing_store()
        if store is not None:
            store._set_residuals(saved)

    def _compressing_store(self) -> kvstore_hvd.Horovod | None:
        store = self.value._kvstore
        return store if isinstance(store, kvstore_hvd.Horovod) and store._reduction.threshold else None

    def conform(self, details: Details, specs: Sequence[Spec]) -> Iterable[tuple[Any, int]]:
        trainer = self.value
        _set(_innermost(trainer), details["optimizer"])
        mxnet_compat.count_on_own_devices(trainer)
        vars(trainer).update(details["trainer"])
        scaler = getattr(trainer, "_amp_loss_scaler", None)
        if scaler is not None and details["scaler"] is not None:
            _replace(vars(scaler), details["scaler"])
        targets: list[tuple[Any, int]] = []
        for at, (updater, device) in enumerate(zip(trainer._updaters, mxnet_compat.devices_of(trainer))):
            # Devices beyond rank 0's take the states of the first one.
            saved = details["states"][at if at < len(details["states"]) else 0]

            def take(place: _Place, present: Any, device: Any = device) -> Any:
                spec = specs[place.number]
                if not mxnet_compat.is_ndarray(present) or self.spec_of("", present) != spec:
                    present = new_array(spec.shape, spec.dtype, device, is_np=spec.is_np)
                targets.append((present, place.number))
                return present

            states = {index: _with_arrays(tree, updater.states.get(index), take) for index, tree in saved.items()}
            _replace(updater.states, states)
            if isinstance(trainer, hvd.ShardedTrainer):
                updater.are_whole()
            _replace(updater.states_synced, dict.fromkeys(states, True))
        return targets


def _states_of(trainer: Any, updater: Any) -> Mapping[Any, Any]:
    """The states of all parameters; of a `ShardedTrainer` every worker has them sent by all others."""
    states: Mapping[Any, Any] = updater.states
    return updater.whole_states() if isinstance(trainer, hvd.ShardedTrainer) and updater.is_cut else states


def _kind_of(trainer: Any) -> str:
    kinds = {hvd.ShardedTrainer: "ShardedTrainer", hvd.DistributedTrainer: "DistributedTrainer"}
    return next((name for kind, name in kinds.items() if isinstance(trainer, kind)), "Trainer of Gluon")


def _innermost(trainer: Any) -> Any:
    """The optimizer that has the settings; a `DistributedOptimizer` is a wrapper of it."""
    optimizer = trainer._optimizer
    while isinstance(optimizer, hvd.DistributedOptimizer):
        optimizer = vars(optimizer)["_optimizer"]
    return optimizer


# -- Settings. Programs may hold references to these objects, which stay the same ones ------------------------------


def _set(optimizer: Any, settings: Mapping[str, Any]) -> None:
    scheduler, saved = optimizer.lr_scheduler, settings["lr_scheduler"]
    kept = {_NOT_SAVED: vars(optimizer)[_NOT_SAVED]} if _NOT_SAVED in vars(optimizer) else {}
    _replace(vars(optimizer), {**settings, **kept})
    if type(scheduler) is type(saved) and hasattr(saved, "__dict__"):
        _replace(vars(scheduler), vars(saved))
        optimizer.lr_scheduler = scheduler


def _replace(present: dict[Any, Any], values: Mapping[Any, Any]) -> None:
    present.clear()
    present.update(values)


# -- States of optimizers: trees of tuples and lists with arrays in them -------------------------------------------


def _without_arrays(state: Any, name: object, found: Arrays) -> Any:
    """A copy of a state with places instead of its arrays, which are appended to `found`."""
    if mxnet_compat.is_ndarray(state):
        found.append((name, state))
        return _Place(len(found) - 1)
    if type(state) in (tuple, list):
        return type(state)([_without_arrays(each, name, found) for each in state])
    return None if state is None else deep_copy(state)


def _with_arrays(tree: Any, present: Any, take: Callable[[_Place, Any], Any]) -> Any:
    """The state of the copy `tree`; `take` returns the array for a place, given the present one."""
    if isinstance(tree, _Place):
        return take(tree, present)
    if type(tree) in (tuple, list):
        parts = present if type(present) is type(tree) and len(present) == len(tree) else [None] * len(tree)
        return type(tree)(_with_arrays(each, part, take) for each, part in zip(tree, parts))
    return tree
