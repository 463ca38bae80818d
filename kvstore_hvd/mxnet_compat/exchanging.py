"""Optimizers that exchange gradients by themselves, such as `DistributedOptimizer`: what stands beside them.

A store that exchanges them as well would sum them twice: the update would be as many times too large as there are
workers. So a Trainer or a Module with such an optimizer gets no store of ours, whatever it asks for, as
MXNet creates none for one device. All workers still begin with the parameters of the first one, which the
optimizer's own store broadcasts. The gradients of several devices are first summed by a store of MXNet's.

Such an optimizer updates in Python, not in the callback of a store: ctypes prints what is raised there, and goes on, so
that the loss of the world would be noticed by nobody.

An optimizer says that it is one by an attribute ``_kvstore_hvd_synchronised = True``. It may have
``_kvstore_hvd_store``, its store, one of ours; and, with an optimizer inside it, ``unwrap()`` and
``_kvstore_hvd_adopt(other)``.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from typing import Any, Optional

from kvstore_hvd import log
from kvstore_hvd.mxnet_compat.trainers import devices_of, states_of
from kvstore_hvd.mxnet_compat.wrapping import wrap

__all__ = [
    "broadcast_parameters",
    "broadcasts_parameters",
    "optimizer_in",
    "patch",
    "present",
    "set_store_aside",
]

# Of an optimizer: whether it exchanges gradients by itself.
_SYNCHRONISED = "_kvstore_hvd_synchronised"
# Of a Trainer: the store of its optimizer, which gives all workers the initial parameters.
_BROADCASTS = "_kvstore_hvd_broadcasts"
# Of an Updater: the topology of the world in which its states were compared.
_COMPARED = "_kvstore_hvd_compared"

IsOurs = Callable[[Any], bool]

# The one that a Module is being given.
_present: Any = None


def optimizer_in(optimizer: Any) -> Any:
    """The optimizer that exchanges gradients: this one, or one inside it, as SVRG's has; None if there is none."""
    inside = getattr(optimizer, "__dict__", {}).values()
    return next((each for each in (optimizer, *inside) if getattr(each, _SYNCHRONISED, False) is True), None)


def present() -> Any:
    """The optimizer that exchanges gradients and that a Module is being given; None if none is."""
    return _present


def broadcast_parameters(optimizer: Any, parameters: Mapping[str, Any]) -> None:
    """Give all workers the first one's, by the optimizer's own store."""
    store = _store_of(optimizer)
    if store is not None:
        for name in sorted(parameters):
            store.broadcast(name, parameters[name])


def set_store_aside(optimizer: Any, asked: Any, devices: int) -> Optional[str]:
    """What a store of ours is replaced with beside such an optimizer; says so in the log, once."""
    log.once(
        "exchanging-optimizer",
        logging.WARNING,
        "kvstore '%s' exchanges no gradients here: the optimizer, a %s, does so itself.%s",
        asked if isinstance(asked, str) else asked.type,
        type(optimizer).__name__,
        " Only the initial parameters are broadcast." if _store_of(optimizer) is not None else "",
    )
    return None if devices == 1 else "device"


def broadcasts_parameters(trainer: Any) -> bool:
    """Whether a Trainer without a store of ours broadcasts its parameters before its first step, like one with it."""
    return _BROADCASTS in vars(trainer)


def patch(mxnet: Any, is_ours: IsOurs) -> None:
    """Make the changes to MXNet; `is_ours` tells whether a store, or the name of one, is ours."""
    _patch_trainer(mxnet.gluon.Trainer, is_ours)
    wrap(mxnet.optimizer.Updater, "get_states", _getting_states)
    wrap(mxnet.optimizer.Updater, "set_states", _setting_states)
    wrap(mxnet.optimizer.Updater, "__call__", _comparing_states)
    if hasattr(mxnet, "mod"):  # only MXNet 1 has it
        _patch_module(mxnet, is_ours)


def _store_of(optimizer: Any) -> Any:
    return getattr(optimizer, "_kvstore_hvd_store", None)


# -- Trainer ------------------------------------------------------------------------------------------------------


def _patch_trainer(owner: Any, is_ours: IsOurs) -> None:
    def resetting(original: Callable[..., Any]) -> Callable[..., Any]:
        def reset_kvstore(self: Any) -> None:
            # The last thing that the constructor does, and what follows `reset_ctx`.
            original(self)
            optimizer = optimizer_in(self._optimizer)
            if optimizer is None:
                return
            asked = self._kvstore_params
            if is_ours(asked["kvstore"]):
                if _store_of(optimizer) is not None:
                    setattr(self, _BROADCASTS, _store_of(optimizer))
                asked["kvstore"] = set_store_aside(optimizer, asked["kvstore"], len(devices_of(self)))
            if asked["update_on_kvstore"]:
                fact = "update_on_kvstore=True has no effect beside an optimizer that exchanges gradients, a %s."
                log.once("exchanging-on-kvstore", logging.WARNING, fact, type(optimizer).__name__)
            asked["update_on_kvstore"] = False

        return reset_kvstore

    def initializing(original: Callable[..., Any]) -> Callable[..., Any]:
        def init_params(self: Any) -> None:
            own, waiting = self._kvstore, self._params_to_init
            if broadcasts_parameters(self):
                self._kvstore = getattr(self, _BROADCASTS)
                try:
                    original(self)
                finally:
                    self._kvstore = own
                if own is not None:
                    self._params_to_init = waiting
            if own is not None or not broadcasts_parameters(self):
                original(self)

        return init_params

    def updating(original: Callable[..., Any]) -> Callable[..., Any]:
        def update(self: Any, *args: Any, **kwargs: Any) -> None:
            if getattr(self, "_amp_loss_scaler", None) is not None:
                _share_overflow(self)
            original(self, *args, **kwargs)

        return update

    wrap(owner, "_reset_kvstore", resetting)
    wrap(owner, "_init_params", initializing)
    wrap(owner, "_update", updating)


def _share_overflow(trainer: Any) -> None:
    """Have AMP see an overflow on all workers if there is one on any."""
    # It looks for one before the update, in which such an optimizer exchanges gradients: a worker that skipped it alone
    # would leave the others waiting.
    store = _store_of(optimizer_in(trainer._optimizer))
    if store is None or store.num_workers == 1:
        return
    own = copy.copy(trainer._amp_loss_scaler).has_overflow(trainer._params)  # a copy: it counts how often it is asked
    if store._is_true_anywhere(own) and not own:
        first = next(each for each in trainer._params if each._grad is not None)
        first._grad[0][:] = float("nan")


# -- Updater: states are saved with the optimizer inside, loaded into that, and compared in the first update ----------


def _getting_states(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_states(self: Any, dump_optimizer: bool = False) -> Any:
        optimizer = self.optimizer
        if optimizer_in(optimizer) is not optimizer or not hasattr(optimizer, "_kvstore_hvd_adopt"):
            return original(self, dump_optimizer)
        self.optimizer = optimizer.unwrap()
        try:
            return original(self, dump_optimizer)
        finally:
            self.optimizer = optimizer

    return get_states


def _setting_states(original: Callable[..., Any]) -> Callable[..., Any]:
    def set_states(self: Any, states: Any) -> None:
        optimizer = self.optimizer
        original(self, states)
        # Else this worker would train alone from now on.
        if self.optimizer is not optimizer and hasattr(optimizer, "_kvstore_hvd_adopt"):
            optimizer._kvstore_hvd_adopt(self.optimizer)
            self.optimizer = optimizer

    return set_states


def _comparing_states(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, index: Any, grad: Any, weight: Any) -> None:
        store = _store_of(self.optimizer)
        if store is not None and vars(self).get(_COMPARED) is not store._member.topology:
            setattr(self, _COMPARED, store._member.topology)
            with store._comparing_states(states_of(self)):
                original(self, index, grad, weight)
        else:
            original(self, index, grad, weight)

    return call


# -- Module -------------------------------------------------------------------------------------------------------


def _patch_module(mxnet: Any, is_ours: IsOurs) -> None:
    def optimizing(original: Callable[..., Any]) -> Callable[..., Any]:
        def init_optimizer(
            self: Any, kvstore: Any = "local", optimizer: Any = "sgd", *args: Any, force_init: Any = False, **kw: Any
        ) -> None:
            exchanging = optimizer_in(optimizer)
            again = force_init or args[1:2] == (True,)
            replaces = exchanging is not None and is_ours(kvstore) and (again or not self.optimizer_initialized)
            beside = set_store_aside(exchanging, kvstore, len(self._context)) if replaces else kvstore
            given = {"force_init": True} if force_init else {}
            _with_present(exchanging, original, self, beside, optimizer, *args, **given, **kw)
            if replaces and _store_of(exchanging) is not None:
                mxnet.model._initialize_kvstore(
                    _store_of(exchanging), self._exec_group.param_arrays, self._arg_params, self._param_names, False
                )

        return init_optimizer

    def making_stores(original: Callable[..., Any]) -> Callable[..., Any]:
        def init_optimizer(self: Any, kvstore: Any = "local", optimizer: Any = "sgd", *args: Any, **kw: Any) -> None:
            _with_present(optimizer_in(optimizer), original, self, kvstore, optimizer, *args, **kw)

        return init_optimizer

    def wrap_all(owner: Any) -> None:
        for each in owner.__subclasses__():
            wrap(each, "init_optimizer", making_stores)
            wrap_all(each)

    def init_subclass(cls: Any, /, **kwargs: Any) -> None:
        super(mxnet.mod.Module, cls).__init_subclass__(**kwargs)
        wrap(cls, "init_optimizer", making_stores)

    wrap(mxnet.mod.Module, "init_optimizer", optimizing)
    # Subclasses may make a store first, as SVRG's does, which is imported later than MXNet.
    wrap_all(mxnet.mod.Module)
    if "__init_subclass__" not in vars(mxnet.mod.Module):
        mxnet.mod.Module.__init_subclass__ = classmethod(init_subclass)


def _with_present(optimizer: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    global _present
    before, _present = _present, optimizer
    try:
        return function(*args, **kwargs)
    finally:
        _present = before
