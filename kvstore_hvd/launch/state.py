"""What is known of a job: its slots, workers and generations; and what its decisions ask to be done, as data."""

from __future__ import annotations

import math
import signal
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Union

from kvstore_hvd.errors import LaunchError
from kvstore_hvd.launch.hosts import MAX_WORKERS, machine_of

EXIT_FAILED, EXIT_NOT_STARTED = 1, 126


class StartError(LaunchError):
    """A job cannot be started, or go on; `code` is the exit code."""

    def __init__(self, text: str, code: int = EXIT_NOT_STARTED) -> None:
        super().__init__(text)
        self.code = code


class Slot(NamedTuple):
    """A place for one worker: the `index`-th of a host."""

    host: str
    index: int  # type: ignore[assignment]  # a method of tuples has this name, too

    def __str__(self) -> str:
        return f"{self.host}:{self.index}"


class Slots:
    """The slots of all hosts, oldest host first."""

    def __init__(self, cooldown: tuple[float, float]) -> None:
        self._cooldown = cooldown  # for how many seconds at least, and at most, a slot is left alone
        self._hosts: dict[str, int] = {}
        # Crashes of slots and losses of hosts, and until when they get no worker. Slots and hosts that have gone keep
        # theirs: they may come back.
        self._crashes: Counter[Slot | str] = Counter()
        self._until: dict[Slot | str, float] = {}

    def __contains__(self, slot: Slot) -> bool:
        return slot.index < self._hosts.get(slot.host, 0)

    def __iter__(self) -> Iterator[Slot]:
        return (Slot(host, index) for host, count in self._hosts.items() for index in range(count))

    def __len__(self) -> int:
        return sum(self._hosts.values())

    def update(self, hosts: Mapping[str, int]) -> list[tuple[str, str, int]]:
        """Take the hosts that are there now with their numbers of slots; returns event, host and number of changes."""
        changes = []
        for host in {**self._hosts, **hosts}:
            # Each slot is looked at for every decision.
            before, now = self._hosts.get(host, 0), min(hosts.get(host, 0), MAX_WORKERS)
            if now != before:
                changes.append(("host_added" if now > before else "host_removed", host, now))
            self._hosts[host] = now
            if now == 0:
                del self._hosts[host]
        return changes

    def crashed(self, place: Slot | str, now: float, *, had_begun: bool = True) -> float:
        """The worker of a slot has crashed, or a host is lost; returns for how many seconds it gets no other."""
        earlier, (lower, upper) = self._crashes[place], self._cooldown
        self._crashes[place] += 1
        if earlier == 0 and had_begun:
            return 0.0
        seconds = min(upper, lower * 2.0 ** min(earlier, 60))  # 2.0 ** 1024 is no float any more
        self._until[place] = now + seconds
        return seconds

    def forgive(self, place: Slot | str) -> None:
        """A worker has lived long in this slot, or on this host."""
        del self._crashes[place]
        self._until.pop(place, None)

    def place_of(self, slot: Slot) -> tuple[int, str, int]:
        """What puts slots into their order, those that are gone behind the others."""
        hosts = list(self._hosts)
        return (hosts.index(slot.host) if slot.host in self._hosts else len(hosts), slot.host, slot.index)

    def usable_from(self, slot: Slot) -> float:
        return max(self._until.get(place, 0.0) for place in (slot, slot.host))


def how_it_ended(code: int) -> str:
    """How a process with this exit code (or -signal) ended, as the end of a sentence."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


#: Stands for another reason than a change of the hosts.
NO_CHANGE = 0
_LONG_LIFE_S = 600.0


class Place(NamedTuple):
    """Where a worker is, as it says itself. Hosts of equal identities can share memory."""

    name: str
    identity: str
    pid: int = 0
    addresses: tuple[str, ...] = ()  # where it listens for other hosts


class Worker:
    """One worker, from the moment it is to be started until after its end. Times are of the job's clock."""

    removed_by: int = NO_CHANGE  # that removed its slot
    place: Place | None = None  # once it has called init()
    generation: int = -1  # the last one that it was told to meet as
    ready: bool = False  # it waits for its next world
    ready_at: float = 0.0  # since when, as a newcomer
    joined_at: float | None = None  # when it was in a world first
    killed: str = ""  # why we killed it: it counts as crashed from that moment
    synced: bool = False  # it has the state of the training
    finished: bool = False  # the function of run() has returned
    leaving: bool = False  # it is not needed any more
    told_to_end: bool = False  # by SIGTERM, because it did not leave
    act_at: float = math.inf  # when something must be done if it is still there: it was to leave, or was killed
    code: int | None = None  # exit code, or -signal; None while it runs
    lines: Sequence[str] = ()  # its last ones on stderr
    lost: str = ""  # what ended its host, and it with that
    pid: int = 0  # once it runs

    def __init__(self, number: int, slot: Slot, started_at: float, change: int) -> None:
        # `change` is of the hosts, because of which it was started. Numbers are never used twice.
        self.id, self.slot, self.started_at, self.change = number, slot, started_at, change

    @property
    def alive(self) -> bool:
        """Whether it runs, as far as is known, and has not been killed by us."""
        return self.code is None and not self.killed

    @property
    def taking_part(self) -> bool:
        """Whether it may be in a world to come."""
        return self.alive and not self.leaving and not self.finished

    @property
    def ending(self) -> str:
        """How it ended, as the end of a sentence."""
        if self.lost:
            return f"was lost with its host {self.slot.host}: {self.lost}"
        text = how_it_ended(self.code or 0)
        return f"{text} ({self.killed})" if self.killed else text

    def has_lived_long(self, now: float) -> bool:
        """Whether it has been in a world for so long that earlier crashes in its slot count no more."""
        return self.joined_at is not None and now - self.joined_at >= _LONG_LIFE_S

    def __str__(self) -> str:
        return f"worker {self.id} ({self.slot})"


def machines(workers: Sequence[Worker]) -> list[str]:
    """What tells the hosts of workers apart: their identities, or, as long as one is not known, the hosts' names."""
    places = [worker.place.identity for worker in workers if worker.place]
    return places if len(places) == len(workers) else [machine_of(worker.slot.host) for worker in workers]


def rank_order(workers: Sequence[Worker]) -> list[Worker]:
    """Workers, given oldest first, in the order of their ranks: host by host, the host of the oldest worker first."""
    hosts: dict[str, list[Worker]] = {}
    for worker, host in zip(workers, machines(workers)):
        hosts.setdefault(host, []).append(worker)
    return [worker for same in hosts.values() for worker in same]


def local_ranks(ranked: Sequence[Worker], slots: Slots) -> list[int]:
    """The local ranks of workers: on each host in the order of their slots, whoever came first."""
    # So a worker that takes the place of another one gets the local rank, and with that the device, that is free.
    counts: Counter[str] = Counter()
    places: dict[int, int] = {}
    for worker, host in sorted(zip(ranked, machines(ranked)), key=lambda each: slots.place_of(each[0].slot)):
        places[worker.id] = counts[host]
        counts[host] += 1
    return [places[worker.id] for worker in ranked]


# What a worker is told of changes, as bits: Horovod's numbers of a HostUpdateResult.
REMOVED, ADDED = 1, 2


class Generation:
    """The members of a world, in the order of their ranks, and how far they have come. Before the first it is -1."""

    def __init__(self, number: int, members: Sequence[Worker], kill_at: float = math.inf) -> None:
        self.number = number
        self.members = list(members)
        # Void: lost, or not begun, and the next one is waited for.
        self.phase: Literal["meeting", "training", "void"] = "meeting" if members else "void"
        self.told = 0  # of changes, since the generation began
        self.kill_at = kill_at  # who is late is killed then
        self.waits_since = math.inf  # workers that are there wait for those that are late
        self.apart: set[frozenset[str]] = set()  # hosts that have not reached each other
        self.joined: set[int] = set()
        self.joined_at = math.inf  # when all had
        self.synced: set[int] = set()  # workers that have the state of the training

    @property
    def begun(self) -> bool:
        """Whether this is a generation at all, and not the time before the first one."""
        return self.number >= 0

    @property
    def left(self) -> list[Worker]:
        """The members that may be in the next world, in the order of their ranks."""
        return [worker for worker in self.members if worker.taking_part]

    def late(self) -> list[Worker]:
        """The members that hold all others up."""
        if self.phase == "meeting":
            return [worker for worker in self.left if worker.id not in self.joined]
        return [worker for worker in self.left if not worker.ready]


class Settings(NamedTuple):
    """What the user asked for. Times in seconds."""

    job: str
    min_np: int
    max_np: int = MAX_WORKERS
    first_np: int | None = None  # slots to wait for at the start; None: min_np
    reset_limit: int | None = None
    elastic_timeout_s: float = 600.0
    timeout_s: float = 600.0
    start_timeout_s: float = 30.0
    survivor_time_s: float = 2.0
    exit_timeout_s: float = 30.0  # for a worker that has trained, from being told to leave to its end
    kill_grace_s: float = 5.0
    lease_s: float = 60.0
    cooldown: tuple[float, float] = (10.0, 300.0)
    is_static: bool = False  # nobody is replaced: a failure ends the job, when the others have had their time


class Start(NamedTuple):
    """Start this worker on its slot."""

    worker: int
    slot: Slot


class Tell(NamedTuple):
    """Send this worker a message."""

    worker: int
    message: dict[str, Any]


class Kill(NamedTuple):
    """Send the processes of this worker a signal; `ended`: how they end from now on is our doing."""

    worker: int
    number: int
    ended: bool


class Note(NamedTuple):
    """Put this into the event log, and tell everybody `news`, if there are any."""

    event: str
    fields: dict[str, Any]
    news: str


class End(NamedTuple):
    """The job is over: end what still runs. No reason: it went well."""

    code: int
    reason: str = ""
    details: tuple[str, ...] = ()
    lines: tuple[str, ...] | None = None  # the last ones on stderr of the worker that is the reason


Action = Union[Start, Tell, Kill, Note, End]
