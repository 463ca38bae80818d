"""The operator of `SyncBatchNorm`: an operator of MXNet that is written in Python, so that graphs can contain it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Optional

from kvstore_hvd import mxnet_compat
from kvstore_hvd.errors import InvalidRequestError, message
from kvstore_hvd.mxnet.batch_statistics import OPERATION, Exchange, StatisticsExchange, by_channel, find_exchange
from kvstore_hvd.mxnet_compat.graphs import SYNC_BATCH_NORM
from kvstore_hvd.store.arrays import copy

__all__ = ["operator_type"]


class OperatorMethods:
    """Normalizes with the statistics of all workers' batches in training, else with the running ones.

    MXNet calls the methods in threads of its own, one after the other for each layer: all write its running statistics.
    Nothing waits in them.
    """

    def __init__(
        self,
        layer: Optional[StatisticsExchange],
        axis: int,
        eps: float,
        momentum: float,
        fix_gamma: bool,
        use_global_stats: bool,
    ) -> None:
        super().__init__()
        # Kept here: MXNet may come to a forward pass when the program has dropped the layer.
        self._layer = layer
        self._axis = axis
        self._eps = eps
        self._momentum = momentum
        self._fix_gamma = fix_gamma
        self._use_global_stats = use_global_stats
        # Of the latest forward pass: an operator serves the next one after the backward pass only.
        self._exchange: Optional[Exchange] = None
        self._mean: Any = None
        self._scale: Any = None
        self._count: Any = None

    def forward(
        self,
        is_train: bool,
        req: Sequence[str],
        in_data: Sequence[Any],
        out_data: Sequence[Any],
        aux: Sequence[Any],
    ) -> None:
        """See ``mxnet.operator.CustomOp``."""
        import mxnet as mx

        with mx.util.np_shape(True):
            values, gamma, beta, running_mean, running_variance = _classic(*in_data, *aux)
            wide = _wide(values)
            self._exchange = None
            if is_train and not self._use_global_stats:
                self._exchange = self._begin()
                found = self._exchange.statistics(wide, self._axis)
                mean, variance, self._count = found.mean, found.variance, found.count
                share = self._number(1 - self._momentum, mean)
                for running, new in ((running_mean, mean), (running_variance, variance)):
                    kept = running.astype("float64") * self._momentum
                    copy(kept + mx.nd.broadcast_mul(new, share), running)
            else:
                mean, variance = running_mean, running_variance
            self._mean = mean.astype(wide.dtype)
            shifted = mx.nd.broadcast_add(variance, self._number(self._eps, variance))
            self._scale = mx.nd.rsqrt(shifted).astype(wide.dtype)
            if wide.size and req[0] != "null":
                factor = self._scale if self._fix_gamma else self._scale * gamma
                result = self._centered(wide)
                mx.nd.broadcast_mul(result, self._by_channel(factor, wide), out=result)
                mx.nd.broadcast_add(result, self._by_channel(beta, wide), out=result)
                _assign(req[0], result, out_data[0])

    def backward(
        self,
        req: Sequence[str],
        out_grad: Sequence[Any],
        in_data: Sequence[Any],
        out_data: Sequence[Any],
        in_grad: Sequence[Any],
        aux: Sequence[Any],
    ) -> None:
        """See ``mxnet.operator.CustomOp``. The gradients of gamma and beta are those of this worker's batch."""
        import mxnet as mx

        with mx.util.np_shape(True):
            values, gamma, _, gradient = _classic(*in_data, out_grad[0])
            gradient, normalized = _wide(gradient), self._centered(_wide(values))
            channels = gamma.shape[0]
            own = mx.nd.zeros((2 * channels,), mxnet_compat.context_of(gradient), gradient.dtype)
            if gradient.size:
                mx.nd.broadcast_mul(normalized, self._by_channel(self._scale, normalized), out=normalized)
                own[:channels] = mx.nd.sum(gradient, axis=self._axis, exclude=True)
                own[channels:] = mx.nd.sum(gradient * normalized, axis=self._axis, exclude=True)
            everybody = self._exchange.sums(own) if self._exchange is not None else None
            if not self._fix_gamma:
                _assign(req[1], own[channels:], in_grad[1])
            elif req[1] == "write":
                _assign(req[1], mx.nd.zeros_like(gamma), in_grad[1])
            _assign(req[2], own[:channels], in_grad[2])
            if not gradient.size:
                return
            if everybody is not None:
                means = mx.nd.broadcast_div(everybody, self._count.astype(gradient.dtype))
                along = self._by_channel(means[channels:], normalized)
                mx.nd.broadcast_mul(normalized, along, out=normalized)
                gradient = gradient - normalized
                gradient = mx.nd.broadcast_sub(gradient, self._by_channel(means[:channels], gradient))
            factor = self._scale if self._fix_gamma else self._scale * gamma
            _assign(req[0], mx.nd.broadcast_mul(gradient, self._by_channel(factor, gradient)), in_grad[0])

    def _begin(self) -> Exchange:
        if self._layer is None:
            fact, fix = "the layer of this graph does not exist any more.", "keep the layer as long as its graph."
            raise InvalidRequestError(message(fact, operation=OPERATION, fix=fix))
        return self._layer.begin()

    @staticmethod
    def _number(value: float, like: Any) -> Any:
        """As an array: operators with Python's numbers must not wait for other workers, see `batch_statistics`."""
        import mxnet as mx

        return mx.nd.array([value], mxnet_compat.context_of(like), like.dtype)

    def _centered(self, values: Any) -> Any:
        import mxnet as mx

        return mx.nd.broadcast_sub(values, self._by_channel(self._mean, values)) if values.size else values

    def _by_channel(self, numbers: Any, values: Any) -> Any:
        return by_channel(numbers, self._axis, values.ndim)


class PropertyMethods:
    """Describes the operator to MXNet; its parameters arrive as text."""

    def __init__(self, layer: str, axis: str, eps: str, momentum: str, fix_gamma: str, use_global_stats: str) -> None:
        super().__init__(need_top_grad=True)  # type: ignore[call-arg]
        self._axis = int(axis)
        self._rest = float(eps), float(momentum), fix_gamma == "True", use_global_stats == "True"
        self._layer = int(layer)

    def list_arguments(self) -> list[str]:
        """See ``mxnet.operator.CustomOpProp``; as the rest."""
        return ["data", "gamma", "beta"]

    def list_outputs(self) -> list[str]:
        """Names of the outputs."""
        return ["output"]

    def list_auxiliary_states(self) -> list[str]:
        """Names of what the operator itself changes."""
        return ["running_mean", "running_var"]

    def infer_shape(self, in_shape: Sequence[Sequence[int]]) -> tuple[list[Any], list[Any], list[Any]]:
        """Shapes of inputs, outputs and states."""
        channels = (in_shape[0][self._axis],)
        return [in_shape[0], channels, channels], [in_shape[0]], [channels, channels]

    def infer_type(self, in_type: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Dtypes of inputs, outputs and states: halves have parameters in float32."""
        import numpy as np

        of_data = in_type[0]
        of_rest = np.float64 if of_data == np.float64 else np.float32
        return [of_data, of_rest, of_rest], [of_data], [of_rest, of_rest]

    def create_operator(self, ctx: Any, in_shapes: Sequence[Sequence[int]], in_dtypes: Sequence[Any]) -> Any:
        """The operator for arrays with as many dimensions, made when a forward pass is submitted or a graph is made."""
        return _operator()(find_exchange(self._layer), self._axis % len(in_shapes[0]), *self._rest)


@functools.cache
def operator_type() -> str:
    """What MXNet knows the operator by; registers it first."""
    import mxnet as mx

    mx.operator.register(SYNC_BATCH_NORM)(type("Property", (PropertyMethods, mx.operator.CustomOpProp), {}))
    return SYNC_BATCH_NORM


@functools.cache
def _operator() -> type:
    import mxnet as mx

    return type("Operator", (OperatorMethods, mx.operator.CustomOp), {})


def _classic(*arrays: Any) -> list[Any]:
    """As arrays of the older interface, whose operators both versions of MXNet have."""
    return [array.as_nd_ndarray() for array in arrays]


def _wide(values: Any) -> Any:
    """As float32 at least."""
    import numpy as np

    return values if np.dtype(values.dtype) in (np.float32, np.float64) else values.astype("float32")


def _assign(req: str, result: Any, place: Any) -> None:
    """Do what MXNet requests with a result, which is cast."""
    if req in ("write", "inplace"):
        copy(result, place)
    elif req == "add":
        place = place.as_nd_ndarray()
        copy(place + result.astype(place.dtype), place)
