"""Which process sets the workers mean: all of them judge one table, so that all add the same sets, or none does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvstore_hvd.errors import InvalidRequestError, MismatchError, message, rank_list
from kvstore_hvd.world.topology import Topology

#: The ranks of a set, in ascending order.
Part = tuple[int, ...]

# What a row tells behind the ranks: how many it names that no worker has, and the least of them; whether it names those
# of a communicator, of which each worker knows its own only; and whether others than workers are in that.
_FOREIGN, _LEAST, _OF_COMMUNICATOR, _STRANGERS = range(-4, 0)
_EXTRA = 4
_FIX = "add the same sets in the same order on every worker."


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
