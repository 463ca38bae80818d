"""What a training does between its steps: clipping, and averages of running statistics."""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any

import mxnet as mx
import numpy as np

from kvstore_hvd import mxnet_compat, numpy_ops
from kvstore_hvd.errors import InvalidRequestError, InvalidTypeError, message
from kvstore_hvd.mxnet.optimizer import DistributedOptimizer, DistributedTrainer
from kvstore_hvd.store.kvstore import Horovod
from kvstore_hvd.world import process

_EPSILON = 1e-8  # that of gluon.utils.clip_global_norm
# How the names of the parameters end: of Gluon, and of symbols.
_STATISTICS = "running_mean", "running_var", "moving_mean", "moving_var"


def clip_global_norm(trainer: Any, max_norm: float) -> float:
    """Scale the gradients of a Trainer so that their common 2-norm is at most `max_norm`; returns the norm before.

    Call it on every worker between ``trainer.allreduce_grads()`` and ``trainer.update(batch_size)``. The norm is that
    of one process with the data of all workers where a store sums (``Trainer(kvstore='horovod')``), and of the average
    over workers with a `DistributedTrainer`: a threshold that is right for one worker is right for any number. All
    workers use rank 0's norm and `max_norm`, so they scale alike. After ``amp.unscale(trainer)`` the norm is that of
    unscaled gradients.

    Parameters
    ----------
    trainer : mxnet.gluon.Trainer
    max_norm : float

    Returns
    -------
    float
        The norm; infinite or NaN if a gradient is not finite. The gradients are undefined then, as with
        ``gluon.utils.clip_global_norm``, which warns likewise.

    Raises
    ------
    InvalidTypeError, InvalidRequestError
        `trainer` is no Trainer, or its optimizer is a `DistributedOptimizer`; rank 0's `max_norm` is negative or NaN.
    HorovodInternalError, MXNetError
        The world is lost, or the computation of a gradient failed.
    """
    where: dict[str, Any] = {**process.current().topology.prefix, "operation": "clip_global_norm"}
    if not isinstance(trainer, mx.gluon.Trainer):
        fix = "pass the Trainer, whose gradients are clipped."
        raise InvalidTypeError(message(f"it got a {type(trainer).__name__}.", **where, fix=fix))
    if isinstance(trainer._optimizer, DistributedOptimizer):
        fact = "the optimizer exchanges gradients later, in the update."
        raise InvalidRequestError(message(fact, **where, fix="use a DistributedTrainer."))
    gradients = [parameter.list_grad() for parameter in trainer._params if parameter.grad_req != "null"]
    factor = trainer._average_factor if isinstance(trainer, DistributedTrainer) else 1.0
    norm = factor * math.sqrt(_sum_of_squares([of_devices[0] for of_devices in gradients]))
    store = mxnet_compat.store_in(trainer)
    if isinstance(store, Horovod):  # workers round the sum of squares differently
        world = store._member
        with world.submitting():
            own = np.array([norm, max_norm], np.float64).view(np.int64)
            rows = world.all_rows("clip_global_norm", f"{store._namespace}/norm", "clip_global_norm", own)
        norm, max_norm = map(float, np.ascontiguousarray(rows[0]).view(np.float64))
    if not max_norm >= 0:
        fix = "pass a number that is not negative."
        raise InvalidRequestError(message(f"max_norm is {max_norm}.", **where, fix=fix))
    if not math.isfinite(norm):
        warnings.warn("nan or inf is detected. Clipping results will be undefined.", stacklevel=2)
    scale = max_norm / (norm + _EPSILON)
    if not scale >= 1:
        for gradient in itertools.chain(*gradients):
            gradient *= scale  # noqa: PLW2901 - in place
    return norm


def _sum_of_squares(arrays: list[Any]) -> float:
    by_dtype: dict[str, list[Any]] = {}
    for array in arrays:
        values = (array if array.stype == "default" else array.data).as_nd_ndarray()
        if mxnet_compat.dtype_name(values) == "float16":  # MXNet 1 would square halves as halves
            values = values.astype("float32")
        by_dtype.setdefault(mxnet_compat.dtype_name(values), []).append(values)
    sums = [mx.nd.multi_sum_sq(*same, num_arrays=len(same)) for same in by_dtype.values()]
    return math.fsum(float(each) for of_dtype in sums for each in of_dtype.asnumpy())


def average_running_statistics(net: Any, samples: float = 1) -> None:
    """Give all workers the average of their running means and variances, as of BatchNorm; waits for them.

    Call it on every worker before an evaluation or a checkpoint: every worker keeps the statistics of its own data.

    Parameters
    ----------
    net : mxnet.gluon.Block or mxnet.mod.Module
        The same on all workers.
    samples : float
        This worker's weight in the average, as the number of samples that it has trained on. If all weights are 0,
        nothing changes.

    Raises
    ------
    MismatchError
        The workers' networks have other statistics; on all of them.
    HorovodInternalError
        The world is lost.
    """
    parameters: Any = {}
    if mxnet_compat.is_block(net):
        found = [each for name, each in net.collect_params().items() if name.endswith(_STATISTICS)]
        arrays = [each.list_data() for each in found if not mxnet_compat.is_deferred(each)]
    else:
        parameters = dict(zip(("arg_params", "aux_params"), net.get_params()))
        arrays = [[each] for name, each in parameters["aux_params"].items() if name.endswith(_STATISTICS)]
    values = [np.mean([x.asnumpy() for x in each], axis=0, dtype=np.float64) for each in arrays]
    parts = [samples * each.ravel() if samples else np.zeros(each.size) for each in values]
    weighted = np.concatenate([[float(samples)], *parts])
    total, *_ = sums = numpy_ops.allreduce(weighted, "average_running_statistics")
    if not total:
        return
    ends = np.cumsum([1, *(each.size for each in values)])
    for on_devices, value, end in zip(arrays, values, ends[1:]):
        average = (sums[end - value.size : end] / total).reshape(value.shape)
        for x in on_devices:
            x[:] = average.astype(x.dtype)
    if parameters:
        net.set_params(**parameters)
