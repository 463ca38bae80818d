"""Modules, and the functions of mxnet.model by which they and Trainers get their stores. MXNet 2 has no Module.

- A misspelt ``'horovod'`` is refused; MXNet takes any name, and creates no store for one device.
- ``kvstore='horovod'`` given as a string creates the store with one device too (MXNet creates nothing there).
- A Module starts from rank 0's parameters.
- It divides gradients by the samples of all workers, as with 'dist_sync': MXNet makes an optimizer of its name with
  ``rescale_grad = 1 / batch_size``, and counts the batches of the other workers only where it reads 'dist' in the type
  of the store. A ``rescale_grad`` that the program chooses itself is left alone.
- Beside an optimizer that exchanges gradients itself it gets no store of ours, and without either it is watched, see
  exchangers.py. FeedForward is refused.
- Its gradients lie in memory that workers share if there is a world as it is bound.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from kvstore_hvd.errors import UnsupportedMethodError, message
from kvstore_hvd.mxnet_compat import exchangers, hooks
from kvstore_hvd.mxnet_compat.exchangers import COMPARED, exchanging_in, new_states, set_store_aside, store_of
from kvstore_hvd.mxnet_compat.hooks import asks_for_ours, is_ours, surround, with_subclasses, wrap
from kvstore_hvd.mxnet_compat.parameter import moved

# Of an optimizer that MXNet has made of its name: the batch size of one worker, and how many workers there were.
_DIVISION = "_kvstore_hvd_division"
# Of a Module: what looks at its updates; None once there is nothing to look at.
_WATCH = "_kvstore_hvd_watch"

# The optimizer that exchanges gradients and that a Module is being given.
_present: Any = None

_Method = Callable[..., Any]


def patch(mxnet: Any) -> None:
    """Make the changes to MXNet."""
    # Each of them has imported the functions by name, so each has a copy to replace.
    for owner in (mxnet.kvstore, sys.modules["mxnet.kvstore.base"]):
        surround(owner, "create", _create)
    trainer, module = sys.modules["mxnet.gluon.trainer"], sys.modules.get("mxnet.module.module")
    for owner in (trainer, module, mxnet.model):
        if owner is not None:
            surround(owner, "_create_kvstore", _create_kvstore)
            surround(owner, "_initialize_kvstore", _initialize_kvstore)
    if module is None:
        return
    surround(module.Module, "init_optimizer", _init_optimizer)
    surround(module.Module, "borrow_optimizer", _borrow_optimizer)
    wrap(module.Module, "update", _updating)
    surround(sys.modules["mxnet.module.executor_group"].DataParallelExecutorGroup, "_bind_ith_exec", _bind)
    surround(mxnet.model.FeedForward, "fit", _fit)
    for kind in with_subclasses(module.Module):
        surround(kind, "init_optimizer", _init_optimizer_of_subclass)
    # SVRG's is imported later than MXNet.
    if "__init_subclass__" not in vars(module.Module):

        def init_subclass(cls: Any, /, **kwargs: Any) -> None:
            super(module.Module, cls).__init_subclass__(**kwargs)
            surround(cls, "init_optimizer", _init_optimizer_of_subclass)

        module.Module.__init_subclass__ = classmethod(init_subclass)


@contextlib.contextmanager
def _given(optimizer: Any) -> Iterator[None]:
    """Within, a Module is given this optimizer, which exchanges gradients; None: another one."""
    global _present
    before, _present = _present, optimizer
    try:
        yield
    finally:
        _present = before


# -- mxnet.model ----------------------------------------------------------------------------------------------------


def _create(original: _Method, name: str = "local") -> Any:
    hooks.refuse_misspelt(name)
    return original(name)


def _create_kvstore(original: _Method, kvstore: Any, num_device: int, arg_params: Any) -> Any:
    hooks.refuse_misspelt(kvstore)
    if asks_for_ours(kvstore):
        if _present is not None:
            store = store_of(_present)
            for name in sorted(arg_params) if store is not None else ():
                store.broadcast(name, arg_params[name])
            kvstore = set_store_aside(_present, kvstore, num_device)
        elif isinstance(kvstore, str):
            # The original creates nothing for one device unless the name has 'dist' in it.
            kvstore = sys.modules["mxnet"].kvstore.create(kvstore)
    created, update_on_kvstore = original(kvstore, num_device, arg_params)
    return created, update_on_kvstore and _present is None


def _initialize_kvstore(
    original: _Method, kvstore: Any, param_arrays: Any, arg_params: Any, param_names: Any, update_on_kvstore: bool
) -> None:
    if not is_ours(kvstore):
        original(kvstore, param_arrays, arg_params, param_names, update_on_kvstore)
        return
    # The original hands over arg_params and leaves the executors alone: their parameters are expected to come back from
    # a store that updates them. Ours does not, so both get rank 0's values here.
    for name, on_devices in zip(param_names, param_arrays):
        kvstore.broadcast(name, arg_params[name], out=[arg_params[name], *on_devices])


# -- mxnet.mod ------------------------------------------------------------------------------------------------------


def _init_optimizer(
    original: _Method,
    self: Any,
    kvstore: Any = "local",
    optimizer: Any = "sgd",
    optimizer_params: Any = (("learning_rate", 0.01),),
    force_init: bool = False,
) -> None:
    before, exchanging, asked = self._optimizer, exchanging_in(optimizer), kvstore
    replaces = exchanging is not None and asks_for_ours(kvstore) and (force_init or not self.optimizer_initialized)
    if replaces:
        kvstore = set_store_aside(exchanging, kvstore, len(self._context))
    with _given(exchanging), warnings.catch_warnings():
        if asks_for_ours(kvstore):  # MXNet's warning would name the batch size of one worker
            warnings.filterwarnings("ignore", "Optimizer created manually outside Module", UserWarning)
        original(self, kvstore, optimizer, optimizer_params, force_init)
    if replaces and store_of(exchanging) is not None:
        sys.modules["mxnet.model"]._initialize_kvstore(
            store_of(exchanging), self._exec_group.param_arrays, self._arg_params, self._param_names, False
        )
    if self._optimizer is before:  # an optimizer that is there already stays
        return
    vars(self)[_WATCH] = exchangers.watch_of(asked)
    if is_ours(self._kvstore):
        _divide_by_all(self, optimizer, optimizer_params)


def _init_optimizer_of_subclass(
    original: _Method, self: Any, kvstore: Any = "local", optimizer: Any = "sgd", *args: Any, **kwargs: Any
) -> None:
    with _given(exchanging_in(optimizer)):  # it may make a store first, as SVRG's does
        original(self, kvstore, optimizer, *args, **kwargs)


def _divide_by_all(module: Any, given: Any, parameters: Any) -> None:
    """Have an optimizer that MXNet has made of its name divide by the samples of all workers; warn of others."""
    batch_size, workers = module._exec_group.batch_size, module._kvstore.num_workers
    expected = 1.0 / (batch_size * workers)
    if not isinstance(given, str):
        if given.rescale_grad != expected:
            warnings.warn(
                f"the optimizer of this Module was made with rescale_grad={given.rescale_grad}; "
                f"1/batch_size/num_workers is {expected}. Is this intended?",
                stacklevel=4,
            )
    elif "rescale_grad" not in dict(parameters):
        vars(module._optimizer)[_DIVISION] = batch_size, workers
        module._optimizer.rescale_grad = expected


def _updating(original: _Method) -> _Method:
    def update(self: Any) -> None:
        watch = vars(self).get(_WATCH)
        if watch is not None:
            vars(self)[_WATCH] = watch.look(self)
        division = vars(self._optimizer).get(_DIVISION)
        if division is not None and is_ours(self._kvstore):
            batch_size, before = division
            workers = self._kvstore.num_workers
            if workers != before and self._optimizer.rescale_grad == 1.0 / (batch_size * before):
                vars(self._optimizer)[_DIVISION] = batch_size, workers
                self._optimizer.rescale_grad = 1.0 / (batch_size * workers)
        store, updater = self._kvstore, self._updater
        if is_ours(store) and vars(updater).get(COMPARED) is not store._member.topology:
            with store._comparing_states(new_states(updater, store)):
                original(self)
        else:
            original(self)

    return update


def _bind(original: _Method, self: Any, i: int, data_shapes: Any, label_shapes: Any, shared_group: Any) -> Any:
    executor, arena = original(self, i, data_shapes, label_shapes, shared_group), hooks.arena()
    # On several devices gradients are summed over those first. A shared group's executors have its gradients.
    if arena is None or len(self.contexts) > 1 or shared_group is not None:
        return executor
    gradients = {name: each for name, each in executor.grad_dict.items() if each is not None}
    found = {name: moved(gradients[name], arena)[0] for name in self.param_names if name in gradients}
    found = {name: each for name, each in found.items() if each is not None}
    if not found:
        return executor
    # An executor keeps the arrays that it was bound to. The second one uses the memory of the first one.
    return self.symbol.bind(
        self.contexts[i],
        executor.arg_dict,
        {**gradients, **found},
        self.grad_req,
        executor.aux_dict,
        self.group2ctxs[i],
        executor,
    )


def _borrow_optimizer(original: _Method, self: Any, shared_module: Any) -> None:
    original(self, shared_module)
    vars(self)[_WATCH] = vars(shared_module).get(_WATCH)


def _fit(original: _Method, self: Any, *args: Any, **kwargs: Any) -> Any:
    kvstore = kwargs.get("kvstore", args[6] if len(args) > 6 else "local")
    if asks_for_ours(kvstore) or (hooks.workers() > 1 and kvstore is not None):
        raise UnsupportedMethodError(message("FeedForward trains on one worker only.", fix="use mx.mod.Module."))
    return original(self, *args, **kwargs)
