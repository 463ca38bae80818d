"""Process sets: some of the workers, with collectives of their own.

A set is a world inside the world of all workers, which only its members join. Any other worker is alone in a world of
its own: a store of the set can be made there, too, and reduces nothing.

Workers agree on new sets by one table: each writes its own set (or that of its communicator) into a row, and all judge
the same table. So all of them add the same sets, or none does.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

import numpy as np

from kvstore_hvd.config import config
from kvstore_hvd.errors import InvalidRequestError, MismatchError, NotInitializedError, message, rank_list
from kvstore_hvd.store.keys import Call
from kvstore_hvd.world import process
from kvstore_hvd.world.member import Member, SetMember
from kvstore_hvd.world.topology import exchange

#: The ranks of a set, in ascending order.
Part = tuple[int, ...]

# The last columns of a row, behind one for each rank: the number of ranks that do not exist, and the least of them;
# whether the ranks are those of a communicator (a worker knows its own part only); whether that has other processes.
_FOREIGN, _LEAST, _OF_COMMUNICATOR, _STRANGERS = range(-4, 0)
_EXTRA = 4
_FIX = "add the same sets in the same order on every worker."


class ProcessSet:
    """Some of the workers. Sets of the same ranks are equal, in whatever order the ranks are given.

    A set can be used once `init` or `add_process_set` has registered it on all workers, and until `remove_process_set`
    or `shutdown`.

    Parameters
    ----------
    ranks_or_comm : iterable of int, or mpi4py communicator
        The ranks of its members; or a communicator of them. Workers that are not members pass ``MPI.COMM_NULL``, or the
        communicator of their own part where one was split into several.

    Raises
    ------
    InvalidRequestError
        It is neither.
    """

    def __init__(self, ranks_or_comm: Any) -> None:
        self._comm = ranks_or_comm if hasattr(ranks_or_comm, "allgather") else None
        self._ranks: Optional[list[int]] = None if self._comm is not None else _check_ranks(ranks_or_comm)
        self._registered: Optional[_Registered] = None

    @property
    def ranks(self) -> Optional[list[int]]:
        """Ranks of the members, in ascending order; None when a communicator's are not known yet."""
        return None if self._ranks is None else list(self._ranks)

    @property
    def mpi_comm(self) -> Any:
        """The communicator that the set was made of, or None."""
        return self._comm

    @property
    def process_set_id(self) -> Optional[int]:
        """Number of the set, the same on all workers; None unless it is registered."""
        found = self._registered
        return found.number if found is not None and _registry().sets.get(found.number) is found else None

    def size(self) -> Optional[int]:
        """Number of members; None unless the set is registered."""
        return None if self.process_set_id is None else len(self.ranks or [])

    def rank(self) -> Optional[int]:
        """This worker's rank within the set, -1 if it is not a member; None unless the set is registered.

        As in Horovod, `root_rank` is never this rank but that of `hvd.rank`.
        """
        if self.process_set_id is None:
            return None
        ranks, own = self.ranks or [], process.current().topology.rank
        return ranks.index(own) if own in ranks else -1

    def included(self) -> Optional[bool]:
        """Whether this worker is a member; None unless the set is registered."""
        return None if self.process_set_id is None else self.rank() != -1

    def _world(self, operation: str, or_outside: bool = False) -> Member:
        """This worker's part in the world of the set; `or_outside`: also where the worker is not in the set."""
        everybody = global_process_set._world(operation)
        call = Call(operation, everybody.topology)
        if self.process_set_id is None or self._registered is None:
            fact, fix = f"{self} is not registered.", "add it with hvd.add_process_set() or hvd.init(process_sets=...)."
            raise InvalidRequestError(call.message(None, fact, fix))
        found, size = self._registered.member, everybody.topology.size
        if found.ranks[-1] >= size:
            fact = f"{self} has ranks that do not exist any more: there are {size} workers."
            raise InvalidRequestError(call.message(None, fact, "use it when enough workers are there."))
        if not (found.topology.is_member or or_outside):
            fact = f"this worker is not one of the members, {rank_list(found.ranks)}."
            raise InvalidRequestError(call.message(None, fact, "call it on the members only."))
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProcessSet):
            return NotImplemented
        return self is other or (self.ranks is not None and self.ranks == other.ranks)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_registered": None}  # a copy is not registered

    def __hash__(self) -> int:
        return hash(ProcessSet)  # ranks may become known later

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _GlobalProcessSet(ProcessSet):
    def __init__(self) -> None:
        self._comm = self._ranks = self._registered = None

    @property
    def ranks(self) -> Optional[list[int]]:
        """All ranks; None outside of a world."""
        world = process.everybody
        return list(range(world.topology.size)) if world.is_initialized else None

    @property
    def process_set_id(self) -> Optional[int]:
        """0; None outside of a world."""
        return 0 if process.everybody.is_initialized else None

    def _world(self, operation: str, or_outside: bool = False) -> Member:
        """See `ProcessSet._world`."""
        if process.everybody.is_forked:
            raise NotInitializedError(str(process.everybody.closed_error()))
        if not process.everybody.is_initialized:
            fix = "call hvd.init() first."
            raise NotInitializedError(message("Horovod has not been initialized.", operation=operation, fix=fix))
        return process.everybody


#: All workers.
global_process_set = _GlobalProcessSet()


@dataclass(eq=False)
class _Registered:
    """A registered set: its number, this worker's part in its world, and the oldest object that stands for it."""

    number: int
    member: SetMember
    first: Optional[ProcessSet] = None

    @property
    def process_set(self) -> ProcessSet:
        """The oldest object; a new one where this worker has named none."""
        if self.first is None:
            self.first = ProcessSet(self.member.ranks)
            self.first._registered = self
        return self.first


class _Registry:
    """The sets of one world."""

    def __init__(self, departures: int) -> None:
        self.departures = departures  # of this worker, before this world
        self.next_number = 1
        self.requested: list[ProcessSet] = []  # before a running job has taken this newcomer in
        self.sets: dict[int, _Registered] = {}
        self.is_dynamic = False


_latest = _Registry(0)


def _registry() -> _Registry:
    """The registry of the present world: `shutdown` forgets the sets, `reset` keeps them."""
    global _latest
    departures = process.current().departures
    if _latest.departures != departures:
        _latest = _Registry(departures)
    return _latest


def allow_dynamic() -> None:
    """Let sets be added and removed in this world."""
    _registry().is_dynamic = True


def add_process_set(process_set: Union[ProcessSet, Iterable[int]]) -> ProcessSet:
    """Register a process set, and return it; every worker calls it, with equal sets in the same order, members or not.

    Raises
    ------
    InvalidRequestError
        Sets cannot be added in this world, this one is there already, or has ranks that do not exist. On every worker.
    MismatchError
        The workers name different sets.
    LaunchError
        Not all members came in time.
    """
    _check_dynamic("add_process_set")
    added = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    register([added], "add_process_set")
    return added


def register(chosen: Sequence[ProcessSet], operation: str) -> None:
    """Register the sets of ``init()``, in any world, or of ``add_process_set()``: all, or none with an error on all.

    A set of ``init()`` that is registered already is used again; its new object stands beside the former ones.
    """
    world, registry = global_process_set._world(operation), _registry()
    if process.everybody.is_waiting:
        registry.requested += [each for each in chosen if not any(one is each for one in registry.requested)]
        return
    call, rows = Call(operation, world.topology), [_row(world, each) for each in chosen]
    with world.submitting():
        if operation == "init":
            table = world.all_rows("init", "hvd.init", "process sets", np.array([len(rows)], np.int64))
            fix = "give init() the same sets on all workers."
            call.compare(None, "the number of process sets", table[:, 0].tolist(), fix)
        table = world.all_rows(operation, "hvd.add_process_set", "process set", np.concatenate(rows))
        agreed = agreed_sets(call, table)
        parts = [part for each in agreed for part in each]
        numbers = {each.member.ranks: number for number, each in registry.sets.items()}
        _check_new(call, parts, numbers)
        for part in parts:
            if part not in numbers:
                number = numbers[part] = registry.next_number
                registry.next_number += 1
                registry.sets[number] = _Registered(number, process.current().join_set(part, number))
        for process_set, each in zip(chosen, agreed):
            # An object stands for the one set that it names, or for this worker's part of several.
            for part in each:
                if len(each) == 1 or world.topology.rank in part:
                    found = process_set._registered = registry.sets[numbers[part]]
                    process_set._ranks = list(part)
                    found.first = found.first or process_set


def _check_new(call: Call, parts: Sequence[Part], numbers: dict[Part, int]) -> None:
    """Raise InvalidRequestError where a set is named twice, or may not exist yet."""
    for part in parts:
        if parts.count(part) > 1:
            fact = f"process_sets has the set of {rank_list(part)} twice."
            raise InvalidRequestError(call.message(None, fact, "name each set once."))
        same: Optional[ProcessSet] = global_process_set if len(part) == call.topology.size else None
        if part in numbers and call.operation != "init":
            same = _registry().sets[numbers[part]].process_set
        if same is not None:
            fact, fix = f"a process set with these ranks exists already: {same}.", "use that one, or remove it first."
            raise InvalidRequestError(call.message(None, fact, fix))


def _row(world: Member, process_set: ProcessSet) -> Any:
    """This worker's row of a set."""
    topology, comm = world.topology, process_set.mpi_comm
    if not comm:  # COMM_NULL has no ranks: workers that are not members learn of them by the table
        return row_of(process_set.ranks or [], topology.size)
    processes = comm.allgather((world.job, topology.rank))
    strangers = any(job != world.job for job, _ in processes)
    ranks = sorted({rank for _, rank in processes if rank < topology.size})
    return row_of(ranks, topology.size, of_communicator=True, has_strangers=strangers)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set, after its pending operations of this worker; every worker calls it, members or not.

    Returns False, and nothing happens, for the global set and for one that is not registered.

    Raises
    ------
    InvalidRequestError
        Sets cannot be removed in this world.
    MismatchError
        The workers name different sets.
    KVHvdError
        An operation of the set failed, and nobody has read its result. The set is removed nevertheless.
    """
    operation = "remove_process_set"
    _check_dynamic(operation)
    world, registry, number = global_process_set._world(operation), _registry(), process_set.process_set_id or 0
    with world.submitting():
        table = world.all_rows(operation, "hvd.remove_process_set", "process set", np.array([number], np.int64))
        call, named = Call(operation, world.topology), [f"set {each}" for each in table[:, 0].tolist()]
        call.compare(None, "the process set", named, "remove the same set on every worker.")
        if not number:
            return False
        # Before an unread error is raised, which other workers may not have.
        process.current().leave_set(registry.sets.pop(number).member)
    return True


def rejoin() -> None:
    """Make the registered sets anew in a world that other workers may have come to, or left; every worker calls it.

    The sets are those of rank 0. One with ranks that do not exist cannot be used, until a later world has them. Raises
    InvalidRequestError where this worker is new, and was given a set by `init` that the others do not have.
    """
    world, registry = process.current().member, _registry()
    own = [(number, each.member.ranks) for number, each in registry.sets.items()]
    text = json.dumps([registry.is_dynamic, registry.next_number, own])
    if not world.is_alone:
        with world.submitting():
            text = exchange(world.engine(), world.topology, "process sets", text)[0]
    dynamic, registry.next_number, sets = json.loads(text)
    registry.is_dynamic = registry.is_dynamic or dynamic
    before, registry.sets = registry.sets, {}
    for number, ranks in sets:
        found = registry.sets[number] = before.get(number) or _Registered(number, SetMember(ranks, number))
        for each in registry.requested:
            if each.ranks == ranks:
                each._registered, found.first = found, found.first or each
        if ranks[-1] < world.topology.size and found.member not in process.current().sets:
            process.current().join_set(ranks, number, found.member)
    foreign = [each for each in registry.requested if each.process_set_id is None]
    registry.requested.clear()
    if foreign:
        fact = f"{foreign[0]} is not one of the process sets of the running job."
        fix = "give init() the same sets on all workers."
        raise InvalidRequestError(Call("init", world.topology).message(None, fact, fix))


def process_sets() -> list[ProcessSet]:
    """The registered sets in the order of their numbers, first the global one; none outside of a world."""
    world = [global_process_set] if process.everybody.is_initialized else []
    return [*world, *(each.process_set for each in _registry().sets.values())]


def process_set_by_id(process_set_id: int) -> ProcessSet:
    """The registered set of this number. Raises InvalidRequestError if there is none."""
    found = next((each for each in process_sets() if each.process_set_id == process_set_id), None)
    if found is None:
        known = ", ".join(str(each.process_set_id) for each in process_sets()) or "none"
        fact = f"there is no process set {process_set_id!r}."
        raise InvalidRequestError(message(fact, operation="process_set_by_id", fix=f"use one of: {known}."))
    return found


def get_process_set_ids_and_ranks() -> dict[int, list[int]]:
    """The ranks of the registered sets, by their numbers."""
    return {each.process_set_id or 0: each.ranks or [] for each in process_sets()}


def _check_dynamic(operation: str) -> None:
    if not (config().dynamic_process_sets or _registry().is_dynamic):
        fact = "process sets cannot be added or removed in this world."
        fix = "call hvd.init(process_sets='dynamic'), or set HOROVOD_DYNAMIC_PROCESS_SETS=1."
        raise InvalidRequestError(Call(operation, process.current().topology).message(None, fact, fix))


def _check_ranks(ranks: Any) -> list[int]:
    fix = "pass a list of different ranks, or an mpi4py communicator."
    try:
        checked = sorted(map(operator.index, ranks))
    except TypeError:
        raise InvalidRequestError(message(f"{ranks!r} is no list of ranks.", operation="ProcessSet", fix=fix)) from None
    if len(set(checked)) != len(checked):
        raise InvalidRequestError(message(f"{checked} names a rank twice.", operation="ProcessSet", fix=fix))
    return checked


# -- The table of new sets --------------------------------------------------------------------------------------------


def row_of(ranks: Iterable[int], size: int, of_communicator: bool = False, has_strangers: bool = False) -> Any:
    """A worker's row of one set, among `size` workers."""
    row = np.zeros(size + _EXTRA, np.int64)
    named = list(ranks)
    foreign = [rank for rank in named if not 0 <= rank < size]
    row[[rank for rank in named if 0 <= rank < size]] = 1
    row[size:] = len(foreign), min(foreign, default=0), of_communicator, has_strangers
    return row


def agreed_sets(call: Call, table: Any) -> list[list[Part]]:
    """The sets that every worker adds, in order: of each object one set, or the parts of a communicator."""
    size = call.topology.size
    rows = table.reshape(size, -1, size + _EXTRA)
    return [_agreed(call, rows[:, place]) for place in range(rows.shape[1])]


def _agreed(call: Call, rows: Any) -> list[Part]:
    size = call.topology.size
    by_ranks: dict[tuple[Part, Part], list[int]] = {}  # by the ranks that exist, and by one that does not
    for rank, row in enumerate(rows):
        least: Part = (int(row[_LEAST]),) if row[_FOREIGN] else ()
        by_ranks.setdefault((tuple(np.flatnonzero(row[:size]).tolist()), least), []).append(rank)
    silent = by_ranks.pop(((), ()), [])
    if not by_ranks:
        raise InvalidRequestError(call.message(None, "the process set is empty.", "name at least one rank."))
    if rows[:, _STRANGERS].any():
        fact = f"the communicator of a process set has processes that are none of the {size} workers."
        raise InvalidRequestError(call.message(None, fact, "split it from a communicator of the workers."))
    if len(by_ranks) == 1:
        ((ranks, _),) = by_ranks
        is_one = not set(silent) & set(ranks)  # a member names its set
    else:
        # The parts of a partition. A worker in none of them could not tell which part is meant.
        is_one = not silent and all(
            list(ranks) == names and rows[names, _OF_COMMUNICATOR].all() for (ranks, _), names in by_ranks.items()
        )
    if not is_one:
        details = [f"{sorted(ranks + foreign)}: {rank_list(who)}" for (ranks, foreign), who in by_ranks.items()]
        details += [f"no ranks: {rank_list(silent)}"] if silent else []
        fact = "the workers name different process sets."
        raise MismatchError(call.message(None, fact, _FIX, tuple(details)))
    for _, foreign in by_ranks:
        if foreign:
            fact = f"the set names {rank_list(foreign)}, but there are {size} workers."
            raise InvalidRequestError(call.message(None, fact, f"use ranks from 0 to {size - 1}."))
    return sorted(ranks for ranks, _ in by_ranks)
