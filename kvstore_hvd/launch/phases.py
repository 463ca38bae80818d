"""The workers and generations of a job: the tables of their phases, and the ranks of workers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from kvstore_hvd.horovod.variables import Ranks
from kvstore_hvd.launch.hosts import Slot, Slots, machine_of
from kvstore_hvd.launch.state import NO_CHANGE, how_it_ended

# After this time in a world, earlier crashes in the slot of a worker count no more.
_LONG_LIFE_S = 600.0
# Phases of workers that may be in the next world, and of those that have been asked to leave.
TAKING_PART, LEAVING = ("starting", "entered", "ready", "member"), ("leaving", "ending", "killed", "left")
# Events, the phases in which they have an effect, and the next phase.
OF_WORKER = (
    ("enter", "starting", "entered"),  # init() was called
    ("ready", "entered member finished", "ready"),  # it waits for its next world
    ("world", "ready", "member"),
    ("finished", "member", "finished"),  # the function of run() has returned
    ("synced", "finished", "member"),  # it trains once more
    ("leave", "starting entered ready", "leaving"),
    ("SIGTERM", "leaving", "ending"),
    ("SIGKILL", "ending", "killed"),
    ("SIGKILL", "starting member", "late"),
    ("success", "starting entered ready member finished late", "done"),
    ("failure", "starting entered ready member finished late", "failed"),
    ("success failure", "leaving ending killed", "left"),
)
OF_GENERATION = (
    ("joined", "meeting", "training"),  # all members have met
    ("lost", "meeting training", "lost"),  # a member, or the meeting has failed
)
_ROWS = (*OF_WORKER, *OF_GENERATION)
_NEXT = {(phase, event): to for events, phases, to in _ROWS for event in events.split() for phase in phases.split()}


class _Phases:
    phase = "starting"

    def takes(self, event: str) -> bool:
        """Go to the next phase; False, and nothing changes, if there is none for this event."""
        before, self.phase = self.phase, _NEXT.get((self.phase, event), self.phase)
        return self.phase != before


class Generation(_Phases):
    """The members of a world, in the order of ranks, and its progress. Number -1 is the time before the first one."""

    def __init__(self, number: int, members: Sequence[Worker], kill_at: float = math.inf) -> None:
        self.number, self.members = number, members
        self.phase = "meeting" if members else "lost"
        self.announced = 0  # changes of the hosts that its members know of
        self.kill_at = kill_at  # deadline of late members
        self.waits_since = math.inf  # time from which members wait for late ones
        self.apart: set[frozenset[str]] = set()  # pairs of hosts that have not reached each other
        self.joined: set[int] = set()
        self.joined_at = math.inf  # time at which all had joined
        self.synced: set[int] = set()  # workers that have the state of the training

    @property
    def begun(self) -> bool:
        return self.number >= 0

    @property
    def left(self) -> list[Worker]:
        """The members that may be in the next world, in the order of ranks."""
        return [worker for worker in self.members if worker.taking_part]


class Worker(_Phases):
    """One worker, from its start until after its end. Times are of the job's clock. Ids are never used twice."""

    pid: int = 0  # 0: not started yet
    entry: Mapping[str, Any] | None = None  # the message of its init(): host, pid, addresses
    generation: int = -1  # the last one that was given out to it
    ready_at: float = 0.0  # of a newcomer
    joined_at: float | None = None  # time of its first world
    synced: bool = False  # it has the state of the training
    removed_by: int = NO_CHANGE  # the change of the hosts that removed its slot
    killed: str = ""  # why it was killed
    act_at: float = math.inf  # deadline of its leaving, or of its end after a signal
    code: int | None = None  # exit code, or -signal; None while it runs
    lines: Sequence[str] = ()  # the last ones on stderr
    lost: str = ""  # why its host was lost

    def __init__(self, number: int, slot: Slot, started_at: float, change: int) -> None:
        # `change`: that of the hosts because of which it starts.
        self.id, self.slot, self.started_at, self.change = number, slot, started_at, change

    @property
    def alive(self) -> bool:
        return self.code is None and not self.killed

    @property
    def taking_part(self) -> bool:
        return self.phase in TAKING_PART

    @property
    def leaving(self) -> bool:
        return self.phase in LEAVING

    @property
    def ending(self) -> str:
        """How it ended, as the end of a sentence."""
        if self.lost:
            return f"was lost with its host {self.slot.host}: {self.lost}"
        text = how_it_ended(self.code or 0)
        return f"{text} ({self.killed})" if self.killed else text

    def has_lived_long(self, now: float) -> bool:
        return self.joined_at is not None and now - self.joined_at >= _LONG_LIFE_S

    def __str__(self) -> str:
        return f"worker {self.id} ({self.slot})"


# -- Ranks in a world of these workers -------------------------------------------------------------------------------


def rank_order(workers: Sequence[Worker]) -> list[Worker]:
    """Workers, given oldest first, in the order of their ranks: host by host, the host of the oldest worker first."""
    hosts: dict[str, list[Worker]] = {}
    for worker, host in zip(workers, _machines(workers)):
        hosts.setdefault(host, []).append(worker)
    return [worker for same in hosts.values() for worker in same]


def ranks_of(rank: int, ranked: Sequence[Worker], slots: Slots) -> Ranks:
    """The ranks of the worker with this rank."""
    hosts, places = _machines(ranked), _local_ranks(ranked, slots)
    column = [other for other, place in enumerate(places) if place == places[rank]]
    return Ranks(rank, len(hosts), places[rank], hosts.count(hosts[rank]), column.index(rank), len(column))


def world_of(ranked: Sequence[Worker], slots: Slots) -> dict[str, Any]:
    """The fields of a message about a world of workers that have called init()."""
    entries = [worker.entry for worker in ranked if worker.entry]
    fields = {"hosts": "host", "pids": "pid", "addresses": "addresses"}
    world = {name: [entry[field] for entry in entries] for name, field in fields.items()}
    return {"size": len(ranked), **world, "local_ranks": _local_ranks(ranked, slots)}


def _machines(workers: Sequence[Worker]) -> list[str]:
    """The host of each worker: identities once all are known, until then names. Equal identities share memory."""
    known = [worker.entry["host"][1] for worker in workers if worker.entry]
    return known if len(known) == len(workers) else [machine_of(worker.slot.host) for worker in workers]


def _local_ranks(ranked: Sequence[Worker], slots: Slots) -> list[int]:
    """The local ranks of workers: on each host in the order of slots."""
    # A worker in the slot of a lost one gets its local rank, and so its GPU.
    counts: Counter[str] = Counter()
    found: dict[int, int] = {}
    for worker, host in sorted(zip(ranked, _machines(ranked)), key=lambda each: slots.order(each[0].slot)):
        found[worker.id] = counts[host]
        counts[host] += 1
    return [found[worker.id] for worker in ranked]
