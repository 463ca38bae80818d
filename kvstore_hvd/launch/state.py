"""What is known of a job: its slots, workers and generations; and what its decisions ask to be done, as data."""

from __future__ import annotations

import enum
import signal
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Union

from kvstore_hvd.launch.capacity import MAX_WORKERS
from kvstore_hvd.launch.hosts import machine_of

if TYPE_CHECKING:
    import random

__all__ = [
    "ADDED",
    "EXIT_FAILED",
    "NO_CHANGE",
    "REMOVED",
    "Action",
    "Cooldown",
    "End",
    "Failures",
    "Generation",
    "Kill",
    "Note",
    "Phase",
    "Roster",
    "Settings",
    "Slot",
    "Slots",
    "Start",
    "Tell",
    "Wait",
    "Worker",
    "because_of",
    "how_it_ended",
    "local_ranks",
    "machines",
    "rank_order",
    "together_with",
]

EXIT_FAILED = 1

# -- Slots ------------------------------------------------------------------------------------------------------------


class Slot(NamedTuple):
    """A place for one worker: the `index`-th of a host."""

    host: str
    index: int  # type: ignore[assignment]  # a method of tuples has this name, too

    def __str__(self) -> str:
        return f"{self.host}:{self.index}"


class Cooldown(NamedTuple):
    """For how many seconds a slot is left alone: at least `lower`, at most `upper`."""

    lower: float = 10.0
    upper: float = 300.0

    def seconds(self, count: int, share: float) -> float:
        """For the `count`-th time, counted from 1; `share`, of 0 to 1, keeps slots from coming back all at once."""
        # The exponent is bounded: 2.0 ** 1024 is no float any more.
        return max(self.lower, min(self.upper, self.lower * 2.0 ** min(count, 60) + share * self.lower))


class Slots:
    """The slots of all hosts, oldest host first."""

    def __init__(self, cooldown: Cooldown, chance: random.Random | None = None) -> None:
        self._cooldown = cooldown
        self._chance = chance
        self._hosts: dict[str, int] = {}
        # Crashes of slots and losses of hosts, and until when they get no worker. Slots and hosts that have gone keep
        # theirs: they may come back.
        self._crashes: Counter[Slot | str] = Counter()
        self._until: dict[Slot | str, float] = {}

    def __contains__(self, place: Slot | str) -> bool:
        return place in self._hosts if isinstance(place, str) else place.index < self._hosts.get(place.host, 0)

    def __iter__(self) -> Iterator[Slot]:
        return (Slot(host, index) for host, count in self._hosts.items() for index in range(count))

    def __len__(self) -> int:
        return sum(self._hosts.values())

    def update(self, hosts: Mapping[str, int]) -> list[tuple[str, str, int]]:
        """Take the hosts that are there now with their numbers of slots; returns event, host and number of changes."""
        changes = []
        for host in {**self._hosts, **hosts}:
            before, now = self._hosts.get(host, 0), hosts.get(host, 0)
            if now != before:
                changes.append(("host_added" if now > before else "host_removed", host, now))
            self._hosts[host] = now
            if now == 0:
                del self._hosts[host]
        return changes

    def crashed(self, place: Slot | str, now: float, *, had_begun: bool = True) -> float:
        """The worker of a slot has crashed, or a host is lost; returns for how many seconds it gets no other."""
        # 0 for the first time, unless nothing had begun there.
        self._crashes[place] += 1
        if self._crashes[place] == 1 and had_begun:
            return 0.0
        import random  # the launcher starts without it

        seconds = self._cooldown.seconds(self._crashes[place] - 1, (self._chance or random).random())
        self._until[place] = now + seconds
        return seconds

    def forgive(self, place: Slot | str) -> None:
        """A worker has lived long in this slot, or on this host: earlier crashes count no more."""
        del self._crashes[place]
        self._until.pop(place, None)

    def place_of(self, slot: Slot) -> tuple[int, str, int]:
        """What puts slots into their order, those that are gone behind the others."""
        hosts = list(self._hosts)
        return (hosts.index(slot.host) if slot.host in self._hosts else len(hosts), slot.host, slot.index)

    def usable(self, slot: Slot, now: float) -> bool:
        """Whether the slot is there and may get a worker now."""
        return slot in self and all(self._until.get(place, 0.0) <= now for place in (slot, slot.host))

    def next_return(self, now: float) -> float | None:
        """When the first slot or host that is left alone may get a worker; None when there is no such one."""
        return min((until for place, until in self._until.items() if until > now and place in self), default=None)


# -- Workers ----------------------------------------------------------------------------------------------------------


def exit_code(code: int) -> int:
    """The exit code as a shell gives it: 128 + n when signal n killed a process, which is -n here."""
    return code if code >= 0 else 128 - code


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
    act_at: float | None = None  # when something must be done if it is still there: it was to leave, or was killed
    code: int | None = None  # exit code, or -signal; None while it runs
    lines: Sequence[str] = ()  # its last ones on stderr
    lost: str = ""  # what ended its host, and it with that
    pid: int = 0  # once it runs

    def __init__(self, number: int, slot: Slot, started_at: float, change: int) -> None:
        # `change` is of the hosts, because of which it was started.
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


class Roster:
    """All workers of a job by number, those that have ended too. Numbers are never used twice."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self._ended: list[Worker] = []

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers)

    def get(self, number: int) -> Worker | None:
        """The worker with this number."""
        return self._workers[number] if 0 <= number < len(self._workers) else None

    def add(self, slot: Slot, now: float, change: int) -> Worker:
        """Make a worker for this slot, because of this change of the hosts."""
        self._workers.append(Worker(len(self._workers), slot, now, change))
        return self._workers[-1]

    def end(self, worker: Worker, code: int, lines: Sequence[str], lost: str) -> None:
        """Note how this worker ended."""
        worker.code, worker.lines, worker.lost = code, tuple(lines), lost
        self._ended.append(worker)

    @property
    def running(self) -> list[Worker]:
        """Those whose end is not known."""
        return [worker for worker in self._workers if worker.code is None]

    def culprit(self, among: Iterable[Worker]) -> Worker | None:
        """Who of these failed first, not counting those that failed because another did."""
        chosen = {worker.id for worker in among}
        failed = [worker for worker in self._ended if worker.id in chosen and worker.code and not worker.leaving]
        # Who ends with this error tells of another's end.
        first = [worker for worker in failed if not any("PeerLostError" in line for line in worker.lines)]
        return next(iter(first or failed), None)


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


# -- Generations ------------------------------------------------------------------------------------------------------

# What a worker is told of changes, as bits: Horovod's numbers of a HostUpdateResult.
REMOVED, ADDED = 1, 2

# A wait is told to the user once it has lasted for so long.
_TELL_AFTER_S = 10.0
# How long the others may take to say that they wait, too, once one of them has said why: from then on they have been
# told, and nothing but the wait itself can hold them.
_AFTER_TIMEOUT_S = 0.5
_AFTER_MEETING_S = 5.0
# A meeting has a deadline of its own, in the workers. This much later all of them must have said how it went.
_MEETING_EXTRA_S = 10.0


class Wait:
    """Since when something is waited for, and whether that was told. Times are of the job's clock."""

    def __init__(self, since: float | None = None) -> None:
        self.since = since  # None: it is not
        self.told = False

    def begin(self, now: float) -> float:
        """Wait from now on, unless it does already; returns since when."""
        if self.since is None:
            self.since = now
        return self.since

    def end(self) -> None:
        """Wait no longer."""
        self.since, self.told = None, False

    @property
    def tell_at(self) -> float | None:
        """When `is_news` is to be asked."""
        return None if self.since is None or self.told else self.since + _TELL_AFTER_S

    def is_news(self, now: float) -> bool:
        """Whether it takes long by now, and nobody was told yet: true once."""
        if self.tell_at is None or now < self.tell_at:
            return False
        self.told = True
        return True


class Phase(enum.Enum):
    """How far a generation has come."""

    MEETING = enum.auto()  # given out, and not all have said that they have met
    TRAINING = enum.auto()
    VOID = enum.auto()  # lost, or not begun: the next one is waited for


class Generation:
    """The members of a world, in the order of their ranks, and how far they have come. Before the first it is -1."""

    def __init__(
        self, number: int, members: Sequence[Worker], now: float, start_timeout_s: float, timeout_s: float
    ) -> None:
        self.number = number
        self.members = list(members)
        self.phase = Phase.MEETING if members else Phase.VOID
        self.told = 0  # of changes, since the generation began
        self.kill_at: float | None = now + start_timeout_s + _MEETING_EXTRA_S if members else None
        self.wait = Wait()  # of workers that are there, for those that are late
        self.apart: set[frozenset[str]] = set()  # hosts that have not reached each other
        self._joined: set[int] = set()
        self._timeout_s = timeout_s

    @property
    def begun(self) -> bool:
        """Whether this is a generation at all, and not the time before the first one."""
        return self.number >= 0

    def has(self, worker: Worker) -> bool:
        """Whether this worker was given the world."""
        return worker in self.members

    @property
    def left(self) -> list[Worker]:
        """The members that may be in the next world, in the order of their ranks."""
        return [worker for worker in self.members if worker.taking_part]

    def joined(self, worker: Worker) -> bool:
        """Note that this member has met the others; returns whether all have now."""
        self._joined.add(worker.id)
        if any(member.id not in self._joined for member in self.members):
            return False
        self.phase = Phase.TRAINING
        self.wait_no_longer()
        return True

    def void(self, now: float) -> None:
        """The world is lost: its members have until `kill_at` to say that they wait for the next one."""
        if self.phase is Phase.MEETING:
            self.wait_no_longer()
        self.phase = Phase.VOID
        self.expect(now, "lost")

    def expect(self, now: float, cause: str) -> None:
        """A worker waits for its next world, and said why: from now on the others' time runs."""
        limit = {"timeout": _AFTER_TIMEOUT_S, "meeting": _AFTER_MEETING_S}.get(cause, self._timeout_s)
        self.kill_at = now + limit if self.kill_at is None else min(self.kill_at, now + limit)
        self.wait.begin(now)

    def wait_no_longer(self) -> None:
        """Nobody is waited for."""
        self.kill_at = None
        self.wait.end()

    def late(self) -> list[Worker]:
        """The members that hold all others up."""
        if self.phase is Phase.MEETING:
            return [worker for worker in self.left if worker.id not in self._joined]
        return [worker for worker in self.left if not worker.ready]


# -- Failures ---------------------------------------------------------------------------------------------------------

# A worker that has trained for longer has done something worth the trouble.
_SOON_S = 60.0
_MAX_GENERATIONS = 5


class Failures:
    """Counts generations, one after the other, in which a newcomer has failed soon after it had joined."""

    # The first workers of a job do not count: on a bad host many of them may fail, one after the other, while the rest
    # could go on. Nor does SIGKILL, which comes from outside.

    def __init__(self) -> None:
        self._first_at: float | None = None  # when the first world was joined
        self._generations: set[int] = set()

    def joined(self, now: float) -> None:
        """The workers of a generation have met."""
        if self._first_at is None:
            self._first_at = now

    def committed(self) -> None:
        """All workers have come to a commit."""
        self._generations.clear()

    def crashed(self, worker: Worker, now: float) -> None:
        """A worker has ended with another code than 0."""
        if worker.joined_at is None or worker.killed or worker.code == -signal.SIGKILL:
            return
        if now - worker.joined_at >= _SOON_S:
            self._generations.clear()
        elif worker.joined_at != self._first_at:
            self._generations.add(worker.generation)

    @property
    def too_many(self) -> bool:
        """Whether there is no hope left."""
        return len(self._generations) >= _MAX_GENERATIONS


# -- What is asked for ------------------------------------------------------------------------------------------------


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
    cooldown: Cooldown = Cooldown()
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
    """Put this into the event log."""

    event: str
    fields: dict[str, Any]


class End(NamedTuple):
    """The job is over: end what still runs. `details` are lines under the reason; no reason: it went well."""

    code: int
    reason: str = ""
    details: tuple[str, ...] | None = None  # None: the reason is not the end of a worker


Action = Union[Start, Tell, Kill, Note, End]


def because_of(culprit: Worker, settings: Settings) -> End:
    """The job ends with this worker."""
    if settings.is_static:
        text = f"rank {culprit.id} of {settings.max_np} (pid {culprit.pid}) {culprit.ending}."
        return End(exit_code(culprit.code or 0), text, tuple(culprit.lines))
    text = f"worker {culprit.id} ({culprit.slot}) {culprit.ending}."
    text += " Its last lines on stderr:" if culprit.lines else " It wrote nothing to stderr."
    return End(exit_code(culprit.code or 0) or EXIT_FAILED, text, tuple(culprit.lines))


def together_with(text: str, which: str, culprit: Worker | None, settings: Settings) -> End:
    """The job ends for this reason, and what became of the ``'First'`` worker that failed, or of another, is told."""
    if culprit is None:
        return End(EXIT_FAILED, text)
    end = because_of(culprit, settings)
    return End(end.code, f"{text} {which}, {end.reason}", end.details)
