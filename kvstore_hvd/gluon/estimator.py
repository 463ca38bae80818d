"""An Estimator whose workers train one network, and a handler that commits an elastic state."""

from __future__ import annotations

import functools
import logging
import math
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from mxnet.gluon.contrib import estimator as library
from mxnet.gluon.data import BatchSampler, DataLoader

from kvstore_hvd import mxnet_compat, numpy_ops
from kvstore_hvd.errors import InvalidRequestError, MismatchError, message
from kvstore_hvd.gluon import metrics
from kvstore_hvd.gluon.samplers import DistributedBatchSampler, EpochSampler
from kvstore_hvd.gluon.steps import average_running_statistics
from kvstore_hvd.mxnet.functions import allgather_object, broadcast_object
from kvstore_hvd.mxnet.optimizer import DistributedOptimizer, DistributedTrainer
from kvstore_hvd.mxnet.sharded import ShardedTrainer
from kvstore_hvd.store.kvstore import Horovod
from kvstore_hvd.world import process

# What rank 0 tells of the checkpoint that it has found.
_RESUMED = "trained_epoch", "trained_batch"


class DistributedEstimator(library.Estimator):
    """MXNet's Estimator, for a Trainer that sums over workers; every worker calls `fit` and `evaluate`.

    - A step divides by the samples of all workers, with a `DistributedTrainer` and with ``kvstore='horovod'``. That
      costs one small operation a step where batches are not those of a ``DataLoader`` with a ``batch_size``. Without a
      Trainer it makes a `DistributedTrainer` with MXNet's default optimizer.
    - Metrics become those of all workers (`DistributedMetric`), also the objects that the program has passed. During
      an evaluation they show this worker's samples until its end, so workers may have different numbers of batches.
    - If a handler of any worker stops the training, all stop after this batch, or epoch. That costs one small operation
      after each batch, or epoch, where a handler of the program or an EarlyStoppingHandler may stop.
    - Running statistics are averaged, by the samples of each worker, before an evaluation and a checkpoint,
      and after `fit`.
    - A CheckpointHandler writes on rank 0. It resumes with rank 0's files on all workers.
    - Other ranks than 0 log warnings only.

    In `fit` all workers have equally many samples: use a `DistributedSampler`, or a `DistributedBatchSampler`, whose
    global batches the steps are divided by. Each epoch begins the sampler's next one.

    Parameters
    ----------
    *args, **kwargs
        As MXNet's ``Estimator``.
    verbose : bool
        Whether all ranks log.

    Raises
    ------
    MismatchError
        By `fit`, on all workers: they have other numbers of samples, batches, epochs, handlers or metrics.
    """

    def __init__(self, *args: Any, verbose: bool = False, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._is_evaluating = False
        self._samples = 0  # of this worker since running statistics were averaged
        for metric in (*self.train_metrics, *self.val_metrics):
            metrics.distribute(metric)
        self.logger.addFilter(
            lambda line: verbose or line.levelno >= logging.WARNING or process.current().topology.rank == 0
        )

    def fit(
        self,
        train_data: Any,
        val_data: Any = None,
        epochs: int | None = None,
        event_handlers: Any = None,
        batches: int | None = None,
        batch_axis: int = 0,
    ) -> None:
        """As MXNet's; every worker calls it. With 0 epochs there is nothing left to do."""
        if epochs == 0 and not batches:
            _check_alike({"epochs": 0})
            return
        in_batches: Any = getattr(train_data, "_batch_sampler", ())
        sampler = getattr(in_batches, "_sampler", in_batches)
        self._sampler = sampler if isinstance(sampler, EpochSampler) else None
        # Other batches may have other sizes on each worker.
        self._is_even = type(in_batches) is BatchSampler
        if self._sampler is not None and getattr(train_data, "_auto_reload", False):
            fact = "a DataLoader with auto_reload=True takes the samples of an epoch before it has begun."
            _refuse(fact, "leave auto_reload out.")
        if isinstance(sampler, DistributedBatchSampler) and isinstance(train_data, DataLoader):
            workers, last = process.current().topology.size, sampler.size_of(sampler.processed + len(sampler) - 1)
            if len(sampler) and last < workers:
                fact = (
                    f"the last batch has {last} samples for {workers} workers, and a DataLoader takes no empty share."
                )
                _refuse(fact, "pass last='discard' to the DistributedBatchSampler.")
        self._alike = {
            "batches in an epoch": _length_of(train_data),
            "samples in an epoch": None if isinstance(sampler, DistributedBatchSampler) else _length_of(sampler),
            "batch sizes": getattr(in_batches, "_batch_size", None),
        }
        super().fit(train_data, val_data, epochs, event_handlers, batches, batch_axis)
        self.average_running_statistics()

    def evaluate(self, val_data: Any, *args: Any, **kwargs: Any) -> None:
        """As MXNet's; every worker calls it, with its share of the samples."""
        self.average_running_statistics()
        self._is_evaluating = True
        try:
            with metrics.of_this_worker(self.val_metrics):
                super().evaluate(val_data, *args, **kwargs)
        finally:
            self._is_evaluating = False

    def average_running_statistics(self) -> None:
        """`average_running_statistics` of the network, weighted by the samples since the last call."""
        samples, self._samples = self._samples, 0
        average_running_statistics(self.net, samples)

    def _check_trainer(self, trainer: Any) -> Any:
        if not trainer:
            text = "No trainer specified, default SGD optimizer with learning rate 0.001 is used."
            warnings.warn(text, stacklevel=3)
            trainer = DistributedTrainer(self.net.collect_params(), "sgd", {"learning_rate": 0.001})
        return super()._check_trainer(trainer)

    def _prepare_default_handlers(self, val_data: Any, event_handlers: Any) -> Any:
        is_one = isinstance(event_handlers, library.event_handler.EventHandler)
        # MXNet's own divides by the samples of this worker.
        given = [
            _Update(each.priority) if type(each) is library.GradientUpdateHandler else each
            for each in ([event_handlers] if is_one else event_handlers or ())
        ]
        if not any(isinstance(each, library.GradientUpdateHandler) for each in given):
            given.append(_Update())
        if val_data is not None and not any(isinstance(each, library.ValidationHandler) for each in given):
            given.append(library.ValidationHandler(val_data=val_data, eval_fn=self.evaluate))  # also without a batch
        handlers = super()._prepare_default_handlers(None, given)
        own = {"epochs": self.max_epoch, "batches": self.max_batch, **self._alike}
        for what, objects in (("handlers", handlers), ("metrics", (*self.train_metrics, *self.val_metrics))):
            own[what] = ", ".join(type(each).__name__ for each in objects)
        _check_alike(own)
        mxnet_compat.start(self.trainer)  # the first batch is that of rank 0's parameters on all workers
        for handler in handlers:
            if isinstance(handler, (library.CheckpointHandler, library.EarlyStoppingHandler)) and handler.monitor:
                metrics.distribute(handler.monitor)
            if isinstance(handler, library.CheckpointHandler):
                vars(handler)["_save_params_and_trainer"] = functools.partial(_save, handler)
                vars(handler)["_save_symbol"] = functools.partial(_save_symbol, handler)
        return handlers

    def _categorize_handlers(self, event_handlers: Any) -> Any:
        train_begin, epoch_begin, batch_begin, batch_end, epoch_end, train_end = super()._categorize_handlers(
            event_handlers
        )
        if self._is_evaluating:
            epoch_end = [_EndOfEvaluation(), *epoch_end]
        else:
            train_begin = [
                _Resume(each) if isinstance(each, library.CheckpointHandler) else each for each in train_begin
            ]
            epoch_begin = [_Epoch(), *epoch_begin]
            batch_end, epoch_end = [_Agreed(batch_end, "batch_end")], [_Agreed(epoch_end, "epoch_end")]
        return train_begin, epoch_begin, batch_begin, batch_end, epoch_end, train_end


def _check_alike(own: dict[str, Any]) -> None:
    """Raise, on all workers, unless all have the same."""
    everybody = allgather_object(own, "kvstore_hvd.estimator/fit")
    for what, here in own.items():
        if any(each.get(what) != here for each in everybody):
            details = [f"rank {rank}: {each.get(what)}" for rank, each in enumerate(everybody)]
            fix = "take the samples from hvd.DistributedSampler(last='pad'); pass the same arguments on every worker."
            text = message(f"workers have different {what}.", **_where(), details=details, fix=fix)
            raise MismatchError(text)


def _where() -> dict[str, Any]:
    return {**process.current().topology.prefix, "operation": "fit"}


def _refuse(fact: str, fix: str) -> NoReturn:
    raise InvalidRequestError(message(fact, **_where(), fix=fix))


class _Epoch:
    def epoch_begin(self, estimator: Any, *args: Any, **kwargs: Any) -> None:
        sampler = estimator._sampler
        estimator._epoch = None if sampler is None else sampler.epoch
        estimator._number = getattr(sampler, "processed", 0)  # of the next batch in the epoch


class _Update(library.GradientUpdateHandler):
    """Divides by the samples of all workers."""

    def batch_end(self, estimator: Any, *args: Any, **kwargs: Any) -> None:
        trainer = estimator.trainer
        optimizer, store = trainer.optimizer, mxnet_compat.store_in(trainer)
        if isinstance(optimizer, DistributedOptimizer):
            store = optimizer._kvstore_hvd_store
        workers = store.num_workers if isinstance(store, Horovod) else 1
        samples = _samples_of(kwargs["loss"])
        if isinstance(estimator._sampler, DistributedBatchSampler):
            samples = estimator._sampler.size_of(estimator._number)
        elif estimator._is_even or workers == 1:
            samples *= workers
        else:
            samples = int(numpy_ops.allreduce(np.array([samples], np.int64), "kvstore_hvd.estimator/samples")[0])
        is_average = isinstance(trainer, DistributedTrainer) or isinstance(optimizer, DistributedOptimizer)
        trainer.step(samples / workers if is_average else samples)


def _samples_of(loss: Any) -> int:
    return sum(each.shape[0] if each.shape else 1 for each in (loss if isinstance(loss, (list, tuple)) else [loss]))


def _length_of(thing: Any) -> int | None:
    return len(thing) if hasattr(thing, "__len__") else None


class _EndOfEvaluation:
    def epoch_end(self, estimator: Any, *args: Any, **kwargs: Any) -> None:
        metrics.of_all_workers(estimator.val_metrics)


class _Agreed:
    """Handlers of an event after which all workers stop if one does."""

    def __init__(self, handlers: Sequence[Any], event: str) -> None:
        self._handlers, self._event = handlers, event
        self._may_stop = any(_may_stop(type(each), event) for each in handlers)

    def batch_end(self, estimator: Any, *args: Any, **kwargs: Any) -> bool:
        estimator._samples += _samples_of(kwargs["loss"])
        stops = self._call(estimator, *args, **kwargs)
        estimator._number += 1
        return stops

    def epoch_end(self, estimator: Any, *args: Any, **kwargs: Any) -> bool:
        stops, sampler = self._call(estimator, *args, **kwargs), estimator._sampler
        if sampler is not None and sampler.epoch == estimator._epoch:  # else a handler has begun another one
            sampler.set_epoch(estimator._epoch + 1)
        return stops

    def _call(self, *args: Any, **kwargs: Any) -> bool:
        stops = [bool(getattr(each, self._event)(*args, **kwargs)) for each in self._handlers]
        if not self._may_stop:
            return any(stops)
        return bool(numpy_ops.allreduce(np.array([any(stops)], np.int32), f"kvstore_hvd.estimator/{self._event}")[0])


def _may_stop(kind: Any, event: str) -> bool:
    """Whether the decision of a handler of this class may differ between workers."""
    is_of_mxnet = kind.__module__.startswith("mxnet.")
    return not (is_of_mxnet or kind is _Update) or (
        event == "epoch_end" and issubclass(kind, library.EarlyStoppingHandler)
    )


class _Resume:
    """A CheckpointHandler at the beginning: rank 0 looks for its files."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler

    def train_begin(self, estimator: Any, *args: Any, **kwargs: Any) -> None:
        handler, is_root = self._handler, process.current().topology.rank == 0
        fault: Exception | None = None
        with mxnet_compat.holding(handler, resume_from_checkpoint=handler.resume_from_checkpoint and is_root):
            try:
                handler.train_begin(estimator, *args, **kwargs)
            except Exception as error:
                if not handler.resume_from_checkpoint:
                    raise
                fault = error
        if not handler.resume_from_checkpoint:
            return
        numbers = {name: vars(handler).get(name) for name in _RESUMED}
        is_found = fault is None and numbers["trained_epoch"] not in (None, -1)
        files = _files_of(handler, numbers) if is_root and is_found else None
        told = (fault and (type(fault).__name__, str(fault))), numbers, estimator.max_epoch, estimator.max_batch, files
        failed, numbers, estimator.max_epoch, estimator.max_batch, files = broadcast_object(told)
        if failed:
            if fault:
                raise fault
            fix = "see the files in model_dir on rank 0, or pass resume_from_checkpoint=False."
            _refuse(f"rank 0 cannot resume: {': '.join(failed)}.", fix)
        vars(handler).update(numbers)
        if files is None:
            return
        if not is_root:
            with tempfile.TemporaryDirectory() as folder:
                paths = [Path(folder, name) for name in ("params", "states")]
                for path, data in zip(paths, files):
                    path.write_bytes(data)
                place = getattr(estimator, "device", None) or estimator.context
                estimator.net.load_parameters(str(paths[0]), ctx=place)
                estimator.trainer.load_states(str(paths[1]))
        if estimator._sampler is not None and estimator.max_epoch:
            estimator._sampler.set_epoch(numbers["trained_epoch"] + 1)


def _files_of(handler: Any, numbers: dict[str, Any]) -> list[bytes]:
    """Parameters and states of the checkpoint that a handler has found."""
    name = f"{handler.model_prefix}-epoch{numbers['trained_epoch']}batch{numbers['trained_batch']}"
    return [Path(handler.model_dir, name + suffix).read_bytes() for suffix in (".params", ".states")]


def _save(handler: Any, estimator: Any, file_prefix: str) -> None:
    """Write the files of a checkpoint on rank 0; every worker calls it."""
    estimator.average_running_statistics()
    if process.current().topology.rank == 0:
        type(handler)._save_params_and_trainer(handler, estimator, file_prefix)
    elif isinstance(estimator.trainer, ShardedTrainer):
        estimator.trainer._updaters[0].whole_states()


def _save_symbol(handler: Any, estimator: Any) -> None:
    if process.current().topology.rank == 0:
        type(handler)._save_symbol(handler, estimator)


class CommitHandler(library.TrainBegin, library.BatchEnd, library.EpochEnd):
    """Commits an elastic state during `DistributedEstimator.fit`, and counts its epochs.

    After an epoch ``state.epoch`` is one more, if the state has it; pass ``epochs=total - state.epoch`` to `fit`. A
    sampler in ``state.sampler`` records the batches and begins the epochs.

    Parameters
    ----------
    state : kvstore_hvd.elastic.State
    batch_period : int or None
        Batches from one commit to the next; None: at the ends of epochs only.
    priority : float
        As of other handlers: later than the update and the metrics.
    """

    def __init__(self, state: Any, batch_period: int | None = 1, priority: float = 1000) -> None:
        self.state, self.batch_period, self.priority = state, batch_period or math.inf, priority
        self._batches = 0

    def train_begin(self, estimator: Any, *args: Any, **kwargs: Any) -> None:
        """Count batches anew: newcomers have counted none."""
        self._batches = 0

    def batch_end(self, estimator: Any, *args: Any, **kwargs: Any) -> None:
        """Record the batch, and commit if it is time."""
        sampler = getattr(self.state, "sampler", None)
        if isinstance(sampler, DistributedBatchSampler):
            sampler.record_batch()
        elif (record := getattr(sampler, "record_batch", None)) is not None:
            record(0, _samples_of(kwargs["loss"]))
        self._batches += 1
        if self._batches % self.batch_period == 0:
            self.state.commit()

    def epoch_end(self, estimator: Any, *args: Any, **kwargs: Any) -> None:
        """Begin the next epoch, and commit."""
        if hasattr(self.state, "epoch"):
            self.state.epoch += 1
            if getattr(self.state, "sampler", None) is not None:
                self.state.sampler.set_epoch(self.state.epoch)
        self.state.commit()
