"""The process's place in the world of workers: joining it, leaving it, forking, and starting over.

One `Engine` holds the current world. MXNet creates stores without arguments, so the stores of a process find it through
`current()`.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvstore_hvd import bootstrap, log, mxnet_compat, native
from kvstore_hvd.comm.base import Communicator, Request
from kvstore_hvd.comm.shm import ShmCommunicator
from kvstore_hvd.config import config
from kvstore_hvd.errors import HorovodInternalError, ShutdownError, message
from kvstore_hvd.leaving import ExitWatchdog, early_end
from kvstore_hvd.namespaces import Namespaces
from kvstore_hvd.recording.recorder import Recorder
from kvstore_hvd.stall import StallInspector
from kvstore_hvd.topology import Host, Topology, World

__all__ = ["Engine", "current", "register_exit_handler"]


class Engine:
    """The current world of one process. All methods may be called from any thread."""

    def __init__(self, ranks: Sequence[int] = (), number: int = 0) -> None:
        # Of a world inside another: its workers' ranks there, and what tells it from others.
        self._ranks, self._number = tuple(ranks), number
        self.departures = 0  # by `shutdown`
        self._inner: list[Engine] = []  # worlds of some of this one's workers, in the order of their making
        self._lock = threading.RLock()
        self._world: World | None = None
        self._communicator: Communicator | None = None
        self._leaving: Communicator | None = None
        self._adapter: native.MXNetAdapter | None = None
        self._watchdog: ExitWatchdog | None = None
        self._inspector: StallInspector | None = None
        self._deferred: Exception | None = None  # an error that no read has raised, for the next call
        self._closed = ""  # why there is no world any more
        self._remedy = ""
        self._forked = False
        self._arenas: list[native.Arena] = []  # of this world, and of earlier ones as long as arrays lie in them
        self._namespaces = Namespaces()
        self._recorder = Recorder()

    # -- Joining and leaving ----------------------------------------------------------------------------------------

    def init(self, comm: Any = None) -> Topology:
        """Join the world; does nothing when this process is in it already. After a `shutdown` it joins a fresh one.

        Parameters
        ----------
        comm : mpi4py communicator, optional
            The workers. By default those of the last world, or whom the launcher's environment names.

        Returns
        -------
        Topology

        Raises
        ------
        LaunchError
            The workers could not find each other.
        ConfigError, InvalidRequestError
            The environment has settings that cannot be used.
        """
        with self._lock:
            if self._world is None:
                self._join(bootstrap.discover(comm))
            elif self._closed:
                self._rejoin(comm)
            else:
                return self._world.topology
            self._record_from_start()
            return self.topology

    def shutdown(self, reason: str = "") -> None:
        """Leave the world; does nothing without one.

        Waits for the pending operations of this worker, unless `reason` is given: then they fail, and so do those of
        the other workers that need this one, with the reason in their text.

        Raises
        ------
        HorovodInternalError
            The world was lost while this worker waited for its operations.
        KVHvdError
            An operation failed, and nobody has read its result. This worker has left the world nevertheless.
        """
        with self._lock:
            # A world that is lost already has told so, by the operation that failed.
            was_lost = self._communicator is not None and self._communicator.health() is not None
            try:
                unread = self._leave(reason)
            finally:
                self._recorder.finish()
                for inner in self._inner:
                    self._arenas += inner._arenas  # arrays may lie in them
                self._inner = []
                self.departures += 1
            if unread is not None and was_lost:
                _log_unread(unread)
            elif unread is not None:
                raise unread

    def _leave(self, reason: str) -> Exception | None:
        """Leave the world; returns the error of an operation whose result nobody has read, unless there is a reason.

        MXNet raises an error once, and then hands out what the array happens to hold: whoever gets this is the last
        one to hear of it.
        """
        if self._world is None or self._closed:
            return None
        inner_unread = self._leave_inner(reason)
        self._closed = f"this worker left the world{': ' + reason if reason else ''}."
        self._remedy = "call kvstore_hvd.reset() on every worker to meet again."
        self._leaving, self._communicator = self._communicator, None
        if self._leaving is None:
            return None
        try:
            if not reason:
                self._drain()
            self._leaving.shutdown(reason)
            # Every operation is complete now; MXNet has to hand the results or errors on before the adapter goes. Not
            # if this worker ends early: something may be wrong with MXNet itself.
            if not reason:
                self._drain()
        finally:  # Ctrl-C may interrupt the waits
            self._recorder.left()
            if self._inspector is not None:
                self._inspector.stop()
            self._inspector = self._adapter = None
            self._leaving = None
        log.logger.debug("left the world")
        if reason:
            return None
        unread, self._deferred = self._deferred, None
        return inner_unread if inner_unread is not None else unread

    def _leave_inner(self, reason: str) -> Exception | None:
        """Leave every inner world, as `_leave`; a lost one counts as unread too."""
        first: Exception | None = None
        for inner in self._inner:
            try:
                unread = inner._leave(reason)
            except HorovodInternalError as error:
                unread = error
            first = unread if first is None else first
        return first

    def reset(self) -> Topology:
        """Leave the world, lost or not, and meet the same workers in a fresh one; every worker must call it.

        Pending operations fail. Stores stay usable.

        Raises
        ------
        LaunchError
            Not all workers came back in time.
        """
        with self._lock:
            if self._world is None:
                return self.init()
            self._leave("reset() was called")
            self._drain()  # the errors of what was pending belong to the old world
            self._rejoin()
            return self.topology

    def abort(self, text: str) -> None:
        """Fail the pending and later operations of all workers, with this text."""
        communicator = self._communicator or self._leaving
        if communicator is not None:
            communicator.abort(text)
        for inner in self._inner:
            inner.abort(text)

    def join_inner(self, ranks: Sequence[int], number: int) -> Engine | None:
        """Make a world of some of this one's workers; every worker of this one calls it, in the same order.

        It is left with this one, and made again by `reset`.

        Parameters
        ----------
        ranks : sequence of int
            In ascending order.
        number : int
            Of no other inner world; the same on all workers.

        Returns
        -------
        Engine or None
            None on a worker that is not one of `ranks`.

        Raises
        ------
        LaunchError
            Not all of these workers came in time.
        """
        with self._lock:
            assert self._world is not None
            if self._world.topology.rank not in ranks:
                return None
            if config().timeline or self._recorder.is_recording:
                log.once("timeline-sets", logging.WARNING, "operations of process sets are not in the timeline")
            inner = Engine(ranks, number)
            inner._join(inner._world_in(self._world))
            self._inner.append(inner)
            return inner

    def leave_inner(self, inner: Engine) -> None:
        """Leave a world that `join_inner` made. Raises as `shutdown`."""
        with self._lock:
            self._inner.remove(inner)
            try:
                inner.shutdown()
            finally:  # arrays may lie in its arenas
                self._arenas = [arena for arena in (*self._arenas, *inner._arenas) if arena.used]

    def _world_in(self, world: World) -> World:
        """The world of `_ranks` inside `world`."""
        topology = world.topology
        rank = self._ranks.index(topology.rank)
        # One host; see bootstrap.
        hosts = [Host.here()] * len(self._ranks)
        return World(
            Topology.of(rank, hosts, epoch=topology.epoch, source=topology.source),
            f"{world.job}.set{self._number}",
            world.secret,
        )

    def _rejoin(self, comm: Any = None) -> None:
        assert self._world is not None
        if self._forked:
            topology = self._world.topology
            raise ShutdownError(message(self._closed, rank=topology.rank, size=topology.size, fix=self._remedy))
        # A failed attempt does not count: it is made again for the same epoch, or workers that failed a different
        # number of times would never meet.
        world = self._world
        if comm is not None:
            chosen = bootstrap.discover(comm)
            # Epochs go on, whoever meets: a name of an earlier meeting is not used again.
            topology = dataclasses.replace(chosen.topology, epoch=world.topology.epoch)
            world = dataclasses.replace(chosen, topology=topology)
        self._join(world.next_epoch())

    def _join(self, world: World) -> None:
        topology = world.topology
        if not self._ranks:
            log.set_rank(topology.rank, topology.size)
        self._deferred = None
        if topology.size > 1:
            if self._world is not None:
                self._closed = "this worker could not join the world."
            if config().simd != "auto" and not native.set_simd_target(config().simd):
                log.once("simd", logging.WARNING, "this CPU has no %s; using %s", config().simd, native.simd_target())
            self._communicator = ShmCommunicator(world)
            self._arenas = [arena for arena in self._arenas if arena.used]
            if self._communicator.arena is not None:
                self._arenas.append(self._communicator.arena)
            _register_fork_handlers()
            if self._watchdog is None and not self._ranks:
                limit_s = config().exit_timeout_s
                text = f"rank {topology.rank} left: its operations did not complete within {limit_s:g} s of its exit"
                self._watchdog = ExitWatchdog(limit_s, lambda: self.abort(text))
            self._inspect(self._communicator, topology)
            if not self._ranks:
                register_exit_handler()
        self._world = world
        self._closed = self._remedy = ""
        self._recorder.joined(self._communicator, topology)
        for inner in self._inner:
            inner._join(inner._world_in(world))
        log.logger.debug("joined a world: %s", topology)

    # -- Timeline ---------------------------------------------------------------------------------------------------

    def start_timeline(self, file_path: Any, mark_cycles: bool = False) -> None:
        """See `timeline.start_timeline`; raises as `Recorder.start` and `communicator`."""
        with self._lock:
            topology = self.topology
            self._recorder.start(file_path, mark_cycles, self._others(), topology)
            register_exit_handler()  # with one worker nobody has done so

    def stop_timeline(self) -> None:
        """See `timeline.stop_timeline`; raises as `Recorder.stop` and `communicator`."""
        with self._lock:
            if self._recorder.is_recording:
                self._recorder.stop(self._others(), self.topology)

    def _others(self) -> Communicator | None:
        return None if self.is_alone else self.communicator()

    def _record_from_start(self) -> None:
        path = config().timeline
        if path in ("", "DYNAMIC") or self._recorder.is_recording:
            return
        try:
            self.start_timeline(path, config().timeline_mark_cycles)
        except BaseException:
            self._leave("")
            raise

    def _inspect(self, communicator: Communicator, topology: Topology) -> None:
        check_s, shutdown_s = config().stall_check_s, config().stall_shutdown_s
        if config().stall_check_disable or not check_s:
            return
        self._inspector = StallInspector(
            communicator, topology.rank, topology.size, check_s, shutdown_s, self._namespaces.describe
        )
        self._inspector.start()

    # -- What stores need -------------------------------------------------------------------------------------------

    @property
    def is_initialized(self) -> bool:
        """Whether this process is in a world."""
        return self._world is not None and not self._closed

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of a worker: it knows the world, and is not in it."""
        return self._forked

    @property
    def topology(self) -> Topology:
        """Who this worker is and how many there are; joins the world first when this process never did.

        Stays readable after `shutdown`.
        """
        world = self._world
        return self.init() if world is None else world.topology

    def expected_size(self) -> int | None:
        """How many workers there are, or what the launcher's variables say about it; None if nobody knows."""
        if self._world is not None:
            return self._world.topology.size
        known = config()
        return known.size or (known.mpi_launch.size if known.mpi_launch is not None else None)

    @property
    def is_alone(self) -> bool:
        """Whether this worker is the only one: then every operation is a local copy."""
        return self.topology.size == 1 and not self._closed

    def next_namespace(self, label: Callable[[str], str]) -> str:
        """A namespace for a new store: equal on all workers when they create their stores in the same order.

        `label` is a method of the store that returns how messages name a key, see `Namespaces.add`.
        """
        return self._namespaces.add(label)

    def communicator(self) -> Communicator:
        """The way to the other workers.

        Raises
        ------
        ShutdownError
            There is none: this worker left the world, or is a forked child.
        """
        communicator = self._communicator
        if communicator is None:
            topology = self.topology
            fact = self._closed or "there is only one worker."
            raise ShutdownError(message(fact, rank=topology.rank, size=topology.size, fix=self._remedy))
        return communicator

    def mxnet_adapter(self) -> native.MXNetAdapter:
        """The adapter for arrays of the MXNet in this process. Raises as `communicator`."""
        if self._adapter is None:
            with self._lock:
                communicator = self.communicator()
                if self._adapter is None:
                    self._adapter = communicator.mxnet_adapter(
                        mxnet_compat.libmxnet_path(), mxnet_compat.engine_is_naive()
                    )
        return self._adapter

    @property
    def used_adapter(self) -> native.MXNetAdapter | None:
        """The adapter, if it is in use already."""
        return self._adapter

    @property
    def current_adapter(self) -> native.MXNetAdapter | None:
        """The adapter, if it is in use already and no error waits to be raised. For callers in a hurry."""
        return self._adapter if self._deferred is None else None

    def report(self) -> native.EngineStatistics:
        """What was measured of this worker's operations since it joined its world."""
        communicator = self._communicator
        return native.EngineStatistics() if communicator is None else communicator.report()

    @property
    def arena(self) -> native.Arena | None:
        """Where gradients live that the other workers sum in place; None when there is no such memory."""
        communicator = self._communicator
        return None if communicator is None else communicator.arena

    def adapter_for_gradients(self) -> native.MXNetAdapter | None:
        """The adapter whose arena gradients may live in, or None: one worker, no world yet, or switched off."""
        communicator = self._communicator
        if communicator is None or communicator.arena is None or not config().zero_copy:
            return None
        if communicator.health() is not None:
            return None  # a rank that lags behind may still write to what the lost world's arena would hand out again
        return self.mxnet_adapter()

    @contextlib.contextmanager
    def submitting(self) -> Iterator[None]:
        """Surround the submission of operations: raises what went wrong since the last one.

        MXNet raises an asynchronous error at one read only and then hands out stale values; this is how a lost world
        is noticed whatever the program reads.

        Raises
        ------
        HorovodInternalError
            Before anything is submitted: the world is lost. The same error each time, until `reset`.
        ShutdownError
            Before anything is submitted, as `communicator`.
        KVHvdError
            An earlier operation failed, and nobody has read its result yet; once. In a world that is not lost it is
            raised after the submission: when such an error arrives is chance, and what a worker submits must not depend
            on that, or the others would wait for what it left out.
        """
        failure = None if self.is_alone else self.communicator().health()
        unread = self._take_unread()
        if failure is not None:
            # An unread error came first, and may be why the others have left.
            raise unread if unread is not None else failure
        try:
            yield
        except BaseException:
            self._deferred = unread
            raise
        if unread is not None:
            raise unread

    def check(self) -> None:
        """Raise as `submitting`."""
        with self.submitting():
            pass

    def _take_unread(self) -> Exception | None:
        unread = None if self._adapter is None else self._adapter.take_unread_error()
        deferred, self._deferred = self._deferred, None
        # Both tell of the same operation; the first is the one with our own class.
        return unread if unread is not None else deferred

    def barrier(self, name: str) -> None:
        """Wait until every worker has called it with this name. Raises as `check`."""
        with self.submitting():
            if not self.is_alone:
                token = np.zeros(1, np.int32)
                place = [token.ctypes.data]
                self.communicator().run(Request("allreduce", f"barrier/{name}", "barrier", place, place, [1], "int32"))

    def all_rows(self, name: str, label: str, row: np.ndarray[Any, np.dtype[np.int64]]) -> Any:
        """Every worker's row of int64 numbers, as a table with one row for each rank; waits for them.

        Rows have the same length on all workers. To be called inside `submitting`, with all that follows from it.

        Raises
        ------
        MismatchError
            Another worker does something else under this name.
        HorovodInternalError
            The world is lost.
        """
        table = np.zeros((self.topology.size, row.size), np.int64)
        table[self.topology.rank] = row
        if not self.is_alone:
            place = [table.ctypes.data]
            self.communicator().run(Request("allreduce", name, label, place, place, table.shape, "int64"))
        return table

    # -- Fork and exit ----------------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Wait for MXNet's operations: it would do so itself, but an unread error there would abort the process."""
        if self._communicator is not None:
            self._drain()
            for inner in self._inner:  # nobody can tell whose it was: the next call of any of them raises it
                inner._deferred = inner._deferred or self._deferred

    def after_fork_in_child(self) -> None:
        """Let go of the world; the child may not talk to the other workers."""
        self._lock = threading.RLock()
        self._watchdog = self._inspector = None
        if self._communicator is not None:
            if self._adapter is not None:
                self._adapter.after_fork_in_child()
            self._communicator = self._adapter = self._deferred = None
            self._forked = True
            self._closed = "this process is a forked child of a worker."
            self._remedy = "use stores in the worker itself only."
        arenas, self._arenas = self._arenas, []  # a child of this child gets copies of them anyway
        with contextlib.ExitStack() as stack:  # each of them, whatever happens to the others
            for inner in self._inner:
                stack.callback(inner.after_fork_in_child)
            for arena in arenas:
                stack.callback(arena.after_fork_in_child)

    def leave_at_exit(self) -> None:
        """Leave the world as the process ends, within the configured time, and tell the others if it ends early."""
        if self._communicator is None:
            self._recorder.finish()  # of a world of one, or one that could not be met again
            return
        if self._watchdog is not None:
            self._watchdog.leaving()
        reason = early_end()
        try:
            unread = self._leave(reason)
            if unread is not None:
                _log_unread(unread)
                native.end_as_failed()
        except Exception as error:  # noqa: BLE001 - the process ends; an exit handler has nobody to raise to
            log.logger.warning("could not leave the world in good order: %s", error)
        finally:
            # After an exception MXNet's own exit handler may wait for ever: the watchdog stays until the process ends.
            if self._watchdog is not None and not reason:
                self._watchdog.left()
            self._recorder.finish()

    def _drain(self) -> None:
        if not mxnet_compat.is_imported():
            return
        try:
            mxnet_compat.waitall()
        except Exception as error:  # noqa: BLE001 - whatever an operation failed with
            self._deferred = error


def _log_unread(error: Exception) -> None:
    log.logger.error("an operation failed, and its result was never read:\n%s", error)


_current = Engine()
_fork_handlers_registered = False


def current() -> Engine:
    """The engine of this process."""
    return _current


def register_exit_handler() -> None:
    """Have this process leave its world at exit. Called again, the handler runs before all that were registered since.

    MXNet waits for its operations at exit. To be able to end those, our handler has to run before MXNet's, and so must
    be registered after it: this is called when a world is joined, and once MXNet is imported.
    """
    atexit.unregister(_current.leave_at_exit)
    atexit.register(_current.leave_at_exit)


def _register_fork_handlers() -> None:
    global _fork_handlers_registered
    if not _fork_handlers_registered:
        _fork_handlers_registered = True
        os.register_at_fork(before=_current.before_fork, after_in_child=_current.after_fork_in_child)
