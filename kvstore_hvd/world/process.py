"""This process among the workers: joining their world, leaving it, forking, and starting over.

One `Process` holds the present world. MXNet creates stores without arguments: they find it through `current()`.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import socket
import threading
from collections.abc import Sequence
from typing import Any

from kvstore_hvd import log, native
from kvstore_hvd.config import config, reload
from kvstore_hvd.errors import HorovodInternalError, InvalidRequestError, LaunchError, message
from kvstore_hvd.mxnet_compat import hooks
from kvstore_hvd.world.control import ControlConnection, control_connection
from kvstore_hvd.world.discover import discover, warn_beside
from kvstore_hvd.world.exit import ExitWatchdog, early_end, shorten_tracebacks
from kvstore_hvd.world.flight import answer_signals
from kvstore_hvd.world.member import Member, SetMember
from kvstore_hvd.world.recorder import Recorder
from kvstore_hvd.world.topology import Place, Topology, World, exchange

__all__ = ["init", "is_initialized", "reset", "shutdown", "topology"]


class Process:
    """This process, with its parts in the world of all workers and in the worlds of process sets."""

    def __init__(self) -> None:
        self.departures = 0  # by `shutdown`
        self._lock = threading.RLock()
        self._member = Member()
        #: Its parts in the worlds of process sets that are joined now, in the order of their making.
        self.sets: list[SetMember] = []
        self._set_joins = 0  # in the present world, by all of its workers alike
        self._watchdog: ExitWatchdog | None = None
        self._recorder = Recorder()
        self._meetings: dict[str, int] = {}  # by job: the number of the next meeting
        #: Control connection to the launcher, which gives out the worlds of an elastic job; None in other jobs.
        self.control: ControlConnection | None = None

    @property
    def member(self) -> Member:
        """This worker's part in the world of all; joins it first when this process never did."""
        if self._member.world is None:
            self.init()
        return self._member

    @property
    def _members(self) -> list[Member]:
        """This worker's parts in all of its worlds."""
        return [self._member, *self.sets]

    @property
    def topology(self) -> Place:
        """This worker's rank, the size, and so on, as `member` knows it; stays readable after `shutdown`."""
        return self.member.topology

    @property
    def last_topology(self) -> Place | None:
        """That of the latest world that this worker was in, left or not; None before the first one."""
        return None if self._member.world is None or self._member.is_waiting else self._member.topology

    @property
    def has_given_up(self) -> bool:
        """As `Member.has_given_up`, in any of its worlds."""
        return any(member.has_given_up for member in self._members)

    def expected_size(self) -> int | None:
        """The number of workers, or what the launcher's variables say about it; None if it is unknown."""
        if self._member.world is not None:
            return self._member.topology.size
        launch = config().mpi_launch
        return config().size or (launch.size if launch is not None else None)

    # -- Joining and leaving ----------------------------------------------------------------------------------------

    def init(self, comm: Any = None) -> Topology:
        """Join the world; does nothing when this process is in it already. After a `shutdown` it joins a fresh one.

        Reads the environment again when it joins one. Returns the `Topology`.

        Parameters
        ----------
        comm : mpi4py communicator, optional
            The workers. By default those of the last world, or those that the launcher's environment names.

        Raises
        ------
        LaunchError
            The workers could not find each other.
        ConfigError, InvalidRequestError
            The environment has settings that cannot be used.
        """
        with self._lock:
            if self._member.is_initialized:
                return self._member.topology
            reload()
            world = self._member.world
            if world is None:
                self.control = control_connection()
            if comm is not None and self.control is not None:
                fix = "call init() without comm, and make process sets in the function that elastic.run wraps."
                raise InvalidRequestError(message("the launcher chooses the workers of an elastic job.", fix=fix))
            if world is not None and self._member.is_waiting:
                self._member.wait_for(world)  # again: only `elastic.run` takes it in
            elif world is not None:
                self.meet(comm=comm)
            elif self.control is None:
                world = discover(comm)
                _tell_launcher(world.topology.rank)
                self._join(world)
            else:
                self.control.on_lost = self._on_lost
                world, is_real = self.control.enter()
                log.set_rank(world.topology.rank, world.topology.size)
                if is_real:
                    self._join(world)
                else:
                    text = "came to a running job, probably as rank %d of %d"
                    log.logger.info(text, world.topology.rank, world.topology.size)
                    self._member.wait_for(world)
            self._record_from_start()
            return self.topology

    def shutdown(self) -> None:
        """Leave the world, after those of process sets; does nothing without one. `init` joins a fresh one.

        Waits for the pending operations of this worker.

        Raises
        ------
        HorovodInternalError
            The world was lost while this worker waited for its operations.
        KVHvdError
            An operation failed, and its result was never read. This worker has left the world nevertheless.
        """
        with self._lock:
            try:
                was_lost = self._member.is_lost
                _report(self._leave(""), was_lost)
            finally:
                self._recorder.finish()
                self._forget_sets()
                self.departures += 1

    def reset(self) -> Topology:
        """Leave the world, lost or not, and meet the same workers in a fresh one; every worker must call it.

        Pending operations fail. Stores stay usable. In an elastic job others may have come or gone, and process sets
        are not met again.

        Raises
        ------
        LaunchError
            Not all workers came back in time.
        """
        with self._lock:
            if self._member.world is None:
                return self.init()
            self.leave("reset() was called")
            return self.meet()

    def leave(self, reason: str = "") -> None:
        """Leave the world, after those of process sets; does nothing without one. Raises as `Member.leave`."""
        # Afterwards no thread of MXNet's writes to arrays any more; if a reason is given, their content is undefined.
        with self._lock:
            self._leave(reason)

    def meet(self, cause: str = "reset", text: str = "", comm: Any = None) -> Place:
        """Join the next world, after `leave`, or the running job that this worker has come to."""
        with self._lock:
            world = self._member.world
            assert world is not None
            if self._member.is_forked:
                raise self._member.closed_error()
            if comm is not None:
                chosen = discover(comm)
                # Generations go on, whoever meets; meetings are counted for each group of workers.
                topology = dataclasses.replace(chosen.topology, generation=world.topology.generation + 1)
                meeting = self._meetings.get(chosen.job, 0)
                self._join(dataclasses.replace(chosen, topology=topology, meeting=meeting))
            elif self.control is not None:
                self._forget_sets()  # made anew, as ranks change
                self._join(self.control.next_world(cause, text))
            else:
                # A failed attempt is repeated under the same name: workers that have failed different numbers of times
                # would never meet otherwise.
                self._join(world.next_generation())
            return self.topology

    def _join(self, world: World) -> None:
        """Join a world, or the launcher's next one if its workers do not meet; and those of process sets again."""
        while True:
            topology = world.topology
            log.set_rank(topology.rank, topology.size)
            if topology.size > 1 and self._watchdog is None:  # the first time
                self._watchdog = ExitWatchdog()
                answer_signals()
                os.register_at_fork(before=self.before_fork, after_in_child=self.after_fork_in_child)
            try:
                self._member.join(world)
                break
            except LaunchError as error:
                if self.control is None:
                    raise
                log.logger.info("the rendezvous failed: %s", error)
                text = " ".join(map(str.strip, str(error).splitlines()))
                world = self.control.next_world("meeting", text, world.unreached)
        self._meetings[world.job] = world.meeting + 1
        if topology.size > 1:
            warn_beside(topology)
            register_exit_handler()
        self._set_joins = 0
        for each in self.sets:
            self._join_set(each, world)
        if self.control is not None and topology.generation > 0 and config().timeline not in ("", "DYNAMIC"):
            self._recorder.follow(self._member.others(), topology)
        self._record(self._members)
        if self.control is not None:
            self.control.joined(world)
        why = world.lost()  # perhaps before this world was joined
        if why:
            self.abort(why)

    def _on_lost(self, generation: int, text: str) -> None:
        world = self._member.world
        if world is not None and world.topology.generation <= generation:
            self.abort(text)

    def abort(self, text: str) -> None:
        """Fail the pending and later operations of all workers, with this text; those of process sets as well."""
        for engine in self._engines():
            engine.abort(text)

    def _engines(self) -> list[native.Engine]:
        """The engines of all worlds, also of those that this process leaves."""
        return [engine for member in self._members if (engine := member.present_engine) is not None]

    def _leave(self, reason: str) -> list[Exception]:
        """As `leave`; returns the unread errors of all worlds."""
        member = self._member
        if not member.is_initialized:
            return []
        try:
            try:
                if not reason and member.is_connected and not member.is_lost:
                    member.drain()  # pending computations of MXNet may submit more, like a layer of SyncBatchNorm
                unread = self._leave_sets(reason)
            except BaseException as error:  # Ctrl-C, above all: the other workers do not wait until the deadline
                interrupted = f"it was interrupted while it left: {type(error).__name__}"
                self._leave_sets(interrupted)
                member.leave(interrupted)
                raise
            unread.append(member.leave(reason))
            if reason:
                member.drain()  # the errors of pending operations belong to this world
            # A fork lets several worlds know of one error.
            return [] if reason else list(dict.fromkeys(error for error in unread if error is not None))
        finally:
            self._recorder.left()

    def _leave_sets(self, reason: str) -> list[Exception | None]:
        """Leave the worlds of process sets; returns their unread errors, also those of lost worlds."""
        unread: list[Exception | None] = []
        for each in self.sets:
            try:
                unread.append(each.leave(reason))
            except HorovodInternalError as error:
                unread.append(error)
        return unread

    def _forget_sets(self) -> None:
        """Let go of the worlds of process sets, which have been left."""
        for each in self.sets:
            self._member.keep_arenas(each)
        self.sets = []

    # -- Process sets -----------------------------------------------------------------------------------------------

    def join_set(self, ranks: Sequence[int], number: int, former: SetMember | None = None) -> SetMember:
        """Make a world of some of this one's workers. Left with this one, and made again by `reset`."""
        # `former`: the object of the set. Every worker of this world calls it, inside `submitting`.
        with self._lock:
            world = self._member.world
            assert world is not None
            made, failure, fault = former or SetMember(ranks, number), None, ""
            try:
                self._join_set(made, world)
            except Exception as error:  # noqa: BLE001 - the other workers wait for this one
                failure, fault = error, f"{type(error).__name__}: {error}"
            try:
                faults = enumerate(exchange(self._member.others(), self.topology, "process set", fault))
                details = [line for rank, fault in faults if fault for line in f"rank {rank}: {fault}".splitlines()]
                if details:
                    fact = f"process set {number} could not be made."
                    fix = "see the first error; the workers are as before."
                    raise LaunchError(message(fact, **self.topology.prefix, details=details, fix=fix)) from failure
            except BaseException:
                if failure is None:
                    made.leave("not all of its workers could join the process set")
                raise
            self.sets = [*self.sets, made]
            self._record([made])
            return made

    def _join_set(self, each: SetMember, world: World) -> None:
        self._set_joins += 1
        each.join_within(world, self._set_joins)

    def leave_set(self, left: SetMember) -> None:
        """Leave a world that `join_set` made; does nothing if this worker is not in it. Raises as `shutdown`."""
        with self._lock:
            if left not in self.sets:
                return
            self.sets = [each for each in self.sets if each is not left]
            try:
                was_lost, unread = left.is_lost, left.leave()
                _report([] if unread is None else [unread], was_lost)
            finally:
                fix = "create the Trainer or store again, with a registered set."
                left.closed = "its process set was removed.", fix
                self._recorder.left(left.topology)
                self._member.keep_arenas(left)

    def worlds_within(self, world: Member) -> list[Member]:
        """A world that this worker is in, and those of some of its workers and no others; without worlds of one."""
        members = set(world.topology.all_ranks)
        return [each for each in self._members if members.issuperset(each.topology.all_ranks) and not each.is_alone]

    # -- Timeline ---------------------------------------------------------------------------------------------------

    def start_timeline(self, file_path: Any, mark_cycles: bool = False) -> None:
        """See `timeline.start_timeline`; raises as `Recorder.start` and `Member.engine`."""
        with self._lock:
            self._recorder.start(file_path, mark_cycles, self.member.others(), self.topology)
            self._record(self._members)
            register_exit_handler()  # `_join` does it for several workers

    def stop_timeline(self) -> None:
        """See `timeline.stop_timeline`; raises as `Recorder.stop` and `Member.engine`."""
        with self._lock:
            if self._recorder.is_recording:
                self._recorder.stop(self._member.others(), self.topology)

    def _record(self, members: Sequence[Member]) -> None:
        for member in members:
            self._recorder.joined(member.others(), member.topology)

    def _record_from_start(self) -> None:
        path = config().timeline
        if path in ("", "DYNAMIC") or self._recorder.is_recording:
            return
        if self._member.is_waiting:
            return  # it records from its first world on, see `_join`
        try:
            self.start_timeline(path, config().timeline_mark_cycles)
        except BaseException:
            self.leave()
            raise

    # -- Fork and exit ----------------------------------------------------------------------------------------------

    def before_fork(self) -> None:
        """Wait for MXNet's operations: it would do so itself, but an unread error there would abort the process."""
        if self._member.is_connected:
            self._member.drain()
            for each in self.sets:  # the error may be of any of them: the next call of each raises it
                each.defer(self._member.deferred)

    def after_fork_in_child(self) -> None:
        """Let go of all worlds; the child may not talk to the other workers."""
        self._lock = threading.RLock()
        self._watchdog = None
        with contextlib.ExitStack() as stack:  # each of them, also if one raises
            for member in self._members:
                stack.callback(member.after_fork_in_child)

    def leave_at_exit(self) -> None:
        """Leave the world as the process ends, within the configured time; early after an exception of the program."""
        if not self._member.is_connected:  # a world of one, or one that could not be met again
            # MXNet's own exit handler ends the threads of operators written in Python before it waits for these.
            self._member.drain()
            if self._member.deferred is not None and not early_end():
                _report([self._member.deferred])
            self._recorder.finish()
            return
        raised, rank, limit_s = hooks.raised, self._member.topology.rank, config().exit_timeout_s
        reason = early_end(f"rank {rank}")
        if self._watchdog is not None:
            text = f"rank {rank} left: none of its operations completed within {limit_s:g} s at its exit"
            self._watchdog.leaving(limit_s, self._engines, text, bool(reason))
        try:
            unread = self._leave(reason)  # without the lock, which a daemon thread may hold
            _report(unread)
            if unread and not raised:  # else it may follow from an error that the program has handled
                native.end_as_failed()
        except Exception as error:  # noqa: BLE001 - an exit handler cannot raise
            if not reason:
                log.logger.warning("could not leave the world in good order: %s", error)
        finally:
            # After an exception MXNet's own exit handler may wait for ever: the watchdog stays until the process ends.
            if self._watchdog is not None and not reason:
                self._watchdog.left.set()
            self._recorder.finish()


def _tell_launcher(rank: int) -> None:
    """Have a launcher that shows how many workers have come count this one."""
    if config().arrivals:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(b"%d" % rank, f"\0{config().arrivals}".encode())


def _report(unread: Sequence[Exception], was_lost: bool = True) -> None:
    """Raise the first error and log the others; log all where an operation has reported the lost world before."""
    for error in unread if was_lost else unread[1:]:
        log.logger.error("an operation failed, and its result was never read:\n%s", error)
    if unread and not was_lost:
        raise unread[0]


_current = Process()


def current() -> Process:
    """This process."""
    return _current


#: This worker's part in the world of all workers, joined or not.
everybody = _current._member

init = _current.init
shutdown = _current.shutdown
reset = _current.reset


def is_initialized() -> bool:
    """Whether this process is in a world of workers."""
    return _current._member.is_initialized


def topology() -> Topology:
    """This worker's rank, the size, and so on; joins the world first when this process never did."""
    return _current.topology


def register_exit_handler() -> None:
    """Have this process leave its world at exit, and show its errors shortly."""
    shorten_tracebacks()
    # MXNet waits for its operations at exit. To be able to end those, our handler has to run before MXNet's, and so
    # must be registered after it: this is called when a world is joined, and once MXNet is imported.
    atexit.unregister(_current.leave_at_exit)
    atexit.register(_current.leave_at_exit)
