"""Process sets: some of the workers, with collectives of their own.

A set is a world inside the world of all workers: one that only its members join.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Optional, Union

import numpy as np

from kvstore_hvd import engine
from kvstore_hvd.comm.agreement import exchange
from kvstore_hvd.config import config
from kvstore_hvd.errors import InvalidRequestError, MismatchError, NotInitializedError, message, rank_list
from kvstore_hvd.inner_worlds import InnerMember
from kvstore_hvd.member import Member

__all__ = [
    "ProcessSet",
    "add_process_set",
    "allow_dynamic",
    "get_process_set_ids_and_ranks",
    "global_process_set",
    "process_set_by_id",
    "process_sets",
    "register",
    "remove_process_set",
]


class ProcessSet:
    """Some of the workers. Sets of the same ranks are equal, in whatever order the ranks are given.

    A set can be used once `init` or `add_process_set` has registered it on all workers, and until `remove_process_set`
    or `shutdown`.

    Parameters
    ----------
    ranks_or_comm : iterable of int, or mpi4py communicator
        The ranks of its members; or a communicator of them, which is ``MPI.COMM_NULL`` on the other workers.

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
        """This worker's number among the members, -1 if it is none; None unless the set is registered."""
        if self.process_set_id is None:
            return None
        ranks, own = self.ranks or [], engine.current().topology.rank
        return ranks.index(own) if own in ranks else -1

    def included(self) -> Optional[bool]:
        """Whether this worker is a member; None unless the set is registered."""
        return None if self.process_set_id is None else self.rank() != -1

    def world(self, operation: str) -> Member:
        """This worker's part in the world that is the set.

        Parameters
        ----------
        operation : str
            Who asks, for messages.

        Raises
        ------
        NotInitializedError
            There is no world of workers.
        InvalidRequestError
            The set is not registered, or this worker is not a member.
        """
        world = engine.current()
        if not world.is_initialized:
            fix = "call hvd.init() first."
            raise NotInitializedError(message("Horovod has not been initialized.", operation=operation, fix=fix))
        if self.process_set_id is None:
            fact, fix = f"{self} is not registered.", "add it with hvd.add_process_set() or hvd.init(process_sets=...)."
            raise InvalidRequestError(_text(fact, fix, operation))
        found = _registry().world_of(self)
        if found is None and max(self.ranks or [0]) >= world.topology.size:
            fact = f"{self} has ranks that do not exist any more: there are {world.topology.size} workers."
            raise InvalidRequestError(_text(fact, "use it when enough workers are there.", operation))
        if found is None:
            fact = f"this worker is not one of the members, {rank_list(self.ranks or [])}."
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
        world = engine.current()
        return list(range(world.topology.size)) if world.is_initialized else None


#: All workers.
global_process_set = _GlobalProcessSet()


class _Registry:
    """The sets of one world."""

    def __init__(self) -> None:
        self.next_number = 1
        self.wanted: list[ProcessSet] = []  # by a worker that has yet to be taken in by a running job
        self.sets: dict[int, tuple[ProcessSet, Optional[InnerMember]]] = {}
        self.is_dynamic = False

    def number_of(self, process_set: ProcessSet) -> Optional[int]:
        """Number of a registered set."""
        if process_set is global_process_set:
            return 0 if engine.current().is_initialized else None
        return next((number for number, (each, _) in self.sets.items() if each is process_set), None)

    def world_of(self, process_set: ProcessSet) -> Optional[Member]:
        """World of a registered set; None if this worker is not a member."""
        number = self.number_of(process_set)
        return engine.current() if number == 0 else None if number is None else self.sets[number][1]


# With the number of times that this worker had left by then: `shutdown` forgets the sets, `reset` keeps them.
_latest: tuple[int, _Registry] = (0, _Registry())


def _registry() -> _Registry:
    global _latest
    departures = engine.current().departures
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
    return register(process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set))


def register(process_set: ProcessSet) -> ProcessSet:
    """As `add_process_set`, in any world. Raises as `add_process_set`."""
    operation = "add_process_set"
    world, registry = global_process_set.world(operation), _registry()
    if engine.current().is_waiting:
        registry.wanted.append(process_set)
        return process_set
    if process_set.mpi_comm is not None:
        process_set._ranks = _members(process_set.mpi_comm)
    ranks = process_set.ranks or []
    with world.submitting():
        # A rank beyond the last is shown by the extra place, and then nobody goes on.
        size = world.topology.size
        row = np.zeros(size + 1, np.int64)
        for rank in ranks:
            row[rank if 0 <= rank < size else size] = 1
        table = world.all_rows(operation, "hvd.add_process_set", "process set", row)
        told = table[table.any(axis=1)]
        _check_agreement(table)
        if told[0][size]:
            foreign = rank_list(rank for rank in ranks if not 0 <= rank < size)
            fact = f"the set names {foreign}, but there are {size} workers."
            raise InvalidRequestError(_text(fact, f"use ranks from 0 to {size - 1}.", operation))
        process_set._ranks = ranks = np.flatnonzero(told[0]).tolist()
        known = [global_process_set, *(each for each, _ in registry.sets.values())]
        same = next((each for each in known if each.ranks == ranks), None)
        if same is not None:
            fix = "use that one, or remove it first."
            raise InvalidRequestError(_text(f"a process set with these ranks exists already: {same}.", fix, operation))
        number = registry.next_number
        registry.next_number += 1
        registry.sets[number] = (process_set, engine.current().join_inner(ranks, number))
    return process_set


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
            details = [f"set {each}: {rank_list(np.flatnonzero(table[:, 0] == each))}" for each in np.unique(table)]
            fix = "remove the same set on every worker."
            raise MismatchError(_text("the workers name different process sets.", fix, operation, details))
        if not number:
            return False
        # Before an unread error is raised, which other workers may not have.
        _, inner = registry.sets.pop(number)
        if inner is not None:
            engine.current().leave_inner(inner)
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
    world, registry = engine.current(), _registry()
    if world.is_alone:
        told = _as_text(registry)
    else:
        with world.submitting():
            told = exchange(world.communicator(), world.topology, "process sets", _as_text(registry))[0]
    dynamic, registry.next_number, sets = json.loads(told)
    registry.is_dynamic = registry.is_dynamic or dynamic
    before, registry.sets = registry.sets, {}
    for number, ranks in sets:
        wanted = next((each for each in registry.wanted if each.ranks == ranks), None)
        process_set, inner = before.get(number, (wanted or ProcessSet(ranks), None))
        exists = ranks[-1] < world.topology.size
        registry.sets[number] = process_set, world.join_inner(ranks, number, inner) if exists else None
    foreign = [each for each in registry.wanted if registry.number_of(each) is None]
    registry.wanted.clear()
    if foreign:
        fact = f"{foreign[0]} is not one of the process sets of the running job."
        raise InvalidRequestError(_text(fact, "give init() the same sets on all workers.", "init"))


def _as_text(registry: _Registry) -> str:
    sets = [(number, process_set.ranks) for number, (process_set, _) in registry.sets.items()]
    return json.dumps([registry.is_dynamic, registry.next_number, sets])


def process_sets() -> list[ProcessSet]:
    """The registered sets in the order of their numbers, first the global one; none outside of a world."""
    world = [global_process_set] if engine.current().is_initialized else []
    return [*world, *(each for each, _ in _registry().sets.values())]


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


def _members(comm: Any) -> list[int]:
    # COMM_NULL has no ranks: the workers that are not members learn who is.
    return sorted(comm.allgather(engine.current().topology.rank)) if comm else []


def _check_agreement(table: Any) -> None:
    """Raise unless all that name ranks name the same ones, and no member names none."""
    by_ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, row in enumerate(table):
        by_ranks.setdefault(tuple(np.flatnonzero(row).tolist()), []).append(rank)
    silent = by_ranks.pop((), [])
    if not by_ranks:
        fix = "name at least one rank."
        raise InvalidRequestError(_text("the process set is empty.", fix, "add_process_set"))
    if len(by_ranks) == 1 and not set(silent) & set(*by_ranks):
        return
    details = [f"{list(ranks)}: {rank_list(who)}" for ranks, who in by_ranks.items()]
    details += [f"no ranks: {rank_list(silent)}"] if silent else []
    fix = "add the same sets in the same order on every worker."
    raise MismatchError(_text("the workers name different process sets.", fix, "add_process_set", details))


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
    topology = engine.current().topology
    return message(fact, rank=topology.rank, size=topology.size, operation=operation, details=details, fix=fix)
