"""Worlds inside the world of all workers, each of some of them: joined and left with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from kvstore_hvd.errors import HorovodInternalError
from kvstore_hvd.process.member import Member, first_unread
from kvstore_hvd.worlds.topology import Host, Inside, Topology, World

__all__ = ["InnerMember", "InnerWorlds"]


class InnerMember(Member):
    """A worker's part in a world of some of the workers. One that is none of them is alone in its own."""

    # Whether it is one of them may change from one world of all to the next: whoever has the part need not know.

    def __init__(self, ranks: Sequence[int], number: int) -> None:
        super().__init__()
        self._ranks, self._number = tuple(ranks), number

    @property
    def ranks(self) -> tuple[int, ...]:
        """Of its workers in the world of all, in ascending order."""
        return self._ranks

    @property
    def reaches_gpus(self) -> bool:
        """See `Member.reaches_gpus`. No: two worlds' operations on one GPU could wait for each other for ever."""
        return False

    def join_inside(self, outer: World, index: int) -> None:
        """Join this world inside `outer`, whose members have joined `index - 1` before it. Raises as `join`."""
        topology = outer.topology
        is_outside = topology.rank not in self._ranks
        ranks = (topology.rank,) if is_outside else self._ranks
        self.join(
            World(
                Topology.of(
                    ranks.index(topology.rank),
                    [Host(topology.hosts[rank], topology.hosts[rank]) for rank in ranks],
                    generation=topology.generation,
                    source=topology.source,
                    inside=Inside(self._number, ranks, topology.size, is_outside),
                    pids=[topology.pids[rank] for rank in ranks] if topology.pids else (),
                ),
                f"{outer.job}.set{self._number}",
                outer.secret,
                lost=outer.lost,
                meeting=outer.meeting,
                communicator=outer.communicator,
                addresses=outer.addresses,
                index=index,
            )
        )


class InnerWorlds:
    """Those that this worker is in, in the order of their making. One thread at a time, but for `abort`."""

    def __init__(self) -> None:
        self._members: list[InnerMember] = []
        self._joins = 0  # in the present outer world, by all of its workers alike

    def add(self, outer: World, ranks: Sequence[int], number: int, former: InnerMember | None = None) -> InnerMember:
        """Join one more; every worker of the outer world calls it, in the same order."""
        member = former or InnerMember(ranks, number)
        self._join(member, outer)
        self._members.append(member)
        return member

    def _join(self, member: InnerMember, outer: World) -> None:
        self._joins += 1
        member.join_inside(outer, self._joins)

    def __iter__(self) -> Iterator[InnerMember]:
        return iter(tuple(self._members))

    def remove(self, member: InnerMember) -> None:
        """Forget one of them; the caller leaves it."""
        self._members.remove(member)

    def take_all(self) -> list[InnerMember]:
        """Forget all of them, which have been left."""
        members, self._members = self._members, []
        return members

    def join(self, outer: World) -> None:
        """Join all of them again, in a fresh outer world. Raises as `add`."""
        self._joins = 0
        for member in self._members:
            self._join(member, outer)

    def leave(self, reason: str) -> Exception | None:
        """Leave every one of them; returns as `Member.leave`, also that one was lost. Of several errors, the first."""
        first: Exception | None = None
        for member in self._members:
            try:
                unread = member.leave(reason)
            except HorovodInternalError as error:
                unread = error
            first = first_unread(first, None if reason else unread)
        return first

    def abort(self, text: str) -> None:
        """As `Member.abort`, in all of them."""
        for member in self._members:
            member.abort(text)

    def defer(self, error: Exception | None) -> None:
        """As `Member.defer`, in all of them."""
        for member in self._members:
            member.defer(error)

    def after_fork_in_child(self) -> None:
        """As `Member.after_fork_in_child`, in all of them."""
        with contextlib.ExitStack() as stack:  # each of them, whatever happens to the others
            for member in self._members:
                stack.callback(member.after_fork_in_child)
