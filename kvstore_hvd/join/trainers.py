"""Gluon's Trainers in a Join: a worker without input takes their steps with gradients of zero.

It averages with the others and applies the same update, so that parameters, the states of the optimizer, its learning
rate and the scale of AMP stay equal on all workers, bit by bit. What a gradient counts is agreed within the allreduce
itself: each worker announces its batch size as its weight (see `native.Request`), and nothing else is sent. Only
gradients of float16 are summed, as a mean might be too small for them; then batch sizes are exchanged in each step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import kvstore_hvd
from kvstore_hvd import mxnet_compat, native
from kvstore_hvd.base.clocks import Deadline
from kvstore_hvd.config import config
from kvstore_hvd.errors import InvalidRequestError, InvalidTypeError, TimeoutError, message  # noqa: A004 - not the builtin
from kvstore_hvd.join.joinable import Joinable, JoinHook
from kvstore_hvd.join.pauses import Pauses
from kvstore_hvd.native.records import Missed
from kvstore_hvd.store.keys import wire_name
from kvstore_hvd.world import process
from kvstore_hvd.world.member import Member
from kvstore_hvd.world.stall import is_stopped

# Of a worker that has no input: counts as an average one of the others, or not at all.
_ABSENT, _NOT_COUNTED = -1.0, 0.0


def joinable_for(thing: Any) -> Joinable:
    """The joinable itself, or the one of a Trainer."""
    if mxnet_compat.is_trainer(thing):
        joinable: Joinable | None = mxnet_compat.joinable_of(thing)
        if joinable is None:
            joinable = _TrainerJoinable(thing)
            mxnet_compat.note_joinable(thing, joinable)
        return joinable
    if not isinstance(thing, Joinable):
        fact = f"Join takes Joinables and Trainers of Gluon, not a {type(thing).__name__}."
        raise InvalidTypeError(message(fact, fix="pass the Trainer itself: Join([trainer])."))
    return thing


def check_stores(joinables: Sequence[Joinable]) -> None:
    """Raise InvalidRequestError when two Trainers share a store: nobody could tell whose a gradient is."""
    stores = [each.store for each in joinables if isinstance(each, _TrainerJoinable)]
    if len({id(store) for store in stores}) < len(stores):
        fact, fix = "two Trainers use the same store.", "give each its own: kvstore='horovod'."
        raise InvalidRequestError(message(fact, **stores[0]._member.topology.speaker, operation="Join", fix=fix))


class _TrainerJoinable(Joinable):
    """Takes part for one Trainer, which need not know of it."""

    def __init__(self, trainer: Any) -> None:
        super().__init__()
        self._trainer = trainer
        self.store: kvstore_hvd.Horovod = _store_of(trainer)
        self._weight = 1.0  # of the step without input that is under way
        self._divisor = 1.0  # what MXNet divides the gradients of the present step by

    def join_hook(self, **kwargs: Any) -> TrainerHook:
        """See `Joinable.join_hook`. Of `kwargs` it knows ``divide_by_initial_world_size``."""
        return TrainerHook(self, bool(kwargs.get("divide_by_initial_world_size", True)))

    @property
    def join_device(self) -> Any:
        """See `Joinable.join_device`."""
        return mxnet_compat.devices_of(self._trainer)[0]

    @property
    def join_process_group(self) -> Any:
        """See `Joinable.join_process_group`."""
        return getattr(self._trainer, "_process_group", None)

    @property
    def trainer(self) -> Any:
        """The Trainer."""
        return self._trainer

    @property
    def world(self) -> Member:
        """The workers that it exchanges gradients with."""
        return self.store._member

    def step(self, original: Callable[..., None], batch_size: Any, ignore_stale_grad: bool) -> None:
        """What ``Trainer.step`` does; `original` is that of MXNet."""
        if not self._join_config.enable or self.world.is_alone:
            original(batch_size, ignore_stale_grad)
            return
        weight = self._checked(batch_size)
        if ignore_stale_grad:
            self._check_fresh()
        self._join_config.context.notify_join_context(self)
        self._start()  # sets the gradient compression of the store
        if self._has_halves:
            self._trainer._allreduce_grads()
            self._divisor = self._agreed_divisor(weight)
            self._update()
            return
        with self.store._averaging(weight):
            original(self._batch_size, False)

    def submit_zeros(self, weight: float) -> None:
        """Take part in a step of the others, up to the update."""
        trainer = self._trainer
        for parameter in self._trained():
            for gradient in parameter.list_grad():
                mxnet_compat.set_to_zero(gradient)
            for array in parameter.list_data():
                array._fresh_grad = True
        self._start()
        self._weight = weight
        with contextlib.nullcontext() if self._has_halves else self.store._averaging(weight):
            trainer._allreduce_grads()

    def wait(self) -> None:
        """Wait for what `submit_zeros` has submitted. Any thread."""
        for parameter in self._trained():
            for gradient in parameter.list_grad():
                gradient.wait_to_read()
        self._divisor = self._agreed_divisor(self._weight) if self._has_halves else self._batch_size

    def wait_for_own(self) -> None:
        """Wait for what this worker's own steps have submitted, broadcasts of parameters too. Any thread."""
        for parameter in self._trainer._params:
            for array in (*(parameter._data or ()), *(parameter._grad or ())):  # none while a shape is not known
                array.wait_to_read()

    def update(self) -> None:
        """Update the parameters as the others do."""
        trainer = self._trainer
        scaler = getattr(trainer, "_amp_loss_scaler", None)
        if scaler is not None:  # as amp.scale_loss does
            trainer._scale = trainer._amp_original_scale / scaler.loss_scale
        self._update()
        for parameter in self._trained():  # no batch of this worker's is in them
            mxnet_compat.zero_added_gradients(parameter)

    def check_reduction(self) -> None:
        """Raise InvalidRequestError in a Join:"""
        if self._join_config.enable and not self.world.is_alone:
            fact = "allreduce_grads() and update() cannot be used within Join: workers without input could not follow."
            raise self._refusal(fact, "call step(); to clip gradients, give the optimizer clip_gradient.")

    @property
    def _batch_size(self) -> float:
        """By what MXNet is to divide."""
        return 1.0 / self.world.topology.size

    @property
    def _has_halves(self) -> bool:
        halves = any(mxnet_compat.dtype_name(each) == "float16" for one in self._trained() for each in one.list_grad())
        return halves or self.store._reduction.as_half or self.store._reduction.threshold > 0

    def _start(self) -> None:
        """What a Trainer's first step begins with."""
        if not self._trainer._kv_initialized:
            self._trainer._init_kvstore()
        if self._trainer._params_to_init:
            self._trainer._init_params()

    def _update(self) -> None:
        self._trainer._optimizer.rescale_grad = self._trainer._scale / self._divisor
        self._trainer._update(False)

    def _agreed_divisor(self, weight: float) -> float:
        """By what MXNet is to divide sums; waits for all workers. As World::weights() in world.hpp."""
        world = self.world
        with world.submitting():
            name = f"{self.store._namespace}/join/weights"
            rows = world.all_rows("Join", name, "batch sizes", np.array([weight]).view(np.int64))
        weights = np.ascontiguousarray(rows[:, 0]).view(np.float64)
        present, absent = int((weights > 0).sum()), int((weights < 0).sum())
        return float(weights[weights > 0].sum()) * (present + absent) / present / world.topology.size

    def _trained(self) -> list[Any]:
        return [each for each in self._trainer._params if each.grad_req != "null"]

    @property
    def is_in_a_context(self) -> bool:
        """Whether its Join is under way."""
        return self._join_config.enable

    def _checked(self, batch_size: Any) -> float:
        try:
            weight = float(batch_size)
        except (TypeError, ValueError):
            weight = float("nan")
        if not 0.0 < weight < float("inf"):
            raise self._refusal(f"batch_size is {batch_size!r}.", "pass the number of samples of this worker's batch.")
        return weight

    def _check_fresh(self) -> None:
        for parameter in self._trained():
            if not all(array._fresh_grad for array in mxnet_compat.arrays_of(parameter) or []):
                key = mxnet_compat.key_of(self._trainer, parameter)
                fact = "its gradient is stale: workers without input cannot know that it is to be ignored."
                fix = "give the Trainer only parameters that every step uses, or leave the Join."
                raise self._refusal(fact, fix, mxnet_compat.labels_of(self._trainer)[key])

    def _refusal(self, fact: str, fix: str, name: str = "") -> InvalidRequestError:
        speaker = self.world.topology.speaker
        return InvalidRequestError(message(fact, **speaker, operation="Trainer.step", name=name, fix=fix))


class TrainerHook(JoinHook):
    """What a Trainer does in place of its steps on a worker that has no more input."""

    def __init__(self, joinable: _TrainerJoinable, divide_by_initial_world_size: bool) -> None:
        self._joinable = joinable
        self._weight = _ABSENT if divide_by_initial_world_size else _NOT_COUNTED

    def main_hook(self) -> None:
        """See `JoinHook.main_hook`. Waits for its end."""
        self._await_shapes()
        self.begin()
        self.wait()
        self.finish()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give all workers the running statistics of one that joined last; compare the rest."""
        trainer, store, world = self._joinable.trainer, self._joinable.store, self._joinable.world
        if world.is_alone:
            return
        is_started = trainer._kv_initialized and not self.is_deferred
        row = np.array([is_last_joiner, is_started], np.int64)
        with world.submitting():
            rows = world.all_rows("Join", f"{store._namespace}/join/end", "the end of a Join", row)
        if not rows[:, 1].all():
            return  # nobody has taken a step
        # Nobody has joined last where each has followed another one with a Trainer of its own.
        root = int(np.flatnonzero(rows[:, 0] if rows[:, 0].any() else rows[:, 1]).max())
        keys = [(mxnet_compat.key_of(trainer, each), each) for each in trainer._params]
        for key, parameter in keys:
            if parameter.grad_req == "null":
                store._broadcast_from(root, key, parameter.list_data())
        labels = mxnet_compat.labels_of(trainer)
        store._verify([(f"'{labels[key]}' (key {key})", each) for key, each in keys], "at the end of a Join")

    # -- A step in parts, for workers that see in the engine what the others submit -----------------------------------

    def begin(self) -> None:
        """Submit gradients of zero."""
        self._joinable.submit_zeros(self._weight)

    def wait(self) -> None:
        """Wait until the gradients are reduced. Any thread."""
        self._joinable.wait()

    def wait_for_own(self) -> None:
        """Wait until this worker's own steps are over. Any thread."""
        self._joinable.wait_for_own()

    def finish(self) -> None:
        """Update the parameters."""
        self._joinable.update()

    @property
    def is_in_a_context(self) -> bool:
        """Whether the Trainer is in an enabled Join."""
        return self._joinable.is_in_a_context

    @property
    def is_deferred(self) -> bool:
        """Whether a parameter waits for its shape, which the others know."""
        return any(map(mxnet_compat.is_deferred, self._joinable.trainer._params))

    def _await_shapes(self) -> None:
        """Wait for the others to broadcast what this worker does not know the shape of."""
        world, pauses = self._joinable.world, Pauses()
        deadline, stopped = Deadline(config().timeout_s), set[int]()
        while self.is_deferred:
            missed = world.engine().missed(native.MAX_NAMES, described=True) or []
            self.initialize(missed)
            pauses.after(found=False)
            world.check()
            if deadline.left() >= 0:
                continue
            before = stopped
            stopped = {rank for rank in range(world.topology.size) if is_stopped(world.engine(), rank)}
            if missed or not config().waits_for_busy or stopped & before:
                raise TimeoutError(self._no_shapes())
            deadline = Deadline(config().timeout_s)  # the others compute

    def _no_shapes(self) -> str:
        trainer, speaker = self._joinable.trainer, self._joinable.world.topology.speaker
        labels = mxnet_compat.labels_of(trainer)
        unknown = next(key for key, each in self._keys() if mxnet_compat.is_deferred(each))
        fact = f"this worker has no input, and no other has broadcast its shape for {config().timeout_s:g} s."
        fix = "see why the workers with input take no step; or initialise the network with a batch on every worker."
        return message(fact, **speaker, operation="Join", name=labels[unknown], key=unknown, fix=fix)

    def initialize(self, missed: Sequence[Missed]) -> None:
        """Initialise the parameters that wait for a shape and that others broadcast."""
        shapes = {one.name: one.announced.shape for one in missed if one.announced is not None}
        for key, parameter in self._keys():
            if not mxnet_compat.is_deferred(parameter):
                continue
            names = (self._wire_name(key), *mxnet_compat.awaited_names(parameter))
            for name in names:
                if name in shapes:
                    mxnet_compat.initialize(parameter, shapes[name])
                    break

    def has_begun(self, missed: Sequence[Missed]) -> bool:
        """Whether others have begun a step, and this worker can follow."""
        own = {self._wire_name(key) for key, _ in self._keys()}
        return not self.is_deferred and any(one.name in own for one in missed)

    def _keys(self) -> list[tuple[int, Any]]:
        trainer = self._joinable.trainer
        return [(mxnet_compat.key_of(trainer, each), each) for each in trainer._params]

    def _wire_name(self, key: int) -> str:
        return wire_name(self._joinable.store._namespace, key)


def _store_of(trainer: Any) -> kvstore_hvd.Horovod:
    """The store of a Trainer, made now if it is not yet: its name must be known before the first step."""
    import mxnet

    store = trainer._kvstore if trainer._kv_initialized else trainer._kvstore_params["kvstore"]
    if isinstance(store, str):
        with contextlib.suppress(ValueError, mxnet.base.MXNetError):
            store = trainer._kvstore_params["kvstore"] = mxnet.kvstore.create(store)
    if not isinstance(store, kvstore_hvd.Horovod):
        fact, fix = "it does not exchange gradients.", "create it with kvstore='horovod', or as a DistributedTrainer."
        speaker = process.current().topology.speaker
        raise InvalidRequestError(message(fact, **speaker, operation="Join", name="Trainer", fix=fix))
    return store
