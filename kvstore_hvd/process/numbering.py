"""Numbers for calls that have no names: the n-th calls of all workers meet."""

from __future__ import annotations

import threading
import weakref

import numpy as np

from kvstore_hvd.process.member import Member

__all__ = ["agree_on_numbers", "next_number"]


class _Unnamed:
    """Counts the calls without a name in one world, for each kind of call."""

    def __init__(self, generation: int) -> None:
        self.generation = generation
        self.counts: dict[str, int] = {}
        self.before = 0  # the largest number of any kind that there may have been, when `counts` was empty


# The n-th calls meet. Workers may have made different numbers of them when a world is lost: each world starts anew.
_unnamed_lock = threading.Lock()
_unnamed: weakref.WeakKeyDictionary[Member, _Unnamed] = weakref.WeakKeyDictionary()


def next_number(world: Member, kind: str) -> int:
    """A number that no call of this kind had in this world; the n-th calls of all workers have the same one."""
    with _unnamed_lock:
        known = _unnamed_in(world)
        known.counts[kind] = known.counts.get(kind, 0) + 1
        return known.before + known.counts[kind]


def agree_on_numbers(world: Member) -> None:
    """Go on with the same numbers everywhere, after workers have made different numbers of calls; waits for all."""
    # To be called inside ``world.submitting()``.
    with _unnamed_lock:
        known = _unnamed_in(world)
        row = np.array([known.before + max(known.counts.values(), default=0)], np.int64)
    table = world.all_rows("join", "hvd/numbers", "join", row)
    with _unnamed_lock:
        known.before, known.counts = int(table.max()), {}


def _unnamed_in(world: Member) -> _Unnamed:
    generation = world.topology.generation
    known = _unnamed.get(world)
    if known is None or known.generation != generation:
        known = _unnamed[world] = _Unnamed(generation)
    return known
