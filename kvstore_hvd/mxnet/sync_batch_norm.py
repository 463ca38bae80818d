"""Batch normalization over the batches of all workers: a layer of Gluon, and the operator that merges the statistics.

MXNet's own BatchNorm normalizes with the mean m_k and the deviation s_k of this worker's batch. With
g = gamma s_k / s and b = beta + gamma (m_k - m) / s in the places of gamma and beta, its result is that of the mean m
and the deviation s of all workers' batches. The operator of this file computes g and b. It sees vectors of one number
per channel only: operators written in Python misread arrays that a convolution has written (in oneDNN's layouts).

The workers' means and variances travel in one operation. They are merged in float64 with the formula of Chan, Golub
and LeVeque ("Updating Formulae and a Pairwise Algorithm for Computing Sample Variances", 1979) for samples of any
sizes. Sums of squares would be simpler, but lose all digits where the mean is large against the deviation. All workers
merge the same bits in the same order, so that they have the same result.

What is computed from the others' numbers uses no operator that asks MXNet for temporary space: no `sum`, `maximum`,
`dot`, `slice` or arithmetic with Python's numbers. MXNet keeps four pieces of it for each thread, and an operator has
one from when it is pushed. Operators written in Python run in few threads, in an order that differs between workers:
one that waits for the others in one layer would hold up one of another layer that they wait for. MXNet's BatchNorm does
ask for such space, in the program's thread: hence all workers must apply their layers in the same order.
"""

from __future__ import annotations

import copy as copying
import dataclasses
import itertools
import weakref
from collections.abc import Sequence
from typing import Any, Optional

import mxnet as mx
import numpy as np

from kvstore_hvd import mxnet_compat
from kvstore_hvd.errors import InvalidRequestError, message
from kvstore_hvd.join.context import is_uneven
from kvstore_hvd.mxnet.calls import Collective
from kvstore_hvd.mxnet.process_sets import ProcessSet, global_process_set
from kvstore_hvd.mxnet_compat.graph import SYNC_BATCH_NORM
from kvstore_hvd.store.arrays import copy

_OPERATION = "SyncBatchNorm"
_MOST = 1e30  # elements; `clip` has two limits, of float32
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
    *args, **kwargs
        As ``mxnet.gluon.nn.BatchNorm``.
    process_set : ProcessSet
        Whose batches are normalized together; this worker must be a member when it trains.

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

    def __init__(self, *args: Any, process_set: ProcessSet = global_process_set, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._exchange = _StatisticsExchange(process_set, self.gamma)

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
            # (graph.py); a momentum of 1 keeps them in other graphs.
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


class _StatisticsExchange:
    """The exchanges of one layer. Every worker must make its layers in the same order."""

    def __init__(self, process_set: ProcessSet, parameter: Any, number: object = None) -> None:
        self._process_set, self._parameter, self._copies = process_set, parameter, itertools.count()
        # Kept by the set itself: which sets are equal depends on the world, since the global one's ranks do.
        count = vars(process_set).setdefault("_layers", itertools.count())
        self._number = next(count) if number is None else number
        self.key = next(_keys)
        _exchanges[self.key] = self

    def __deepcopy__(self, memo: dict[int, Any]) -> _StatisticsExchange:
        number = f"{self._number}.{next(self._copies)}"  # layers that are made later keep their numbers
        return _StatisticsExchange(self._process_set, copying.deepcopy(self._parameter, memo), number)

    def check(self) -> Collective:
        """The call of a forward pass, which raises here if it cannot be made."""
        one, name = Collective(_OPERATION, self._process_set), self._parameter.name
        if len(mxnet_compat.arrays_of(self._parameter) or ()) > 1:
            one.refuse("its parameters are on several devices.", "use one device in each worker.", name)
        if is_uneven() and not one.world.is_alone:
            fact = "it cannot be used within Join: a worker without input has no batch to normalize with the others'."
            one.refuse(fact, "use nn.BatchNorm, or Join(..., throw_on_early_termination=True).", name)
        return one

    def begin(self) -> Collective:
        """The call of the next forward pass, and of the backward pass that belongs to it. Raises as `check`."""
        kind = f"{_OPERATION}.{self._number}"
        name = f"{kind}.{self.check().world.next_number(kind)}"
        one = Collective(_OPERATION, self._process_set, name)
        names = dict.fromkeys((name, _gradient_of(one)), self._parameter.name)
        one.call = dataclasses.replace(one.call, names=names)
        return one


# An operator knows its layer by this number.
_keys = itertools.count()
_exchanges: weakref.WeakValueDictionary[int, _StatisticsExchange] = weakref.WeakValueDictionary()


class _Operator(mx.operator.CustomOp):
    """(shift, sum, sum of squares, size, gamma, beta; running mean, running variance) to (g, b), as said above."""

    # The sums are those of the array less the shift of each channel.
    # MXNet calls the methods in threads of its own, one after the other for each layer: all write its running
    # statistics. Nothing waits in them. All arrays that they compute with are of float64.

    def __init__(
        self, layer: Optional[_StatisticsExchange], eps: float, momentum: float, fix_gamma: bool, is_empty: bool
    ) -> None:
        super().__init__()
        # Kept here: MXNet may come to a forward pass when the program has dropped the layer.
        self._layer = layer
        self._eps = eps
        self._momentum = momentum
        self._fix_gamma = fix_gamma
        self._is_empty = is_empty
        # The latest forward pass: an operator serves the next one after the backward pass only.
        self._exchange: Optional[Collective] = None

    def forward(self, is_train: bool, req: Any, in_data: Any, out_data: Any, aux: Any) -> None:
        with mx.util.np_shape(True):
            shift, total, squares, size, gamma, beta = _wide(in_data)
            if self._fix_gamma:
                gamma = mx.nd.ones_like(gamma)
            self._exchange = None
            if is_train:
                if self._layer is None:
                    fact = "the layer of this graph does not exist any more."
                    fix = "keep the layer as long as its graph."
                    raise InvalidRequestError(message(fact, operation=_OPERATION, fix=fix))
                self._exchange = self._layer.begin()
                self._count = size / gamma.shape[0]
                # These and their gradients are of the shifted array.
                self._per_element = mx.nd.broadcast_like(1 / mx.nd.clip(self._count, 1, _MOST), gamma)
                self._shifted_mean = total * self._per_element
                variance = mx.nd.relu(squares * self._per_element - mx.nd.square(self._shifted_mean))
                mean = shift + self._shifted_mean
                self._merge(self._exchange, mean, variance, aux)
                self._gamma = gamma
                self._offset = (mean - self._mean) * self._inverse  # (m_k - m) / s
                gamma, beta = gamma * self._own * self._inverse, beta + gamma * self._offset
            else:
                _, running_variance = _wide(aux)
                beta = beta + gamma * shift * mx.nd.rsqrt(running_variance + self._eps)
            for how, result, place in zip(req, (gamma, beta), out_data):
                _assign(how, result, place)

    def _merge(self, one: Collective, mean: Any, variance: Any, running: Sequence[Any]) -> None:
        """Exchange the statistics, and update the running ones."""
        channels, topology = mean.shape[0], one.world.topology
        self._own = mx.nd.sqrt(mx.nd.broadcast_add(variance, self._number(self._eps, variance)))  # s_k
        numbers = mx.nd.concat(mean, variance, self._count, dim=0)
        table = mx.nd.zeros((topology.size, *numbers.shape), mxnet_compat.context_of(numbers), numbers.dtype)
        table[topology.rank] = numbers
        one.reduce(one.shown, table, table)
        # From here on arrays wait for the other workers, see the top of this file.
        means, variances, counts = (
            mx.nd.slice_axis(table, axis=1, begin=begin, end=end)
            for begin, end in ((0, channels), (channels, 2 * channels), (2 * channels, None))
        )
        self._total = mx.nd.clip(_over_rows(counts), 1, _MOST)
        self._mean = mx.nd.broadcast_div(_over_rows(mx.nd.broadcast_mul(means, counts)), self._total)
        between = mx.nd.square(mx.nd.broadcast_sub(means, self._mean.reshape((1, -1))))
        squares = _over_rows(mx.nd.broadcast_mul(variances + between, counts))
        of_all = mx.nd.broadcast_div(squares, self._total)
        self._inverse = mx.nd.rsqrt(mx.nd.broadcast_add(of_all, self._number(self._eps, of_all)))  # 1 / s
        for place, new in zip(running, (self._mean, of_all)):
            (old,) = _wide([place])
            kept = mx.nd.broadcast_mul(old, self._number(self._momentum, old))
            copy(kept + mx.nd.broadcast_mul(new, self._number(1 - self._momentum, new)), place.as_nd_ndarray())

    def backward(self, req: Any, out_grad: Any, in_data: Any, out_data: Any, in_grad: Any, aux: Any) -> None:
        # The gradients of gamma and beta are those of this worker's batch.
        with mx.util.np_shape(True):
            of_g, of_b = _wide(out_grad)
            zeros = of_total = of_squares = mx.nd.zeros_like(of_g)
            if self._is_empty:  # MXNet does not compute the gradients then
                of_g, of_b = zeros, zeros
            of_gamma, of_beta = of_g, of_b
            if self._exchange is not None:
                of_gamma = of_g * self._own * self._inverse + of_b * self._offset
                sums = mx.nd.stack(of_gamma, of_beta)
                self._exchange.reduce(_gradient_of(self._exchange), sums, sums)
                gamma_of_all, beta_of_all = sums[0], sums[1]
                # The loss depends on this worker's mean and variance in g and b, and in those of all, of which they are
                # a share.
                scale = self._gamma * self._inverse
                share = mx.nd.broadcast_div(self._count, self._total)
                minus, half = self._number(-1, of_g), self._number(0.5, of_g)
                of_mean = mx.nd.broadcast_mul(scale * (beta_of_all + gamma_of_all * self._offset), share)
                of_mean = scale * of_b + mx.nd.broadcast_mul(of_mean, minus)
                of_variance = mx.nd.broadcast_mul(scale * self._inverse * gamma_of_all, share)
                of_variance = mx.nd.broadcast_mul(of_g * scale / self._own - of_variance, half)
                of_squares = of_variance * self._per_element
                of_total = of_mean * self._per_element - (of_squares + of_squares) * self._shifted_mean
            if self._fix_gamma:
                of_gamma = zeros
            results = zeros, of_total, of_squares, mx.nd.zeros_like(in_grad[3].as_nd_ndarray()), of_gamma, of_beta
            for how, result, place in zip(req, results, in_grad):
                _assign(how, result, place)

    @staticmethod
    def _number(value: float, like: Any) -> Any:
        """As an array: operators with Python's numbers need temporary space."""
        return mx.nd.array([value], mxnet_compat.context_of(like), like.dtype)


@mx.operator.register(SYNC_BATCH_NORM)
class _Property(mx.operator.CustomOpProp):
    """Describes the operator to MXNet; its parameters arrive as text."""

    def __init__(self, layer: str, eps: str, momentum: str, fix_gamma: str, is_empty: str) -> None:
        super().__init__(need_top_grad=True)
        self._layer = int(layer)
        self._rest = float(eps), float(momentum), fix_gamma == "True", is_empty == "True"

    def list_arguments(self) -> list[str]:
        return ["shift", "sum", "squares", "size", "gamma", "beta"]

    def list_outputs(self) -> list[str]:
        return ["g", "b"]

    def list_auxiliary_states(self) -> list[str]:
        return ["running_mean", "running_var"]

    def infer_shape(self, in_shape: Sequence[Sequence[int]]) -> tuple[list[Any], list[Any], list[Any]]:
        channels = in_shape[0]
        return [channels] * 3 + [(1,), channels, channels], [channels] * 2, [channels] * 2

    def infer_type(self, in_type: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        dtype = in_type[0]
        return [dtype] * 3 + [np.int64, dtype, dtype], [dtype] * 2, [dtype] * 2

    def create_operator(self, ctx: Any, in_shapes: Sequence[Sequence[int]], in_dtypes: Sequence[Any]) -> Any:
        return _Operator(_exchanges.get(self._layer), *self._rest)


def _wide(arrays: Sequence[Any]) -> list[Any]:
    """As float64 arrays of the older interface, whose operators both versions of MXNet have."""
    return [array.as_nd_ndarray().astype("float64") for array in arrays]


def _assign(req: str, result: Any, place: Any) -> None:
    """Do what MXNet requests with a result, which is cast."""
    place = place.as_nd_ndarray()
    if req in ("write", "inplace"):
        copy(result, place)
    elif req == "add":
        copy(place + result.astype(place.dtype), place)


def _over_rows(table: Any) -> Any:
    """The sum of a matrix's rows, from the first one to the last one."""
    return mx.nd.cumsum(table, axis=0)[table.shape[0] - 1]


def _gradient_of(one: Collective) -> str:
    return f"{one.shown}.gradient"
