"""Who takes part: the ranks of a world, the hosts they are on, and short texts that all ranks send each other."""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvstore_hvd import errors, native
from kvstore_hvd.errors import LaunchError, message

__all__ = ["Topology"]

_CLOCK_ROUNDS = 20
#: Of errors that name ranks which did not arrive in time.
FIX_OF_LATE = "see whether they failed or create no store; KVHVD_START_TIMEOUT (seconds) gives them more time."


@dataclass(frozen=True)
class Host:
    """What ranks must share to map each other's memory and to watch each other's processes."""

    name: str  # for people
    identity: str  # equal exactly where memory and processes can be shared

    @classmethod
    def here(cls) -> Host:
        """The host of this process."""
        # The boot id tells machines apart whose hostnames are equal. Abstract sockets live in the network namespace:
        # containers that do not share it, or the namespaces of `watching_namespaces`, count as different hosts.
        name = socket.gethostname()
        try:
            with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
                boot = file.read().strip()
        except OSError:
            boot = name
        return cls(name, " ".join((boot, _namespace("net") or name, *watching_namespaces())))


def virtual_hosts(hosts: Sequence[Host], counts: Sequence[int]) -> list[Host]:
    """The hosts of all ranks where tests split those of one machine; they have segments of their own, nothing else."""
    # `counts` (``KVHVD_TEST_HOSTS``): 2: two hosts with equally many ranks; 2,1,1: so many ranks each, in order. Worlds
    # of other sizes stay on one host.
    size = len(hosts)
    numbers = [host for host, count in enumerate(counts) for _ in range(count)]
    if len(counts) == 1:
        numbers = [rank * min(counts[0], size) // size for rank in range(size)]
    if len(numbers) != size:
        return list(hosts)
    return [dataclasses.replace(host, identity=f"{host.identity} {number}") for host, number in zip(hosts, numbers)]


def watching_namespaces() -> tuple[str, str]:
    """The PID and the time namespace of this process; '' where the system has none, or hides it."""
    # Workers watch each other by process ids and start times: both mean something else in another such namespace.
    return _namespace("pid"), _namespace("time")


def _namespace(kind: str) -> str:
    try:
        return os.readlink(f"/proc/self/ns/{kind}")
    except OSError:
        return ""


@dataclass(frozen=True, repr=False)
class Topology:
    """This process among the ranks of its world.

    Attributes
    ----------
    rank, size, local_rank, local_size : int
        As in Horovod. Local ranks follow the order of ranks, or of the launcher's slots.
    cross_rank, cross_size : int
        The rank and number among the workers that have this local rank on their host.
    hosts : tuple of str
        The host of each rank; names are equal exactly where memory can be shared.
    generation : int
        The number of worlds that this process was in before.
    source : str
        ``'launcher'``, ``'mpi'`` or ``'single'``.
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

    def __repr__(self) -> str:
        fields = (f"{each.name}={getattr(self, each.name)!r}" for each in dataclasses.fields(Topology))
        return f"Topology({', '.join(fields)})"


@dataclass(frozen=True, repr=False)
class Place(Topology):
    """A topology with what this package needs besides."""

    local_rank_of: tuple[int, ...] = ()  # each rank
    pids: tuple[int, ...] = ()  # the process of each rank, of a world on several hosts
    # Messages name ranks by those in the world of all.
    all_ranks: tuple[int, ...] = ()  # the rank of each rank in the world of all, ascending
    size_of_all: int = 0  # of the world of all
    set_number: int = 0  # of the process set that this world belongs to; 0: the world of all
    is_member: bool = True  # False: this worker is not in the process set, and alone in this world

    @classmethod
    def of(
        cls, rank: int, hosts: Sequence[Host], *, source: str, local_rank_of: Sequence[int] = (), **more: Any
    ) -> Place:
        """Derive the rest from the host of each rank, and from the local ranks if the launcher has given them."""
        # Hostnames have a suffix ('node#2') where different hosts have the same one.
        names, used = dict[str, str](), Counter[str]()
        for host in hosts:
            if host.identity not in names:
                used[host.name] += 1
                names[host.identity] = host.name if used[host.name] == 1 else f"{host.name}#{used[host.name]}"
        of_ranks = tuple(names[host.identity] for host in hosts)
        local = tuple(local_rank_of) or tuple(of_ranks[:r].count(name) for r, name in enumerate(of_ranks))
        column = [r for r, local_rank in enumerate(local) if local_rank == local[rank]]
        counts = len(hosts), local[rank], of_ranks.count(of_ranks[rank]), column.index(rank), len(column)
        of_all = {"all_ranks": tuple(range(len(hosts))), "size_of_all": len(hosts)}
        return cls(rank, *counts, of_ranks, source=source, local_rank_of=local, **{**of_all, **more})

    @property
    def rank_in_all(self) -> int:
        """This worker's rank in the world of all."""
        return self.all_ranks[self.rank]

    def rank_list(self, ranks: Iterable[int]) -> str:
        """As `errors.rank_list`, of ranks of this world, which are named as ranks of the world of all."""
        return errors.rank_list(map(self.all_ranks.__getitem__, ranks))

    def listed(self, values: Iterable[object]) -> list[str]:
        """The ranks that have each value, of values in the order of ranks: ``'float32: ranks 0-2'``, a line each."""
        return [f"{value}: {self.rank_list(ranks)}" for value, ranks in _ranks_by(values).items()]

    @property
    def group(self) -> str:
        """The suffix of 'the workers' in messages: ``' of process set 3'``, or nothing."""
        return f" of process set {self.set_number}" if self.set_number else ""

    def late(self, ranks: Iterable[int], limit_s: float, details: Iterable[str] = (), why: str = "") -> LaunchError:
        """The error of ranks that did not arrive in time."""
        fact = f"{self.rank_list(ranks)} did not arrive within {limit_s:g} s{why}."
        return LaunchError(message(fact, **self.prefix, details=details, fix=FIX_OF_LATE))

    @property
    def prefix(self) -> dict[str, Any]:
        """The prefix of errors of this worker: ``message(fact, **topology.prefix)``."""
        within = f"process set {self.set_number}" if self.set_number else ""
        if not self.is_member:
            within = f"outside of {within}"
        elif self.rank_in_all != self.rank:
            within = f"rank {self.rank}/{self.size} in {within}"
        return {"rank": self.rank_in_all, "size": self.size_of_all, "within": within}

    @property
    def host(self) -> str:
        return self.hosts[self.rank]

    @property
    def local_ranks(self) -> list[int]:
        """The ranks on this host, in the order of their local ranks."""
        return sorted(self.ranks_by_host[self.host], key=self.local_rank_of.__getitem__)

    @property
    def ranks_by_host(self) -> dict[str, list[int]]:
        """The ranks on each host, ascending; hosts are in the order of their lowest ranks, as links add them."""
        return _ranks_by(self.hosts)

    @property
    def host_count(self) -> int:
        return len(set(self.hosts))


def _ranks_by(values: Iterable[Any]) -> dict[Any, list[int]]:
    """The ranks that have each value, ascending; values are in the order of their lowest ranks."""
    ranks: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return ranks


@dataclass(frozen=True)
class World:
    """A topology and what its ranks need to find and trust each other."""

    topology: Place
    job: str  # equal on all ranks of the world, and on no others; so is the secret
    secret: bytes = field(repr=False)
    #: Why the world is lost, before the ranks have met or afterwards; '' as long as it is not.
    lost: Callable[[], str] = field(default=lambda: "", repr=False, compare=False)
    meeting: int = 0  # the number of this meeting of the job: equal on all ranks
    #: mpi4py's, with the ranks of the world of all, where that is on several hosts and MPI's.
    communicator: Any = field(default=None, repr=False, compare=False)
    #: Where each rank of the world of all listens, where that is on several hosts without MPI.
    addresses: tuple[tuple[str, ...], ...] = field(default=(), repr=False, compare=False)
    index: int = 0  # the number of this join of a process set in the world of all, whose own index is 0
    #: One rank of each host that did not answer for half the start timeout.
    unreached: list[int] = field(default_factory=list, repr=False, compare=False)

    def next_generation(self) -> World:
        """The same ranks one generation, and one meeting, later."""
        topology = dataclasses.replace(self.topology, generation=self.topology.generation + 1)
        return dataclasses.replace(self, topology=topology, meeting=self.meeting + 1)


# -- Texts and clocks of all ranks ----------------------------------------------------------------------------------


def exchange(engine: native.Engine | None, topology: Place, name: str, text: str) -> list[str]:
    """The text of every rank, in the order of ranks; collective. No engine: a world of one."""
    if engine is None:
        return [text]
    encoded, rank = text.encode(errors="surrogatepass"), topology.rank
    lengths = np.zeros(topology.size, np.int64)
    lengths[rank] = len(encoded)
    reduce_in_place(engine, f"{name}/lengths", f"'{name}/lengths'", lengths)
    rows = np.zeros((topology.size, max(1, int(lengths.max()))), np.uint8)
    rows[rank, : len(encoded)] = np.frombuffer(encoded, np.uint8)
    reduce_in_place(engine, name, f"'{name}'", rows)
    return [row[:length].tobytes().decode(errors="surrogatepass") for row, length in zip(rows, lengths.tolist())]


def clock_ahead(engine: native.Engine | None, topology: Place, name: str) -> tuple[int, int]:
    """By how many ns this host's monotonic clock is ahead of rank 0's, and the error of that; collective."""
    # F. Cristian, Probabilistic clock synchronization (1989). No rank has a sum before all ranks have submitted it: its
    # times bound the difference from both sides. All ranks of a host take the times of the host's lowest rank.
    first = topology.ranks_by_host[topology.host][0]
    if engine is None or topology.host_count == 1:
        return 0, 0
    low, high, completed, submitted_before = -(1 << 62), 1 << 62, 0, list[int]()
    for _ in range(_CLOCK_ROUNDS):
        table = np.zeros((topology.size, 2), np.int64)
        table[topology.rank] = time.monotonic_ns(), completed
        reduce_in_place(engine, name, f"'{name}'", table)
        completed = time.monotonic_ns()
        if submitted_before:
            low = max(low, submitted_before[first] - int(table[0, 1]))
            high = min(high, int(table[first, 1]) - submitted_before[0])
        submitted_before = table[:, 0].tolist()
    return ((low + high) // 2, (high - low + 1) // 2) if first else (0, 0)


def reduce_in_place(engine: native.Engine, name: str, label: str, array: np.ndarray[Any, Any], op: str = "sum") -> None:
    """Reduce an array of NumPy over the workers; waits for them."""
    address = [array.ctypes.data]
    engine.run(native.Request("allreduce", name, label, address, address, array.shape, array.dtype.name, op))
