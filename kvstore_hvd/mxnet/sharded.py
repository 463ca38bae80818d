"""A Trainer whose workers share the update: each keeps the optimizer's states of its share of the parameters only.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020, stage 1.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, Optional

import mxnet as mx
import numpy as np

from kvstore_hvd import mxnet_compat
from kvstore_hvd.errors import InvalidRequestError, message
from kvstore_hvd.mxnet.functions import allgather_object
from kvstore_hvd.mxnet.optimizer import DistributedTrainer
from kvstore_hvd.native import ITEM_BYTES
from kvstore_hvd.store.keys import wire_name

# Optimizers of MXNet that update each element by itself: their parameters may be cut anywhere.
_ELEMENTWISE = {"SGD", "NAG", "Adam", "AdamW", "Adamax", "RMSProp", "AdaGrad", "AdaDelta", "Ftrl", "FTML", "Signum"}
# Those whose update of one parameter changes that of others.
_ENTANGLED = {"Nadam"}
# Elements below which a parameter is not cut, and of which each share is a multiple: a cache line of float32.
_LEAST, _UNIT = 1024, 16
# kShares of native/engine/mismatch.cpp: the workers compare their shares.
_SHARES = 0x73686172 << 32


class ShardedTrainer(DistributedTrainer):
    """A `DistributedTrainer` whose workers each update a share of the parameters, and send it to the others.

    A worker keeps the optimizer's states of its share: ``1/size`` of the memory. The parameters have the same bits as
    with a `DistributedTrainer`. Optimizers that update each element by itself (SGD, NAG, Adam, AdamW, Adamax, RMSProp,
    AdaGrad, AdaDelta, Ftrl, FTML, Signum) have parameters of 1024 elements and more cut; of the other ones, and of
    subclasses, whole parameters are dealt out by size. Parameters, exceptions and what a step does are those of
    `DistributedTrainer`.

    Every worker must call ``save_states``, which writes the file of any Trainer, and ``load_states``, which reads one.

    Raises
    ------
    InvalidRequestError
        Also: parameters or gradients are row_sparse, on a GPU or on several devices; the optimizer is Nadam.
    """

    def _init_optimizer(self, optimizer: Any, optimizer_params: Any) -> None:
        super()._init_optimizer(optimizer, optimizer_params)
        fix = "use a DistributedTrainer."
        devices = mxnet_compat.devices_of(self)
        if len(devices) != 1 or not devices[0].device_type.startswith("cpu"):
            _refuse(f"its parameters are on {', '.join(map(str, devices))}, and not on one CPU.", fix)
        for parameter in self._params:
            if parameter._stype != "default" or parameter._grad_stype != "default":
                _refuse(f"parameter '{parameter.name}' or its gradient is row_sparse.", fix)
        if type(self._optimizer).__name__ in _ENTANGLED:
            _refuse("Nadam updates no parameter alone.", fix)
        self._updaters = [ShardedUpdater(self._optimizer, self)]


class _Prepared(NamedTuple):
    """What an update of a parameter needs again and again."""

    weight: Any
    gradient: Any
    own: Optional[tuple[Any, Any]]  # views of this worker's share of the gradient and of the weight; None: it has none
    exchange: tuple[Any, ...]  # arguments of `MXNetAdapter.exchange`
    kept: Any  # the arrays behind them


class ShardedUpdater(mx.optimizer.Updater):
    """Updates this worker's share of each parameter as MXNet's Updater does, and has all shares sent to all workers."""

    def __init__(self, optimizer: Any, trainer: Any) -> None:
        super().__init__(optimizer)
        self._trainer = trainer
        self._place = (0, 1)  # this worker's rank and the number of workers when parameters were shared out
        #: The shares of each parameter: that of rank r begins at element bounds[r] and ends at bounds[r + 1].
        self._kvstore_hvd_shares: dict[Any, list[int]] = {}
        self._loads: list[int] = []  # elements of each rank
        self._prepared: dict[Any, _Prepared] = {}

    def __call__(self, index: Sequence[Any], grad: Sequence[Any], weight: Sequence[Any]) -> None:
        """Update parameters, which the Trainer gives in lists."""
        world = self._trainer._world
        self._check_place()
        if world.is_alone:
            super().__call__(index, grad, weight)
            return
        if not self._kvstore_hvd_shares:
            self._place, self._loads = (world.topology.rank, world.topology.size), [0] * world.topology.size
            self._prepared = {}
        self._share_out(index, weight)
        for key, gradient, whole in zip(index, grad, weight):
            prepared = self._prepared.get(key)
            if prepared is None or prepared.weight is not whole or prepared.gradient is not gradient:
                self._prepared[key] = self._prepare(key, gradient, whole)
        for keys in self._at_once(index, weight):
            mine = [(key, *own) for key in keys if (own := self._prepared[key].own) is not None]
            with self._counting(keys):
                if mine:
                    super().__call__(*zip(*mine))
        adapter = world.mxnet_adapter()
        with world.submitting():
            for key in index:
                adapter.exchange(*self._prepared[key].exchange)

    @contextlib.contextmanager
    def _counting(self, keys: Sequence[Any]) -> Iterator[None]:
        """Within, the updates of parameters without a share here are counted when those around them are."""
        # The rate of a schedule is that of the parameter with the most updates so far.
        optimizer: Any = self.optimizer
        place = {key: at for at, key in enumerate(keys)}
        others = [key for key in reversed(keys) if self._prepared[key].own is None]
        count = type(optimizer)._update_count

        def counted(index: Any) -> None:
            end = len(keys) if isinstance(index, (list, tuple)) else place[index]
            while others and place[others[-1]] < end:
                count(optimizer, others.pop())
            count(optimizer, index)

        optimizer._update_count = counted
        try:
            yield
        finally:
            del optimizer._update_count
        for key in others:
            count(optimizer, key)

    def _at_once(self, index: Sequence[Any], weight: Sequence[Any]) -> list[list[Any]]:
        """The parameters in the groups that MXNet's Updater gives to the optimizer together."""
        optimizer = self.optimizer
        if len({optimizer._index_update_count.get(key, optimizer.begin_num_update) for key in index}) == 1:
            return [list(index)]  # all rates are those of the same update
        most = max(1, optimizer.aggregate_num)
        by_dtype: dict[Any, list[Any]] = {}
        for key, each in zip(index, weight):
            by_dtype.setdefault(None if most == np.inf else mxnet_compat.dtype_name(each), []).append(key)
        size = len(index) if most == np.inf else most
        return [keys[at : at + size] for keys in by_dtype.values() for at in range(0, len(keys), size)]

    def get_states(self, dump_optimizer: bool = False) -> Any:
        """As MXNet's, of all workers' shares; every worker calls it."""
        with mxnet_compat.holding(self, states=self.whole_states()):
            return super().get_states(dump_optimizer)

    def whole_states(self) -> dict[Any, Any]:
        """The states of whole parameters; every worker calls it."""
        self._check_place()
        if self._trainer._world.is_alone:
            return dict(self.states)
        shares = self._kvstore_hvd_shares
        mine = {key: _each_array(self.states[key], mx.nd.NDArray.asnumpy) for key in shares if key in self.states}
        everybody = allgather_object(mine, f"{self._store._namespace}.states", self._trainer._process_set)
        shapes = {mxnet_compat.key_of(self._trainer, each): each.shape for each in self._trainer._params}
        cut = {key: [each[key] for each in everybody if key in each] for key in shares}
        return {**self.states, **{key: _joined(pieces, shapes[key]) for key, pieces in cut.items()}}

    def set_states(self, states: Any) -> None:
        """As MXNet's; the next update cuts them."""
        super().set_states(states)
        self.are_whole()

    @property
    def is_cut(self) -> bool:
        """Whether there are states of shares."""
        return bool(self._kvstore_hvd_shares)

    def are_whole(self) -> None:
        """Note that the states are those of whole parameters: the next update cuts them."""
        self._kvstore_hvd_shares = {}

    def _check_place(self) -> None:
        topology, (rank, size) = self._trainer._world.topology, self._place
        if self._kvstore_hvd_shares and (topology.rank, topology.size) != (rank, size):
            fact = f"this worker keeps the optimizer's states of rank {rank} of {size}, and now it is another one."
            fix = "save_states() before the world changes, and load_states() after it, on every worker."
            _refuse(fact, fix, **topology.prefix)

    def _share_out(self, index: Sequence[Any], weight: Sequence[Any]) -> None:
        """Share out the parameters that are new, the largest first, and cut their states."""
        ranks, kind = len(self._loads), type(self.optimizer)
        is_elementwise = kind.__name__ in _ELEMENTWISE and kind.__module__.startswith("mxnet.optimizer.")
        new = [(key, each) for key, each in zip(index, weight) if key not in self._kvstore_hvd_shares]
        for key, each in sorted(new, key=lambda one: -one[1].size):
            if is_elementwise and each.size >= max(_LEAST, ranks * _UNIT):
                bounds = [each.size * rank // ranks // _UNIT * _UNIT for rank in range(ranks)] + [each.size]
            else:
                owner = self._loads.index(min(self._loads))
                bounds = [0] * (owner + 1) + [each.size] * (ranks - owner)
            self._kvstore_hvd_shares[key] = bounds
            self._loads = [load + count for load, count in zip(self._loads, _counts(bounds))]
            if key in self.states:
                first, end = self._own(key)
                state = self.states.pop(key)
                if end - first == each.size:
                    self.states[key] = state
                elif end > first:
                    self.states[key] = _each_array(state, lambda x: _part(x, first, end).copy())  # noqa: B023 - at once

    def _own(self, key: Any) -> tuple[int, int]:
        bounds, (rank, _) = self._kvstore_hvd_shares[key], self._place
        return bounds[rank], bounds[rank + 1]

    def _prepare(self, key: Any, gradient: Any, weight: Any) -> _Prepared:
        store, whole, bounds = self._store, weight.as_nd_ndarray(), self._kvstore_hvd_shares[key]
        first, end = self._own(key)
        own: Optional[tuple[Any, Any]] = None
        if end - first == whole.size:  # an optimizer may look at the shape
            own = gradient, weight
        elif end > first:
            own = _part(gradient.as_nd_ndarray(), first, end), _part(whole, first, end)
        unit, counts = ITEM_BYTES[mxnet_compat.dtype_name(whole)], _counts(bounds)
        others = [rank for rank, count in enumerate(counts) if count and rank != self._place[0]]
        exchange = (
            wire_name(store._namespace, f"{key}/weight"),
            store._label(str(key)),
            # Without a share, the weight fails with the gradient all the same.
            mxnet_compat.handle_of(gradient if own is None else own[1]),
            mxnet_compat.handle_of(whole),
            max(counts),
            end - first,
            [(rank, 0, counts[rank] * unit, bounds[rank] * unit) for rank in others],
            _SHARES | zlib.crc32(repr(bounds).encode()),
            -key,
        )
        return _Prepared(weight, gradient, own, exchange, whole)

    @property
    def _store(self) -> Any:
        return self._trainer._kvstore_params["kvstore"]


def _counts(bounds: Sequence[int]) -> list[int]:
    return [end - first for first, end in zip(bounds, bounds[1:])]


def _part(array: Any, first: int, end: int) -> Any:
    """Elements of an array, as a view of one dimension."""
    return array.reshape((-1,))[first:end]


def _each_array(state: Any, change: Callable[[Any], Any]) -> Any:
    """A state of an optimizer, a tree of tuples and lists, with other arrays."""
    if isinstance(state, (tuple, list)):
        return type(state)([_each_array(each, change) for each in state])
    return change(state) if hasattr(state, "asnumpy") else state


def _joined(pieces: Sequence[Any], shape: tuple[int, ...]) -> Any:
    """The state of a parameter, of the states of its shares; one that is not cut has a shape of its own."""
    if isinstance(pieces[0], (tuple, list)):
        return type(pieces[0])([_joined(each, shape) for each in zip(*pieces)])
    if not isinstance(pieces[0], np.ndarray):
        return pieces[0]
    whole = np.concatenate(pieces).reshape(shape) if len(pieces) > 1 else pieces[0]
    return mx.nd.array(whole, dtype=whole.dtype)


def _refuse(fact: str, fix: str, **prefix: Any) -> NoReturn:
    raise InvalidRequestError(message(fact, operation="ShardedTrainer", fix=fix, **prefix))
