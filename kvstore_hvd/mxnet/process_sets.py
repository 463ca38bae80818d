"""Process sets: some of the workers, with collectives of their own.

A set is a world inside the world of all workers: one that only its members join. The others are alone in it, so that
what reduces among its members can be made on them, too, and reduces nothing there.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Optional, Union

import numpy as np

from kvstore_hvd.config import config
from kvstore_hvd.errors import InvalidRequestError, MismatchError, NotInitializedError, message, rank_list
from kvstore_hvd.world import process
from kvstore_hvd.world.agree import exchange
from kvstore_hvd.world.member import InnerMember, Member
from kvstore_hvd.world.topology import Topology

#: The ranks of a set, in ascending order.
Part = tuple[int, ...]

# What a row tells behind the ranks: how many it names that no worker has, and the least of them; whether it names those
# of a communicator, of which each worker knows its own only; and whether others than workers are in that.
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
        return _registry().number_of(self)

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

    def world(self, operation: str, or_outside: bool = False) -> Member:
        """This worker's part in the world that is the set.

        Parameters
        ----------
        operation : str
            Who asks, for messages.
        or_outside : bool
            Whether a worker that is no member has one too, in which it is alone.

        Raises
        ------
        NotInitializedError
            There is no world of workers.
        InvalidRequestError
            The set is not registered, or this worker is not a member.
        """
        everybody, registry = global_process_set.world(operation), _registry()
        number = registry.number_of(self)
        if number is None:
            fact, fix = f"{self} is not registered.", "add it with hvd.add_process_set() or hvd.init(process_sets=...)."
            raise InvalidRequestError(_text(fact, fix, operation))
        found, size = registry.sets[number].member, everybody.topology.size
        if found.ranks[-1] >= size:
            fact = f"{self} has ranks that do not exist any more: there are {size} workers."
            raise InvalidRequestError(_text(fact, "use it when enough workers are there.", operation))
        if found.topology.is_outside and not or_outside:
            fact = f"this worker is not one of the members, {rank_list(found.ranks)}."
            raise InvalidRequestError(_text(fact, "call it on the members only.", operation))
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ProcessSet):
            return NotImplemented
        return self is other or (self.ranks is not None and self.ranks == other.ranks)

    def __hash__(self) -> int:
        return hash(ProcessSet)  # ranks may become known later

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


class _GlobalProcessSet(ProcessSet):
    def __init__(self) -> None:
        self._comm = self._ranks = None

    @property
    def ranks(self) -> Optional[list[int]]:
        """All ranks; None outside of a world."""
        world = process.current()
        return list(range(world.topology.size)) if world.is_initialized else None

    def world(self, operation: str, or_outside: bool = False) -> Member:
        """See `ProcessSet.world`."""
        if not process.everybody.is_initialized:
            fix = "call hvd.init() first."
            raise NotInitializedError(message("Horovod has not been initialized.", operation=operation, fix=fix))
        return process.everybody


#: All workers.
global_process_set = _GlobalProcessSet()


class _Registered(NamedTuple):
    """A registered set: the objects that stand for it, oldest first, and this worker's part in its world."""

    objects: list[ProcessSet]
    member: InnerMember

    @property
    def first(self) -> ProcessSet:
        """The oldest of the objects; one is made where this worker has named none."""
        if not self.objects:
            self.objects.append(ProcessSet(self.member.ranks))
        return self.objects[0]


class _Registry:
    """The sets of one world."""

    def __init__(self) -> None:
        self.next_number = 1
        self.wanted: list[ProcessSet] = []  # by a worker that has yet to be taken in by a running job
        self.sets: dict[int, _Registered] = {}
        self.is_dynamic = False

    def number_of(self, process_set: ProcessSet) -> Optional[int]:
        """Number of a registered set."""
        if process_set is global_process_set:
            return 0 if process.current().is_initialized else None
        found = (number for number, each in self.sets.items() if any(one is process_set for one in each.objects))
        return next(found, None)


# With the number of times that this worker had left by then: `shutdown` forgets the sets, `reset` keeps them.
_latest: tuple[int, _Registry] = (0, _Registry())


def _registry() -> _Registry:
    global _latest
    departures = process.current().departures
    if _latest[0] != departures:
        _latest = (departures, _Registry())
    return _latest[1]


def allow_dynamic() -> None:
    """Let sets be added and removed in this world."""
    _registry().is_dynamic = True


def add_process_set(process_set: Union[ProcessSet, Iterable[int]]) -> ProcessSet:
    """Register a process set; every worker calls it, with equal sets in the same order, members or not.

    Parameters
    ----------
    process_set : ProcessSet or iterable of int

    Returns
    -------
    ProcessSet

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
    _register([added], "add_process_set")
    return added


def add_at_start(chosen: Sequence[ProcessSet]) -> None:
    """As `add_process_set` for each, in any world: those of ``init()``.

    Sets that are there already are used again, with these objects beside the former ones.

    Raises
    ------
    InvalidRequestError, MismatchError
        A set has ranks that do not exist, those of all workers, or those of another one of `chosen`; or the workers
        name different ones. On every worker, and none of them is added.
    LaunchError
        As `add_process_set`.
    """
    if any(each.process_set_id is None for each in chosen):
        _register(chosen, "init")


def _register(chosen: Sequence[ProcessSet], operation: str) -> None:
    world, registry = global_process_set.world(operation), _registry()
    if process.current().is_waiting:
        registry.wanted += [each for each in chosen if not any(one is each for one in registry.wanted)]
        return
    rows = [_row(each) for each in chosen]
    with world.submitting():
        if operation == "init":
            _check_counts(world, len(rows))
        told = world.all_rows(operation, "hvd.add_process_set", "process set", np.concatenate(rows))
        agreed = agreed_sets(world.topology, operation, told)
        parts = [part for each in agreed for part in each]
        numbers = {each.member.ranks: number for number, each in registry.sets.items()}
        _check_new(operation, parts, numbers)
        for part in parts:
            if part not in numbers:
                numbers[part] = registry.next_number
                registry.next_number += 1
                member = process.current().join_inner(part, numbers[part])
                registry.sets[numbers[part]] = _Registered([], member)
        for process_set, each in zip(chosen, agreed):
            _name(process_set, each, numbers)


def _check_counts(world: Member, count: int) -> None:
    table = world.all_rows("init", "hvd.init", "process sets", np.array([count], np.int64))
    if (table != table[0]).any():
        details = world.topology.listed(table[:, 0].tolist())
        fact, fix = "the workers name different numbers of process sets.", "give init() the same sets on all workers."
        raise MismatchError(_text(fact, fix, "init", details))


def _check_new(operation: str, parts: Sequence[Part], numbers: dict[Part, int]) -> None:
    """Raise InvalidRequestError where a set is named twice, or may not be there yet."""
    everybody = tuple(global_process_set.ranks or ())
    twice = next((each for place, each in enumerate(parts) if each in parts[:place]), None)
    if twice is not None:
        fact, fix = f"process_sets has the set of {rank_list(twice)} twice.", "name each set once."
        raise InvalidRequestError(_text(fact, fix, operation))
    for part in parts:
        if part == everybody or (operation != "init" and part in numbers):
            same = global_process_set if part == everybody else _registry().sets[numbers[part]].first
            fact, fix = f"a process set with these ranks exists already: {same}.", "use that one, or remove it first."
            raise InvalidRequestError(_text(fact, fix, operation))


def _name(process_set: ProcessSet, parts: Sequence[Part], numbers: dict[Part, int]) -> None:
    """Have an object stand for what it names: the one set, or this worker's part of several."""
    own = process.current().topology.rank
    for part in parts:
        objects = _registry().sets[numbers[part]].objects
        if len(parts) == 1 or own in part:
            process_set._ranks = list(part)
            if not any(each is process_set for each in objects):
                objects.append(process_set)


def _row(process_set: ProcessSet) -> Any:
    """What this worker says of a set."""
    topology, comm = process.current().topology, process_set.mpi_comm
    if not comm:  # COMM_NULL has no ranks: the workers that are not members learn who is
        return row_of(process_set.ranks or [], topology.size)
    told = comm.allgather((process.current().member.job, topology.rank))
    strangers = any(job != process.current().member.job for job, _ in told)
    ranks = sorted({rank for _, rank in told if rank < topology.size})
    return row_of(ranks, topology.size, of_communicator=True, has_strangers=strangers)


def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set, after its pending operations of this worker; every worker calls it, members or not.

    Returns
    -------
    bool
        False, and nothing happens, for the global set and for one that is not registered.

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
    world, registry = global_process_set.world(operation), _registry()
    number = registry.number_of(process_set)
    with world.submitting():
        table = world.all_rows(operation, "hvd.remove_process_set", "process set", np.array([number or 0], np.int64))
        if (table != table[0]).any():
            details = world.topology.listed(f"set {each}" for each in table[:, 0].tolist())
            fix = "remove the same set on every worker."
            raise MismatchError(_text("the workers name different process sets.", fix, operation, details))
        if not number:
            return False
        # Before an unread error is raised, which other workers may not have.
        process.current().leave_inner(registry.sets.pop(number).member)
    return True


def rejoin() -> None:
    """Make the registered sets anew in a world that other workers may have come to, or left; every worker calls it.

    The sets are those of rank 0. One with ranks that do not exist cannot be used, until a later world has them.

    Raises
    ------
    InvalidRequestError
        This worker is new, and was given a set by `init` that the others do not have.
    LaunchError, HorovodInternalError
        As `register`.
    """
    world, registry = process.current().member, _registry()
    if world.is_alone:
        told = _as_text(registry)
    else:
        with world.submitting():
            told = exchange(world.engine(), world.topology, "process sets", _as_text(registry))[0]
    dynamic, registry.next_number, sets = json.loads(told)
    registry.is_dynamic = registry.is_dynamic or dynamic
    before, registry.sets = registry.sets, {}
    for number, ranks in sets:
        wanted = [each for each in registry.wanted if each.ranks == ranks]
        known = before.get(number) or _Registered(wanted, InnerMember(ranks, number))
        registry.sets[number] = known
        if ranks[-1] < world.topology.size and not process.current().has_inner(known.member):
            process.current().join_inner(ranks, number, known.member)
    foreign = [each for each in registry.wanted if registry.number_of(each) is None]
    registry.wanted.clear()
    if foreign:
        fact = f"{foreign[0]} is not one of the process sets of the running job."
        raise InvalidRequestError(_text(fact, "give init() the same sets on all workers.", "init"))


def _as_text(registry: _Registry) -> str:
    sets = [(number, each.member.ranks) for number, each in registry.sets.items()]
    return json.dumps([registry.is_dynamic, registry.next_number, sets])


def process_sets() -> list[ProcessSet]:
    """The registered sets in the order of their numbers, first the global one; none outside of a world."""
    world = [global_process_set] if process.current().is_initialized else []
    return [*world, *(each.first for each in _registry().sets.values())]


def process_set_by_id(process_set_id: int) -> ProcessSet:
    """The registered set of this number.

    Raises
    ------
    InvalidRequestError
        There is none.
    """
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
        raise InvalidRequestError(_text(fact, fix, operation))


def _check_ranks(ranks: Any) -> list[int]:
    fix = "pass a list of different ranks, or an mpi4py communicator."
    try:
        checked = sorted(int(rank) for rank in ranks)
    except (TypeError, ValueError):
        raise InvalidRequestError(message(f"{ranks!r} is no list of ranks.", operation="ProcessSet", fix=fix)) from None
    if len(set(checked)) != len(checked):
        raise InvalidRequestError(message(f"{checked} names a rank twice.", operation="ProcessSet", fix=fix))
    return checked


def _text(fact: str, fix: str, operation: str, details: Sequence[str] = ()) -> str:
    topology = process.current().topology
    return message(fact, rank=topology.rank, size=topology.size, operation=operation, details=details, fix=fix)


# -- The sets that the workers mean: all judge one table, so that all add the same sets, or none does ----------------


def row_of(ranks: Iterable[int], size: int, of_communicator: bool = False, has_strangers: bool = False) -> Any:
    """What a worker says of one set."""
    row = np.zeros(size + _EXTRA, np.int64)
    named = list(ranks)
    foreign = [rank for rank in named if not 0 <= rank < size]
    row[[rank for rank in named if 0 <= rank < size]] = 1
    row[size:] = len(foreign), min(foreign, default=0), of_communicator, has_strangers
    return row


def agreed_sets(topology: Topology, operation: str, table: Any) -> list[list[Part]]:
    """The sets that every worker has to add, in order."""
    size = topology.size
    said = table.reshape(size, -1, size + _EXTRA)
    return [_agreed(topology, operation, said[:, place]) for place in range(said.shape[1])]


def _agreed(topology: Topology, operation: str, rows: Any) -> list[Part]:
    size = topology.size
    by_ranks: dict[tuple[Part, Part], list[int]] = {}  # by those that exist, and by one that does not
    for rank, row in enumerate(rows):
        least: Part = (int(row[_LEAST]),) if row[_FOREIGN] else ()
        by_ranks.setdefault((tuple(np.flatnonzero(row[:size]).tolist()), least), []).append(rank)
    silent = by_ranks.pop(((), ()), [])

    def text(fact: str, fix: str, details: Sequence[str] = ()) -> str:
        return message(fact, **topology.speaker, operation=operation, details=details, fix=fix)

    if not by_ranks:
        raise InvalidRequestError(text("the process set is empty.", "name at least one rank."))
    if rows[:, _STRANGERS].any():
        fact = f"the communicator of a process set has processes that are none of the {size} workers."
        raise InvalidRequestError(text(fact, "split it from a communicator of the workers."))
    if not _fit(by_ranks, silent, rows[:, _OF_COMMUNICATOR].astype(bool).tolist()):
        details = [f"{sorted(ranks + foreign)}: {rank_list(who)}" for (ranks, foreign), who in by_ranks.items()]
        details += [f"no ranks: {rank_list(silent)}"] if silent else []
        raise MismatchError(text("the workers name different process sets.", _FIX, details))
    for _, foreign in by_ranks:
        if foreign:
            fact = f"the set names {rank_list(foreign)}, but there are {size} workers."
            raise InvalidRequestError(text(fact, f"use ranks from 0 to {size - 1}."))
    return sorted(ranks for ranks, _ in by_ranks)


def _fit(by_ranks: dict[tuple[Part, Part], list[int]], silent: list[int], of_communicator: list[bool]) -> bool:
    """Whether what the workers name is one set, or the parts of a partition; `silent` ones know none."""
    if len(by_ranks) == 1:
        ((ranks, _),) = by_ranks
        return not set(silent) & set(ranks)
    # Whoever is in no part could not tell which of them is meant.
    return not silent and all(
        list(ranks) == who and all(of_communicator[rank] for rank in who) for (ranks, _), who in by_ranks.items()
    )
