"""The loop around elastic training: what a lost world costs, and how the next one begins.

Horovod, "Elastic Horovod", is the reference for the order of calls.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from kvstore_hvd import log
from kvstore_hvd.elastic import checkpoint
from kvstore_hvd.elastic.notification import notification_manager
from kvstore_hvd.elastic.recovery import REPLACES, as_lost_world, check_recoverable
from kvstore_hvd.errors import (
    HorovodInternalError,
    HostsUpdatedInterrupt,
    InvalidRequestError,
    InvalidTypeError,
    TimeoutError,  # noqa: A004 - Horovod's word
    message,
)
from kvstore_hvd.mxnet import process_sets
from kvstore_hvd.world import process

Result = TypeVar("Result")
Saved = TypeVar("Saved", bound="Synchronised")
if TYPE_CHECKING:
    from typing_extensions import Concatenate, ParamSpec

    Arguments = ParamSpec("Arguments")


class Synchronised(Protocol):
    """What the loop asks of a state, see `kvstore_hvd.elastic.State`."""

    def sync(self) -> None:
        """Give every worker the state of rank 0."""

    def restore(self) -> None:
        """Go back to the last commit."""

    def on_reset(self) -> None:
        """Adapt to a new world."""

    def on_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """Hear that workers are about to come or go."""


_CALLED = ("sync", "restore", "on_reset", "on_hosts_updated")

# Of the calls of `run` in this process. A worker that came later makes the first one when the others make another.
_numbers = itertools.count(1)


def run(func: Callable[Concatenate[Saved, Arguments], Result]) -> Callable[Concatenate[Saved, Arguments], Result]:
    """Continue training when workers are lost, come, or go.

    Parameters
    ----------
    func : callable
        Trains from the state that is its first argument, a `State` or whatever has its ``sync``, ``restore``,
        ``on_reset`` and ``on_hosts_updated``, and commits it from time to time (``state.commit()``). All collective
        operations belong in it. Called again in every new world.

    Returns
    -------
    callable
        Takes the same arguments. It synchronises the state of all workers (``state.sync()``) and calls `func`. When the
        world is lost it goes back to the last commit (``state.restore()``); when workers come or go, training continues
        from where it is. Then the workers meet again, ``state.on_reset()`` is called, and it starts over. It returns
        what `func` returns. Exceptions other than `HorovodInternalError` and `HostsUpdatedInterrupt` propagate.
        A worker that joins later starts the program from its beginning, so no collective operation may come between
        ``hvd.init()`` and the call, not even ``hvd.broadcast_parameters``: ``state.sync()`` does that.

    Raises
    ------
    HorovodInternalError
        The world was lost, and without an elastic launcher nothing can replace the worker that died.
    LaunchError
        The launcher ends the job, or the workers could not meet again.
    InvalidTypeError
        The state lacks one of these methods.
    InvalidRequestError
        It is called within itself; or this worker came to the job when the others were in a later call of a function
        that `run` wraps.
    """
    return run_fn(func, reset=None)


def run_fn(
    func: Callable[Concatenate[Saved, Arguments], Result], reset: Callable[[], None] | None = None
) -> Callable[Concatenate[Saved, Arguments], Result]:
    """As `run`, with a function to call in place of `kvstore_hvd.reset` to meet the workers of the next world."""

    @functools.wraps(func)
    def wrapper(state: Saved, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        notification_manager.init()
        loop = _Loop(state, reset)
        loop.begin()
        try:
            loop.resume()
            if process.current().is_waiting:
                loop.meet("start")
            else:
                notification_manager.repeat()  # of what came while the program prepared
            while True:
                lost: HorovodInternalError | None = None
                try:
                    if not loop.skips_sync:
                        state.sync()
                        loop.has_state()
                    result = func(state, *args, **kwargs)
                    loop.finish()
                    return result
                except HostsUpdatedInterrupt as interrupt:
                    loop.skips_sync = interrupt.skip_sync
                except Exception as error:
                    lost = as_lost_world(error)
                    if lost is None:
                        raise
                # Here, so that an error of what follows is not shown as one that came while this one was handled.
                if lost is None:
                    loop.meet("updated")
                else:
                    loop.recover(lost)
        finally:
            loop.end()

    return wrapper  # type: ignore[return-value]


class _Loop:
    """What is between one world and the next."""

    is_running = False  # in this process

    def __init__(self, state: Any, reset: Callable[[], None] | None) -> None:
        self._state, self._reset = state, reset
        self._number = next(_numbers)
        self.skips_sync = False

    def begin(self) -> None:
        """Listen to the launcher."""
        lacking = [f"{name}()" for name in _CALLED if not callable(getattr(self._state, name, None))]
        if lacking:
            speaker = process.current().topology.speaker
            fact = f"the state, a {type(self._state).__name__}, has no {', '.join(lacking)}."
            fix = "derive its class from kvstore_hvd.elastic.State, or define that."
            raise InvalidTypeError(message(fact, **speaker, operation="elastic.run", fix=fix))
        if _Loop.is_running:
            speaker = process.current().topology.speaker
            fact, fix = "it is called within itself.", "decorate the outer function only."
            raise InvalidRequestError(message(fact, **speaker, operation="elastic.run", fix=fix))
        _Loop.is_running = True
        notification_manager.register_listener(self._state)

    def end(self) -> None:
        """Listen no more."""
        _Loop.is_running = False
        notification_manager.remove_listener(self._state)

    def recover(self, error: HorovodInternalError) -> None:
        """Go back to the last commit, and on into the next world."""
        check_recoverable(error)
        text = str(error).partition("\n")[0]
        log.logger.info("the world is lost, back to the last commit: %s", text)
        cause = _cause_of(error)
        process.current().abandon(text)  # whatever is under way fails, and nothing writes to arrays any more
        self._state.restore()
        self.skips_sync = False
        self.meet(cause, text)

    def meet(self, cause: str, text: str = "") -> None:
        """Form the next world, or one after it, should that be lost before it has begun."""
        while True:
            try:
                if self._reset is not None:
                    self._reset()
                if self._reset is None or process.current().is_waiting:
                    _meet(cause, text)
                self._agree()
                self._state.on_reset()
                notification_manager.repeat()
                return
            except Exception as error:
                lost = as_lost_world(error)
                if lost is None:
                    raise
                check_recoverable(lost)
                self.skips_sync = False
                cause, text = _cause_of(lost), str(lost).partition("\n")[0]

    def resume(self) -> None:
        """Begin the program's first call from the job's checkpoint, if there is one."""
        newcomer = process.current().is_waiting
        text = checkpoint.resume(self._state, is_newcomer=newcomer) if self._number == 1 else ""
        if text and process.current().topology.rank == 0:
            log.logger.warning("%s", text)

    def has_state(self) -> None:
        """The training can go on from this worker, should it be the only one that is left."""
        world = process.current()
        if world.line is not None:
            world.line.synced()
        elif world.topology.size > 1 and world.topology.rank == 0:
            log.once("not-elastic", logging.WARNING, "this job cannot replace workers that die: %s", REPLACES)

    def finish(self) -> None:
        """Training is over on this worker."""
        checkpoint.finish()
        line = process.current().line
        if line is not None:
            line.finished()

    def _agree(self) -> None:
        """Skip the next sync only if all workers would: those that are new to the world need it."""
        world = process.current().member
        with world.submitting():
            own = np.array([self.skips_sync, self._number], np.int64)
            rows = world.all_rows("elastic.run", "elastic/skip", "the start of a world", own)
        latest = int(rows[:, 1].max())
        if self._number < latest:
            fact = f"this worker is in call {self._number} of run, but the training is in call {latest} by now."
            fix = "call the decorated function once: a worker that joins later starts the program from its beginning."
            raise InvalidRequestError(message(fact, **world.topology.speaker, operation="elastic.run", fix=fix))
        self.skips_sync = bool(rows[:, 0].all())
        process_sets.rejoin()


def _cause_of(error: HorovodInternalError) -> str:
    """Why the world is lost: after a timeout, who does not come soon stands still, and is not waited for again."""
    return "timeout" if isinstance(error, TimeoutError) or process.current().has_given_up else "lost"


def _meet(cause: str, text: str) -> None:
    world = process.current()
    if not world.is_waiting:
        # All have agreed on an update: without a reason nobody fails who still waits for the end of that.
        world.abandon("" if cause == "updated" else text or "the world was left")
    world.meet(cause, text)
