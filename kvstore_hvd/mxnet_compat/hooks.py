"""Everything that this package changes in MXNet, in one place.

- The store is registered, as ``'horovod'`` and ``'dist_horovod'``.
- ``kvstore='horovod'`` given as a string creates the store with one device too (MXNet creates nothing there).
- A Trainer that would train alone although there are several workers raises (see unsynchronised.py).
- With our store, a ``Module`` starts from rank 0's parameters, and a Trainer tells the store the names
  of its parameters.
- With our store, a Module divides by the batch size of all workers (see batch_division.py).
- Beside an optimizer that exchanges gradients itself there is no store that does so, too (see exchanging.py).
- A Trainer's step is one call of our store, not one for each parameter (see trainer_steps.py).
- Our store takes a Trainer's row_sparse gradients (see sparse_trainers.py).
- Gradients of Gluon's parameters live in memory that the workers share (see gradients.py; KVHVD_ZERO_COPY=0: not).
- Graphs with our operators are compiled so that these work, and inferred and exported without them (see graphs.py).
- With ``ignore_stale_grad`` a gradient that is stale on some workers counts as zero there, and all update.
- In a Trainer's first step with our store, and in the first update of an optimizer that exchanges gradients, the
  workers compare which states their optimizers have.
- The steps of a Trainer in a Join go through its joinable (see trainers.py).
- The states that a Trainer saves to a file and loads contain the residuals of 2bit gradient compression. An optimizer
  that is loaded goes on counting its updates on the Trainer's own devices.
- Parameters tell when they have got their arrays (see parameters.py).
- Every KVHVD_VERIFY_EVERY updates of a Trainer its parameters are compared with the other workers' (0: never).
- Our errors keep their classes on their way through MXNet's engine (see engine_errors.py).

Every change is a thin wrapper around the original, and is made once however often it is asked for.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
from collections.abc import Callable, Iterable
from typing import Any, Optional

from kvstore_hvd import log
from kvstore_hvd.config import config
from kvstore_hvd.mxnet_compat import (
    batch_division,
    engine_errors,
    exchanging,
    gradients,
    graphs,
    parameters,
    sparse_trainers,
    trainer_steps,
    unsynchronised,
)
from kvstore_hvd.mxnet_compat.trainers import count_on_own_devices, joinable_of, key_of, labels_of, states_in
from kvstore_hvd.mxnet_compat.wrapping import is_wrapped, wrap

__all__ = ["ALIAS", "NAME", "install_hooks", "register_store"]

NAME = "horovod"
# With 'dist' in the name even an MXNet without our wrappers creates the store; the store's .type stays NAME.
ALIAS = "dist_horovod"

WorldSize = Callable[[], Optional[int]]
Arena = Callable[[], Any]

# Of a Trainer: why which of its gradients are staged, as its store and the log were told.
_TOLD = "_kvstore_hvd_told"
# Of a Trainer: what it exchanges in each step.
_COLLECTED = "_kvstore_hvd_collected"
# Of a Trainer: the topology of the world in which the states of its optimizer were compared.
_COMPARED = "_kvstore_hvd_compared"
_NOTHING = contextlib.nullcontext()
# Of a Trainer: whether its last step, or an update, ignored stale gradients; and the arrays whose gradients are fresh
# on any worker, if the workers have told each other since the last update.
_IGNORES, _SHARED = "_kvstore_hvd_ignores_stale", "_kvstore_hvd_shared_freshness"
# MXNet is one per process, and so is what was done to it.
_store: Optional[type] = None
_arena: Arena = lambda: None  # noqa: E731


def install_hooks(store: type, world_size: WorldSize, arena: Arena = lambda: None) -> None:
    """Make all changes to the MXNet that is imported. Calling it again replaces the store and `world_size`."""
    global _store, _arena
    import mxnet

    _arena = arena
    _store = store
    register_store(mxnet, store)
    engine_errors.register_errors(mxnet)
    exchanging.patch(mxnet, _is_ours_or_named_so)
    _patch_model(mxnet)
    _patch_trainer(mxnet)
    unsynchronised.patch(mxnet, world_size, _is_ours_or_named_so)
    batch_division.patch(mxnet, _is_ours_or_named_so)
    _patch_gradients(mxnet)
    graphs.patch(mxnet)
    parameters.patch(mxnet)


def register_store(mxnet: Any, store: type) -> None:
    """Register `store` under both names, in the place of MXNet's own, without a warning."""
    base = mxnet.kvstore.KVStoreBase
    present = base.kv_registry.get(NAME)
    # 2.0 has a store of this name, which needs Horovod; to replace that one is the point, and not worth a warning.
    # Replacing anybody else's is.
    if present is not None and present.__module__ in ("mxnet.kvstore.horovod", store.__module__):
        del base.kv_registry[NAME]
    base.register(store)
    base.kv_registry[NAME] = base.kv_registry[ALIAS] = store


# -- Wrappers -----------------------------------------------------------------------------------------------------


def _is_ours(kv: object) -> bool:
    return _store is not None and isinstance(kv, _store)


def _is_ours_or_named_so(kv: object) -> bool:
    return _is_ours(kv) or (isinstance(kv, str) and kv.lower() in (NAME, ALIAS))


# -- mxnet.model, mxnet.module: Module, and where stores are created -----------------------------------------------


def _patch_model(mxnet: Any) -> None:
    model = mxnet.model
    # Each of them has imported the functions by name, so each has a copy to replace.
    trainer = sys.modules["mxnet.gluon.trainer"]
    module = sys.modules.get("mxnet.module.module")  # only in MXNet 1

    def creating(original: Callable[..., Any]) -> Callable[..., Any]:
        def create_kvstore(kvstore: Any, num_device: int, arg_params: Any) -> Any:
            optimizer = exchanging.present()
            if _is_ours_or_named_so(kvstore):
                if optimizer is not None:
                    exchanging.broadcast_parameters(optimizer, arg_params)
                    kvstore = exchanging.set_store_aside(optimizer, kvstore, num_device)
                elif isinstance(kvstore, str):
                    # The original creates nothing for one device unless the name has 'dist' in it.
                    kvstore = mxnet.kvstore.create(kvstore)
            created, update_on_kvstore = original(kvstore, num_device, arg_params)
            return created, update_on_kvstore and optimizer is None

        return create_kvstore

    wrap(trainer, "_create_kvstore", creating)
    if module is not None:
        wrap(module, "_create_kvstore", creating)
    wrap(model, "_create_kvstore", creating)

    def initializing(original: Callable[..., Any]) -> Callable[..., Any]:
        def initialize_kvstore(
            kvstore: Any, param_arrays: Any, arg_params: Any, param_names: Any, update_on_kvstore: bool
        ) -> None:
            if not _is_ours(kvstore):
                original(kvstore, param_arrays, arg_params, param_names, update_on_kvstore)
                return
            # The original hands over arg_params and leaves the executors alone: their parameters are expected to come
            # back from a store that updates them. Ours does not, so both get rank 0's values here.
            for name, on_devices in zip(param_names, param_arrays):
                kvstore.broadcast(name, arg_params[name], out=[arg_params[name], *on_devices])

        return initialize_kvstore

    wrap(model, "_initialize_kvstore", initializing)
    if module is not None:
        wrap(module, "_initialize_kvstore", initializing)


# -- mxnet.gluon.Trainer ------------------------------------------------------------------------------------------


def _patch_trainer(mxnet: Any) -> None:
    def constructing(original: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
            # In MXNet 2 every parameter is called 'weight' or 'bias'; only the keys of this dictionary tell them apart.
            self._kvstore_hvd_names = (
                {id(param): str(name) for name, param in params.items()} if hasattr(params, "items") else {}
            )
            original(self, params, *args, **kwargs)
            # Before the first forward pass rather than at the first step, if there is a store already: a graph that
            # was recorded before gradients move leaves its gradients in the old ones.
            kv = self._kvstore_params["kvstore"]
            if _is_ours(kv):
                _move_gradients(self._params, _arena_of(kv))

        return init

    def starting(original: Callable[..., Any]) -> Callable[..., Any]:
        def init_kvstore(self: Any) -> None:
            if _is_ours_or_named_so(self._kvstore_params["kvstore"]):
                sparse_trainers.prepare(self)
            original(self)
            kv = self._kvstore
            if _is_ours(kv):
                if hasattr(kv, "_set_key_labels"):
                    kv._set_key_labels(labels_of(self))
                if config().verify_every and hasattr(kv, "_verify"):
                    _verify_updates(self, config().verify_every)
                return
            gradients.look_at(self._params)

        return init_kvstore

    def stepping(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(self: Any, batch_size: Any, ignore_stale_grad: bool = False) -> None:
            joinable = joinable_of(self)
            vars(self)[_IGNORES] = bool(ignore_stale_grad)
            if joinable is None:
                original(self, batch_size, ignore_stale_grad)
            else:
                joinable.step(functools.partial(original, self), batch_size, ignore_stale_grad)

        return step

    def reducing(original: Callable[..., Any]) -> Callable[..., Any]:
        def allreduce_grads(self: Any) -> None:
            joinable = joinable_of(self)
            if joinable is not None:
                joinable.check_reduction()
            original(self)

        return allreduce_grads

    def updating(original: Callable[..., Any]) -> Callable[..., Any]:
        def update(self: Any, batch_size: Any, ignore_stale_grad: bool = False) -> None:
            joinable = joinable_of(self)
            if joinable is not None:
                joinable.check_reduction()
            mine = vars(self)
            mine[_IGNORES] = bool(ignore_stale_grad) or mine.get(_IGNORES, False)  # for later calls of allreduce_grads
            original(self, batch_size, ignore_stale_grad)

        return update

    def ignoring(original: Callable[..., Any]) -> Callable[..., Any]:
        def update(self: Any, ignore_stale_grad: bool = False) -> None:
            # An optimizer that exchanges does so below, for fresh gradients only.
            is_exchanged = _is_ours(self._kvstore)
            optimizer = exchanging.optimizer_in(self._optimizer)
            store = self._kvstore if is_exchanged else getattr(optimizer, "_kvstore_hvd_store", None)
            shared = vars(self).pop(_SHARED, None)
            refreshed: list[Any] = []
            if ignore_stale_grad and hasattr(store, "_anywhere"):
                if shared is None:
                    _, shared = trainer_steps.share_freshness(self, store, is_exchanged)
                refreshed = [array for array in shared if not array._fresh_grad]
            for array in refreshed:
                array._fresh_grad = True
            try:
                original(self, ignore_stale_grad)
            finally:
                for array in refreshed:  # MXNet's AMP may have skipped the update
                    array._fresh_grad = False

        return update

    def with_residuals(method: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def keeping(original: Callable[..., Any]) -> Callable[..., Any]:
            def states(self: Any, fname: str) -> None:
                # The first step broadcasts the parameters, and makes a store that is only named: both are matched
                # across workers by their order, and not every worker may save or load.
                store = self._kvstore_params["kvstore"]
                postponed: dict[str, Any] = {}
                if _is_ours_or_named_so(store):
                    postponed["_params_to_init"] = []
                    if isinstance(store, str) and not self._compression_params:
                        postponed["_kv_initialized"] = True
                before = {name: getattr(self, name) for name in postponed}
                vars(self).update(postponed)
                try:
                    original(self, fname)
                finally:
                    vars(self).update(before)
                if _is_ours(self._kvstore) and hasattr(self._kvstore, method):
                    getattr(self._kvstore, method)(fname)

            return states

        return keeping

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def load_states(self: Any, fname: str) -> None:
            original(self, fname)
            if _is_ours(self._kvstore) or exchanging.optimizer_in(self._optimizer) is not None:
                count_on_own_devices(self)

        return load_states

    wrap(mxnet.gluon.Trainer, "save_states", with_residuals("_save_residuals"))
    wrap(mxnet.gluon.Trainer, "load_states", with_residuals("_load_residuals"))
    wrap(mxnet.gluon.Trainer, "load_states", counting)
    wrap(mxnet.gluon.Trainer, "step", stepping)
    wrap(mxnet.gluon.Trainer, "update", updating)
    wrap(mxnet.gluon.Trainer, "_update", ignoring)
    wrap(mxnet.gluon.Trainer, "allreduce_grads", reducing)
    wrap(mxnet.gluon.Trainer, "__init__", constructing)
    wrap(mxnet.gluon.Trainer, "_init_kvstore", starting)


def _verify_updates(trainer: Any, every: int) -> None:
    """Have a Trainer's store compare the parameters after every so many updates; once for a Trainer."""
    if "_update" in vars(trainer):  # the class has a wrapper of its own
        return
    original = trainer._update  # what `step` and `update` call
    generation, number = None, 0

    @functools.wraps(original)
    def update(*args: Any, **kwargs: Any) -> None:
        nonlocal generation, number
        original(*args, **kwargs)
        present = trainer._kvstore._generation
        # Workers that are new to a world have not counted what came before it.
        generation, number = present, number + 1 if generation == present else 1
        if number % every == 0:
            labels = labels_of(trainer)
            keys = [(key_of(trainer, param), param) for param in trainer._params]
            trainer._kvstore._verify(
                [(f"'{labels[key]}' (key {key})", param) for key, param in keys], f"after {number} updates"
            )

    trainer._update = update


# -- Gradients ----------------------------------------------------------------------------------------------------


def _patch_gradients(mxnet: Any) -> None:
    def allocating(original: Callable[..., Any]) -> Callable[..., Any]:
        def init_grad(self: Any) -> None:
            original(self)
            _move_gradients([self], _arena(), unused=True)

        return init_grad

    def casting(original: Callable[..., Any]) -> Callable[..., Any]:
        def cast(self: Any, dtype: Any) -> None:
            original(self, dtype)
            _move_gradients([self], _arena(), unused=True)

        return cast

    def compiling(original: Callable[..., Any]) -> Callable[..., Any]:
        def init(self: Any, sym: Any, flags: Any = (), *args: Any, **kwargs: Any) -> None:
            flags = graphs.checked_flags(sym, flags)
            gradients.note_graph(flags)
            original(self, sym, flags, *args, **kwargs)

        return init

    def exchanging(original: Callable[..., Any]) -> Callable[..., Any]:
        is_stock = original.__module__ == mxnet.gluon.Trainer.__module__

        def allreduce_grads(self: Any) -> None:
            if not _is_ours(self._kvstore):
                original(self)
                return
            stale, loaded = _stale(self), _new_states(self)
            if stale or loaded or not _exchange(self, is_stock):
                comparing = self._kvstore._comparing_states(loaded) if loaded else _NOTHING
                without = self._kvstore._without(stale) if stale else _NOTHING
                with unsynchronised.uncounted(), comparing, without:
                    original(self)

        return allreduce_grads

    wrap(mxnet.gluon.Parameter, "_init_grad", allocating)
    wrap(mxnet.gluon.Parameter, "cast", casting)
    cached_op = mxnet.ndarray.CachedOp
    if not is_wrapped(cached_op.__init__) and any(type(each) is cached_op for each in gc.get_objects()):
        gradients.note_early_graphs()
    try:
        wrap(cached_op, "__init__", compiling)
    except TypeError:  # a class of Cython's
        gradients.note_early_graphs()
    wrap(mxnet.gluon.Trainer, "_allreduce_grads", exchanging)


def _arena_of(store: Any) -> Any:
    """Where the gradients lie that this store sums: not all stores have the same workers."""
    return store._gradient_memory() if hasattr(store, "_gradient_memory") else _arena()


def _move_gradients(parameters: Iterable[Any], arena: Any, unused: bool = False) -> bool:
    return arena is not None and gradients.move_to_arena(parameters, arena, arena.new_array, unused)


def _stale(trainer: Any) -> list[int]:
    """The keys of gradients that are stale on all workers, where such are to be ignored; see share_freshness."""
    mine, joinable = vars(trainer), joinable_of(trainer)
    if not mine.get(_IGNORES) or not hasattr(trainer._kvstore, "_anywhere"):
        return []
    if joinable is not None and joinable.is_in_a_context:  # it has refused stale gradients
        return []
    stale, mine[_SHARED] = trainer_steps.share_freshness(trainer, trainer._kvstore)
    return stale


def _new_states(trainer: Any) -> list[int]:
    """Of which parameters the optimizer has states in the Trainer's first exchange in a world."""
    # Later ones need no comparison: whatever all workers have then, the same updates have changed.
    if not hasattr(trainer._kvstore, "_comparing_states"):
        return []
    topology = trainer._kvstore._member.topology
    if vars(trainer).get(_COMPARED) is topology:
        return []
    setattr(trainer, _COMPARED, topology)
    return states_in(trainer)


def _exchange(trainer: Any, in_one_call: bool) -> bool:
    """Exchange a Trainer's gradients, if it can be done in one call; in any case see to it where they are."""
    arena = _arena_of(trainer._kvstore)
    collected = vars(trainer).get(_COLLECTED)
    if collected is None or not collected.is_current(trainer, arena):
        if _move_gradients(trainer._params, arena) or not hasattr(trainer, _TOLD):
            _tell_staged(trainer)
        collected = None
        if in_one_call and hasattr(trainer._kvstore, "_exchange"):
            collected = trainer_steps.collect(trainer, arena, trainer._kvstore._make_step)
        setattr(trainer, _COLLECTED, collected)
    return collected is not None and bool(trainer._kvstore._exchange(collected.step))


def _tell_staged(trainer: Any) -> None:
    """Tell a Trainer's store which gradients are not summed in place, and why; and the log, once for each."""
    labels, told = labels_of(trainer), getattr(trainer, _TOLD, {})
    reasons = {}
    for param in trainer._params:
        key, why = key_of(trainer, param), gradients.why_staged(param)
        if why is None:
            continue
        reasons[key] = why
        if why and told.get(key) != why:
            log.logger.debug("the gradient of '%s' (key %s) goes through staging memory: %s", labels[key], key, why)
    if hasattr(trainer._kvstore, "_set_staged_reasons"):
        trainer._kvstore._set_staged_reasons(reasons)
    setattr(trainer, _TOLD, reasons)
