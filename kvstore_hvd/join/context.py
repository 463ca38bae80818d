"""The context manager in which workers may run out of input at different times.

A worker that has left the body follows the others, in one of two ways. Joinables of the program announce each iteration
of their worker with a small allreduce that nobody waits for; a worker without input takes part in it with zero, and
runs the hooks as long as the sum is not zero. Where all joinables are Trainers, nothing is sent in an iteration: the
engine lists the operations of others that a worker without input has not submitted (see `_follow_steps`).

PyTorch, "Distributed Training with Uneven Inputs Using the Join Context Manager", is the reference.
"""

from __future__ import annotations

import contextlib
import re
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NoReturn, Optional

import numpy as np

from kvstore_hvd import errors, native
from kvstore_hvd.errors import InvalidRequestError, InvalidTypeError, message
from kvstore_hvd.join.following import LEFT, Pauses, Withdrawal, early_name, is_withdrawn, submit_sum, wait_for
from kvstore_hvd.join.joinables import Joinable, TrainerHook, joinable_for
from kvstore_hvd.mxnet_compat.hooks import in_one_line
from kvstore_hvd.world import process
from kvstore_hvd.world.member import Member

# Iterations that a worker follows the others before it warns.
_WARN_AFTER = 1000
# The contexts of this process, the outermost first.
_entered: list[Join] = []


# Errors of an operation that all its workers have.
_SHARED = errors.DivergedError, errors.MismatchError, errors.InputFailedError, errors.HorovodInternalError


class _Exhausted(RuntimeError):
    """The error of `throw_on_early_termination`, on every worker of the context's world."""

    def __init__(self, text: str, world: Member) -> None:
        super().__init__(text)
        self.world = world


class Join:
    """Surrounds training in which workers may run out of input at different times.

    Parameters
    ----------
    joinables : sequence of Joinable or mxnet.gluon.Trainer
        In the order in which each iteration calls them; the same on all workers. In a list of Trainers alone the order
        does not matter, nor how often an iteration steps each of them, as long as workers with input step them in the
        same order. A Trainer has ``kvstore='horovod'`` or is a `DistributedTrainer`, and its ``step`` is used, with
        the batch size of this worker.
    enable : bool
        False: all workers are known to have the same number of iterations, and nothing is done.
    throw_on_early_termination : bool
        Raise on all workers as soon as one has no more input, instead of following the others.
    **kwargs
        For every `Joinable.join_hook`. Trainers take ``divide_by_initial_world_size`` (bool, default True). True: an
        exhausted worker counts as one with a batch of average size and gradients of zero. False: it does not count;
        gradients are the mean over all samples, exactly as if one process had them all, also where batch sizes differ.

    Raises
    ------
    ValueError
        There is no joinable, one was given twice, or they have different process sets.
    TypeError, InvalidRequestError
        Another object was passed, an unknown argument, or a Trainer that does not exchange its gradients through a
        store of its own.
    RuntimeError
        On entering the context: a Trainer, or another thread, is in one already.

    Notes
    -----
    A Trainer's step takes no additional communication, unless `throw_on_early_termination` is given. A worker without
    input takes the others' steps with gradients of zero and makes the same updates, so that parameters and states of
    the optimizer are equal on all workers at any time; in the end the parameters are compared. It does not see what the
    program does between its steps: a learning rate that changes belongs into a scheduler. An exception in the body ends
    the waiting of all other workers with an error that names it.

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
        self, joinables: Sequence[Any], enable: bool = True, throw_on_early_termination: bool = False, **kwargs: Any
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
        self._trainers = [hook for hook in self._hooks if isinstance(hook, TrainerHook)]
        if len({id(hook.joinable.store) for hook in self._trainers}) < len(self._trainers):
            fact, fix = "two Trainers use the same store.", "give each its own: kvstore='horovod'."
            prefix = self._trainers[0].joinable.world.topology.prefix
            raise InvalidRequestError(message(fact, **prefix, operation="Join", fix=fix))
        groups = [joinable.join_process_group for joinable in self._joinables]
        if any(group is not groups[0] for group in groups):
            fact = "Using join context manager with multiple process groups"
            raise InvalidRequestError(message(fact, fix="nest one Join for each process set."))
        self._world = process.current().member if groups[0] is None else groups[0]._world("Join")
        self._has_only_trainers = len(self._trainers) == len(self._hooks)
        self._thread = 0
        # Steps are seen in the engine; otherwise workers announce each iteration.
        self._follows_steps = not self._throws and self._has_only_trainers
        unknown = set(kwargs) - {"divide_by_initial_world_size"}
        if self._has_only_trainers and unknown:  # other joinables may take more arguments
            fact = f"Join of Trainers has no argument {sorted(unknown)[0]!r}."
            raise InvalidTypeError(message(fact, fix="leave it out; divide_by_initial_world_size is the only one."))

    def __enter__(self) -> Join:
        if self._enable:
            if any(hook.joinable._join is not None for hook in self._trainers):
                fix = "leave the first one, or nest contexts of other Trainers."
                raise InvalidRequestError(message("a Trainer is in a Join already.", operation="Join", fix=fix))
            if any(each._enable and each._thread != threading.get_ident() for each in _entered):
                fact, fix = "another thread is in a Join.", "use one thread for all of them."
                raise InvalidRequestError(message(fact, operation="Join", fix=fix))
            self._number = self._world.next_number("Join")  # from 1, equal on all workers
        self._before = [joinable._join for joinable in self._joinables]
        for joinable in self._joinables:
            joinable._join = self if self._enable else None
        self._followed = 0  # iterations
        self._beginner: Optional[Joinable] = None  # of Trainers alone, the first one that this worker has stepped
        self._thread = threading.get_ident()
        # Worlds with unread errors that may be of withdrawn operations.
        self._held = process.current().worlds_within(self._world) if self._enable and self._throws else []
        for world in self._held:
            world.hold_unread(1)
        _entered.append(self)
        return self

    def __exit__(self, kind: Any, error: Optional[BaseException], traceback: Any) -> None:
        try:
            if self._was_declined(error):
                self._begin_or_throw()  # as the next joinable would
            if error is None and self._enable:
                self._followed = 0  # without the iterations at the end of a context within this one
                if self._throws:
                    self._end_all()
                elif not self._follows_steps:
                    self._follow()
                elif not self._world.is_alone:
                    self._follow_steps()
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
            for joinable, before in zip(self._joinables, self._before):
                joinable._join = before

    @staticmethod
    def notify_join_context(joinable: Joinable) -> Optional[native.Work]:
        """Announce to the workers that have joined that this one begins an iteration. Called by joinables.

        Returns
        -------
        native.Work or None
            The handle of an allreduce in flight; None outside of an enabled context, from all but its first joinable,
            and where no other worker waits for it.

        Raises
        ------
        RuntimeError
            A worker is exhausted, and the context was made with `throw_on_early_termination`.
        """
        assert hasattr(joinable, "_join"), (
            f"Check that the {type(joinable)} constructor calls the ``Joinable`` constructor"
        )
        context: Optional[Join] = joinable._join
        if context is None or context._follows_steps:
            return None
        if context._has_only_trainers:
            # Their order is that of their steps, which is the same on all workers with input.
            context._beginner = context._beginner or joinable
        if joinable is not (context._beginner or context._joinables[0]):
            return None
        if context._throws:
            return context._begin_or_throw()
        if context._world.is_alone:
            return None
        # Nobody reads its error: the operations of the training have the same one.
        with context._world.submitting():
            return context._submit(LEFT, 1)[0]

    # -- The protocol -----------------------------------------------------------------------------------------------

    def _follow(self) -> None:
        """Run the hooks in each iteration that another worker begins, until none does."""
        while not self._world.is_alone:
            with self._world.submitting():
                work, present = self._submit(LEFT, 0)
                wait_for(work, self._world)
            if present[0] == 0:
                return
            for hook in self._hooks:
                hook.main_hook()
            self._count()

    def _begin_or_throw(self) -> Optional[native.Work]:
        """Begin an iteration of a context that throws; raises if another worker has ended."""
        if self._world.is_alone:
            return None
        work, _ = self._submit(LEFT, 1)
        if self._wait_for_early(0):
            self._throw("Detected at least one rank that exhausted inputs. Throwing across all ranks.")
        for world in self._held:
            world.raise_unread()
        return work

    def _end_all(self) -> None:
        """End the body of a context that throws; raises if another worker has begun an iteration."""
        if self._world.is_alone:
            return
        withdrawal = Withdrawal(self._world, self._number)
        if withdrawal.drain():  # others have declined operations of this worker
            self._begin_or_throw()
        work, present = self._submit(LEFT, 0)
        withdrawal.decline_until(work)
        if present[0] > 0:
            self._wait_for_early(1)
            self._throw(f"Rank {self._world.topology.rank_in_all} exhausted all inputs.", withdrawal)

    def _throw(self, text: str, withdrawal: Optional[Withdrawal] = None) -> NoReturn:
        """Raise on all workers, once the operations that only some of them have submitted are over."""
        withdrawal = withdrawal or Withdrawal(self._world, self._number)
        withdrawal.drain()
        # Patient: a host learns of operations that another one submits after this one only once all have come to it.
        work, _ = self._submit(f"{native.PATIENT}join/{self._number}/withdrawn", 0)
        withdrawal.decline_until(work)
        withdrawal.drain()
        withdrawal.agree()
        raise _Exhausted(text, self._world)

    def _was_declined(self, error: Optional[BaseException]) -> bool:
        """Whether an operation failed because a worker of this context, which throws, has no more input."""
        throws = self._enable and self._throws and not isinstance(error, _Exhausted)
        return throws and is_withdrawn(error, self._world, self._number)

    def _follow_steps(self) -> None:
        """Take the others' steps until no worker has input any more."""
        # Each worker that has left the body submits a sum without timeout; it is complete when all have left. Nothing
        # here blocks for one Trainer: another worker may wait for another Trainer's step.
        current = self._world
        # The others may step Trainers of contexts around this one before they leave this one.
        contexts = [each for each in _entered if each._follows_steps and each._world is current and each._enable]
        hooks = {hook: each for each in contexts for hook in each._trainers}
        waiting = ThreadPoolExecutor(len(hooks), "kvstore_hvd-join")
        # First come this worker's own last steps, which may still wait for their gradients or for other workers.
        own = set(hooks)
        steps: dict[TrainerHook, Future[None]] = {hook: waiting.submit(hook.joinable.wait_for_own) for hook in hooks}
        left: Optional[native.Work] = None
        pauses = Pauses()
        try:
            while left is None or not left.done or steps:
                for hook in [hook for hook, step in steps.items() if step.done()]:
                    steps.pop(hook).result()
                    if hook in own:
                        own.remove(hook)
                    else:
                        hook.joinable.update()
                if left is None and not own:
                    with current.submitting():
                        left, _ = self._submit(LEFT, 0)
                is_over = left is not None and left.done
                begun = [] if is_over else self._begun([hook for hook in hooks if hook not in steps])
                for hook in begun:
                    hook.joinable.submit_zeros(hook.weight)
                    steps[hook] = waiting.submit(hook.joinable.wait)
                    hooks[hook]._count()
                pauses.after(found=bool(begun))
        finally:
            waiting.shutdown(wait=False)  # after an exception its threads end when the world is aborted
        wait_for(left, current)

    def _begun(self, hooks: Sequence[TrainerHook]) -> list[TrainerHook]:
        """The hooks of Trainers with a step that others have begun, and that this worker can follow."""
        missed = self._world.engine().missed(native.MAX_NAMES, any(hook.joinable.is_deferred for hook in hooks))
        if not missed:
            return []
        for hook in hooks:
            hook.initialize(missed)
        return [hook for hook in hooks if hook.has_begun(missed)]

    def _count(self) -> None:
        """Count an iteration of the others."""
        self._followed += 1
        if self._followed == _WARN_AFTER + 1:
            text = f"Detected uneven input skew of greater than {_WARN_AFTER}. This means that rank "
            text += f"{self._world.topology.rank_in_all} has at least {_WARN_AFTER} fewer inputs than other "
            text += "currently-active ranks. This level of skew could lead to performance degradation during training."
            warnings.warn(text, stacklevel=4)

    def _tell_of(self, error: BaseException) -> None:
        """Abort the world, since other workers would wait for this one, unless they have the same error."""
        if not self._enable or self._world.is_alone or self._is_shared(error):
            return
        if any(each._was_declined(error) for each in _entered):  # by a worker of a context around this one
            return
        with contextlib.suppress(Exception):  # the error of the body is the one to raise
            reason = in_one_line(error, "RuntimeError" if isinstance(error, _Exhausted) else "").rstrip(": .")
            self._world.abort(f"rank {self._world.topology.rank_in_all} left a Join context with {reason}")

    def _is_shared(self, error: BaseException) -> bool:
        """Whether all workers of the context have the error, not only workers of a process set or this one."""
        if isinstance(error, _Exhausted):
            return error.world is self._world
        if not isinstance(error, _SHARED):
            return False
        who = str(error).partition("]")[0]  # see `Place.prefix`
        worlds = [each for each in process.current().worlds_within(self._world) if each is not self._world]
        sets = [each.topology.set_number for each in worlds if each.topology.set_number]
        return not any(re.search(rf"process set {number}\b", who) for number in sets)

    def _submit(self, name: str, value: int) -> tuple[native.Work, Any]:
        """Submit a sum over the workers of this context; returns its handle and its memory."""
        table = np.array([value], np.int64)
        # The group tells contexts apart that use one name.
        return submit_sum(self._world, name, f"'{name}'", table, self._number), table

    def _wait_for_early(self, early: int) -> bool:
        """Whether a worker has ended early; waits for all."""
        work, total = self._submit(early_name(self._number), early)
        self._world.engine().wait(work)
        return bool(total[0] > 0)


def is_uneven() -> bool:
    """Whether this process is in a context in which workers go on while others have no input."""
    return any(context._enable and not context._throws for context in _entered)
