"""Joinables: the base class, and Gluon's Trainers, whose steps a worker without input takes with gradients of zero.

That worker averages with the others and applies the same update: parameters, the states of the optimizer, its learning
rate and the scale of AMP stay equal on all workers, bit by bit. The allreduce of a gradient itself agrees on the
divisor: each worker announces its batch size as its weight (see `native.Request`), and nothing else is sent. Gradients
of float16 are summed, since their mean might be too small; there, batch sizes are exchanged in each step.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import kvstore_hvd
from kvstore_hvd import mxnet_compat
from kvstore_hvd.base.cores import Deadline
from kvstore_hvd.config import config
from kvstore_hvd.errors import InvalidRequestError, InvalidTypeError, TimeoutError, message  # noqa: A004 - not the builtin
from kvstore_hvd.join.following import Pauses, missed_in
from kvstore_hvd.native import Missed
from kvstore_hvd.store.keys import wire_name
from kvstore_hvd.world import process
from kvstore_hvd.world.member import Member
from kvstore_hvd.world.stall import is_stopped

# Weights of a worker without input: it counts as an average worker, or not at all.
_ABSENT, _NOT_COUNTED = -1.0, 0.0


class JoinHook:
    """The iterations of a joinable on a worker that has no more input."""

    def main_hook(self) -> None:
        """Take part in the collectives of one iteration of the others; called once for each iteration."""

    def post_hook(self, is_last_joiner: bool) -> None:
        """Finish, after all workers have joined.

        Parameters
        ----------
        is_last_joiner : bool
            Whether this worker joined last; several may have.
        """


class Joinable(ABC):
    """An object that communicates in each iteration, and can take part in iterations without input.

    A subclass calls this constructor, and `Join.notify_join_context` in each iteration, before it communicates.
    """

    def __init__(self) -> None:
        super().__init__()
        self._join: Any = None  # the innermost Join around this one, if it is enabled

    @abstractmethod
    def join_hook(self, **kwargs: Any) -> JoinHook:
        """The hook for a context, with the `kwargs` of `Join`."""

    @property
    @abstractmethod
    def join_device(self) -> Any:
        """The MXNet context of its arrays."""

    @property
    @abstractmethod
    def join_process_group(self) -> Any:
        """The process set of its collectives; None means all workers."""


# -- Trainers -----------------------------------------------------------------------------------------------------


def joinable_for(thing: Any) -> Joinable:
    """The joinable itself, or the one of a Trainer."""
    if mxnet_compat.is_trainer(thing):
        exchange = mxnet_compat.exchange_of(thing)
        if exchange.joinable is None:
            exchange.joinable = _TrainerJoinable(thing)
        thing = exchange.joinable
    if not isinstance(thing, Joinable):
        fact = f"Join takes Joinables and Trainers of Gluon, not a {type(thing).__name__}."
        fix = "pass the Trainer itself: Join([trainer])."
        if any(each.__name__ == "BaseModule" for each in type(thing).__mro__):
            fix = "give a Module as many batches as on other workers, as by last_batch_handle='discard'; or use Gluon."
        raise InvalidTypeError(message(fact, fix=fix))
    return thing


class _TrainerJoinable(Joinable):
    """The joinable of a Trainer, whose steps go through it."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self.trainer = trainer
        store = mxnet_compat.store_in(trainer)  # made now: its name must be known before the first step
        if not isinstance(store, kvstore_hvd.Horovod):
            fact = "it does not exchange gradients."
            fix = "create it with kvstore='horovod', or as a DistributedTrainer."
            prefix = process.current().topology.prefix
            raise InvalidRequestError(message(fact, **prefix, operation="Join", name="Trainer", fix=fix))
        self.store = store
        self.world: Member = store._member  # the workers that it exchanges gradients with
        self._weight = 1.0  # of the pending step without input
        self._divisor = 1.0  # MXNet divides the gradients of the present step by it

    def join_hook(self, **kwargs: Any) -> TrainerHook:
        return TrainerHook(self, bool(kwargs.get("divide_by_initial_world_size", True)))

    @property
    def join_device(self) -> Any:
        return mxnet_compat.devices_of(self.trainer)[0]

    @property
    def join_process_group(self) -> Any:
        return getattr(self.trainer, "_process_group", None)

    @property
    def is_deferred(self) -> bool:
        """Whether a parameter waits for its shape, which the others know."""
        return any(map(mxnet_compat.is_deferred, self.trainer._params))

    def step(self, original: Callable[..., None], batch_size: Any, ignore_stale_grad: bool) -> None:
        """``Trainer.step``; `original` is MXNet's."""
        if self._join is None or self.world.is_alone:
            original(batch_size, ignore_stale_grad)
            return
        weight = float("nan")
        with contextlib.suppress(TypeError, ValueError):
            weight = float(batch_size)
        if not 0.0 < weight < float("inf"):
            raise self._refusal(f"batch_size is {batch_size!r}.", "pass the number of samples of this worker's batch.")
        for parameter in self._trained() if ignore_stale_grad else ():
            if not all(array._fresh_grad for array in mxnet_compat.arrays_of(parameter) or []):
                key = mxnet_compat.key_of(self.trainer, parameter)
                fact = "its gradient is stale: workers without input cannot know that it is to be ignored."
                fix = "give the Trainer only parameters that every step uses, or leave the Join."
                raise self._refusal(fact, fix, mxnet_compat.labels_of(self.trainer)[key])
        self._join.notify_join_context(self)
        mxnet_compat.start(self.trainer)  # sets the gradient compression of the store
        if self._has_halves:
            self.trainer._allreduce_grads()
            self._divisor = self._agreed_divisor(weight)
            self._update()
            return
        with self.store._reducing(op="average", weight=weight):
            original(1.0 / self.world.topology.size, False)  # MXNet divides by it

    def submit_zeros(self, weight: float) -> None:
        """Take part in a step of the others, up to the update."""
        for parameter in self._trained():
            for gradient in parameter.list_grad():
                mxnet_compat.set_to_zero(gradient)
            for array in parameter.list_data():
                array._fresh_grad = True
        mxnet_compat.start(self.trainer)
        self._weight = weight
        with self.store._reducing(**({} if self._has_halves else {"op": "average", "weight": weight})):
            self.trainer._allreduce_grads()

    def wait(self) -> None:
        """Wait until the gradients of `submit_zeros` are reduced. Any thread."""
        for parameter in self._trained():
            for gradient in parameter.list_grad():
                gradient.wait_to_read()
        self._divisor = self._agreed_divisor(self._weight) if self._has_halves else 1.0 / self.world.topology.size

    def wait_for_own(self) -> None:
        """Wait until this worker's own steps and broadcasts of parameters are over. Any thread."""
        for parameter in self.trainer._params:
            for array in (*(parameter._data or ()), *(parameter._grad or ())):  # none while a shape is not known
                array.wait_to_read()

    def update(self) -> None:
        """Update the parameters as the others do."""
        trainer = self.trainer
        scaler = getattr(trainer, "_amp_loss_scaler", None)
        if scaler is not None:  # as amp.scale_loss does
            trainer._scale = trainer._amp_original_scale / scaler.loss_scale
        self._update()
        for parameter in self._trained():  # they have no batch of this worker's
            mxnet_compat.zero_added_gradients(parameter)

    def check_reduction(self) -> None:
        if self._join is not None and not self.world.is_alone:
            fact = "allreduce_grads() and update() cannot be used within Join: workers without input could not follow."
            raise self._refusal(fact, "call step(); to clip gradients, give the optimizer clip_gradient.")

    @property
    def _has_halves(self) -> bool:
        halves = any(mxnet_compat.dtype_name(each) == "float16" for one in self._trained() for each in one.list_grad())
        return halves or self.store._reduction.as_half or self.store._reduction.threshold > 0

    def _update(self) -> None:
        self.trainer._optimizer.rescale_grad = self.trainer._scale / self._divisor
        self.trainer._update(False)

    def _agreed_divisor(self, weight: float) -> float:
        """MXNet divides sums by it; waits for all workers. As World::weights() in world.hpp."""
        world = self.world
        with world.submitting():
            name = f"{self.store._namespace}/join/weights"
            rows = world.all_rows("Join", name, "batch sizes", np.array([weight]).view(np.int64))
        weights = np.ascontiguousarray(rows[:, 0]).view(np.float64)
        present, absent = int((weights > 0).sum()), int((weights < 0).sum())
        return float(weights[weights > 0].sum()) * (present + absent) / present / world.topology.size

    def _trained(self) -> list[Any]:
        return [each for each in self.trainer._params if each.grad_req != "null"]

    def _refusal(self, fact: str, fix: str, name: str = "") -> InvalidRequestError:
        prefix = self.world.topology.prefix
        return InvalidRequestError(message(fact, **prefix, operation="Trainer.step", name=name, fix=fix))


class TrainerHook(JoinHook):
    """The steps of a Trainer on a worker that has no more input."""

    def __init__(self, joinable: _TrainerJoinable, divide_by_initial_world_size: bool) -> None:
        self.joinable = joinable
        self.weight = _ABSENT if divide_by_initial_world_size else _NOT_COUNTED

    def main_hook(self) -> None:
        """Take a step of the others; waits for its end."""
        self._await_shapes()
        self.joinable.submit_zeros(self.weight)
        self.joinable.wait()
        self.joinable.update()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give all workers the running statistics of one that joined last; compare the rest."""
        trainer, store, world = self.joinable.trainer, self.joinable.store, self.joinable.world
        if world.is_alone:
            return
        row = np.array([is_last_joiner, trainer._kv_initialized and not self.joinable.is_deferred], np.int64)
        with world.submitting():
            rows = world.all_rows("Join", f"{store._namespace}/join/end", "the end of a Join", row)
        if not rows[:, 1].all():
            return  # nobody has taken a step
        # Without a last joiner each worker has followed another one, with a Trainer of its own.
        root = int(np.flatnonzero(rows[:, 0] if rows[:, 0].any() else rows[:, 1]).max())
        for key, parameter in self._keys():
            if parameter.grad_req == "null":
                store._broadcast_from(root, key, parameter.list_data())
        labels = mxnet_compat.labels_of(trainer)
        store._verify([(f"'{labels[key]}' (key {key})", each) for key, each in self._keys()], "at the end of a Join")

    def _await_shapes(self) -> None:
        """Wait until the others broadcast the parameters whose shapes this worker does not know."""
        world, pauses = self.joinable.world, Pauses()
        deadline, stopped = Deadline(config().timeout_s), set[int]()
        while self.joinable.is_deferred:
            missed = missed_in(world)
            self.initialize(missed)
            pauses.after(found=False)
            world.check()
            if deadline.left() >= 0:
                continue
            before = stopped
            stopped = {rank for rank in range(world.topology.size) if is_stopped(world.engine(), rank)}
            if missed or not config().waits_for_busy or stopped & before:
                unknown = next(key for key, each in self._keys() if mxnet_compat.is_deferred(each))
                label, prefix = mxnet_compat.labels_of(self.joinable.trainer)[unknown], world.topology.prefix
                fact = f"this worker has no input, and no other has broadcast its shape for {config().timeout_s:g} s."
                fix = "see why workers with input take no step; or initialise the network with a batch on every worker."
                raise TimeoutError(message(fact, **prefix, operation="Join", name=label, key=unknown, fix=fix))
            deadline = Deadline(config().timeout_s)  # the others compute

    def initialize(self, missed: Sequence[Missed]) -> None:
        """Initialise the parameters that wait for a shape and that others broadcast."""
        shapes = {one.name: one.announced.shape for one in missed if one.announced is not None}
        for key, parameter in self._keys():
            if mxnet_compat.is_deferred(parameter):
                for name in (self._wire_name(key), *mxnet_compat.awaited_names(parameter)):
                    if name in shapes:
                        mxnet_compat.initialize(parameter, shapes[name])
                        break

    def has_begun(self, missed: Sequence[Missed]) -> bool:
        """Whether others have begun a step, and this worker can follow."""
        own = {self._wire_name(key) for key, _ in self._keys()}
        return not self.joinable.is_deferred and any(one.name in own for one in missed)

    def _keys(self) -> list[tuple[int, Any]]:
        trainer = self.joinable.trainer
        return [(mxnet_compat.key_of(trainer, each), each) for each in trainer._params]

    def _wire_name(self, key: int) -> str:
        return wire_name(self.joinable.store._namespace, key)
