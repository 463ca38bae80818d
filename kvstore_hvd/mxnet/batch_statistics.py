"""Mean and variance over the batches of all workers, and how they are exchanged.

Each worker takes the mean and the sum of squared deviations from it over its own batch, and all receive everybody's in
one operation. They are merged in float64 with the formula of Chan, Golub and LeVeque ("Updating Formulae and a Pairwise
Algorithm for Computing Sample Variances", 1979) for samples of any sizes. Sums of squares, from which a variance
would follow with less effort, lose all digits where the mean is large against the deviation. All workers merge the
same bits in the same order, so that they have the same result.

What is computed from the others' numbers uses no operator that asks MXNet for temporary space, neither here nor in the
layer itself: no `sum`, `maximum`, `dot`, `slice` or arithmetic with Python's numbers. MXNet keeps four pieces of it for
each thread, and an operator has one from when it is pushed. Layers run in few threads, in an order that differs between
workers: an operator that waits for the others in one layer would hold up one of another layer that they wait for.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from typing import Any, Optional

from kvstore_hvd import mxnet_compat
from kvstore_hvd.errors import InvalidRequestError
from kvstore_hvd.join.context import is_uneven
from kvstore_hvd.mxnet.calls import make_call, operations
from kvstore_hvd.mxnet.process_sets import ProcessSet
from kvstore_hvd.process.member import Member
from kvstore_hvd.process.numbering import next_number
from kvstore_hvd.store.keys import Call, Group
from kvstore_hvd.store.operations import SUM

__all__ = ["OPERATION", "Exchange", "Statistics", "StatisticsExchange", "by_channel", "find_exchange"]

OPERATION = "SyncBatchNorm"
_MOST = 1e30  # elements; `clip` has two limits, of float32


@dataclasses.dataclass
class Statistics:
    """Of each channel, over all elements of the batches of all workers.

    Parameters
    ----------
    mean, variance : NDArray
        One number for each channel, as float64; the variance is not corrected for the mean being estimated.
    count : NDArray
        Elements of one channel, of shape (1,), as float64.
    """

    mean: Any
    variance: Any
    count: Any


@dataclasses.dataclass
class Exchange:
    """One forward pass of one layer, and the backward pass that belongs to it."""

    call: Call
    world: Member
    name: str

    def statistics(self, values: Any, axis: int) -> Statistics:
        """Of the values of all workers; asynchronous.

        Parameters
        ----------
        values : NDArray
            This worker's, of float32 or float64. Only the length of `axis`, the channels, must be equal on all workers.
        axis : int
        """
        import mxnet as mx

        rank, size = self.world.topology.rank, self.world.topology.size
        channels = values.shape[axis]
        count = values.size // channels
        table = mx.nd.zeros((size, 2 * channels + 1), mxnet_compat.context_of(values), "float64")
        if count:
            mean = mx.nd.mean(values, axis=axis, exclude=True)
            deviation = mx.nd.broadcast_sub(values, by_channel(mean, axis, values.ndim))
            squares = mx.nd.sum(mx.nd.square(deviation, out=deviation), axis=axis, exclude=True)
            table[rank, :channels] = mean.astype("float64")
            table[rank, channels:-1] = squares.astype("float64")
            table[rank, -1] = count
        self._sum(self.name, table)
        # From here on arrays wait for the other workers, see above.
        means, squares, counts = (
            mx.nd.slice_axis(table, axis=1, begin=begin, end=end)
            for begin, end in ((0, channels), (channels, 2 * channels), (2 * channels, None))
        )
        total = mx.nd.clip(_over_rows(counts), 1, _MOST)
        mean = mx.nd.broadcast_div(_over_rows(mx.nd.broadcast_mul(means, counts)), total)
        between = mx.nd.square(mx.nd.broadcast_sub(means, mean.reshape((1, -1))))
        variance = mx.nd.broadcast_div(_over_rows(squares + mx.nd.broadcast_mul(between, counts)), total)
        return Statistics(mean, variance, total)

    def sums(self, numbers: Any) -> Any:
        """The sum over the workers of an array of numbers, in the backward pass; a new array, asynchronous."""
        total = numbers.copy()
        self._sum(_gradient_of(self.name), total)
        return total

    def _sum(self, name: str, array: Any) -> None:
        operations(self.world).pushpull(self.call, [Group(name, [array], [array])], 0, SUM)


class StatisticsExchange:
    """The exchanges of one layer. Every worker must make its layers in the same order.

    Parameters
    ----------
    process_set : ProcessSet
        Who takes part.
    parameter : mxnet.gluon.Parameter
        One of the layer's.
    """

    def __init__(self, process_set: ProcessSet, parameter: Any) -> None:
        self._process_set = process_set
        self._parameter = parameter
        # Kept by the set itself: which sets are equal depends on the world, since the global one's ranks do.
        self._number = next(vars(process_set).setdefault("_layers", itertools.count()))
        self.key = next(_keys)
        _exchanges[self.key] = self

    def check(self) -> tuple[Member, Call]:
        """Who takes part in a forward pass, and the call for messages.

        Raises
        ------
        InvalidRequestError, NotInitializedError
            There is no world, this worker is not a member, or the layer is used in a way that cannot work.
        """
        world = self._process_set.world(OPERATION)
        call = make_call(world, OPERATION)
        if len(mxnet_compat.arrays_of(self._parameter) or ()) > 1:
            fact, fix = "its parameters are on several devices.", "use one device in each worker."
            raise InvalidRequestError(call.message(self._parameter.name, fact, fix))
        if is_uneven() and not world.is_alone:
            fact = "it cannot be used within Join: a worker without input has no batch to normalize with the others'."
            fix = "use nn.BatchNorm, or Join(..., throw_on_early_termination=True)."
            raise InvalidRequestError(call.message(self._parameter.name, fact, fix))
        return world, call

    def begin(self) -> Exchange:
        """The exchange of the next forward pass. Raises as `check`."""
        world, call = self.check()
        kind = f"{OPERATION}.{self._number}"
        name = f"{kind}.{next_number(world, kind)}"
        shown = dict.fromkeys((name, _gradient_of(name)), self._parameter.name)
        return Exchange(dataclasses.replace(call, names=shown), world, name)


# What an operator knows its layer by.
_keys = itertools.count()
_exchanges: weakref.WeakValueDictionary[int, StatisticsExchange] = weakref.WeakValueDictionary()


def find_exchange(key: int) -> Optional[StatisticsExchange]:
    """The exchange of a layer of this process; None when the layer is gone, or was of another process."""
    return _exchanges.get(key)


def _over_rows(table: Any) -> Any:
    """The sum of a matrix's rows, from the first one to the last one."""
    import mxnet as mx

    return mx.nd.cumsum(table, axis=0)[table.shape[0] - 1]


def _gradient_of(name: str) -> str:
    return f"{name}.gradient"


def by_channel(numbers: Any, axis: int, ndim: int) -> Any:
    """One number for each channel, in a shape that broadcasts against arrays of `ndim` dimensions."""
    shape = [1] * ndim
    shape[axis] = numbers.shape[0]
    return numbers.reshape(shape)
