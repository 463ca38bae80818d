"""The workers of an elastic job: what each has said, how it ended, and who of them stands where in a world."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvstore_hvd.driver.resets import NO_CHANGE
from kvstore_hvd.driver.slots import Slot
from kvstore_hvd.launcher.workers import exit_code, first_culprit, how_it_ended

__all__ = ["Place", "Roster", "Worker", "local_ranks", "rank_order"]

#: Name and identity of a host, as a worker tells them: equal identities can share memory.
Place = tuple[str, str]


@dataclass
class Worker:
    """One worker, from the moment it is to be started until after its end. Times are of a `JobClock`."""

    id: int
    slot: Slot
    started_at: float = 0.0
    change: int = NO_CHANGE  # of the hosts, because of which it was started
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

    @property
    def alive(self) -> bool:
        """Whether it runs, as far as is known, and has not been killed by us."""
        return self.code is None and not self.killed

    @property
    def taking_part(self) -> bool:
        """Whether it may be in a world to come."""
        return self.alive and not self.leaving and not self.finished

    @property
    def exit_code(self) -> int:
        """The exit code as a shell gives it."""
        return exit_code(self.code or 0)

    @property
    def ending(self) -> str:
        """How it ended, as the end of a sentence."""
        if self.lost:
            return f"was lost with its host: {self.lost}"
        text = how_it_ended(self.code or 0)
        return f"{text} ({self.killed})" if self.killed else text


class Roster:
    """All workers of a job by number, those that have ended too. Numbers are never used twice."""

    def __init__(self) -> None:
        self._workers: dict[int, Worker] = {}
        self._ended: list[Worker] = []

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def get(self, number: int) -> Worker | None:
        """The worker with this number."""
        return self._workers.get(number)

    def add(self, slot: Slot, now: float = 0.0, change: int = NO_CHANGE) -> Worker:
        """Make a worker for this slot, because of this change of the hosts."""
        worker = Worker(len(self._workers), slot, now, change)
        self._workers[worker.id] = worker
        return worker

    def end(self, worker: Worker, code: int, lines: Sequence[str], lost: str = "") -> None:
        """Note how this worker ended."""
        worker.code, worker.lines, worker.lost = code, tuple(lines), lost
        self._ended.append(worker)

    @property
    def running(self) -> list[Worker]:
        """Those whose end is not known."""
        return [worker for worker in self._workers.values() if worker.code is None]

    def on(self, slot: Slot) -> list[Worker]:
        """Those that run on this slot, ones that leave or were killed too."""
        return [worker for worker in self.running if worker.slot == slot]

    def culprit(self, among: Iterable[Worker]) -> Worker | None:
        """Who of these failed first, not counting those that failed because another did."""
        chosen = {worker.id for worker in among}
        failed = [worker for worker in self._ended if worker.id in chosen and worker.code and not worker.leaving]
        return first_culprit(failed, lambda worker: [line.encode() for line in worker.lines])


def rank_order(workers: Iterable[Worker]) -> list[Worker]:
    """Put workers, oldest first, into the order of their ranks."""
    # Workers of one host stand next to each other; hosts stand in the order of their oldest worker.
    hosts: dict[str, list[Worker]] = {}
    for worker in workers:
        assert worker.place is not None
        hosts.setdefault(worker.place[1], []).append(worker)
    return [worker for same in hosts.values() for worker in same]


def local_ranks(ranked: Sequence[Worker], order: Callable[[Slot], Any]) -> list[int]:
    """The local ranks of workers: on each host in the order of their slots, whoever came first."""
    # So a worker that takes the place of another one gets the local rank, and with that the device, that is free.
    hosts: dict[str, list[Worker]] = {}
    is_known = all(worker.place is not None for worker in ranked)  # else all are taken for workers of one host
    for worker in ranked:
        hosts.setdefault(worker.place[1] if is_known and worker.place is not None else "", []).append(worker)
    places = {
        worker.id: place
        for same in hosts.values()
        for place, worker in enumerate(sorted(same, key=lambda worker: order(worker.slot)))
    }
    return [places[worker.id] for worker in ranked]
