"""One worker's part in one world of workers: its engine while it is in the world, and errors that were never read.

MXNet raises the error of an operation at one read only, and later reads return undefined values. So an unread error is
kept here, and raised by the next call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvstore_hvd import gpu, log, mxnet_compat, native
from kvstore_hvd.config import config
from kvstore_hvd.errors import InvalidRequestError, ShutdownError, message
from kvstore_hvd.mxnet_compat import hooks
from kvstore_hvd.native import EngineStatistics
from kvstore_hvd.world.segment import Connection, refusals_explained
from kvstore_hvd.world.stall import StallInspector
from kvstore_hvd.world.topology import Host, Inside, Topology, World

# Seconds after an operation's deadline: the engine fails the operation a little later, with a better text.
_PATIENCE_S = 5.0


class Member:
    """A worker's part in a world. All methods may be called from any thread."""

    def __init__(self) -> None:
        # A thread that leaves the world holds the process's lock and waits for operators of MXNet, which need this.
        self._adapter_lock = threading.Lock()
        #: The present world or the last one; None before the first one.
        self.world: World | None = None
        self._connection: Connection | None = None
        self._leaving: Connection | None = None
        self._adapter: native.MXNetAdapter | None = None
        self._inspector: StallInspector | None = None
        self._deferred_lock = threading.Lock()
        self._deferred: Exception | None = None  # an error that no read has raised, for the next call
        self._holds_unread = 0  # number of open requests to leave unread errors alone
        self._closed = ""  # why there is no world any more
        self._remedy = ""
        #: Whether this worker of an elastic job has come to a running one, and has yet to be taken in.
        self.is_waiting = False
        #: Whether this process is a forked child of a worker: it knows the world, and is not in it.
        self.is_forked = False
        self._arenas: list[native.Arena] = []  # of this world, and of earlier ones as long as arrays lie in them
        self._namespaces = Namespaces()
        # Calls without a name, by kind; and the largest number of any kind before all of these were 0. Workers may have
        # made different numbers of calls when a world is lost, so each world counts from 0.
        self._numbers_lock = threading.Lock()
        self._numbers: dict[str, int] = {}
        self._first_number = 0

    # -- Joining and leaving ----------------------------------------------------------------------------------------

    def join(self, world: World) -> None:
        """Join a world, the first one or after `leave`."""
        topology = world.topology
        self._deferred = None
        self._numbers, self._first_number = {}, 0
        if topology.size > 1:
            if self.world is not None:
                self._closed = "this worker could not join the world."
            if config().simd != "auto" and not native.set_simd_target(config().simd):
                log.once("simd", logging.WARNING, "this CPU has no %s; using %s", config().simd, native.simd_target())
            connection = Connection(world)
            self._arenas = [arena for arena in self._arenas if arena.used]
            if connection.arena is not None:
                self._arenas.append(connection.arena)
            try:
                with refusals_explained(topology):
                    self._inspect(connection.engine, topology)
            except BaseException as error:
                connection.close(f"it could not join the world: {type(error).__name__}")
                raise
            self._connection = connection
        self.world, self.is_waiting = world, False
        self._closed = self._remedy = ""
        log.logger.debug("joined a world: %s", topology)

    def wait_for(self, world: World) -> None:
        """Show `world` as this worker's, as long as a running job has not taken it in."""
        self.world, self.is_waiting = world, True
        self._closed = ""

    def leave(self, reason: str = "") -> Exception | None:
        """Leave the world; does nothing without one."""
        # Waits for the pending operations of this worker, unless `reason` is given: then they fail, and so do those of
        # the other workers that need this one, with the reason in their text; its second line may be their fix.
        if self.world is None or self._closed:
            return None
        why = reason.partition("\n")[0]
        self._closed = f"this worker left the world{': ' + why if why else ''}."
        self._remedy = "call kvstore_hvd.reset() on every worker to meet again."
        with self._adapter_lock:  # from here on there is no new adapter
            self._leaving, self._connection = self._connection, None
        if self._leaving is None:
            return None
        try:
            early = reason
            while not early and not self._leaving.engine.wait_for_all(config().timeout_s + _PATIENCE_S):
                if not config().waits_for_busy or self._waits_patiently(self._leaving.engine):
                    early = "it left while its operations were pending"
            if not early:
                self.drain()
            self._leaving.close(early)
            # Every operation is complete now; MXNet has to hand the results or errors on before the adapter goes. Not
            # if this worker ends early: something may be wrong with MXNet itself.
            if not reason:
                self.drain()
        except BaseException as error:  # Ctrl-C, above all: the others do not wait for this worker until the deadline
            self._leaving.close(f"it was interrupted while it left: {type(error).__name__}")
            raise
        finally:
            self._arenas = [arena for arena in self._arenas if arena.used]
            if self._inspector is not None:
                self._inspector.stop()
            self._inspector = self._adapter = None
            self._leaving = None
        log.logger.debug("left the world")
        if reason:
            return None
        return self._take_deferred()

    @staticmethod
    def _waits_patiently(engine: native.Engine) -> bool:
        """Whether every pending operation may wait for any time; a worker that leaves does not wait for these."""
        waiting = engine.waiting(0.0)
        return waiting is not None and all(one.name.startswith(native.PATIENT) for one in waiting)

    def shutdown(self, reason: str = "") -> None:
        """As `leave`, but raises what that returns."""
        was_lost = self.is_lost
        raise_unread(self.leave(reason), was_lost)

    def abort(self, text: str) -> None:
        """Fail the pending and later operations of all workers, with this text."""
        connection = self._connection or self._leaving
        if connection is not None:
            connection.engine.abort(text)

    @property
    def counts(self) -> tuple[int, int]:
        """How many operations of this worker are over in the present world, and how many are pending."""
        connection = self._connection or self._leaving
        return (0, 0) if connection is None else connection.engine.counts()

    @property
    def waits_for_late(self) -> bool:
        """Whether a pending operation waits for workers that have not submitted it, and has a deadline."""
        connection = self._connection or self._leaving
        waiting = None if connection is None else connection.engine.waiting(0.0)
        return any(not one.announced_by_all and not one.name.startswith(native.PATIENT) for one in waiting or ())

    def after_fork_in_child(self) -> None:
        """Let go of the world; the child may not talk to the other workers."""
        self._adapter_lock, self._deferred_lock, self._numbers_lock = (threading.Lock() for _ in range(3))
        self._inspector = None
        if self._connection is not None:
            if self._adapter is not None:
                self._adapter.after_fork_in_child()
            self._connection = self._adapter = self._deferred = None
            self.is_forked = True
            self._closed = "this process is a forked child of a worker."
            self._remedy = "use stores in the worker itself only."
        arenas, self._arenas = self._arenas, []  # a child of this child gets copies of them anyway
        with contextlib.ExitStack() as stack:  # each of them, also if one raises
            for arena in arenas:
                stack.callback(arena.after_fork_in_child)

    def keep_arenas(self, other: Member) -> None:
        """Keep the arenas of a world that was left, as long as arrays lie in them."""
        self._arenas += [arena for arena in other._arenas if arena.used]

    def defer(self, error: Exception | None) -> None:
        """Have the next call raise `error`, unless one waits for that already."""
        with self._deferred_lock:
            self._deferred = self._deferred or error

    def drain(self) -> None:
        """Wait for MXNet's operations; the error of a failed one is raised by the next call."""
        if not mxnet_compat.is_imported():
            return
        raised = hooks.raised
        try:
            mxnet_compat.waitall()
        except Exception as error:  # noqa: BLE001 - operations may fail with anything
            self.defer(error)
            hooks.raised = raised

    def hold_unread(self, change: int) -> None:
        """Postpone unread errors, while this was called with 1 more often than with -1."""
        # MXNet forgets an error as it is read, and later operations on the failed arrays run with undefined values. So
        # a Join, which forgets errors of its own, postpones all reads.
        with self._deferred_lock:
            self._holds_unread += change

    def raise_unread(self) -> None:
        """Raise an unread error, postponed or not."""
        unread = self._take_unread()
        if unread is not None:
            raise unread

    def forget_unread(self, is_meant: Callable[[Exception], bool]) -> bool:
        """Forget an unread error if `is_meant` says so; returns whether it did."""
        unread = self._take_unread()
        if unread is None or is_meant(unread):
            return unread is not None
        self.defer(unread)
        return False

    def _inspect(self, engine: native.Engine, topology: Topology) -> None:
        check_s, shutdown_s = config().stall_check_s, config().stall_shutdown_s
        if config().stall_check_disable or not check_s:
            check_s = shutdown_s = 0.0
        inspector = StallInspector(engine, topology, check_s, shutdown_s, self._namespaces.describe)
        inspector.start()
        self._inspector = inspector

    # -- What stores need -------------------------------------------------------------------------------------------

    @property
    def is_initialized(self) -> bool:
        """Whether this worker is in a world."""
        return self.world is not None and not self._closed

    @property
    def is_connected(self) -> bool:
        """Whether this worker is in a world of several."""
        return self._connection is not None

    @property
    def is_lost(self) -> bool:
        """Whether this worker's world is lost: every operation fails."""
        return self._connection is not None and self._connection.engine.health() is not None

    @property
    def deferred(self) -> Exception | None:
        """The error that the next call will raise."""
        return self._deferred

    @property
    def has_given_up(self) -> bool:
        """Whether this worker has failed the world because others did not come within the stall shutdown time."""
        return self._inspector is not None and self._inspector.has_given_up

    @property
    def topology(self) -> Topology:
        """Who this worker is in the world and how many there are; stays readable after `leave`."""
        assert self.world is not None
        return self.world.topology

    @property
    def job(self) -> str:
        """What tells the world from those of other workers."""
        assert self.world is not None
        return self.world.job

    @property
    def is_alone(self) -> bool:
        """Whether this worker is the only one: then every operation is a local copy."""
        assert self.world is not None
        return self.world.topology.size == 1 and not self._closed

    def next_namespace(self, label: Callable[[str], str]) -> str:
        """A namespace for a new store: equal on all workers when they create their stores in the same order."""
        # `label` is a method of the store that returns how messages name a key.
        return self._namespaces.add(label)

    def next_number(self, kind: str) -> int:
        """A number for a call that has no name: the n-th calls of this kind of all workers have the same one."""
        with self._numbers_lock:
            self._numbers[kind] = self._numbers.get(kind, 0) + 1
            return self._first_number + self._numbers[kind]

    def agree_on_numbers(self) -> None:
        """Go on with the same numbers everywhere, after workers have made different numbers of calls; waits for all."""
        # To be called inside `submitting`.
        with self._numbers_lock:
            row = np.array([self._first_number + max(self._numbers.values(), default=0)], np.int64)
        table = self.all_rows("join", "hvd/numbers", "join", row)
        with self._numbers_lock:
            self._numbers, self._first_number = {}, int(table.max())

    def engine(self) -> native.Engine:
        """The engine of this world. Raises where this worker is in no world of several."""
        return self._connected().engine

    def others(self) -> native.Engine | None:
        """The same; None where this worker is the only one."""
        return None if self.is_alone else self.engine()

    def _connected(self) -> Connection:
        connection = self._connection
        if self.is_waiting:
            fact = "this worker has joined a running elastic job, and the other workers have not taken it in yet."
            fix = (
                "call no collective before the function that kvstore_hvd.elastic.run wraps; state.sync() sends the "
                "parameters, so remove hvd.broadcast_parameters()."
            )
            raise InvalidRequestError(message(fact, fix=fix))
        if connection is None:
            raise self.closed_error()
        return connection

    def explain_closed(self, fact: str, remedy: str) -> None:
        """Set the reason and the fix of the errors of later calls, after this worker has left its world."""
        self._closed, self._remedy = fact, remedy

    def closed_error(self) -> ShutdownError:
        """The error of a call without a world."""
        fact = self._closed or "there is only one worker."
        return ShutdownError(message(fact, **self.topology.speaker, fix=self._remedy))

    @property
    def reaches_gpus(self) -> bool:
        """Whether arrays on GPUs can be submitted."""
        return gpu.is_installed()

    def start_device(self, device: int) -> None:
        """Be ready for operations on arrays of a GPU, before the first one is submitted. Raises as `engine`, too."""
        self._connected().start_device(device)

    def mxnet_adapter(self) -> native.MXNetAdapter:
        """The adapter for arrays of the MXNet in this process. Raises as `engine`."""
        adapter = self._adapter
        if adapter is None:
            with self._adapter_lock:
                connection, adapter = self._connected(), self._adapter
                if adapter is None:
                    adapter = self._adapter = connection.mxnet_adapter()
        return adapter

    @property
    def used_adapter(self) -> native.MXNetAdapter | None:
        """The adapter, if it is in use already."""
        return self._adapter

    @property
    def current_adapter(self) -> native.MXNetAdapter | None:
        """The adapter, if it is in use already and there is no deferred error. For the fast paths."""
        return self._adapter if self._deferred is None else None

    def report(self) -> EngineStatistics:
        """What was measured of this worker's operations since it joined its world."""
        connection = self._connection
        return EngineStatistics() if connection is None else connection.engine.report()

    @property
    def arena(self) -> native.Arena | None:
        """Where gradients live that the other workers sum in place; None when there is no such memory."""
        connection = self._connection
        return None if connection is None else connection.arena

    def adapter_for_gradients(self) -> native.MXNetAdapter | None:
        """The adapter whose arena gradients may live in, or None: one worker, no world yet, or switched off."""
        connection = self._connection
        if connection is None or connection.arena is None or not config().zero_copy:
            return None
        if connection.engine.health() is not None:
            return None  # a rank that lags behind may still write to what the lost world's arena would hand out again
        return self.mxnet_adapter()

    @contextlib.contextmanager
    def submitting(self) -> Iterator[None]:
        """Surround the submission of operations: raises the errors since the last submission."""
        # So a program notices a lost world whatever it reads.
        hooks.raised = False
        connection = self._connection
        if connection is None and not self.is_alone:
            connection = self._connected()  # raises
        failure = None if connection is None else connection.engine.health()
        unread = None if self._holds_unread and failure is None else self._take_unread()
        if failure is not None:
            # The unread error came first, and may be the cause of the loss.
            raise unread if unread is not None else failure
        try:
            yield
        except BaseException:
            self.defer(unread)
            raise
        if unread is not None:
            hooks.raised = True
            raise unread

    def check(self) -> None:
        """Raise as `submitting`."""
        with self.submitting():
            pass

    def _take_unread(self) -> Exception | None:
        adapter = self._adapter  # once: another thread may leave the world
        unread = None if adapter is None else adapter.take_unread_error()
        deferred = None if self._deferred is None else self._take_deferred()
        if unread is None or deferred is None:
            return unread if unread is not None else deferred
        if str(unread).partition("\n")[0] in str(deferred):
            return unread  # both are of the same operation; this one has our own class
        return type(deferred)(f"{deferred}\n{unread}")

    def _take_deferred(self) -> Exception | None:
        with self._deferred_lock:
            deferred, self._deferred = self._deferred, None
        return deferred

    def barrier(self, name: str) -> None:
        """Wait until every worker has called it with this name. Raises as `check`."""
        with self.submitting():
            if not self.is_alone:
                self.allreduce(f"barrier/{name}", "barrier", np.zeros(1, np.int32))

    def allreduce(self, name: str, label: str, array: np.ndarray[Any, Any], op: str = "sum") -> None:
        """Reduce an array of NumPy over the workers in place; waits for them."""
        place = [array.ctypes.data]
        self.engine().run(native.Request("allreduce", name, label, place, place, array.shape, array.dtype.name, op))

    def all_rows(self, operation: str, name: str, label: str, row: np.ndarray[Any, np.dtype[np.int64]]) -> Any:
        """Every worker's row of int64 numbers, as a table with one row for each rank; waits for them."""
        # Rows have the same length on all workers. To be called inside `submitting`. `operation`: as messages name it.
        # Earlier operations of the name may wait in MXNet's engine for their arrays.
        topology = self.topology
        if self._adapter is not None:
            self._adapter.await_turn(name)
        table = np.zeros((topology.size, row.size + 1), np.int64)
        table[topology.rank] = [*row, 1]
        if not self.is_alone:
            self.allreduce(name, label, table)
        joined = np.flatnonzero(table[:, -1] == 0).tolist()
        if joined:
            text = message(
                f"{operation.capitalize()} is not supported with Join at this time.",
                **topology.speaker,
                operation=operation,
                details=[f"{topology.rank_list(joined)} called join()."],
                fix="only allreduce can be called while workers are in join().",
            )
            raise InvalidRequestError(text)
        return table[:, :-1]


class InnerMember(Member):
    """A worker's part in the world of a process set. A worker that is not in the set is alone in a world of its own."""

    # Membership may change when the outer world is met again; the object stays valid.

    def __init__(self, ranks: Sequence[int], number: int) -> None:
        super().__init__()
        #: Of its workers in the world of all, in ascending order.
        self.ranks = tuple(ranks)
        self._number = number

    @property
    def reaches_gpus(self) -> bool:
        """See `Member.reaches_gpus`. No: two worlds' operations on one GPU could wait for each other for ever."""
        return False

    def join_inside(self, outer: World, index: int) -> None:
        """Join this world inside `outer`, whose members have joined `index - 1` before it. Raises as `join`."""
        topology = outer.topology
        is_outside = topology.rank not in self.ranks
        ranks = (topology.rank,) if is_outside else self.ranks
        inner = Topology.of(
            ranks.index(topology.rank),
            [Host(topology.hosts[rank], topology.hosts[rank]) for rank in ranks],
            generation=topology.generation,
            source=topology.source,
            inside=Inside(self._number, ranks, topology.size, is_outside),
            pids=[topology.pids[rank] for rank in ranks] if topology.pids else (),
        )
        job = f"{outer.job}.set{self._number}"
        self.join(dataclasses.replace(outer, topology=inner, job=job, index=index, unreached=[]))


class Namespaces:
    """Names under which workers match operations: ``s0/3`` of a store, ``np/loss``; and what messages call them."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._labels: dict[str, weakref.WeakMethod[Callable[[str], str]]] = {}

    def add(self, label: Callable[[str], str]) -> str:
        """A fresh namespace: equal on all workers when they ask for theirs in the same order."""
        namespace = f"s{next(self._numbers)}"
        self._labels[namespace] = weakref.WeakMethod(label, lambda _: self._labels.pop(namespace, None))
        return namespace

    def describe(self, name: str) -> str:
        """How messages name the operation: ``'dense0_weight' (key 3)``, ``'loss'``, ``barrier 's0'``."""
        namespace, _, key = name.partition("/")
        if namespace == "np":
            return f"'{key}'"
        reference = self._labels.get(namespace)
        label = None if reference is None else reference()
        return f"{namespace} '{key}'" if label is None else label(key)


def first_unread(first: Exception | None, other: Exception | None) -> Exception | None:
    """The error to raise, of two worlds that were left; the other error is logged."""
    if first is None:
        return other
    if other is not None and other is not first:
        log_unread(other)
    return first


def raise_unread(unread: Exception | None, was_lost: bool) -> None:
    """Raise the error that `Member.leave` returned; log it where an operation has reported the lost world before."""
    if unread is not None and not was_lost:
        raise unread
    if unread is not None:
        log_unread(unread)


def log_unread(error: Exception) -> None:
    """Log an error that no later call can raise."""
    log.logger.error("an operation failed, and its result was never read:\n%s", error)
