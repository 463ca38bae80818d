"""Horovod's ways to train: a Trainer of Gluon that averages gradients, and an optimizer for Module.

Both exchange gradients through a store of their own, like ``Trainer(kvstore='horovod')``.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any, NoReturn

from kvstore_hvd.arrays import copy
from kvstore_hvd.errors import InvalidRequestError, message
from kvstore_hvd.kvstore import make_store_class
from kvstore_hvd.mxnet.compression import Compression, store_type
from kvstore_hvd.mxnet.process_sets import ProcessSet, global_process_set
from kvstore_hvd.operations import Reduction

__all__ = ["DistributedOptimizer", "DistributedTrainer"]  # noqa: F822 - made when they are asked for


class TrainerMethods:
    """A Gluon Trainer that averages gradients over all devices of all workers of a process set.

    ``step(batch_size)`` takes the batch size of one worker. Initial parameters are those of the set's first worker.
    Every worker must make its Trainers in the same order.

    Parameters
    ----------
    params : dict of str to Parameter, ParameterDict, or list of Parameter
        As ``mxnet.gluon.Trainer``.
    optimizer : str or mxnet.optimizer.Optimizer
        Not a `DistributedOptimizer`: of that the optimizer inside is taken, with a warning.
    optimizer_params : dict, optional
        As ``mxnet.gluon.Trainer``.
    compression : class
        One of `Compression`, or another with the methods of `Compressor`: as what gradients are exchanged.
    gradient_predivide_factor : float
        Gradients are divided by it before they are summed, and multiplied with it as the optimizer scales them.
    prefix : str, optional
        Put before the names of parameters in messages and reports. Trainers never meet, also without one.
    num_groups : int
        Without effect: small gradients share operations anyway.
    process_set : ProcessSet
        Who takes part; this worker must be a member.

    Raises
    ------
    InvalidRequestError, TypeError, NotInitializedError
        An argument is wrong, this worker is not a member of the set, or there is no world.
    """

    # Of mxnet.gluon.Trainer.
    _scale: float
    _params: list[Any]
    _kvstore: Any

    def __init__(
        self,
        params: Any,
        optimizer: Any,
        optimizer_params: Any = None,
        compression: Any = Compression.none,
        gradient_predivide_factor: float = 1.0,
        prefix: Any = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if isinstance(optimizer, OptimizerMethods):
            text = "DistributedTrainer does not take a DistributedOptimizer: the optimizer inside it is used."
            warnings.warn(text, stacklevel=2)
            optimizer = optimizer.unwrap()
        if prefix is not None and not isinstance(prefix, str):
            _refuse("DistributedTrainer", f"prefix is {prefix!r}.", "pass a str.")
        store, scale = _store_and_scale("DistributedTrainer", gradient_predivide_factor, num_groups, process_set)
        self._compression = compression
        #: See `join.trainers`: None means all workers.
        self._process_group = None if process_set is global_process_set else process_set
        self._is_compressed_here = not store_type(compression)
        if not self._is_compressed_here:
            store.set_gradient_compression({"type": store_type(compression)})
        super().__init__(params, optimizer, optimizer_params, kvstore=store, update_on_kvstore=False)  # type: ignore[call-arg]
        # Not in the reduction: gradients stay where they are summed, and AMP reads the scale from here.
        self._scale *= scale
        if prefix:
            names = getattr(self, "_kvstore_hvd_names", {})
            self._kvstore_hvd_names = {id(each): prefix + names.get(id(each), each.name) for each in self._params}

    def _allreduce_grads(self) -> None:
        if not self._is_compressed_here:
            super()._allreduce_grads()  # type: ignore[misc]
            return
        for place, parameter in enumerate(self._params):
            if parameter.grad_req == "null":
                continue
            gradients = parameter.list_grad()
            compressed = [self._compression.compress(each) for each in gradients]
            self._kvstore.pushpull(place, [each for each, _ in compressed], priority=-place)
            for gradient, (each, context) in zip(gradients, compressed):
                if each is not gradient:
                    copy(self._compression.decompress(each, context), gradient)


class OptimizerMethods:
    """An optimizer that averages gradients over the workers before another one uses them, for ``Module``.

    All else is the other optimizer's. Every worker must make its optimizers in the same order.

    Parameters
    ----------
    optimizer : mxnet.optimizer.Optimizer
        Its ``rescale_grad`` is divided by the number of workers.
    gradient_predivide_factor, num_groups, process_set
        As `DistributedTrainer`.

    Raises
    ------
    InvalidRequestError, TypeError, NotInitializedError
        As `DistributedTrainer`.
    """

    #: For the hooks: a Module with this optimizer needs no store.
    _kvstore_hvd_synchronised = True

    def __init__(
        self,
        optimizer: Any,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        import mxnet as mx

        if isinstance(optimizer, OptimizerMethods) or not isinstance(optimizer, mx.optimizer.Optimizer):
            fact, fix = f"the optimizer is a {type(optimizer).__name__}.", "pass one of mx.optimizer."
            _refuse("DistributedOptimizer", fact, fix)
        store, scale = _store_and_scale("DistributedOptimizer", gradient_predivide_factor, num_groups, process_set)
        vars(self).update(_optimizer=optimizer, _store=store, _exchange_scale=scale)
        optimizer.rescale_grad *= scale

    def unwrap(self) -> Any:
        """The optimizer inside, as it was before."""
        optimizer = vars(self)["_optimizer"]
        optimizer.rescale_grad /= vars(self)["_exchange_scale"]
        vars(self)["_exchange_scale"] = 1.0  # once
        return optimizer

    # MXNet sets and reads attributes of an optimizer (its learning rate, its counts): they are the inner one's.

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_optimizer" not in vars(self):  # while it is being copied
            raise AttributeError(name)
        return getattr(vars(self)["_optimizer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_optimizer"], name, value)

    def __reduce__(self) -> Any:
        """A copy elsewhere would not exchange anything."""
        fact, fix = "it cannot be pickled: a copy would train alone.", "pickle the optimizer inside it."
        raise TypeError(message(fact, operation="DistributedOptimizer", fix=fix))

    def create_state(self, index: Any, weight: Any) -> Any:
        """As the inner optimizer."""
        return self._optimizer.create_state(index, weight)

    def create_state_multi_precision(self, index: Any, weight: Any) -> Any:
        """As the inner optimizer."""
        return self._optimizer.create_state_multi_precision(index, weight)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Sum the gradients, and update as the inner optimizer."""
        self._exchange(index, grad)
        self._optimizer.update(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Sum the gradients, and update as the inner optimizer."""
        self._exchange(index, grad)
        self._optimizer.update_multi_precision(index, weight, grad, state)

    def _exchange(self, index: Any, grad: Any) -> None:
        several = isinstance(index, (list, tuple))
        for key, gradient in zip(index, grad) if several else [(index, grad)]:
            self._store.pushpull(key, gradient, priority=-key if isinstance(key, int) else 0)


def _store_and_scale(who: str, factor: Any, num_groups: Any, process_set: ProcessSet) -> tuple[Any, float]:
    """A store of the set, and by what its sums are to be multiplied."""
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0:
        _refuse(who, f"gradient_predivide_factor is {factor!r}.", "pass a positive number.")
    if isinstance(num_groups, bool) or not isinstance(num_groups, int) or num_groups < 0:
        _refuse(who, f"num_groups is {num_groups!r}.", "pass an int that is not negative.")
    world = process_set.world(who)
    store = make_store_class()(world, Reduction(prescale=1.0 / factor))
    return store, factor / world.topology.size


def _refuse(who: str, fact: str, fix: str) -> NoReturn:
    raise InvalidRequestError(message(fact, operation=who, fix=fix))


@functools.cache
def _make(name: str) -> type:
    import mxnet as mx

    methods, base = {
        "DistributedTrainer": (TrainerMethods, mx.gluon.Trainer),
        "DistributedOptimizer": (OptimizerMethods, mx.optimizer.Optimizer),
    }[name]
    return type(name, (methods, base), {"__doc__": methods.__doc__, "__module__": __name__})


def __getattr__(name: str) -> Any:
    # The classes derive from MXNet's: they are made when they are asked for.
    if name in __all__:
        return _make(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
