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
from kvstore_hvd.errors import InvalidRequestError, MismatchError, message
from kvstore_hvd.mxnet.functions import allgather_object
from kvstore_hvd.mxnet.optimizer import DistributedTrainer
from kvstore_hvd.native import ITEM_BYTES
from kvstore_hvd.store.keys import wire_name

# Optimizers of MXNet that update each element by itself: their parameters may be cut anywhere.
_ELEMENTWISE = {"SGD", "NAG", "Adam", "AdamW", "Adamax", "RMSProp", "AdaGrad", "AdaDelta", "Ftrl", "FTML", "Signum"}
# Those of MXNet 1 and 2 whose update of one parameter changes that of others.
_ENTANGLED = {"Nadam", "LBSGD", *(["LARS"] if mx.__version__.startswith("1.") else [])}
_OTHER = "use a DistributedTrainer."
# Elements below which a parameter is not cut, and of which each share is a multiple: a cache line of float32.
_LEAST, _UNIT = 1024, 16
_NAME = 24  # bytes of an optimizer's name that workers compare


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
        Also: parameters or gradients are row_sparse, on a GPU or on several devices; the optimizer is Nadam, LBSGD, or
        LARS of MXNet 1. By a step: states that were loaded are of other parameters.
    MismatchError
        By a step, on all workers, before anything is changed: their optimizers or parameters differ.
    """

    def _init_optimizer(self, optimizer: Any, optimizer_params: Any) -> None:
        super()._init_optimizer(optimizer, optimizer_params)
        devices = mxnet_compat.devices_of(self)
        if len(devices) != 1 or not devices[0].device_type.startswith("cpu"):
            _refuse(f"its parameters are on {', '.join(map(str, devices))}, and not on one CPU.", _OTHER)
        for parameter in self._params:
            if parameter._stype != "default" or parameter._grad_stype != "default":
                _refuse(f"parameter '{parameter.name}' or its gradient is row_sparse.", _OTHER)
        _check_optimizer(self._optimizer)
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
        new = [(key, each) for key, each in zip(index, weight) if key not in self._kvstore_hvd_shares]
        if new:
            self._share_out(new)
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

        def count_before(end: int) -> None:
            while others and place[others[-1]] < end:
                count(optimizer, others.pop())

        def counted(index: Any) -> None:
            if isinstance(index, (list, tuple)):
                count_before(len(keys))
            elif index in place:
                count_before(place[index])
            else:
                _refuse(f"{type(optimizer).__name__} counts updates of {index!r}, which is no parameter.", _OTHER)
            count(optimizer, index)

        # An optimizer of the program may ask for its rate before it counts.
        count_before(next((place[key] for key in keys if self._prepared[key].own is not None), 0))
        optimizer._update_count = counted
        try:
            yield
        finally:
            del optimizer._update_count
        count_before(len(keys))

    def _at_once(self, index: Sequence[Any], weight: Sequence[Any]) -> list[list[Any]]:
        """The parameters in the groups that MXNet's Updater gives to the optimizer together."""
        optimizer = self.optimizer
        counts = {optimizer._index_update_count.get(key, optimizer.begin_num_update) for key in index}
        if len(counts) == 1 and _is_of_mxnet(type(optimizer)):
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
        before = dict(vars(self))
        super().set_states(states)
        try:
            _check_optimizer(vars(self)["optimizer"])
        except InvalidRequestError:
            self.__dict__.update(before)
            raise
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

    def _share_out(self, new: Sequence[tuple[Any, Any]]) -> None:
        """Share out parameters, the largest first, and cut their states."""
        loads, kind = self._loads, type(self.optimizer)
        ranks, is_elementwise = len(loads), kind.__name__ in _ELEMENTWISE and _is_of_mxnet(kind)
        shares: dict[Any, list[int]] = {}
        for key, each in sorted(new, key=lambda one: -one[1].size):
            if is_elementwise and each.size >= max(_LEAST, ranks * _UNIT):
                shares[key] = [each.size * rank // ranks // _UNIT * _UNIT for rank in range(ranks)] + [each.size]
            else:
                owner = loads.index(min(loads))
                shares[key] = [0] * (owner + 1) + [each.size] * (ranks - owner)
            loads = [load + count for load, count in zip(loads, _counts(shares[key]))]
        misfits = [
            place
            for place, (key, each) in enumerate(new)
            if is_elementwise and any(state.shape != each.shape for state in _arrays_of(self.states.get(key)))
        ]
        world, told = self._trainer._world, np.zeros(2 + _NAME // 8, np.int64)
        told[:2] = zlib.crc32(repr(sorted(shares.items())).encode()), misfits[0] if misfits else -1
        told[2:].view(f"S{_NAME}")[:] = kind.__name__
        world.hold_unread(1)  # it must not keep this worker from submitting what follows
        try:
            with world.submitting():
                rows = world.all_rows("update", f"{self._store._namespace}.shares", "the shares of parameters", told)
        finally:
            world.hold_unread(-1)
        where = world.topology.prefix
        names = [self._store._label(str(key)) for key, _ in new]
        faults = [f"rank {rank}: {names[place]}" for rank, place in enumerate(rows[:, 1]) if place >= 0]
        if faults:
            fix = "load states that were saved for this network."
            _refuse("states of the optimizer have other shapes than their parameters.", fix, details=faults, **where)
        if (rows != told).any():
            kinds = np.ascontiguousarray(rows[:, 2:]).view(f"S{_NAME}")[:, 0]
            each = enumerate(zip(kinds, rows[:, 0]))
            details = [f"rank {rank}: {one.decode()}, shares {shared:08x}" for rank, (one, shared) in each]
            fix = "give it the same optimizer and parameters on every rank, and load_states on every rank."
            fact = "ranks disagree on who updates which elements."
            raise MismatchError(message(fact, operation="ShardedTrainer", details=details, fix=fix, **where))
        self._kvstore_hvd_shares.update(shares)
        self._loads = loads
        for key, each in new:
            first, end = self._own(key)
            if key in self.states and end - first < each.size:
                state = self.states.pop(key)
                if end > first:
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
            -key,
        )
        return _Prepared(weight, gradient, own, exchange, whole)

    @property
    def _store(self) -> Any:
        return self._trainer._kvstore_params["kvstore"]


def _check_optimizer(optimizer: Any) -> None:
    for kind in type(optimizer).__mro__:
        if kind.__name__ in _ENTANGLED and _is_of_mxnet(kind):
            _refuse(f"{kind.__name__} updates no parameter alone.", _OTHER)


def _is_of_mxnet(kind: type) -> bool:
    return kind.__module__.startswith("mxnet.optimizer.")


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


def _arrays_of(state: Any) -> list[Any]:
    """The arrays in a state of an optimizer."""
    found: list[Any] = []
    _each_array(state, found.append)
    return found


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
