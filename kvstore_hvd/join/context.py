"""The context manager in which workers may run out of input at different times.

Who has left its body follows the others, in one of two ways. Joinables that others may have written tell in each
iteration that this worker is still there, with one small allreduce that nobody waits for; who has left takes part in
those with zeros, and runs the hooks as long as their sum is not zero. Where all joinables are Trainers, nothing is sent
in an iteration: who has left sees in the engine what the others have submitted (see `_follow_steps`).

PyTorch, "Distributed Training with Uneven Inputs Using the Join Context Manager", is the reference.
"""

from __future__ import annotations

import contextlib
import re
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Optional

import numpy as np

from kvstore_hvd import native
from kvstore_hvd.errors import (
    DivergedError,
    HorovodInternalError,
    InputFailedError,
    InvalidRequestError,
    InvalidTypeError,
    MismatchError,
    message,
)
from kvstore_hvd.join import tokens
from kvstore_hvd.join.joinable import Joinable, _JoinConfig
from kvstore_hvd.join.pauses import Pauses
from kvstore_hvd.join.trainers import TrainerHook, check_stores, joinable_for
from kvstore_hvd.join.withdrawal import Withdrawal, is_withdrawn
from kvstore_hvd.join.zeros import LEFT, explained
from kvstore_hvd.mxnet_compat.engine_errors import in_one_line
from kvstore_hvd.world import process
from kvstore_hvd.world.member import Member

# Iterations that a worker follows the others before it is told that this is a lot.
_WARN_AFTER = 1000
# The contexts that this process is in, the outermost first.
_entered: list[Join] = []


class _Exhausted(RuntimeError):
    """What `throw_on_early_termination` raises, on every worker of the context's world."""

    def __init__(self, text: str, world: Member) -> None:
        super().__init__(text)
        self.world = world


class _Presence(NamedTuple):
    """An operation that sums how many workers begin an iteration, under way, and its memory."""

    work: native.Work
    token: Any


class Join:
    """Surrounds training in which workers may run out of input at different times.

    Parameters
    ----------
    joinables : sequence of Joinable or mxnet.gluon.Trainer
        In the order in which each iteration calls them; the same on all workers. Of Trainers alone the order in the
        list does not matter, nor how often an iteration steps each of them, as long as workers with input step them
        in the same order. A Trainer has ``kvstore='horovod'`` or is a
        `DistributedTrainer`, and its ``step`` is used, with the batch size of this worker.
    enable : bool
        False: all workers are known to have the same number of iterations, and nothing is done.
    throw_on_early_termination : bool
        Raise on all workers as soon as one has no more input, instead of following the others.
    **kwargs
        For every `Joinable.join_hook`. That of a Trainer takes ``divide_by_initial_world_size`` (bool, default True).
        True: an exhausted worker counts as one with a batch of average size and gradients of zero. False: it does not
        count; gradients are the mean over all samples, exactly as if one process had them all, also where batch sizes
        differ.

    Raises
    ------
    ValueError
        There is no joinable, one was given twice, or they have different process sets.
    TypeError, InvalidRequestError
        Something else was passed, an unknown argument, or a Trainer that does not exchange its gradients through a
        store of its own.
    RuntimeError
        On entering the context: a Trainer, or another thread, is in one already.

    Notes
    -----
    A Trainer's step takes no additional communication, unless `throw_on_early_termination` is given. A worker without
    input takes the others' steps with gradients of zero and makes the same updates, so that parameters and states of
    the optimizer are equal on all workers at any time; in the end the parameters are compared. It does not see what the
    program does between its steps: a learning rate that changes belongs into a scheduler.

    An exception in the body ends the waiting of all other workers with an error that names it.

    Examples
    --------
    >>> with Join([trainer], divide_by_initial_world_size=False):
    ...     for data, label in uneven_batches:
    ...         with autograd.record():
    ...             loss = loss_function(net(data), label)
    ...         loss.backward()
    ...         trainer.step(data.shape[0])
    """

    def __init__(
        self,
        joinables: Sequence[Any],
        enable: bool = True,
        throw_on_early_termination: bool = False,
        **kwargs: Any,
    ) -> None:
        if len(joinables) == 0:
            fact, fix = "The join context manager requires at least one joinable", "pass the Trainer: Join([trainer])."
            raise InvalidRequestError(message(fact, fix=fix))
        self._joinables = [joinable_for(each) for each in joinables]
        self._enable = enable
        self._throws = throw_on_early_termination
        self._hooks = [joinable.join_hook(**kwargs) for joinable in self._joinables]
        if len({id(joinable) for joinable in self._joinables}) < len(joinables):
            fact, fix = "a joinable was given twice.", "pass each of them once."
            raise InvalidRequestError(message(fact, operation="Join", fix=fix))
        check_stores(self._joinables)
        groups = [joinable.join_process_group for joinable in self._joinables]
        if any(group is not groups[0] for group in groups):
            fact = "Using join context manager with multiple process groups"
            raise InvalidRequestError(message(fact, fix="nest one Join for each process set."))
        # That of a process set, if the joinables have one.
        self._world = process.current().member if groups[0] is None else groups[0].world("Join")
        # Whether who has no input sees what the others submit; else they tell in each iteration that they are there.
        self._trainers = [hook for hook in self._hooks if isinstance(hook, TrainerHook)]
        self._follows_steps = not self._throws and len(self._trainers) == len(self._hooks)
        unknown = set(kwargs) - {"divide_by_initial_world_size"}
        if len(self._trainers) == len(self._hooks) and unknown:  # other joinables may know more
            fact = f"Join of Trainers has no argument {sorted(unknown)[0]!r}."
            raise InvalidTypeError(message(fact, fix="leave it out; divide_by_initial_world_size is the only one."))
        self._followed = 0  # iterations
        self._beginner: Optional[Joinable] = None  # of Trainers alone, the first one that this worker has stepped
        self._number = 0  # from 1: among those of the world, the same one on all its workers
        self._thread = 0
        self._before: list[_JoinConfig] = []
        self._held: list[Member] = []  # worlds whose unread errors may be those of what is withdrawn

    def __enter__(self) -> Join:
        if self._enable and any(isinstance(each, TrainerHook) and each.is_in_a_context for each in self._hooks):
            fix = "leave the first one, or nest contexts of other Trainers."
            raise InvalidRequestError(message("a Trainer is in a Join already.", operation="Join", fix=fix))
        if self._enable and any(each._enable and each._thread != threading.get_ident() for each in _entered):
            fact, fix = "another thread is in a Join.", "use one thread for all of them."
            raise InvalidRequestError(message(fact, operation="Join", fix=fix))
        if self._enable:
            self._number = self._world.next_number("Join")
        self._before = [joinable._join_config for joinable in self._joinables]
        for place, joinable in enumerate(self._joinables):
            joinable._join_config = _JoinConfig(self._enable, self._throws, place == 0, self)
        self._followed = 0
        self._beginner = None
        self._thread = threading.get_ident()
        self._held = process.current().worlds_within(self._world) if self._enable and self._throws else []
        for world in self._held:
            world.hold_unread(1)
        _entered.append(self)
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        try:
            if self._was_declined(error):
                # As it would have learnt from its next joinable.
                self._begin_or_throw()
            if error is None and self._enable:
                self._followed = 0  # not those that it followed as it left a context within this one
                if self._throws:
                    self._end_all()
                elif self._follows_steps:
                    self._follow_steps()
                else:
                    self._follow()
                for hook in self._hooks:
                    hook.post_hook(self._followed == 0)
        except BaseException as failure:
            error = failure
            raise
        finally:
            if error is not None:
                self._tell_of(error)
            _entered.remove(self)
            for world in self._held:
                world.hold_unread(-1)
            # A later use outside of the context must not wait for workers that are not in it.
            for joinable, config in zip(self._joinables, self._before):
                joinable._join_config = config

    @staticmethod
    def notify_join_context(joinable: Joinable) -> Optional[native.Work]:
        """Tell the workers that have joined that this one begins an iteration. For joinables, not for their users.

        Returns
        -------
        native.Work or None
            The handle of an allreduce in flight; None outside of an enabled context, from all but its first joinable,
            and where no other worker needs to be told.

        Raises
        ------
        RuntimeError
            A worker is exhausted, and the context was made with `throw_on_early_termination`.
        """
        assert hasattr(joinable, "_join_config"), (
            f"Check that the {type(joinable)} constructor calls the ``Joinable`` constructor"
        )
        config = joinable._join_config
        context: Join = config.context
        if not config.enable or context._follows_steps or not context._begins_iteration(joinable):
            return None
        if context._throws:
            return context._begin_or_throw()
        return context._tell_presence(1)

    def _begins_iteration(self, joinable: Joinable) -> bool:
        if len(self._trainers) < len(self._hooks):
            return joinable._join_config.is_first_joinable
        # The order of Trainers is that of their steps, which all workers with input take in the same one.
        if self._beginner is None:
            self._beginner = joinable
        return joinable is self._beginner

    # -- The protocol -----------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Run the hooks until no worker has input any more, as the others tell."""
        while self._others_present():
            for hook in self._hooks:
                hook.main_hook()
            self._count()

    def _begin_or_throw(self) -> Optional[native.Work]:
        """Where contexts throw, what an iteration begins with, if no worker has ended."""
        if self._world.is_alone:
            return None
        presence = self._submit(1)
        if self._wait_for_early(0):
            self._throw("Detected at least one rank that exhausted inputs. Throwing across all ranks.")
        for world in self._held:
            world.raise_unread()
        return presence.work

    def _end_all(self) -> None:
        """Where contexts throw, the end of the body: the end of all, if another worker has begun an iteration."""
        if self._world.is_alone:
            return
        withdrawal = self._withdrawal()
        if withdrawal.drain():  # of what this worker has begun
            self._begin_or_throw()
        presence = self._submit(0)
        withdrawal.decline_until(presence.work)
        if presence.token[0] > 0:
            self._wait_for_early(1)
            self._throw(f"Rank {self._world.topology.rank_in_all} exhausted all inputs.", withdrawal)

    def _throw(self, text: str, withdrawal: Optional[Withdrawal] = None) -> NoReturn:
        """Raise on all workers, when what only some of them have submitted is gone."""
        withdrawal = withdrawal or self._withdrawal()
        withdrawal.drain()
        token = np.zeros(1, np.int64)
        # Patient: what a host does after it is news to another one only once all have come to it.
        request = self._request(f"{native.PATIENT}{self._wire_name('withdrawn')}", token)
        withdrawal.decline_until(tokens.submit(self._world, request, token))
        withdrawal.drain()
        withdrawal.agree()
        raise _Exhausted(text, self._world)

    def _was_declined(self, error: Optional[BaseException]) -> bool:
        """Whether an operation failed because a worker has no more input, and this context is to throw then."""
        if not self._enable or not self._throws or isinstance(error, _Exhausted):
            return False
        return is_withdrawn(error, self._world, self._number)

    def _withdrawal(self) -> Withdrawal:
        return Withdrawal(self._world, self._number, self._wire_name("early"))

    def _follow_steps(self) -> None:
        """Take the others' steps until no worker has input any more."""
        # Each worker announces that it has left the body, under a name for which one may wait for any time; when that
        # operation is complete, all have. Until then this one looks at what others have submitted and it has not: the
        # gradients of a step.
        current = self._world
        if current.is_alone:
            return
        # Contexts around this one have Trainers, too, that others may step before they leave this one.
        contexts = [each for each in _entered if each._follows_steps and each._world is current and each._enable]
        hooks = {hook: each for each in contexts for hook in each._trainers}
        waiting = ThreadPoolExecutor(len(hooks), "kvstore_hvd-join")
        # Nothing blocks here: of two Trainers another worker may wait for the step of the other one. First come this
        # worker's own last steps, which may still wait for their gradients or for others.
        own = set(hooks)
        steps: dict[TrainerHook, Future[None]] = {hook: waiting.submit(hook.wait_for_own) for hook in hooks}
        token = np.zeros(1, np.int64)
        left: Optional[native.Work] = None
        pauses = Pauses()
        try:
            while left is None or not left.done or steps:
                for hook in [hook for hook, step in steps.items() if step.done()]:
                    steps.pop(hook).result()
                    if hook in own:
                        own.remove(hook)
                    else:
                        hook.finish()
                if left is None and not own:
                    with current.submitting():
                        left = tokens.submit(current, self._request(LEFT, token), token)
                is_over = left is not None and left.done
                begun = [] if is_over else self._begun([hook for hook in hooks if hook not in steps])
                for hook in begun:
                    hook.begin()
                    steps[hook] = waiting.submit(hook.wait)
                    hooks[hook]._count()
                pauses.after(found=bool(begun))
        finally:
            waiting.shutdown(wait=False)  # after an exception its threads end when the others have been told of it
        if left.error is not None:
            raise explained(left.error, current)

    def _begun(self, hooks: Sequence[TrainerHook]) -> list[TrainerHook]:
        """Those of which others have begun a step that this worker can follow."""
        missed = self._world.engine().missed(native.MAX_NAMES, any(hook.is_deferred for hook in hooks))
        if not missed:
            return []
        for hook in hooks:
            hook.initialize(missed)
        return [hook for hook in hooks if hook.has_begun(missed)]

    def _count(self) -> None:
        """Count an iteration of the others."""
        self._followed += 1
        if self._followed == _WARN_AFTER + 1:
            rank = self._world.topology.rank_in_all
            warnings.warn(
                f"Detected uneven input skew of greater than {_WARN_AFTER}. This means that rank {rank} has at "
                f"least {_WARN_AFTER} fewer inputs than other currently-active ranks. This level of skew could "
                "lead to performance degradation during training.",
                stacklevel=4,
            )

    def _tell_of(self, error: BaseException) -> None:
        """Free the workers that would wait for this one, unless they have the same error."""
        current = self._world
        if not self._enable or current.is_alone or self._is_shared(error):
            return
        if any(each._was_declined(error) for each in _entered):  # of one around this one, perhaps
            return
        rank = current.topology.rank_in_all
        with contextlib.suppress(Exception):  # the error of the body is the one to raise
            reason = in_one_line(error, "RuntimeError" if isinstance(error, _Exhausted) else "").rstrip(": .")
            current.abort(f"rank {rank} left a Join context with {reason}")

    def _is_shared(self, error: BaseException) -> bool:
        """Whether all workers of the context have it: it is none of a process set inside, or of this worker alone."""
        if isinstance(error, _Exhausted):
            return error.world is self._world
        if not isinstance(error, (DivergedError, MismatchError, InputFailedError, HorovodInternalError)):
            return False
        who = str(error).partition("]")[0]  # see `Topology.speaker`
        inner = [
            each.topology.inside for each in process.current().worlds_within(self._world) if each is not self._world
        ]
        return not any(re.search(rf"process set {each.number}\b", who) for each in inner if each is not None)

    def _tell_presence(self, present: int) -> Optional[native.Work]:
        if self._world.is_alone:
            return None
        # Nobody reads its error: the operations that training waits for have the same one.
        with self._world.submitting():
            return self._submit(present).work

    def _others_present(self) -> bool:
        """How a worker without input begins an iteration: waits for the others to begin theirs, or to have none."""
        if self._world.is_alone:
            return False
        with self._world.submitting():
            presence = self._submit(0)
            try:
                self._world.engine().wait(presence.work)
            except MismatchError as error:
                raise explained(error, self._world) from None
        return bool(presence.token[0] > 0)

    def _submit(self, present: int) -> _Presence:
        token = np.array([present], np.int64)
        return _Presence(tokens.submit(self._world, self._request(LEFT, token), token), token)

    def _wait_for_early(self, early: int) -> bool:
        """Whether a worker has ended early; waits for all."""
        token = np.array([early], np.int64)
        self._world.engine().run(self._request(self._wire_name("early"), token))
        return bool(token[0] > 0)

    def _wire_name(self, what: str) -> str:
        return f"join/{self._number}/{what}"

    def _request(self, name: str, token: Any) -> native.Request:
        place = [token.ctypes.data]
        # The group tells contexts apart that are under one name.
        return native.Request("allreduce", name, f"'{name}'", place, place, (1,), "int64", group=self._number)


def is_uneven() -> bool:
    """Whether this process is in a context in which some workers may go on without the others' input."""
    return any(context._enable and not context._throws for context in _entered)
