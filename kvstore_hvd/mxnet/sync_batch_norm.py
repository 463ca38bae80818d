"""Batch normalization over the batches of all workers, as a layer of Gluon."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mxnet as mx
import numpy as np

from kvstore_hvd import mxnet_compat
from kvstore_hvd.mxnet.batch_statistics import StatisticsExchange
from kvstore_hvd.mxnet.process_sets import ProcessSet, global_process_set
from kvstore_hvd.mxnet_compat.graph import SYNC_BATCH_NORM

# In the operator's order.
_PARAMETERS = ("gamma", "beta", "running_mean", "running_var")


class SyncBatchNorm(mx.gluon.nn.BatchNorm):
    """Batch normalization with the mean and variance of all workers' batches, which may differ in size.

    A ``mxnet.gluon.nn.BatchNorm`` in everything else: its parameters, their names and files, `cast`, `hybridize`, and
    inference, which uses the running statistics. These change in the forward pass, and have the same bits on all
    workers. The gradients of gamma and beta are those of a worker's own batch: the Trainer sums them.

    Every worker must make its layers in the same order, and apply them in the same order in training. Not for several
    devices in one process, and not within a `Join` that lets workers run out of input: a forward pass needs everybody.
    An exported network has MXNet's BatchNorm in its place.

    A hybridized graph with this layer is compiled without ``static_shape``: with it MXNet may run several passes of the
    layer at the same time, and workers would match different passes with each other.

    What is refused within a hybridized graph is raised as an ``MXNetError`` where the result is read.

    Parameters
    ----------
    process_set : ProcessSet
        Whose batches are normalized together; this worker must be a member when it trains.
    others, **kwargs
        As ``mxnet.gluon.nn.BatchNorm``.

    Raises
    ------
    InvalidRequestError, NotInitializedError
        When it trains: there is no world, this worker is not a member of the set, its parameters are on several
        devices, or it is within a `Join`.
    MismatchError
        When the output is read: the workers' arrays differ in the number of channels.
    HorovodInternalError
        The world is lost.
    """

    def __init__(
        self,
        axis: int = 1,
        momentum: float = 0.9,
        epsilon: float = 1e-5,
        center: bool = True,
        scale: bool = True,
        use_global_stats: bool = False,
        beta_initializer: Any = "zeros",
        gamma_initializer: Any = "ones",
        running_mean_initializer: Any = "zeros",
        running_variance_initializer: Any = "ones",
        in_channels: int = 0,
        process_set: ProcessSet = global_process_set,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            axis=axis,
            momentum=momentum,
            epsilon=epsilon,
            center=center,
            scale=scale,
            use_global_stats=use_global_stats,
            beta_initializer=beta_initializer,
            gamma_initializer=gamma_initializer,
            running_mean_initializer=running_mean_initializer,
            running_variance_initializer=running_variance_initializer,
            in_channels=in_channels,
            **kwargs,
        )
        self._exchange = StatisticsExchange(process_set, self.gamma)

    def _alias(self) -> str:
        return "batchnorm"  # in the names of parameters

    def infer_shape(self, x: Any, *args: Any) -> None:
        """See ``mxnet.gluon.HybridBlock``; not by a graph, which cannot take arrays without rows."""
        for name in _PARAMETERS:
            getattr(self, name).shape = (x.shape[self._kwargs["axis"]],)

    # What a block defines differs between MXNet's versions.
    if hasattr(mx.gluon.nn.BatchNorm, "hybrid_forward"):

        def hybrid_forward(self, F: Any, x: Any, *parameters: Any, **named: Any) -> Any:  # noqa: N803 - MXNet's name
            """See ``mxnet.gluon.HybridBlock``."""
            ordered = parameters or [named[name] for name in _PARAMETERS]
            own = self._synchronized(x, isinstance(x, mx.sym.Symbol), ordered)
            return super().hybrid_forward(F, x, *ordered) if own is None else own

    else:

        def forward(self, x: Any) -> Any:
            """See ``mxnet.gluon.HybridBlock``."""
            ordered = [getattr(self, name).data(x.device) for name in _PARAMETERS]
            own = self._synchronized(x, mxnet_compat.is_tracing(), ordered)
            return super().forward(x) if own is None else own

    def _synchronized(self, values: Any, is_graph: bool, parameters: Sequence[Any]) -> Any:
        """The output that the batches of all workers have; None where MXNet's layer computes the same."""
        if self._kwargs["use_global_stats"]:
            return None
        if is_graph:
            return self._normalized(values, *parameters)
        if not mx.autograd.is_training():
            return None
        one = self._exchange.check()
        if not -values.ndim <= self._kwargs["axis"] < values.ndim:
            fact = f"there is no axis {self._kwargs['axis']} in an array of shape {values.shape}."
            one.refuse(fact, "pass the axis of the channels.", self.gamma.name)
        if one.world.is_alone:
            return None
        with one.world.submitting():
            return self._normalized(values, *parameters)

    def _normalized(self, values: Any, *parameters: Any) -> Any:
        """The layer's operators, of arrays or in a graph."""
        F = mx.sym if isinstance(values, mx.sym.Symbol) else mx.nd  # noqa: N806 - MXNet's name
        x, gamma, beta, *running = [each.as_nd_ndarray() for each in (values, *parameters)]
        is_empty = F is mx.nd and not mxnet_compat.is_tracing() and not x.size
        if is_empty:
            zeros = F.zeros_like(gamma)
            statistics = [zeros, zeros, zeros, F.zeros((1,), x.context, "int64")]
        else:
            shifted, *statistics = self._statistics(F, x)
        options = {name: self._kwargs[name] for name in ("eps", "momentum", "fix_gamma")}
        options.update(op_type=SYNC_BATCH_NORM, layer=self._exchange.key, is_empty=is_empty)
        g, b = F.Custom(*statistics, gamma, beta, *running, **options)
        if is_empty:  # MXNet's operator would make NaN of the running statistics
            shape = [-1 if each == self._kwargs["axis"] % x.ndim else 1 for each in range(x.ndim)]
            result = F.broadcast_mul(x, F.cast(F.reshape(g + b, shape=shape), dtype=x.dtype))
        else:
            # The custom operator updates the running statistics. BatchNorm gets others here, and in blocks' graphs
            # (graphs.py); a momentum of 1 keeps them in other graphs.
            if F is mx.nd and not mxnet_compat.is_tracing():
                running = [F.zeros_like(each) for each in running]
            result = F.BatchNorm(shifted, g, b, *running, **{**self._kwargs, "fix_gamma": False, "momentum": 1})
        return result.as_np_ndarray() if isinstance(values, (mx.np.ndarray, mx.sym.np._Symbol)) else result

    def _statistics(self, F: Any, x: Any) -> tuple[Any, Any, Any, Any, Any]:  # noqa: N803 - MXNet's name
        """`x` less a shift of each channel; the shifts; the sums and the sums of squares of that; the size of `x`."""
        # The shift is a mean of a few elements: numbers whose mean is large against their deviation lose no digits.
        # As (before, channels, after). In graphs shapes are not known.
        axis = self._kwargs["axis"]
        shaped = x
        if axis < 0:
            shaped = F.reshape(x, shape=(-1,) + (0,) * -axis, reverse=True)
        elif axis == 0:
            shaped = F.expand_dims(x, axis=0)
        for _ in range(axis - 1):
            shaped = F.reshape(shaped, shape=(-3, -2))
        shaped = F.reshape(shaped, shape=(0, 0, -1))
        some = F.slice(shaped, begin=(0, None, 0), end=(16, None, 16))  # or as many as there are
        shift = F.BlockGrad(F.mean(F.mean(some, axis=2, keepdims=True), axis=0, keepdims=True))

        def less(array: Any, shift: Any) -> Any:  # `broadcast_sub` would sum the gradient of the shift, slowly
            return F.elemwise_sub(array, F.BlockGrad(F.broadcast_like(shift, array)))

        wide = shifted = less(shaped, shift)
        dtype = np.dtype(self.gamma.dtype).name
        if mxnet_compat.is_tracing() or not hasattr(x, "dtype"):  # dtypes are not known either
            wide = F.cast(shifted, dtype=dtype)
        elif x.dtype != self.gamma.dtype:
            wide = less(F.cast(shaped, dtype=dtype), F.cast(shift, dtype=dtype))

        def sum_of(array: Any) -> Any:  # in two steps: the last axis is much the fastest one
            return F.sum(F.sum(array, axis=2), axis=0)

        shift = F.cast(F.reshape(shift, shape=(-1,)), dtype=dtype)
        return F.reshape_like(shifted, x), shift, sum_of(wide), sum_of(F.square(wide)), F.BlockGrad(F.size_array(x))
