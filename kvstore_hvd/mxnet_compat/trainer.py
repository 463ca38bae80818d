"""Gluon's Trainers: one wrapper for each method that is changed, whose body shows the order of what happens.

With a store of ours a Trainer

- begins with rank 0's parameters, which it names to the store, and may have row_sparse gradients;
- exchanges all gradients of a step in one call of the store, which sums them in memory that the workers share;
- counts a gradient that is stale on some workers as zero there (``ignore_stale_grad=True``), and updates on all;
- compares, in its first exchange in a world, of which parameters the optimizers of the workers have states;
- compares its parameters with the other workers' every KVHVD_VERIFY_EVERY updates;
- saves the residuals of 2bit compression with its states.

Beside an optimizer that exchanges gradients itself it gets no store of ours, see exchangers.py; without either it is
watched, see there. In a Join its steps go through its joinable.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import operator
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Optional

from kvstore_hvd import log
from kvstore_hvd.config import config
from kvstore_hvd.errors import UnsupportedMethodError, message
from kvstore_hvd.mxnet_compat import exchangers
from kvstore_hvd.mxnet_compat.exchangers import COMPARED, exchanging_in, new_states, set_store_aside, store_of
from kvstore_hvd.mxnet_compat.hooks import asks_for_ours, holding, is_ours, require_mxnet, surround, wrap
from kvstore_hvd.mxnet_compat.parameter import fill, move_to_arena, note_gradients, set_to_zero, why_staged

#: Tells a worker that waits alone what the others have not passed.
_FRESHNESS = "fresh gradients (ignore_stale_grad=True)"
# Of a Trainer: its `Exchange`.
_EXCHANGE = "_kvstore_hvd_exchange"
_NOTHING = contextlib.nullcontext()
_list_of = operator.attrgetter("_grad")
_first_of = operator.itemgetter(0)


# -- Questions ------------------------------------------------------------------------------------------------------


def devices_of(trainer: Any) -> Any:
    """The list of MXNet's contexts that its parameters live on."""
    return trainer._devices if hasattr(trainer, "_devices") else trainer._contexts  # MXNet 2, MXNet 1


def trainers_of(parameters: Iterable[Any]) -> list[Any]:
    """The Trainers that update these parameters, in their order; other things have none."""
    found = [getattr(each, "_trainer", None) for each in parameters]
    trainers = [each() if isinstance(each, weakref.ref) else each for each in found]  # MXNet 2, MXNet 1
    return list({id(each): each for each in trainers if each is not None}.values())


def count_on_own_devices(trainer: Any) -> None:
    """Have the optimizer go on counting updates on the Trainer's devices, whatever devices it has counted on."""
    # MXNet counts for each device: on another one a correction of bias, or a schedule, would begin anew.
    counts: dict[int, dict[Any, int]] = trainer._optimizer._all_index_update_counts
    present: dict[Any, int] = {}
    for table in counts.values():
        present.update((index, max(count, present.get(index, 0))) for index, count in table.items())
    for device in devices_of(trainer):
        counts.setdefault(device.device_id, {})
    for table in counts.values():
        table.update(present)


def key_of(trainer: Any, param: Any) -> int:
    """What a Trainer calls a parameter on its store."""
    is_mxnet_2 = hasattr(param, "_uuid")
    key: int = trainer._param2idx[param._uuid if is_mxnet_2 else param.name]
    if is_mxnet_2 or trainer._params[key] is param:
        return key
    return [each is param for each in trainer._params].index(True)  # parameters of one name are one entry


def labels_of(trainer: Any) -> dict[int, str]:
    """Names of a Trainer's parameters by the keys that it uses for them on the store."""
    names = exchange_of(trainer).names
    return {key_of(trainer, param): names.get(id(param), param.name) for param in trainer._params}


def store_in(trainer: Any) -> Any:
    """A Trainer's store, or its name. A store of this package is made now if the first step would make it."""
    store = trainer._kvstore if trainer._kv_initialized else trainer._kvstore_params["kvstore"]
    if isinstance(store, str) and asks_for_ours(store):
        store = trainer._kvstore_params["kvstore"] = require_mxnet().kvstore.create(store)
    return store


def start(trainer: Any) -> None:
    """Make a Trainer's store and broadcast parameters, as its first step does."""
    if not trainer._kv_initialized:
        trainer._init_kvstore()
    if trainer._params_to_init:
        trainer._init_params()


# -- What a Trainer exchanges ---------------------------------------------------------------------------------------


class Exchange:
    """The state of this package for one Trainer: its gradients, exchanged in one call in each step, and how."""

    def __init__(self) -> None:
        #: By the identity of a parameter; in MXNet 2 every parameter calls itself 'weight' or 'bias'.
        self.names: dict[int, str] = {}
        #: What its steps go through, see `join.joinables`.
        self.joinable: Any = None
        self.watch: Optional[exchangers.Watch] = None
        #: The store of the optimizer, where that gives all workers the initial parameters before the first step.
        self.first_values_by: Any = None
        #: Whether the last step, or an update, ignored stale gradients.
        self.ignores_stale = False
        #: The arrays whose gradients are fresh on any worker; None: unknown since the last update.
        self.fresh_anywhere: Optional[list[Any]] = None
        #: By key: why a gradient is staged.
        self._staged: Optional[dict[int, str]] = None
        #: Every how many updates parameters are compared; in which generation, and how many updates it has had.
        self.verify_every, self._generation, self._updates = 0, None, 0
        #: What the store of ours has made of the gradients (None when it takes them one by one), and that store.
        self.step: Any = None
        self.store: object = None
        self._arena: Callable[[], object] = lambda: None
        # MXNet makes a new list whenever it replaces the gradients of a parameter (`cast`, `reset_ctx`, `grad_req`,
        # `initialize`), so two comparisons of identities for each parameter show whether they are the same.
        self._lists: list[Any] = []
        self._filled: list[Any] = []
        self._arrays: list[Any] = []

    def is_current(self, trainer: Any, arena: object) -> bool:
        """Whether there is nothing to move to the arena, and the same to exchange on the same store in one call."""
        params = trainer._params
        return (
            self.step is not None
            and trainer._kvstore is self.store
            and self._arena() is arena
            and len(params) == len(self._lists)
            and all(map(operator.is_, map(_list_of, params), self._lists))
            and all(map(operator.is_, map(_first_of, self._filled), self._arrays))
        )

    def look(self, trainer: Any, arena: Any, in_one_call: bool) -> None:
        """Move gradients to the arena where they can be, and look whether one call can exchange them."""
        if move_to_arena(trainer._params, arena) or self._staged is None:
            # Why gradients are not summed in place: recorded in the store, and in the log, once for each.
            labels, logged = labels_of(trainer), self._staged or {}
            reasons = [(key_of(trainer, param), why_staged(param)) for param in trainer._params]
            self._staged = {key: why for key, why in reasons if why is not None}
            for key, why in self._staged.items():
                if why and logged.get(key) != why:
                    text = "the gradient of '%s' (key %s) goes through staging memory: %s"
                    log.logger.debug(text, labels[key], key, why)
            trainer._kvstore._set_staged_reasons(self._staged)
        found = _gradients_of(trainer) if in_one_call else None
        self.step = None if found is None else trainer._kvstore._make_step(found)
        self.store = trainer._kvstore
        self._arena = (lambda: None) if arena is None else weakref.ref(arena)  # Trainers outlive worlds
        self._lists = [param._grad for param in trainer._params]
        self._filled = [each for each in self._lists if each is not None]
        self._arrays = [each[0] for each in self._filled]

    @staticmethod
    def share_freshness(trainer: Any, store: Any, exchanged: bool = False) -> tuple[list[int], list[Any]]:
        """Make stale gradients zero that are fresh on another worker, unless they are `exchanged` already.

        Returns the keys of those that are stale on all workers, and the arrays whose gradients count as fresh in the
        update that follows. Waits for the others.
        """
        fresh = [each._grad is not None and any(array._fresh_grad for array in each._data) for each in trainer._params]
        stale, shared = [], []
        for parameter, is_fresh in zip(trainer._params, store._anywhere(fresh, _FRESHNESS)):
            if parameter._grad is None:
                continue
            if not is_fresh:
                stale.append(key_of(trainer, parameter))
                continue
            for array, gradient in zip(parameter._data, parameter._grad):
                if not (array._fresh_grad or exchanged):
                    set_to_zero(gradient)
                shared.append(array)
        return stale, shared

    def refreshed(self, trainer: Any, shared: Optional[list[Any]]) -> list[Any]:
        """The arrays whose stale gradients count as fresh in the update that follows; `shared` if that is known."""
        # An optimizer that exchanges does so below, for fresh gradients only.
        is_exchanged = is_ours(trainer._kvstore)
        store = trainer._kvstore if is_exchanged else store_of(exchanging_in(trainer._optimizer))
        if store is None:
            return []
        if shared is None:
            _, shared = self.share_freshness(trainer, store, is_exchanged)
        return [array for array in shared if not array._fresh_grad]

    def verify(self, trainer: Any) -> None:
        """Have the store compare the parameters after every so many updates."""
        present = trainer._kvstore._member.topology.generation
        # New workers of a world have not counted earlier updates.
        self._generation, self._updates = present, self._updates + 1 if self._generation == present else 1
        if self._updates % self.verify_every == 0:
            labels = labels_of(trainer)
            keys = [(key_of(trainer, param), param) for param in trainer._params]
            labelled = [(f"'{labels[key]}' (key {key})", param) for key, param in keys]
            trainer._kvstore._verify(labelled, f"after {self._updates} updates")


# The wrappers of a step look for the attribute first, which saves a call.
def exchange_of(trainer: Any) -> Exchange:
    found: Optional[Exchange] = vars(trainer).get(_EXCHANGE)
    if found is None:  # it was made before MXNet was changed
        found = vars(trainer)[_EXCHANGE] = Exchange()
    return found


def _gradients_of(trainer: Any) -> Optional[list[tuple[int, Any, int]]]:
    """(key, array, priority) of each gradient; None if there is more to them."""
    if trainer._update_on_kvstore:
        return None
    gluon, found = require_mxnet().gluon, []
    stock = gluon.Parameter
    for place, param in enumerate(trainer._params):
        kind, arrays = type(param), param._grad
        if kind is gluon.Constant and arrays is None:
            continue
        # Subclasses may say something else each time.
        is_stock = kind.grad_req is stock.grad_req and kind.list_grad is stock.list_grad
        if not is_stock or param._data is None or (arrays is None) != (param.grad_req == "null"):
            return None
        if arrays is not None:
            if len(arrays) != 1:
                return None
            key = trainer._param2idx[param._uuid] if hasattr(param, "_uuid") else place  # MXNet 2, MXNet 1
            found.append((key, arrays[0], -place))
    return found


def _share_overflow(trainer: Any) -> None:
    """Have AMP see an overflow on all workers if there is one on any, beside an optimizer that exchanges gradients."""
    # AMP looks for one before the update: a worker that skipped it alone would leave the others waiting.
    store = store_of(exchanging_in(trainer._optimizer))
    if store is None or store.num_workers == 1:
        return
    own = copy.copy(trainer._amp_loss_scaler).has_overflow(trainer._params)  # a copy: it counts how often it is asked
    if store._anywhere([own], "overflow of AMP")[0] and not own:
        fill(next(each._grad[0] for each in trainer._params if each._grad is not None), float("nan"))


# -- The wrappers ---------------------------------------------------------------------------------------------------

_Method = Callable[..., Any]


def patch(mxnet: Any) -> None:
    """Make the changes to MXNet."""
    owner = mxnet.gluon.Trainer
    surround(owner, "__init__", _init)
    surround(owner, "_reset_kvstore", _reset_kvstore)
    surround(owner, "_init_kvstore", _init_kvstore)
    surround(owner, "_init_params", _init_params)
    wrap(owner, "step", _stepping)
    wrap(owner, "allreduce_grads", _reducing)
    wrap(owner, "_allreduce_grads", _exchanging)
    wrap(owner, "update", _updating)
    wrap(owner, "_update", _applying)
    surround(owner, "save_states", _save_states)
    surround(owner, "load_states", _load_states)


def _init(original: _Method, self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
    exchange = exchange_of(self)
    if hasattr(params, "items"):
        exchange.names = {id(param): str(name) for name, param in params.items()}
    original(self, params, *args, **kwargs)
    asked = self._kvstore_params["kvstore"]
    exchange.watch = exchangers.watch_of(asked)
    # Before the first forward pass rather than at the first step, if there is a store already: a graph that was
    # recorded before gradients move leaves its gradients in the old ones.
    if is_ours(asked):
        move_to_arena(self._params, asked._member.adapter_for_gradients())


def _reset_kvstore(original: _Method, self: Any) -> None:
    # The last thing that the constructor does, and what follows `reset_ctx`.
    original(self)
    optimizer = exchanging_in(self._optimizer)
    if optimizer is None:
        return
    asked = self._kvstore_params
    if asks_for_ours(asked["kvstore"]):
        exchange_of(self).first_values_by = store_of(optimizer)
        asked["kvstore"] = set_store_aside(optimizer, asked["kvstore"], len(devices_of(self)))
    if asked["update_on_kvstore"]:
        fact = "update_on_kvstore=True has no effect beside an optimizer that exchanges gradients, a %s."
        log.once("exchanging-on-kvstore", logging.WARNING, fact, type(optimizer).__name__)
    asked["update_on_kvstore"] = False


def _init_kvstore(original: _Method, self: Any) -> None:
    if asks_for_ours(self._kvstore_params["kvstore"]):
        if self._contains_sparse_weight:
            sparse = next(each for each in self._params if each._stype != "default")
            fact = f"its weights are {sparse._stype}, and the store 'horovod' keeps none."
            fix = "use dense weights (stype='default'); their gradients may be row_sparse (grad_stype)."
            raise UnsupportedMethodError(message(fact, operation="Trainer", name=sparse.name, fix=fix))
        # MXNet asks nothing else: from here on it treats row_sparse gradients as dense ones.
        self._contains_sparse_grad = False
    original(self)
    if is_ours(self._kvstore):
        self._kvstore._set_key_labels(labels_of(self))
        exchange_of(self).verify_every = config().verify_every
    else:
        note_gradients(self._params)


def _init_params(original: _Method, self: Any) -> None:
    own, waiting, store = self._kvstore, self._params_to_init, exchange_of(self).first_values_by
    if store is None:
        original(self)
        return
    with holding(self, _kvstore=store):
        original(self)
    if own is not None:
        self._params_to_init = waiting
        original(self)


def _stepping(original: _Method) -> _Method:
    def step(self: Any, batch_size: Any, ignore_stale_grad: bool = False) -> None:
        exchange = vars(self).get(_EXCHANGE) or exchange_of(self)
        exchange.ignores_stale = bool(ignore_stale_grad)
        if exchange.joinable is None:
            original(self, batch_size, ignore_stale_grad)
        else:
            exchange.joinable.step(functools.partial(original, self), batch_size, ignore_stale_grad)

    return step


def _reducing(original: _Method) -> _Method:
    def allreduce_grads(self: Any) -> None:
        joinable = exchange_of(self).joinable
        if joinable is not None:
            joinable.check_reduction()
        original(self)

    return allreduce_grads


def _updating(original: _Method) -> _Method:
    def update(self: Any, batch_size: Any, ignore_stale_grad: bool = False) -> None:
        exchange = exchange_of(self)
        if exchange.joinable is not None:
            exchange.joinable.check_reduction()
        exchange.ignores_stale = bool(ignore_stale_grad) or exchange.ignores_stale  # for later `allreduce_grads`
        original(self, batch_size, ignore_stale_grad)

    return update


def _exchanging(original: _Method) -> _Method:
    is_stock = original.__module__ == "mxnet.gluon.trainer"

    def allreduce_grads(self: Any) -> None:
        exchange_gradients(self, original, is_stock)

    return allreduce_grads


def exchange_gradients(trainer: Any, one_by_one: Callable[[Any], None], in_one_call: bool) -> None:
    """What ``Trainer._allreduce_grads`` does; `one_by_one` gives the trainer's store each gradient."""
    store, exchange = trainer._kvstore, vars(trainer).get(_EXCHANGE) or exchange_of(trainer)
    if store is None or (store is not exchange.store and not is_ours(store)):
        aside = store_of(exchanging_in(trainer._optimizer)) if exchange.ignores_stale else None
        if aside is not None:  # before MXNet's store sums the gradients of several devices
            _, exchange.fresh_anywhere = exchange.share_freshness(trainer, aside)
        one_by_one(trainer)
        return
    stale: list[int] = []
    # An enabled Join refuses stale gradients.
    if exchange.ignores_stale and not (exchange.joinable is not None and exchange.joinable._join is not None):
        stale, exchange.fresh_anywhere = exchange.share_freshness(trainer, store)
    loaded: list[int] = []
    is_compared = vars(trainer._updaters[0]).get(COMPARED) is store._member.topology
    if not is_compared and (not stale or len(stale) < sum(each._grad is not None for each in trainer._params)):
        loaded = new_states(trainer._updaters[0], store)
    if not stale and not loaded:
        arena = store._member.adapter_for_gradients()
        if not exchange.is_current(trainer, arena):
            exchange.look(trainer, arena, in_one_call)
        if exchange.step is not None and store._exchange(exchange.step):
            return
    comparing = store._comparing_states(loaded) if loaded else _NOTHING
    without = store._without(stale) if stale else _NOTHING
    with exchangers.uncounted(), comparing, without:
        one_by_one(trainer)


def _applying(original: _Method) -> _Method:
    def update(self: Any, ignore_stale_grad: bool = False) -> None:
        exchange = vars(self).get(_EXCHANGE) or exchange_of(self)
        if exchange.watch is not None:
            exchange.watch = exchange.watch.look(self)
        shared, exchange.fresh_anywhere = exchange.fresh_anywhere, None
        refreshed = exchange.refreshed(self, shared) if ignore_stale_grad else []
        for array in refreshed:
            array._fresh_grad = True
        try:
            if getattr(self, "_amp_loss_scaler", None) is not None:
                _share_overflow(self)
            original(self, ignore_stale_grad)
        finally:
            for array in refreshed:  # MXNet's AMP may have skipped the update
                array._fresh_grad = False
        if exchange.verify_every:
            exchange.verify(self)

    return update


def _save_states(original: _Method, self: Any, fname: str) -> None:
    with _without_first_step(self):
        original(self, fname)
    if is_ours(self._kvstore):
        self._kvstore._save_residuals(fname)


def _load_states(original: _Method, self: Any, fname: str) -> None:
    with _without_first_step(self):
        original(self, fname)
    if is_ours(self._kvstore):
        self._kvstore._load_residuals(fname)
    if is_ours(self._kvstore) or exchanging_in(self._optimizer) is not None:
        count_on_own_devices(self)


def _without_first_step(trainer: Any) -> contextlib.AbstractContextManager[None]:
    """Within, a Trainer makes no store that is only named, and broadcasts no parameters."""
    # Workers match both by their order, and not every worker may save or load.
    store = trainer._kvstore_params["kvstore"]
    postponed: dict[str, Any] = {}
    if asks_for_ours(store):
        postponed["_params_to_init"] = []
        if isinstance(store, str) and not trainer._compression_params:
            postponed["_kv_initialized"] = True
    return holding(trainer, **postponed)
