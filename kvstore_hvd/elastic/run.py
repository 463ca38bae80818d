"""The loop around elastic training: recovery from a lost world, the next world, and the launcher's notifications.

Horovod, "Elastic Horovod", is the reference for the order of calls.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from kvstore_hvd import errors, log
from kvstore_hvd.elastic import checkpoint
from kvstore_hvd.errors import HorovodInternalError, InvalidRequestError, PeerLostError, message
from kvstore_hvd.mxnet import process_sets
from kvstore_hvd.world import process

Result = TypeVar("Result")
Saved = TypeVar("Saved", bound="_Synchronised")
if TYPE_CHECKING:
    from typing_extensions import Concatenate, ParamSpec

    Arguments = ParamSpec("Arguments")

# The errors of a lost world, by name.
_LOST = {
    kind.__name__: kind for kind in (HorovodInternalError, PeerLostError, errors.TimeoutError, errors.TransportError)
}
_REPLACES = "start with `kvhvdrun --min-np 1 --max-np N python train.py`, which replaces workers."

# Numbers of the calls of `run` in this process. A worker that came later makes the first call when the others may make
# another one.
_numbers = itertools.count(1)


class _Synchronised(Protocol):
    def sync(self) -> None: ...
    def restore(self) -> None: ...
    def on_reset(self) -> None: ...
    def on_hosts_updated(self, timestamp: int, update_res: int) -> None: ...


class NotificationManager:
    """Forwards the launcher's updates to its listeners. Thread-safe."""

    def __init__(self) -> None:
        self._listeners: dict[int, Any] = {}  # by identity

    def init(self) -> None:
        """Listen to the launcher from now on, if this worker belongs to an elastic job."""
        process.current().init()
        control = process.current().control
        if control is not None:
            control.on_update = self._on_update

    def register_listener(self, listener: Any) -> None:
        """Call ``listener.on_hosts_updated(timestamp, update_res)`` for every update from now on."""
        self._listeners[id(listener)] = listener

    def remove_listener(self, listener: Any) -> None:
        """Call this listener no more."""
        self._listeners.pop(id(listener), None)

    def handle_hosts_updated(self, timestamp: int, update_res: int) -> None:
        """Call the listeners with the number of an update, which grows, and its `HostUpdateResult`."""
        for listener in list(self._listeners.values()):
            listener.on_hosts_updated(timestamp, update_res)

    def _on_update(self, timestamp: int, update_res: int) -> None:
        """As `handle_hosts_updated`, on the thread of the control connection, which an error would end."""
        try:
            self.handle_hosts_updated(timestamp, update_res)
        except Exception as error:  # noqa: BLE001 - a class of the program may raise anything
            fact = f"on_hosts_updated() of the state has raised {type(error).__name__}: {error}"
            fix = "correct it; until then this worker learns only from others that workers come or go."
            details = traceback.format_exc().splitlines()
            log.logger.error(message(fact, operation="elastic.run", details=details, fix=fix))

    def repeat(self) -> None:
        """Repeat an update that came after the present world was formed: states forget updates when they are reset."""
        control = process.current().control
        if control is not None and control.update is not None:
            self.handle_hosts_updated(*control.update)


#: Tells the states of this process that workers are about to come or go. `run` uses it; programs need not.
notification_manager = NotificationManager()


def run(func: Callable[Concatenate[Saved, Arguments], Result]) -> Callable[Concatenate[Saved, Arguments], Result]:
    """Continue training when workers are lost, come, or go.

    Parameters
    ----------
    func : callable
        Trains from its first argument, a `State` or another object with its methods ``sync``, ``restore``,
        ``on_reset`` and ``on_hosts_updated``, and commits it from time to time (``state.commit()``). All collective
        operations belong in it. Called again in every new world.

    Returns
    -------
    callable
        Takes the arguments of `func` and returns its result. It calls ``state.sync()`` and `func`. When the world is
        lost it calls ``state.restore()``; when workers come or go, training continues from the present state. Then the
        workers meet again, ``state.on_reset()`` is called, and it starts over. A worker that joins later starts the
        program from its beginning, so no collective operation may come between ``hvd.init()`` and the call, not even
        ``hvd.broadcast_parameters``: ``state.sync()`` does that.

    Raises
    ------
    HorovodInternalError
        The world was lost, and without an elastic launcher nothing can replace the worker that died.
    LaunchError
        The launcher ends the job, or the workers could not meet again.
    InvalidTypeError
        The state lacks one of these methods.
    InvalidRequestError
        The call is within another one; or this worker came to the job when the others were in a later call of `run`.
    Exception
        Any other one of `func`.
    """
    return run_fn(func, reset=None)


def run_fn(
    func: Callable[Concatenate[Saved, Arguments], Result], reset: Callable[[], None] | None = None
) -> Callable[Concatenate[Saved, Arguments], Result]:
    """As `run`, with a function to call in place of `kvstore_hvd.reset` to meet the workers of the next world."""

    @functools.wraps(func)
    def wrapper(state: Saved, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        notification_manager.init()
        return _Loop(state, reset).run(lambda: func(state, *args, **kwargs))

    return wrapper  # type: ignore[return-value]


class _Loop:
    """One call of a function that `run` wraps."""

    is_running = False  # a loop of this process

    def __init__(self, state: Any, reset: Callable[[], None] | None) -> None:
        self._state, self._reset, self._process = state, reset, process.current()
        self._number, self._skips_sync = next(_numbers), False
        called = ("sync", "restore", "on_reset", "on_hosts_updated")
        lacking = [f"{name}()" for name in called if not callable(getattr(state, name, None))]
        if lacking:
            fact = f"the state, of type {type(state).__name__}, has no {', '.join(lacking)}."
            fix = "derive its class from kvstore_hvd.elastic.State, or define that."
            raise errors.InvalidTypeError(self._text(fact, fix))
        if _Loop.is_running:
            raise InvalidRequestError(self._text("it is called within itself.", "decorate the outer function only."))

    def run(self, train: Callable[[], Result]) -> Result:
        mine = self._process
        _Loop.is_running = True
        notification_manager.register_listener(self._state)
        try:
            if self._number == 1:
                text = checkpoint.resume(self._state, is_newcomer=process.everybody.is_waiting)
                if text and mine.topology.rank == 0:
                    log.logger.warning("%s", text)
            if process.everybody.is_waiting:
                self._meet("start")
            else:
                notification_manager.repeat()  # an update may have come before the listener was registered
            while True:
                lost: HorovodInternalError | None = None
                try:
                    if not self._skips_sync:
                        self._state.sync()
                        if mine.control is not None:
                            mine.control.synced()
                        elif mine.topology.size > 1 and mine.topology.rank == 0:
                            text = "this job cannot replace workers that die: %s"
                            log.once("not-elastic", logging.WARNING, text, _REPLACES)
                    result = train()
                    checkpoint.finish()
                    if mine.control is not None:
                        mine.control.finished()
                    return result
                except errors.HostsUpdatedInterrupt as interrupt:
                    self._skips_sync = interrupt.skip_sync
                except Exception as error:
                    lost = _as_lost_world(error)
                    if lost is None:
                        raise
                # After the except clause: an error of the recovery does not have this one as its context.
                if lost is None:
                    self._meet("updated")
                else:
                    self._recover(lost)
        finally:
            _Loop.is_running = False
            notification_manager.remove_listener(self._state)

    def _recover(self, error: HorovodInternalError) -> None:
        """Go back to the last commit, and on into the next world."""
        cause, text = _loss(error)
        log.logger.info("the world is lost, back to the last commit: %s", text)
        self._process.leave(text)  # all pending operations fail, and no thread writes to arrays any more
        self._state.restore()
        self._skips_sync = False
        self._meet(cause, text)

    def _meet(self, cause: str, text: str = "") -> None:
        """Form the next world, or one after it if that is lost before training begins."""
        mine = self._process
        while True:
            try:
                if self._reset is not None:
                    self._reset()
                worker = process.everybody
                if self._reset is None or worker.is_waiting:
                    if worker.is_initialized and not worker.is_waiting:
                        # After an update all workers have agreed, and some may wait for the end of that operation: a
                        # reason would make it fail.
                        mine.leave("" if cause == "updated" else text or "the world was left")
                    mine.meet(cause, text)
                self._agree()
                self._state.on_reset()
                notification_manager.repeat()
                return
            except Exception as error:
                lost = _as_lost_world(error)
                if lost is None:
                    raise
                self._skips_sync = False
                cause, text = _loss(lost)

    def _agree(self) -> None:
        """Skip the next sync only if all workers would: a worker that is new to the world needs it."""
        world = self._process.member
        with world.submitting():
            own = np.array([self._skips_sync, self._number], np.int64)
            rows = world.all_rows("elastic.run", "elastic/skip", "the start of a world", own)
        latest = int(rows[:, 1].max())
        if self._number < latest:
            fact = f"this worker is in call {self._number} of run, but the training is in call {latest} by now."
            fix = "call the decorated function once: a worker that joins later starts the program from its beginning."
            raise InvalidRequestError(self._text(fact, fix))
        self._skips_sync = bool(rows[:, 0].all())
        process_sets.rejoin()

    def _text(self, fact: str, fix: str) -> str:
        return message(fact, **self._process.topology.prefix, operation="elastic.run", fix=fix)


def _as_lost_world(error: BaseException) -> HorovodInternalError | None:
    """The error as one of a lost world; None for another error."""
    # MXNet raises the errors of our operations with their classes where it can. In a graph it raises an ``MXNetError``
    # with name and text of ours. An operation on the result of a failed one raises an `InputFailedError` with the text
    # of that one.
    if isinstance(error, HorovodInternalError):
        return error
    is_ours = type(error).__name__ == "MXNetError" or isinstance(error, errors.InputFailedError)
    found = re.search(rf"({'|'.join(_LOST)}): (\[rank .*)", str(error)) if is_ours else None
    if found is None:
        return None
    lost = _LOST[found[1]](found[2])
    lost.__cause__ = error
    return lost


def _loss(error: HorovodInternalError) -> tuple[str, str]:
    """Cause and text of a lost world, for the launcher; raises PeerLostError if nobody replaces a dead worker."""
    mine = process.current()
    if mine.control is None and isinstance(error, PeerLostError):
        fact = "training cannot recover: a worker has died, and this job cannot go on without it."
        details = [line for line in str(error).splitlines() if "Fix: " not in line]
        raise PeerLostError(message(fact, details=details, fix=_REPLACES)) from error
    # After a timeout the launcher does not wait again for a stopped worker.
    is_timeout = isinstance(error, errors.TimeoutError) or mine.has_given_up
    return "timeout" if is_timeout else "lost", str(error).partition("\n")[0]
