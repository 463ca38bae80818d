"""Gluon's Trainers: one wrapper for each method that is changed, whose body shows the order of what happens.

With a store of ours a Trainer

- begins with rank 0's parameters, which it names to the store, and may have row_sparse gradients;
- exchanges all gradients of a step in one call of the store, which sums them in memory that the workers share;
- counts a gradient that is stale on some workers as zero there (``ignore_stale_grad=True``), and updates on all;
- compares, in its first exchange in a world, of which parameters the optimizers of the workers have states;
- compares its parameters with the other workers' every KVHVD_VERIFY_EVERY updates;
- saves the residuals of 2bit compression with its states.

Beside an optimizer that exchanges gradients itself it gets no store of ours, see optimizer.py. Without either it is
watched, see unsynchronised.py. In a Join its steps go through its joinable.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import operator
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Optional

from kvstore_hvd import log
from kvstore_hvd.config import config
from kvstore_hvd.errors import UnsupportedMethodError, message
from kvstore_hvd.mxnet_compat import unsynchronised
from kvstore_hvd.mxnet_compat.hooks import asks_for_ours, is_ours, wrap
from kvstore_hvd.mxnet_compat.optimizer import (
    COMPARED,
    exchanging_in,
    new_states,
    set_store_aside,
    states_of,
    store_of,
)
from kvstore_hvd.mxnet_compat.parameter import move_to_arena, note_gradients, set_to_zero, why_staged

#: Tells a worker that waits alone what the others have not passed.
_FRESHNESS = "fresh gradients (ignore_stale_grad=True)"
# Of a Trainer: its `_Exchange`.
_EXCHANGE = "_kvstore_hvd_exchange"
_NOTHING = contextlib.nullcontext()

_list_of = operator.attrgetter("_grad")
_first_of = operator.itemgetter(0)


# -- Questions ------------------------------------------------------------------------------------------------------


def is_trainer(thing: Any) -> bool:
    """Whether it is a Trainer of Gluon. Does not import MXNet."""
    mxnet = sys.modules.get("mxnet")
    return mxnet is not None and isinstance(thing, mxnet.gluon.Trainer)


def devices_of(trainer: Any) -> list[Any]:
    """The contexts of MXNet that its parameters live on."""
    devices: list[Any] = trainer._devices if hasattr(trainer, "_devices") else trainer._contexts  # MXNet 2, MXNet 1
    return devices


def trainers_of(parameters: Iterable[Any]) -> list[Any]:
    """The Trainers that update these parameters, in their order; other things have none."""
    found = [getattr(each, "_trainer", None) for each in parameters]
    trainers = [each() if isinstance(each, weakref.ref) else each for each in found]  # MXNet 2, MXNet 1
    return list({id(each): each for each in trainers if each is not None}.values())


def states_in(trainer: Any) -> list[int]:
    """For which parameters its optimizer has states, as numbers in order."""
    return states_of(trainer._updaters[0]) if trainer._updaters else []


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
    identity = param._uuid if hasattr(param, "_uuid") else param.name  # MXNet 2, MXNet 1
    key: int = trainer._param2idx[identity]
    return key


def labels_of(trainer: Any) -> dict[int, str]:
    """Names of a Trainer's parameters by the keys that it uses for them on the store."""
    names = _exchange_of(trainer).names
    return {key_of(trainer, param): names.get(id(param), param.name) for param in trainer._params}


def name_parameters(trainer: Any, prefix: str) -> None:
    """Put `prefix` before the names that `labels_of` returns."""
    exchange = _exchange_of(trainer)
    exchange.names = {id(each): prefix + exchange.names.get(id(each), each.name) for each in trainer._params}


def note_joinable(trainer: Any, joinable: Any) -> None:
    """Have the Trainer's steps go through ``joinable.step``, see `join.joinables`."""
    _exchange_of(trainer).joinable = joinable


def joinable_of(trainer: Any) -> Any:
    """The joinable of `note_joinable`, or None."""
    return _exchange_of(trainer).joinable


def store_in(trainer: Any) -> Any:
    """A Trainer's store, or its name. A store of this package is made now if the first step would make it."""
    import mxnet

    store = trainer._kvstore if trainer._kv_initialized else trainer._kvstore_params["kvstore"]
    if isinstance(store, str) and asks_for_ours(store):
        store = trainer._kvstore_params["kvstore"] = mxnet.kvstore.create(store)
    return store


def broadcasts_parameters(trainer: Any) -> bool:
    """Whether a Trainer without a store of ours broadcasts its parameters before its first step, like one with it."""
    return _exchange_of(trainer).first_values_by is not None


# -- What a Trainer exchanges ---------------------------------------------------------------------------------------


class _Exchange:
    """The state of this package for one Trainer: its gradients, exchanged in one call in each step, and how."""

    def __init__(self) -> None:
        #: By the identity of a parameter; in MXNet 2 every parameter calls itself 'weight' or 'bias'.
        self.names: dict[int, str] = {}
        self.joinable: Any = None
        self.watch: Optional[unsynchronised.Watch] = None
        #: The store of the optimizer, where that gives all workers the initial parameters.
        self.first_values_by: Any = None
        #: Whether the last step, or an update, ignored stale gradients.
        self.ignores_stale = False
        #: The arrays whose gradients are fresh on any worker; None: unknown since the last update.
        self.fresh_anywhere: Optional[list[Any]] = None
        #: By key: why a gradient is staged; in the store and the log, too.
        self._staged: Optional[dict[int, str]] = None
        #: Every how many updates parameters are compared; in which generation, and how many updates it has had.
        self.verify_every, self._generation, self._updates = 0, None, 0
        #: What the store made of the gradients; None when it takes them one by one.
        self.step: Any = None
        #: The store of ours that has made it.
        self.store: object = None
        self._arena: Callable[[], object] = lambda: None
        # MXNet makes a new list whenever it replaces the gradients of a parameter (`cast`, `reset_ctx`, `grad_req`,
        # `initialize`), so two comparisons of identities for each parameter show whether they are the same.
        self._lists: list[Any] = []
        self._filled: list[Any] = []
        self._arrays: list[Any] = []

    @property
    def is_joined(self) -> bool:
        """Whether the Trainer is in an enabled Join, which refuses stale gradients."""
        return self.joinable is not None and bool(self.joinable.is_in_a_context)

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
            self._tell_staged(trainer)
        found = _gradients_of(trainer) if in_one_call else None
        self.step = None if found is None else trainer._kvstore._make_step(found)
        self.store = trainer._kvstore
        # Weakly: Trainers outlive worlds.
        self._arena = (lambda: None) if arena is None else weakref.ref(arena)
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

    def _tell_staged(self, trainer: Any) -> None:
        """Record in the store which gradients are not summed in place, and why; and in the log, once for each."""
        labels, logged = labels_of(trainer), self._staged or {}
        self._staged = {}
        for param in trainer._params:
            key, why = key_of(trainer, param), why_staged(param)
            if why is None:
                continue
            self._staged[key] = why
            if why and logged.get(key) != why:
                log.logger.debug("the gradient of '%s' (key %s) goes through staging memory: %s", labels[key], key, why)
        trainer._kvstore._set_staged_reasons(self._staged)


# The wrappers of a step look for the attribute first, which saves a call.
def _exchange_of(trainer: Any) -> _Exchange:
    found: Optional[_Exchange] = vars(trainer).get(_EXCHANGE)
    if found is None:  # it was made before MXNet was changed
        found = vars(trainer)[_EXCHANGE] = _Exchange()
    return found


def _gradients_of(trainer: Any) -> Optional[list[tuple[int, Any, int]]]:
    """(key, array, priority) of each gradient; None if there is more to them."""
    import mxnet

    if trainer._update_on_kvstore:
        return None
    stock = mxnet.gluon.Parameter
    found = []
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
        found.append((key, arrays[0], -place))
    return found


def _allow_sparse(trainer: Any) -> None:
    """Let a Trainer start with our store, though it has row_sparse gradients."""
    if trainer._contains_sparse_weight:
        sparse = next(each for each in trainer._params if each._stype != "default")
        fact = f"its weights are {sparse._stype}, and the store 'horovod' keeps none."
        fix = "use dense weights (stype='default'); their gradients may be row_sparse (grad_stype)."
        raise UnsupportedMethodError(message(fact, operation="Trainer", name=sparse.name, fix=fix))
    # MXNet asks nothing else: from here on it treats the gradients as dense ones.
    trainer._contains_sparse_grad = False


def _share_overflow(trainer: Any) -> None:
    """Have AMP see an overflow on all workers if there is one on any."""
    # It looks for one before the update, in which such an optimizer exchanges gradients: a worker that skipped it alone
    # would leave the others waiting.
    store = store_of(exchanging_in(trainer._optimizer))
    if store is None or store.num_workers == 1:
        return
    own = copy.copy(trainer._amp_loss_scaler).has_overflow(trainer._params)  # a copy: it counts how often it is asked
    if store._anywhere([own], "overflow of AMP")[0] and not own:
        first = next(each for each in trainer._params if each._grad is not None)
        first._grad[0][:] = float("nan")


# -- The wrappers ---------------------------------------------------------------------------------------------------

_Method = Callable[..., Any]


def patch(mxnet: Any) -> None:
    """Make the changes to MXNet."""
    owner = mxnet.gluon.Trainer
    wrap(owner, "__init__", _constructing)
    wrap(owner, "_reset_kvstore", _resetting)
    wrap(owner, "_init_kvstore", _starting)
    wrap(owner, "_init_params", _initializing)
    wrap(owner, "step", _stepping)
    wrap(owner, "allreduce_grads", _reducing)
    wrap(owner, "_allreduce_grads", _exchanging)
    wrap(owner, "update", _updating)
    wrap(owner, "_update", _applying)
    wrap(owner, "save_states", _saving)
    wrap(owner, "load_states", _loading)


def _constructing(original: _Method) -> _Method:
    def init(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        exchange = _exchange_of(self)
        if hasattr(params, "items"):
            exchange.names = {id(param): str(name) for name, param in params.items()}
        original(self, params, *args, **kwargs)
        asked = self._kvstore_params["kvstore"]
        exchange.watch = unsynchronised.watch_of(asked)
        # Before the first forward pass rather than at the first step, if there is a store already: a graph that was
        # recorded before gradients move leaves its gradients in the old ones.
        if is_ours(asked):
            move_to_arena(self._params, asked._member.adapter_for_gradients())

    return init


def _resetting(original: _Method) -> _Method:
    def reset_kvstore(self: Any) -> None:
        # The last thing that the constructor does, and what follows `reset_ctx`.
        original(self)
        optimizer = exchanging_in(self._optimizer)
        if optimizer is None:
            return
        asked = self._kvstore_params
        if asks_for_ours(asked["kvstore"]):
            _exchange_of(self).first_values_by = store_of(optimizer)
            asked["kvstore"] = set_store_aside(optimizer, asked["kvstore"], len(devices_of(self)))
        if asked["update_on_kvstore"]:
            fact = "update_on_kvstore=True has no effect beside an optimizer that exchanges gradients, a %s."
            log.once("exchanging-on-kvstore", logging.WARNING, fact, type(optimizer).__name__)
        asked["update_on_kvstore"] = False

    return reset_kvstore


def _starting(original: _Method) -> _Method:
    def init_kvstore(self: Any) -> None:
        if asks_for_ours(self._kvstore_params["kvstore"]):
            _allow_sparse(self)
        original(self)
        if is_ours(self._kvstore):
            self._kvstore._set_key_labels(labels_of(self))
            _exchange_of(self).verify_every = config().verify_every
        else:
            note_gradients(self._params)

    return init_kvstore


def _initializing(original: _Method) -> _Method:
    def init_params(self: Any) -> None:
        own, waiting, store = self._kvstore, self._params_to_init, _exchange_of(self).first_values_by
        if store is not None:
            self._kvstore = store
            try:
                original(self)
            finally:
                self._kvstore = own
            if own is not None:
                self._params_to_init = waiting
        if own is not None or store is None:
            original(self)

    return init_params


def _stepping(original: _Method) -> _Method:
    def step(self: Any, batch_size: Any, ignore_stale_grad: bool = False) -> None:
        exchange = vars(self).get(_EXCHANGE) or _exchange_of(self)
        exchange.ignores_stale = bool(ignore_stale_grad)
        if exchange.joinable is None:
            original(self, batch_size, ignore_stale_grad)
        else:
            exchange.joinable.step(functools.partial(original, self), batch_size, ignore_stale_grad)

    return step


def _reducing(original: _Method) -> _Method:
    def allreduce_grads(self: Any) -> None:
        joinable = joinable_of(self)
        if joinable is not None:
            joinable.check_reduction()
        original(self)

    return allreduce_grads


def _updating(original: _Method) -> _Method:
    def update(self: Any, batch_size: Any, ignore_stale_grad: bool = False) -> None:
        exchange = _exchange_of(self)
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
    store, exchange = trainer._kvstore, vars(trainer).get(_EXCHANGE) or _exchange_of(trainer)
    if store is None or (store is not exchange.store and not is_ours(store)):
        aside = store_of(exchanging_in(trainer._optimizer)) if exchange.ignores_stale else None
        if aside is not None:  # before MXNet's store sums the gradients of several devices
            _, exchange.fresh_anywhere = exchange.share_freshness(trainer, aside)
        one_by_one(trainer)
        return
    stale: list[int] = []
    if exchange.ignores_stale and not exchange.is_joined:
        stale, exchange.fresh_anywhere = exchange.share_freshness(trainer, store)
    loaded: list[int] = []
    if vars(trainer._updaters[0]).get(COMPARED) is not store._member.topology and not _are_all(stale, trainer):
        loaded = new_states(trainer._updaters[0], store)
    if not stale and not loaded:
        arena = store._member.adapter_for_gradients()
        if not exchange.is_current(trainer, arena):
            exchange.look(trainer, arena, in_one_call)
        if exchange.step is not None and store._exchange(exchange.step):
            return
    comparing = store._comparing_states(loaded) if loaded else _NOTHING
    without = store._without(stale) if stale else _NOTHING
    with unsynchronised.uncounted(), comparing, without:
        one_by_one(trainer)


def _are_all(stale: list[int], trainer: Any) -> bool:
    return bool(stale) and len(stale) == sum(each._grad is not None for each in trainer._params)


def _applying(original: _Method) -> _Method:
    def update(self: Any, ignore_stale_grad: bool = False) -> None:
        exchange = vars(self).get(_EXCHANGE) or _exchange_of(self)
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


def _saving(original: _Method) -> _Method:
    def save_states(self: Any, fname: str) -> None:
        with _without_first_step(self):
            original(self, fname)
        if is_ours(self._kvstore):
            self._kvstore._save_residuals(fname)

    return save_states


def _loading(original: _Method) -> _Method:
    def load_states(self: Any, fname: str) -> None:
        with _without_first_step(self):
            original(self, fname)
        if is_ours(self._kvstore):
            self._kvstore._load_residuals(fname)
        if is_ours(self._kvstore) or exchanging_in(self._optimizer) is not None:
            count_on_own_devices(self)

    return load_states


@contextlib.contextmanager
def _without_first_step(trainer: Any) -> Iterator[None]:
    """Within, a Trainer makes no store that is only named, and broadcasts no parameters."""
    # Workers match both by their order, and not every worker may save or load.
    store = trainer._kvstore_params["kvstore"]
    postponed: dict[str, Any] = {}
    if asks_for_ours(store):
        postponed["_params_to_init"] = []
        if isinstance(store, str) and not trainer._compression_params:
            postponed["_kv_initialized"] = True
    before = {name: getattr(trainer, name) for name in postponed}
    vars(trainer).update(postponed)
    try:
        yield
    finally:
        vars(trainer).update(before)
