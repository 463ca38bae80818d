"""Horovod's ways to train: a Trainer of Gluon that averages gradients, and an optimizer for Module.

Both exchange gradients through a store of their own, like ``Trainer(kvstore='horovod')``.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

import mxnet as mx

from kvstore_hvd import mxnet_compat
from kvstore_hvd.errors import InvalidRequestError, InvalidTypeError, KVHvdError, message
from kvstore_hvd.mxnet.calls import STORE_TYPES, Compression
from kvstore_hvd.mxnet.process_sets import ProcessSet, global_process_set
from kvstore_hvd.store.arrays import copy
from kvstore_hvd.store.keys import Reduction
from kvstore_hvd.store.kvstore import Horovod
from kvstore_hvd.world.member import Member


class Scale(NamedTuple):
    """By what a Trainer multiplies sums over workers: by this value where there are so many of them.

    The number of workers changes in an elastic job: ``Scale(1.0, 1)`` is a third among three, and a half among two.
    """

    value: float
    workers: int

    def among(self, workers: int) -> float:
        """The value where there are so many workers."""
        return self.value if workers == self.workers else self.value * self.workers / workers


class _PresentScale:
    """An attribute of a `DistributedTrainer`: read and written as it is among the present workers."""

    # The `Scale` itself is in the instance's dictionary, under the attribute's name: elastic states save that.

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: Any, owner: type | None = None) -> Any:
        if trainer is None:
            return self
        scale = vars(trainer).get(self._name)
        if scale is None:
            raise AttributeError(f"{type(trainer).__name__!r} object has no attribute {self._name!r}")
        return scale.among(trainer._workers)

    def __set__(self, trainer: Any, value: float) -> None:
        # AMP keeps a copy of one scale as another one: it stays as exact as that is, whatever the world becomes.
        known = [vars(trainer).get(name) for name in DistributedTrainer._SCALES]
        workers = trainer._workers
        same = [each for each in known if each is not None and each.among(workers) == value]
        vars(trainer)[self._name] = same[0] if same else Scale(value, workers)


class DistributedTrainer(mx.gluon.Trainer):
    """A Gluon Trainer that averages gradients over all devices of all workers of a process set.

    ``step(batch_size)`` takes the batch size of one worker; sums are divided by the present number of workers. Initial
    parameters are those of the set's first worker. Every worker must make its Trainers in the same order. On a worker
    that is not in the set nothing is exchanged: a step takes the worker's own gradients, and divides them by the number
    of members like theirs.

    Parameters
    ----------
    params : dict of str to Parameter, ParameterDict, or list of Parameter
        As ``mxnet.gluon.Trainer``.
    optimizer : str or mxnet.optimizer.Optimizer
        If it is a `DistributedOptimizer`, its inner optimizer is used, with a warning.
    optimizer_params : dict, optional
        As ``mxnet.gluon.Trainer``.
    compression : class
        The format in which gradients are exchanged: one of `Compression`, or a class with the methods of `Compressor`.
    gradient_predivide_factor : float
        Gradients are divided by it before they are summed, and multiplied with it as the optimizer scales them.
    prefix : str, optional
        Put before the names of parameters in messages and reports. Trainers never meet, also without one.
    num_groups : int
        Without effect: small gradients share operations anyway.
    process_set : ProcessSet
        Who takes part.
    sparse_as_dense : bool
        Whether row_sparse gradients are exchanged as dense ones, which does not wait.

    Raises
    ------
    InvalidRequestError, InvalidTypeError, NotInitializedError
        An argument is wrong, the set is not registered, or there is no world.
    """

    _SCALES = ("_scale", "_amp_original_scale")
    #: Of mxnet.gluon.Trainer, and of its AMP.
    _scale = _PresentScale()
    _amp_original_scale = _PresentScale()

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
        sparse_as_dense: bool = False,
    ) -> None:
        if isinstance(optimizer, DistributedOptimizer):
            text = "DistributedTrainer does not take a DistributedOptimizer: the optimizer inside it is used."
            warnings.warn(text, stacklevel=2)
            optimizer = optimizer._unwrap()
        if prefix is not None and not isinstance(prefix, str):
            _refuse("DistributedTrainer", f"prefix is {prefix!r}.", "pass a str.")
        store = _store_for("DistributedTrainer", gradient_predivide_factor, num_groups, process_set, sparse_as_dense)
        self._world, self._process_set = store._member, process_set
        self._sparse_as_dense, self._compression = sparse_as_dense, compression
        self._predivide_factor = gradient_predivide_factor
        #: See `join.joinables`: None means all workers.
        self._process_group = None if process_set is global_process_set else process_set
        kind = compression if isinstance(compression, type) else type(compression)
        self._is_compressed_here = kind not in STORE_TYPES
        if not self._is_compressed_here:
            store.set_gradient_compression({"type": STORE_TYPES[kind]})
        super().__init__(params, optimizer, optimizer_params, kvstore=store, update_on_kvstore=False)
        # Not in the reduction: gradients stay where they are summed, and AMP reads the scale from here.
        self.__dict__["_scale"] = Scale(self._optimizer.rescale_grad * gradient_predivide_factor, workers=1)
        if prefix:
            names = mxnet_compat.exchange_of(self).names
            names.update({id(each): prefix + names.get(id(each), each.name) for each in self._params})

    @property
    def _workers(self) -> int:
        """By how many the sums are divided."""
        return _members_of(self._process_set, self._world)

    @property
    def _average_factor(self) -> float:
        """By what the gradients after ``allreduce_grads()`` are multiplied to be the averages over workers."""
        # amp.unscale() has multiplied them by the scale, which is 1 from then on.
        is_unscaled = hasattr(self, "_amp_loss_scaler") and self._scale == 1
        return 1.0 if is_unscaled else self._predivide_factor / self._workers

    def _allreduce_grads(self) -> None:
        widens = self._sparse_as_dense and any(
            parameter.grad_req != "null" and parameter._grad_stype != "default" for parameter in self._params
        )
        if not (self._world.topology.is_member and (self._is_compressed_here or widens)):
            super()._allreduce_grads()
        else:
            mxnet_compat.exchange_gradients(self, DistributedTrainer._allreduce_one_by_one, in_one_call=False)

    def _allreduce_one_by_one(self) -> None:
        _submit_all(
            functools.partial(self._allreduce, mxnet_compat.key_of(self, parameter), parameter.list_grad())
            for parameter in self._params
            if parameter.grad_req != "null"
        )

    def _allreduce(self, key: int, gradients: list[Any]) -> None:
        if not self._is_compressed_here:
            _pushpull(self._kvstore, key, gradients, self._sparse_as_dense)
            return
        compressed = [self._compression.compress(each) for each in gradients]
        _pushpull(self._kvstore, key, [each for each, _ in compressed], self._sparse_as_dense)
        for gradient, (each, context) in zip(gradients, compressed):
            restored = self._compression.decompress(each, context)
            if restored is not gradient:
                copy(restored, gradient)


class DistributedOptimizer(mx.optimizer.Optimizer):
    """Wraps an optimizer, for ``Module``: averages gradients over the workers before the inner optimizer uses them.

    Everything else is the inner optimizer's. Every worker must make its optimizers in the same order.

    Parameters
    ----------
    optimizer : mxnet.optimizer.Optimizer
        Its ``rescale_grad`` is divided, in each update, by the present number of workers.
    gradient_predivide_factor, num_groups, process_set, sparse_as_dense
        As `DistributedTrainer`.

    Raises
    ------
    InvalidRequestError, InvalidTypeError, NotInitializedError
        As `DistributedTrainer`.
    """

    #: For the hooks, see mxnet_compat/exchangers.py.
    _kvstore_hvd_synchronised = True

    def __init__(
        self,
        optimizer: Any,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
        sparse_as_dense: bool = False,
    ) -> None:
        if isinstance(optimizer, DistributedOptimizer) or not isinstance(optimizer, mx.optimizer.Optimizer):
            fact, fix = f"the optimizer is a {type(optimizer).__name__}.", "pass one of mx.optimizer."
            _refuse("DistributedOptimizer", fact, fix)
        store = _store_for("DistributedOptimizer", gradient_predivide_factor, num_groups, process_set, sparse_as_dense)
        self.__dict__.update(_optimizer=optimizer, _factor=gradient_predivide_factor, _set=process_set)
        self.__dict__.update(_sparse_as_dense=sparse_as_dense, _kvstore_hvd_store=store)

    def _unwrap(self) -> Any:
        """The inner optimizer, whose ``rescale_grad`` is not divided by the number of workers."""
        return self._optimizer

    def _kvstore_hvd_adopt(self, optimizer: Any) -> None:
        """Take another optimizer inside, which was loaded from a file. For the hooks."""
        self.__dict__["_optimizer"] = optimizer

    # MXNet sets and reads attributes of an optimizer (its learning rate, its counts): they are the inner one's.

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_optimizer" not in self.__dict__:  # while it is being copied
            raise AttributeError(name)
        return getattr(self.__dict__["_optimizer"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_optimizer"], name, value)

    def __reduce__(self) -> Any:
        """A copy elsewhere would not exchange anything."""
        fact, fix = "it cannot be pickled: a copy would train alone.", "pickle the optimizer inside it."
        raise InvalidTypeError(message(fact, operation="DistributedOptimizer", fix=fix))

    def create_state(self, index: Any, weight: Any) -> Any:
        """As the inner optimizer."""
        return self._optimizer.create_state(index, weight)

    def create_state_multi_precision(self, index: Any, weight: Any) -> Any:
        """As the inner optimizer."""
        return self._optimizer.create_state_multi_precision(index, weight)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Sum `grad` over the workers in place, and update `weight` by the inner optimizer.

        Its ``rescale_grad`` is divided by the number of workers meanwhile: the update is that of the average.
        """
        self._update(self._optimizer.update, index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """As `update`, by the inner optimizer's method of this name."""
        self._update(self._optimizer.update_multi_precision, index, weight, grad, state)

    def _update(self, update: Callable[..., None], index: Any, weight: Any, grad: Any, state: Any) -> None:
        store, optimizer = self._kvstore_hvd_store, self._optimizer
        _submit_all(
            functools.partial(_pushpull, store, key, gradient, self._sparse_as_dense)
            for key, gradient in (zip(index, grad) if isinstance(index, (list, tuple)) else [(index, grad)])
        )
        own = optimizer.rescale_grad
        optimizer.rescale_grad = own * self._factor / _members_of(self._set, store._member)
        try:
            update(index, weight, grad, state)
        finally:
            optimizer.rescale_grad = own


def _store_for(who: str, factor: Any, num_groups: Any, process_set: ProcessSet, sparse_as_dense: Any) -> Any:
    """A store of the set, whose sums are of gradients divided by `factor`."""
    if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not factor > 0:
        _refuse(who, f"gradient_predivide_factor is {factor!r}.", "pass a positive number.")
    if isinstance(num_groups, bool) or not isinstance(num_groups, int) or num_groups < 0:
        _refuse(who, f"num_groups is {num_groups!r}.", "pass an int that is not negative.")
    if not isinstance(sparse_as_dense, bool):
        _refuse(who, f"sparse_as_dense is {sparse_as_dense!r}.", "pass True or False.")
    return Horovod(process_set._world(who, or_outside=True), Reduction(prescale=1.0 / factor))


def _submit_all(submissions: Iterable[Callable[[], None]]) -> None:
    """Make every submission, and raise the first error at the end: the other workers wait for all of them."""
    failures: list[KVHvdError] = []
    for submit in submissions:
        try:
            submit()
        except KVHvdError as error:
            failures.append(error)
    if failures:
        raise failures[0]


def _pushpull(store: Any, key: Any, gradients: Any, sparse_as_dense: bool) -> None:
    """Sum one gradient, given for each device or alone, in place."""
    priority = -key if isinstance(key, int) else 0
    several = gradients if isinstance(gradients, list) else [gradients]
    if not sparse_as_dense or several[0].stype == "default":
        store.pushpull(key, gradients, priority=priority)
        return
    dense = [each.tostype("default") for each in several]
    store.pushpull(key, dense, priority=priority)
    for each, gradient in zip(dense, several):
        each.tostype("row_sparse").copyto(gradient)


def _members_of(process_set: ProcessSet, world: Member) -> int:
    """How many workers are in a set, be this one of them or not."""
    return world.topology.size if world.topology.is_member else len(process_set.ranks or ())


def _refuse(who: str, fact: str, fix: str) -> NoReturn:
    raise InvalidRequestError(message(fact, operation=who, fix=fix))
