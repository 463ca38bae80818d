"""Who takes part: the ranks of a world and the hosts they are on."""

from __future__ import annotations

import dataclasses
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from kvstore_hvd import errors

__all__ = [
    "Host",
    "Inside",
    "Speaker",
    "Topology",
    "World",
    "virtual_hosts",
    "watching_namespaces",
]


@dataclass(frozen=True)
class Host:
    """What ranks must share to map each other's memory and to watch each other's processes."""

    name: str  # for people
    identity: str  # equal exactly where memory and processes can be shared

    @classmethod
    def here(cls) -> Host:
        """The host of this process.

        The boot id tells machines apart whose hostnames are equal. Abstract sockets live in the network namespace:
        containers that do not share it count as different hosts, and so do those whose processes cannot watch each
        other, see `watching_namespaces`.
        """
        name = socket.gethostname()
        try:
            with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
                boot = file.read().strip()
        except OSError:
            boot = name
        return cls(name, " ".join((boot, _namespace("net") or name, *watching_namespaces())))


def virtual_hosts(hosts: Sequence[Host], placement: str) -> list[Host]:
    """The hosts of all ranks where tests split those of one machine; they have segments of their own, nothing else.

    `placement` (``KVHVD_TEST_HOSTS``): ``'2'``, two hosts with equally many ranks; ``'2,1,1'``, so many ranks each, in
    order; ``'0/1/0'``, the host of each rank. Worlds of other sizes stay on one host.
    """
    size = len(hosts)
    if "/" in placement:
        numbers = [int(part) for part in placement.split("/")]
    elif "," in placement:
        numbers = [host for host, part in enumerate(placement.split(",")) for _ in range(int(part))]
    else:
        count = min(int(placement or 1), size)
        numbers = [rank * count // size for rank in range(size)]
    if len(numbers) != size:
        return list(hosts)
    return [dataclasses.replace(host, identity=f"{host.identity} {number}") for host, number in zip(hosts, numbers)]


def watching_namespaces() -> tuple[str, str]:
    """The PID and the time namespace of this process, ``('pid:[4026531836]', 'time:[4026531834]')``.

    Workers watch each other by their process ids and the times at which they started: both mean something else in
    another such namespace. Empty where the system has none, or does not tell.
    """
    return _namespace("pid"), _namespace("time")


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


class Speaker(TypedDict, total=False):
    """What `errors.message` takes of the worker that speaks: ``message(fact, **topology.speaker)``."""

    rank: int
    size: int
    within: str


@dataclass(frozen=True)
class Inside:
    """The place of a world of some of the workers in the world of all: messages name those by their ranks there."""

    number: int  # of the process set
    ranks: tuple[int, ...]  # of its workers, in ascending order; outside of it: of this worker
    size: int  # of the world of all
    is_outside: bool = False  # this worker is no member, and alone


@dataclass(frozen=True)
class Topology:
    """The place of this process in its world. Local ranks follow the order of ranks, or of slots where that is known.

    `cross_rank` and `cross_size` are the rank and number among the workers that have this local rank on their host.
    `hosts` names each rank's host, and names are equal exactly where memory can be shared. `generation` is the world's
    number: the number of worlds that this process was in before. `source` is ``'launcher'``, ``'mpi'`` or ``'single'``.
    `inside` is set for a process set's world. `places` are the local ranks of all ranks, where they were given; `pids`
    their processes, where the world is on several hosts.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    hosts: tuple[str, ...]
    generation: int = 0
    source: str = "single"
    inside: Inside | None = None
    places: tuple[int, ...] = ()
    pids: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        rank: int,
        hosts: Sequence[Host],
        *,
        generation: int = 0,
        source: str,
        inside: Inside | None = None,
        places: Sequence[int] = (),
        pids: Sequence[int] = (),
    ) -> Topology:
        """Derive everything from the hosts of all ranks, given in rank order, and their local ranks if these differ."""
        names = _unique_names(hosts)
        seen: dict[str, int] = {}
        place: list[int] = []  # local rank of each rank
        for name in names:
            place.append(seen.get(name, 0))
            seen[name] = place[-1] + 1
        place = list(places) or place
        column = [r for r in range(len(names)) if place[r] == place[rank]]
        return cls(
            rank=rank,
            size=len(names),
            local_rank=place[rank],
            local_size=seen[names[rank]],
            cross_rank=column.index(rank),
            cross_size=len(column),
            hosts=names,
            generation=generation,
            source=source,
            inside=inside,
            places=tuple(places),
            pids=tuple(pids),
        )

    def rank_of_all(self, rank: int) -> int:
        """The rank among all workers of the worker with this rank in this world, which may be a process set's."""
        return rank if self.inside is None else self.inside.ranks[rank]

    @property
    def all_ranks(self) -> Sequence[int]:
        """Those of this world among all workers, in order."""
        return range(self.size) if self.inside is None else self.inside.ranks

    @property
    def rank_in_all(self) -> int:
        """This worker's rank among all workers."""
        return self.rank_of_all(self.rank)

    def rank_list(self, ranks: Iterable[int]) -> str:
        """As `errors.rank_list`: names ranks of this world by those among all workers."""
        return errors.rank_list(self.rank_of_all(rank) for rank in ranks)

    def listed(self, said: Iterable[object]) -> list[str]:
        """Who said what, given in the order of ranks: ``'float32: ranks 0-2'``, one line for each answer."""
        ranks: dict[object, list[int]] = {}
        for rank, answer in enumerate(said):
            ranks.setdefault(answer, []).append(rank)
        return [f"{answer}: {self.rank_list(who)}" for answer, who in ranks.items()]

    @property
    def is_outside(self) -> bool:
        """Whether this stands for a process set of which this worker is not a member: it is alone in it."""
        return self.inside is not None and self.inside.is_outside

    @property
    def group(self) -> str:
        """What messages add to 'the workers': ``' of process set 3'``, or nothing."""
        return "" if self.inside is None else f" of process set {self.inside.number}"

    @property
    def speaker(self) -> Speaker:
        """This worker, as messages name it."""
        if self.inside is None:
            return Speaker(rank=self.rank, size=self.size)
        rank, within = self.rank_in_all, f"process set {self.inside.number}"
        if self.inside.is_outside:
            within = f"outside of {within}"
        elif rank != self.rank:
            within = f"rank {self.rank}/{self.size} in {within}"
        return Speaker(rank=rank, size=self.inside.size, within=within)

    @property
    def host(self) -> str:
        """Name of this rank's host."""
        return self.hosts[self.rank]

    @property
    def local_ranks(self) -> tuple[int, ...]:
        """The ranks on this host, in the order of their local ranks; entry `local_rank` is this one."""
        ranks = self.ranks_by_host[self.host]
        return tuple(sorted(ranks, key=self.places.__getitem__) if self.places else ranks)

    @property
    def ranks_by_host(self) -> dict[str, list[int]]:
        """The ranks on each host, ascending; hosts are in the order of their lowest ranks, as links add them."""
        ranks: dict[str, list[int]] = {}
        for rank, host in enumerate(self.hosts):
            ranks.setdefault(host, []).append(rank)
        return ranks

    @property
    def host_count(self) -> int:
        """Number of hosts in the world."""
        return len(set(self.hosts))


def _unique_names(hosts: Sequence[Host]) -> tuple[str, ...]:
    """Hostnames, told apart by a suffix (``'node#2'``) where different hosts have the same one."""
    given: dict[str, str] = {}
    used: dict[str, int] = {}
    for host in hosts:
        if host.identity not in given:
            used[host.name] = used.get(host.name, 0) + 1
            given[host.identity] = host.name if used[host.name] == 1 else f"{host.name}#{used[host.name]}"
    return tuple(given[host.identity] for host in hosts)


@dataclass(frozen=True)
class World:
    """A topology and what its ranks need to find and trust each other.

    `job` and `secret` are equal on all ranks of the world and on no others. `lost` tells, before the ranks have met and
    afterwards, why they need not any more; empty as long as they need. `meeting` tells the meetings of a job from each
    other: it is equal on all ranks, whatever other worlds each of them was in. Of a world on several hosts,
    `communicator` is mpi4py's, with the ranks of the world of all; where there is none, `addresses` tells where each of
    those ranks listens. `index` tells the joins of process sets within that world from each other, and from it (0).
    `unreached` gets one rank of each host that did not answer for half the start timeout.
    """

    topology: Topology
    job: str
    secret: bytes = field(repr=False)
    lost: Callable[[], str] = field(default=lambda: "", repr=False, compare=False)
    meeting: int = 0
    communicator: Any = field(default=None, repr=False, compare=False)
    addresses: tuple[tuple[str, ...], ...] = field(default=(), repr=False, compare=False)
    index: int = 0
    unreached: list[int] = field(default_factory=list, repr=False, compare=False)

    def next_generation(self) -> World:
        """The same ranks one generation, and one meeting, later."""
        topology = dataclasses.replace(self.topology, generation=self.topology.generation + 1)
        return dataclasses.replace(self, topology=topology, meeting=self.meeting + 1)
