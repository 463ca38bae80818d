"""One worker's part in one world of workers: its engine while it is in the world, and its unread errors.

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
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from kvstore_hvd import gpu, log, mxnet_compat, native
from kvstore_hvd.config import config
from kvstore_hvd.errors import InputFailedError, InvalidRequestError, ShutdownError, message
from kvstore_hvd.mxnet_compat import hooks
from kvstore_hvd.native import EngineStatistics
from kvstore_hvd.world import flight
from kvstore_hvd.world.control import failure_sender
from kvstore_hvd.world.flight import Observer
from kvstore_hvd.world.segment import Connection, refusals_explained
from kvstore_hvd.world.stall import StallInspector
from kvstore_hvd.world.topology import Host, Place, World, reduce_in_place

# Seconds after an operation's deadline: the engine fails the operation a little later, with a better text.
_PATIENCE_S = 5.0
# In the failure of a world that a worker has left: by an exception, which tells itself, or to meet the others again.
_EXPLAINED = " ended early: "
_MEET_AGAIN = "call kvstore_hvd.reset() on every worker to meet again."


class Member:
    """A worker's part in a world. All methods may be called from any thread."""

    def __init__(self) -> None:
        # A thread that leaves the world holds the process's lock and waits for operators of MXNet, which need this.
        self._adapter_lock = threading.Lock()
        #: The present world or the last one; None before the first one.
        self.world: World | None = None
        self._connection: Connection | None = None
        self._leaving: Connection | None = None
        #: The adapter, if it is in use already.
        self.adapter: native.MXNetAdapter | None = None
        self._inspector: StallInspector | None = None
        self._observer: Observer | None = None
        self._lock = threading.Lock()  # of what follows
        #: The error that the next call will raise.
        self.deferred: Exception | None = None
        self._holds_unread = 0  # number of open requests to leave unread errors alone
        #: Why there is no world any more, and the fix, for the errors of later calls.
        self.closed: tuple[str, str] | None = None
        #: Whether this worker has come to a running elastic job, which has not taken it in yet.
        self.is_waiting = False
        #: Whether this process is a forked child of a worker: it knows the world, and is not in it.
        self.is_forked = False
        self._has_told = False  # of a failure
        self._arenas: list[native.Arena] = []  # of this world, and of earlier ones as long as arrays lie in them
        self._namespaces = itertools.count()
        self._labels: dict[str, weakref.WeakMethod[Callable[[str], str]]] = {}  # by namespace
        # Calls without a name, by kind; and the largest number of any kind before all of these were 0. Workers may have
        # made different numbers of calls when a world is lost, so each world counts from 0.
        self._numbers: Counter[str] = Counter()
        self._first_number = 0

    # -- Joining and leaving ----------------------------------------------------------------------------------------

    def join(self, world: World) -> None:
        """Join a world, the first one or after `leave`."""
        topology = world.topology
        self.deferred = None
        self._numbers, self._first_number = Counter(), 0
        self._has_told = False
        if topology.size > 1:
            if self.world is not None:
                self.closed = "this worker could not join the world.", _MEET_AGAIN
            if config().simd != "auto" and not native.set_simd_target(config().simd):
                log.once("simd", logging.WARNING, "this CPU has no %s; using %s", config().simd, native.simd_target())
            connection = Connection(world)
            self._arenas = [arena for arena in self._arenas if arena.used]
            if connection.arena is not None:
                self._arenas.append(connection.arena)
            try:
                with refusals_explained(topology):
                    check_s = 0.0 if config().stall_check_disable else config().stall_check_s
                    shutdown_s = config().stall_shutdown_s
                    observer = Observer(connection.engine, topology, check_s)
                    about = connection.engine, topology, check_s, shutdown_s, self._describe
                    inspector = StallInspector(*about, observer.look, lambda: self._note_loss(connection))
                    inspector.start()
            except BaseException as error:
                connection.close(f"it could not join the world: {type(error).__name__}")
                raise
            self._connection, self._inspector, self._observer = connection, inspector, observer
        self.world, self.is_waiting, self.closed = world, False, None
        log.logger.debug("joined a world: %s", topology)

    def wait_for(self, world: World) -> None:
        """Show `world` as this worker's, as long as a running job has not taken it in."""
        self.world, self.is_waiting, self.closed = world, True, None

    def leave(self, reason: str = "") -> Exception | None:
        """Leave the world; does nothing without one."""
        # Waits for the pending operations of this worker, unless `reason` is given: then they fail, and so do those of
        # the other workers that need this one, with the reason in their text; its second line may be their fix.
        if self.world is None or self.closed:
            return None
        why = reason.partition("\n")[0]
        self.closed = f"this worker left the world{': ' + why if why else ''}.", _MEET_AGAIN
        with self._adapter_lock:  # from here on there is no new adapter
            self._leaving, self._connection = self._connection, None
        if self._leaving is None:
            return None
        if self._leaving.engine.health() is not None:
            self._note_loss(self._leaving)
        if self._observer is not None:
            self._observer.write_metrics()
        try:
            early = reason
            while not early and not self._leaving.engine.wait_for_all(config().timeout_s + _PATIENCE_S):
                # A worker that leaves does not wait for operations that may wait for any time.
                waiting = self._leaving.engine.waiting(0.0)
                is_patient = waiting is not None and all(one.name.startswith(native.PATIENT) for one in waiting)
                if is_patient or not config().waits_for_busy:
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
            self._inspector = self.adapter = self._leaving = None
        log.logger.debug("left the world")
        return None if reason else self._take_deferred()

    def _note_loss(self, connection: Connection) -> None:
        if self._has_told or _EXPLAINED in str(connection.engine.health()):
            return
        self._has_told = True
        flight.note_loss(connection.engine.segment, failure_sender())

    @property
    def present_engine(self) -> native.Engine | None:
        """The engine, also while this worker leaves."""
        connection = self._connection or self._leaving
        return None if connection is None else connection.engine

    def abort(self, text: str) -> None:
        """Fail the pending and later operations of all workers, with this text."""
        engine = self.present_engine
        if engine is not None:
            engine.abort(text)

    def after_fork_in_child(self) -> None:
        """Let go of the world; the child may not talk to the other workers."""
        self._adapter_lock, self._lock = threading.Lock(), threading.Lock()
        self._inspector = None
        if self._connection is not None:
            if self.adapter is not None:
                self.adapter.after_fork_in_child()
            self._connection = self.adapter = self.deferred = None
            self.is_forked = True
            self.closed = "this process is a forked child of a worker.", "communicate in the worker itself only."
        arenas, self._arenas = self._arenas, []  # a child of this child gets copies of them anyway
        with contextlib.ExitStack() as stack:  # each of them, also if one raises
            for arena in arenas:
                stack.callback(arena.after_fork_in_child)

    def keep_arenas(self, other: Member) -> None:
        """Keep the arenas of a world that was left, as long as arrays lie in them."""
        self._arenas += [arena for arena in other._arenas if arena.used]

    def defer(self, error: Exception | None) -> None:
        """Have the next call raise `error`, unless one waits for that already."""
        with self._lock:
            self.deferred = self.deferred or error

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
        with self._lock:
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

    # -- What stores need -------------------------------------------------------------------------------------------

    @property
    def is_initialized(self) -> bool:
        """Whether this worker is in a world."""
        return self.world is not None and not self.closed

    @property
    def is_connected(self) -> bool:
        """Whether this worker is in a world of several."""
        return self._connection is not None

    @property
    def is_lost(self) -> bool:
        """Whether this worker's world is lost: every operation fails."""
        return self._connection is not None and self._connection.engine.health() is not None

    @property
    def has_given_up(self) -> bool:
        """Whether this worker has failed the world because others did not come within the stall shutdown time."""
        return self._inspector is not None and self._inspector.has_given_up

    @property
    def topology(self) -> Place:
        """This worker's rank in the world, the size, and so on; stays readable after `leave`."""
        assert self.world is not None
        return self.world.topology

    @property
    def job(self) -> str:
        """The name of the world's workers as a group."""
        assert self.world is not None
        return self.world.job

    @property
    def is_alone(self) -> bool:
        """Whether this worker is the only one: then every operation is a local copy."""
        assert self.world is not None
        return self.world.topology.size == 1 and not self.closed

    def next_namespace(self, label: Callable[[str], str]) -> str:
        """A namespace for a new store: equal on all workers when they create their stores in the same order."""
        # Workers match operations under names: ``s0/3`` of a store, ``np/loss``. `label` is a method of the store that
        # returns the name of a key in messages.
        namespace = f"s{next(self._namespaces)}"
        self._labels[namespace] = weakref.WeakMethod(label, lambda _: self._labels.pop(namespace, None))
        return namespace

    def _describe(self, name: str) -> str:
        """The operation in messages: ``'dense0_weight' (key 3)``, ``'loss'``, ``barrier 's0'``."""
        namespace, _, key = name.partition("/")
        if namespace == "np":
            return f"'{key}'"
        reference = self._labels.get(namespace)
        label = None if reference is None else reference()
        return f"{namespace} '{key}'" if label is None else label(key)

    def next_number(self, kind: str) -> int:
        """A number for a call that has no name: the n-th calls of this kind of all workers have the same one."""
        with self._lock:
            self._numbers[kind] += 1
            return self._first_number + self._numbers[kind]

    def agree_on_numbers(self) -> None:
        """Go on with the same numbers everywhere, after workers have made different numbers of calls; waits for all."""
        # To be called inside `submitting`.
        with self._lock:
            row = np.array([self._first_number + max(self._numbers.values(), default=0)], np.int64)
        table = self.all_rows("join", "hvd/numbers", "join", row)
        with self._lock:
            self._numbers, self._first_number = Counter(), int(table.max())

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
            fix = "call no collective before the function that kvstore_hvd.elastic.run wraps; state.sync() sends the "
            fix += "parameters, so remove hvd.broadcast_parameters()."
            raise InvalidRequestError(message(fact, fix=fix))
        if connection is None:
            raise self.closed_error()
        return connection

    def closed_error(self) -> ShutdownError:
        """The error of a call without a world."""
        fact, fix = self.closed or ("there is only one worker.", "")
        return ShutdownError(message(fact, **self.topology.prefix, fix=fix))

    @property
    def reaches_gpus(self) -> bool:
        """Whether arrays on GPUs can be submitted."""
        # Not of a process set: two worlds' operations on one GPU could wait for each other for ever.
        return not self.topology.set_number and gpu.is_installed()

    def start_device(self, device: int) -> None:
        """Be ready for operations on arrays of a GPU, before the first one is submitted. Raises as `engine`, too."""
        self._connected().start_device(device)

    def mxnet_adapter(self) -> native.MXNetAdapter:
        """The adapter for arrays of the MXNet in this process. Raises as `engine`."""
        adapter = self.adapter
        if adapter is None:
            with self._adapter_lock:
                connection, adapter = self._connected(), self.adapter
                if adapter is None:
                    adapter = self.adapter = connection.mxnet_adapter()
        return adapter

    @property
    def current_adapter(self) -> native.MXNetAdapter | None:
        """The adapter, if it is in use already and there is no deferred error. For the fast paths."""
        return self.adapter if self.deferred is None else None

    def report(self) -> EngineStatistics:
        """The statistics of this worker's operations since it joined its world."""
        connection = self._connection
        return EngineStatistics() if connection is None else connection.engine.report()

    def figures(self) -> dict[int, dict[str, float]]:
        """The figures of all workers, by rank, see `flight.figures`; none where this worker is the only one."""
        engine = self.present_engine
        return flight.figures(None if engine is None else engine.segment)

    @property
    def arena(self) -> native.Arena | None:
        """The memory for gradients that the other workers sum in place; None if there is none."""
        connection = self._connection
        return None if connection is None else connection.arena

    def adapter_for_gradients(self) -> native.MXNetAdapter | None:
        """The adapter whose arena gradients may live in, or None: one worker, no world yet, or switched off."""
        connection = self._connection
        if connection is None or connection.arena is None or not config().zero_copy:
            return None
        if connection.engine.health() is not None:
            return None  # a rank that lags behind may still write to memory that the lost world's arena would reuse
        return self.mxnet_adapter()

    @contextlib.contextmanager
    def submitting(self) -> Iterator[None]:
        """Surround the submission of operations: raises the errors since the last submission."""
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
        adapter = self.adapter  # once: another thread may leave the world
        unread = None if adapter is None else adapter.take_unread_error()
        deferred = None if self.deferred is None else self._take_deferred()
        if unread is None:
            return deferred
        connection = self._connection
        failure = None if connection is None else connection.engine.health()
        if isinstance(unread, InputFailedError) and f"{type(failure).__name__}: [" in str(unread):
            unread = failure  # of an operation on the result of one that failed with the world
        if deferred is None:
            return unread
        if str(unread).partition("\n")[0] in str(deferred):
            return unread  # both are of the same operation; this one has our own class
        return type(deferred)(f"{deferred}\n{unread}")

    def _take_deferred(self) -> Exception | None:
        with self._lock:
            deferred, self.deferred = self.deferred, None
        return deferred

    def barrier(self, name: str) -> None:
        """Wait until every worker has called it with this name. Raises as `check`."""
        with self.submitting():
            if not self.is_alone:
                self.allreduce(f"barrier/{name}", "barrier", np.zeros(1, np.int32))

    def allreduce(self, name: str, label: str, array: np.ndarray[Any, Any], op: str = "sum") -> None:
        """Reduce an array of NumPy over the workers in place; waits for them."""
        reduce_in_place(self.engine(), name, label, array, op)

    def all_rows(self, operation: str, name: str, label: str, row: np.ndarray[Any, np.dtype[np.int64]]) -> Any:
        """Every worker's row of int64 numbers, as a table with one row for each rank; waits for them."""
        # Rows have the same length on all workers. To be called inside `submitting`. `operation`: as messages name it.
        # Earlier operations of the name may wait in MXNet's engine for their arrays.
        topology = self.topology
        if self.adapter is not None:
            self.adapter.await_turn(name)
        table = np.zeros((topology.size, row.size + 1), np.int64)
        table[topology.rank] = [*row, 1]
        if not self.is_alone:
            self.allreduce(name, label, table)
        joined = np.flatnonzero(table[:, -1] == 0).tolist()
        if joined:
            fact = f"{operation.capitalize()} is not supported with Join at this time."
            details = [f"{topology.rank_list(joined)} called join()."]
            fix = "only allreduce can be called while workers are in join()."
            text = message(fact, **topology.prefix, operation=operation, details=details, fix=fix)
            raise InvalidRequestError(text)
        return table[:, :-1]


class SetMember(Member):
    """A worker's part in the world of a process set. A worker that is not in the set is alone in a world of its own."""

    # Membership may change when the world of all is met again; the object stays valid.

    def __init__(self, ranks: Sequence[int], number: int) -> None:
        super().__init__()
        #: Of its workers in the world of all, in ascending order.
        self.ranks = tuple(ranks)
        self._number = number

    def join_within(self, outer: World, index: int) -> None:
        """Join this world of ranks of `outer`, whose members have joined `index - 1` before it. Raises as `join`."""
        topology = outer.topology
        ranks = self.ranks if topology.rank in self.ranks else (topology.rank,)
        inner = Place.of(
            ranks.index(topology.rank),
            [Host(topology.hosts[rank], topology.hosts[rank]) for rank in ranks],
            generation=topology.generation,
            source=topology.source,
            set_number=self._number,
            all_ranks=ranks,
            size_of_all=topology.size,
            is_member=ranks is self.ranks,
            pids=tuple(topology.pids[rank] for rank in ranks) if topology.pids else (),
        )
        job = f"{outer.job}.set{self._number}"
        self.join(dataclasses.replace(outer, topology=inner, job=job, index=index, unreached=[]))
