"""All decisions about a job, without processes, sockets or a clock of its own.

Events go in, each with its time; what is to be done comes out as `actions`. Whatever the order of events, the
decisions depend only on what is known of the workers and slots: after each event they are taken anew.
"""

from __future__ import annotations

import itertools
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvstore_hvd.errors import rank_list
from kvstore_hvd.horovod.variables import Seat
from kvstore_hvd.launch.hosts import machine_of
from kvstore_hvd.launch.state import (
    ADDED,
    EXIT_FAILED,
    NO_CHANGE,
    REMOVED,
    Action,
    End,
    Failures,
    Generation,
    Kill,
    Note,
    Phase,
    Place,
    Roster,
    Settings,
    Slot,
    Slots,
    Start,
    Tell,
    Wait,
    Worker,
    because_of,
    local_ranks,
    machines,
    rank_order,
    together_with,
)

if TYPE_CHECKING:
    import random

__all__ = ["Job"]

# Why a worker waits that tells of a lost world; with the others ('updated', 'reset') all come on their own.
_LOST = ("lost", "timeout", "meeting")
# A worker that has been in a world for so long was not what made its slot crash before.
_LONG_LIFE_S = 600.0
# How long newcomers that are ready wait for others at least; and at most as long as it took the first of them itself.
_TOGETHER_S = 2.0
_NOT_NEEDED = "this worker is not needed any more"
# A worker that the kernel has not ended so long after SIGKILL is taken for gone: it will not run again.
_KILL_TAKES_S = 5.0
# Nobody dies, and still they do not meet: there is no end to that.
_MAX_FAILED_MEETINGS = 20
# One of two hosts that have not reached each other in so many meetings is left out.
_MOST_APART = 3


class Job:
    """The state of a job."""

    def __init__(self, settings: Settings, now: float, chance: random.Random | None = None) -> None:
        self._settings = settings
        self._slots = Slots(settings.cooldown, chance)
        self._roster = Roster()
        self._generation = Generation(-1, (), now, settings.start_timeout_s, settings.timeout_s)
        self._begun = False  # there were slots enough to start
        self._succeeded = False  # a worker has ended with 0
        self._short = Wait(now)  # for workers, of which there are too few
        # In a static job, by worker: the ranks that it waits for, and until when.
        self._meeting: dict[int, tuple[list[int], float]] = {}
        self._known: Mapping[str, int] = {}  # the hosts that were discovered last
        self._leaving: dict[str, str] = {}  # those that will be lost, and why
        self._changes = 0  # of the hosts
        self._change = NO_CHANGE  # the one that is being attended to
        self._resets = 0  # how often the workers have met again, as `--reset-limit` counts it
        self._counted: set[int] = set()  # changes of the hosts that are in that number
        self._updates = 0
        self._failures = Failures()
        self._failed_meetings = 0  # in a row
        self._failure = ""  # of the last of them
        # In how many meetings two hosts have not reached each other, since they last met.
        self._apart: Counter[frozenset[str]] = Counter()
        self._fail_at: float | None = None  # of a static job: when the others have had their time
        self._over = False
        self.hosts_fault = ""  # what is wrong with the discovery of hosts
        self._actions: list[Action] = []
        self._note("job_start", job=settings.job, min_np=settings.min_np, max_np=settings.max_np)

    # -- What can be asked ----------------------------------------------------------------------------------------

    def take(self) -> list[Action]:
        """What is to be done, in order; told once."""
        actions, self._actions = self._actions, []
        return actions

    @property
    def generation(self) -> Generation:
        """The last generation that was given out."""
        return self._generation

    @property
    def workers(self) -> Roster:
        """All workers."""
        return self._roster

    @property
    def slots(self) -> Slots:
        """The slots that there are now."""
        return self._slots

    def seat(self, number: int) -> Seat:
        """Where a worker will be in its first world, if nothing happens until then; asked when it is started."""
        if self._settings.is_static:
            hosts = [machine_of(slot.host) for slot in self.static_slots]
            counts = {host: itertools.count() for host in hosts}
            return _seat(number, hosts, [next(counts[host]) for host in hosts])
        worker = self._roster.get(number)
        assert worker is not None
        coming = [
            each for each in self._roster if each is worker or (each.taking_part and not self._generation.has(each))
        ]
        if not self._generation.begun:
            coming.sort(key=lambda each: self._slots.place_of(each.slot))
        ranked = rank_order([*(each for each in self._generation.left if each.slot in self._slots), *coming])
        return _seat(ranked.index(worker), machines(ranked), self._local_ranks(ranked))

    @property
    def static_slots(self) -> list[Slot]:
        """The slots of all ranks of a static job."""
        return list(self._slots)[: self._settings.max_np]

    def deadline(self, now: float) -> float | None:
        """When `tick` must be called even if nothing happens; None for never."""
        if self._settings.is_static:
            times = [self._fail_at, *(until for _, until in self._meeting.values())]
            return min((time for time in times if time is not None), default=None) if not self._over else None
        times = [
            self._generation.kill_at,
            self._generation.wait.tell_at,
            self._short.tell_at,
            self._newcomers_join_at(),
        ]
        if self._short.since is not None:
            times.append(self._short.since + self._settings.elastic_timeout_s)
        times += [worker.act_at for worker in self._roster.running]
        if not self._finishing:
            times.append(self._slots.next_return(now))
        return min((time for time in times if time is not None), default=None) if not self._over else None

    # -- Events ---------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self._settings.is_static and not self._over:
            self._start_static(now)
        self._decide(now)

    def hosts(self, hosts: Mapping[str, int], now: float) -> None:
        """These are the hosts now, with so many slots each."""
        self._known = hosts
        changes = self._slots.update({host: count for host, count in hosts.items() if host not in self._leaving})
        for event, host, count in changes:
            self._note(event, host=host, slots=count)
        if changes:
            self._changes += 1
            self._change = self._changes
        for worker in self._generation.left:
            gone = worker.slot not in self._slots
            worker.removed_by = (worker.removed_by or self._change) if gone else NO_CHANGE
        self._decide(now)
        self._change = NO_CHANGE

    def host_leaves(self, host: str, text: str, now: float) -> None:
        """A host will be lost soon, because of what `text` says: its workers leave in good order, if they have time."""
        if not self._over:
            self._leaving[host] = text
            self._note("host_leaves", host=host, text=text)
            self.hosts(self._known, now)

    def host_lost(self, host: str, text: str, now: float, lines: Mapping[int, Sequence[str]] | None = None) -> None:
        """All workers of a host are gone, because of what `text` says; `lines` are the last ones of each on stderr."""
        workers = [worker for worker in self._roster.running if worker.slot.host == host]
        if not self._over:
            if any(_has_lived_long(worker, now) for worker in workers):
                self._slots.forgive(host)
            had_begun = any(worker.pid for worker in workers) and host not in self._leaving
            seconds = self._slots.crashed(host, now, had_begun=had_begun)
            text = self._leaving.pop(host, text)
            self._note("host_lost", host=host, text=text, seconds=round(seconds, 3))
        self._ended(workers, -signal.SIGKILL, lines or {}, now, text)
        self.hosts(self._known, now)

    def give_up(self, text: str, code: int = EXIT_FAILED) -> None:
        """There is a reason outside of it to end the job."""
        if not self._over:
            self._end(End(code, text))

    def stop(self) -> None:
        """The user ends the job: decide nothing any more."""
        self._over = True

    def started(self, number: int, pid: int, now: float) -> None:
        """A worker runs."""
        worker = self._roster.get(number)
        if worker is not None:
            worker.pid = pid
            self._note("worker_started", worker=number, slot=str(worker.slot), pid=pid)
        self._decide(now)

    def exited(self, number: int, code: int, lines: Sequence[str], now: float) -> None:
        """A worker has ended, with the exit code or minus the signal that killed it, and these last lines on stderr."""
        worker = self._roster.get(number)
        if worker is not None and worker.code is None:
            self._ended([worker], code, {number: lines}, now)
        self._decide(now)

    def heard(self, number: int, message: Mapping[str, Any], now: float) -> None:
        """A worker says something. Raises ValueError, TypeError or LookupError if that makes no sense."""
        worker = self._roster.get(number)
        if worker is None:
            raise ValueError(f"there is no worker {number}")
        if not worker.alive or self._over:
            return  # its last words
        kind = message["t"]
        if kind != "enter" and worker.place is None:
            raise ValueError(f"worker {number} says '{kind}' before it has called init()")
        if message.get("generation", -1) > worker.generation:
            raise ValueError(f"worker {number} tells of a generation that it was not given")
        if kind == "enter":
            self._on_enter(worker, message, now)
        elif kind == "ready":
            self._on_ready(worker, message, now)
        elif kind == "joined":
            self._on_joined(worker, message["generation"], now)
        elif kind == "synced":
            worker.synced, worker.finished = True, False  # finished: of an earlier run()
        elif kind != "finished":
            raise ValueError(f"worker {number} says '{kind}'")
        elif not worker.finished:
            worker.finished = True
            self._note("worker_finished", worker=worker.id)
        self._decide(now)

    # -- What workers say -----------------------------------------------------------------------------------------

    def _on_enter(self, worker: Worker, message: Mapping[str, Any], now: float) -> None:
        name, identity = map(str, message["host"])
        worker.place = Place(name, identity, int(message["pid"]), tuple(map(str, message["addresses"])))
        self._note("worker_entered", worker=worker.id)
        if self._settings.is_static:
            self._meeting[worker.id] = [int(rank) for rank in message["ranks"]], now + self._settings.start_timeout_s
        elif worker.leaving:
            self._tell(worker.id, "leave", text=_NOT_NEEDED)
        elif not self._generation.begun:
            # There is nobody yet whom it could keep waiting while it prepares: it waits for the first world at once.
            worker.ready = True
            self._generation.expect(now, "start")
        elif not self._generation.has(worker):
            others = [newcomer for newcomer in self._newcomers() if newcomer is not worker]
            ranked = rank_order([*self._generation.left, *others, worker])
            self._tell(worker.id, "place", rank=ranked.index(worker), **self._world(ranked))

    def _on_ready(self, worker: Worker, message: Mapping[str, Any], now: float) -> None:
        if worker.ready or worker.leaving or message["generation"] < worker.generation:
            return  # said before it knew of the world that it has been given since
        cause, text = str(message["cause"]), str(message["text"])
        worker.ready, worker.finished = True, False
        if self._generation.has(worker):
            self._hear_of_hosts(worker, [self._generation.members[int(rank)] for rank in message["unreached"]])
            if self._generation.phase is Phase.MEETING or cause in _LOST:
                self._void(cause, text, now)
            if cause == "updated":
                self._failures.committed()
            self._generation.expect(now, cause)
        else:
            worker.ready_at = now
            self._note("newcomer_ready", worker=worker.id)

    def _hear_of_hosts(self, worker: Worker, unreached: Sequence[Worker]) -> None:
        """A worker has not reached these others; its meeting counts once for each two hosts."""
        pairs = {frozenset((worker.slot.host, other.slot.host)) for other in unreached}
        self._apart.update(pair for pair in pairs - self._generation.apart if len(pair) == 2)
        self._generation.apart |= pairs

    def _on_joined(self, worker: Worker, generation: int, now: float) -> None:
        if generation != self._generation.number or self._generation.phase is not Phase.MEETING:
            return
        if self._generation.joined(worker):
            for member in self._generation.members:
                member.joined_at = now if member.joined_at is None else member.joined_at
            self._failures.joined(now)
            self._failed_meetings = 0
            hosts = {member.slot.host for member in self._generation.members}
            self._apart = Counter({pair: count for pair, count in self._apart.items() if not pair <= hosts})
            self._note("generation_joined", generation=generation)

    def _ended(
        self, workers: Sequence[Worker], code: int, lines: Mapping[int, Sequence[str]], now: float, lost: str = ""
    ) -> None:
        missed = [worker for worker in workers if self._generation.has(worker) and not worker.killed]
        for worker in workers:
            last = lines.get(worker.id, ())
            self._roster.end(worker, code, last, lost)
            self._note("worker_exited", worker=worker.id, code=code, lines=list(last))
            if worker.leaving:
                continue
            if code == 0:
                self._succeeded = True
            elif not lost:
                self._on_crash(worker, now)
        for worker in missed:
            # A finished worker had met the others, also if not all of them have said so yet, and takes nothing with it
            # that they need; if it does, they say so.
            is_meeting = self._generation.phase is Phase.MEETING
            if not worker.finished and (is_meeting or code != 0):
                self._void("lost", f"worker {worker.id} ({worker.slot}) {worker.ending}", now)

    def _on_crash(self, worker: Worker, now: float) -> None:
        self._failures.crashed(worker, now)
        if _has_lived_long(worker, now):
            self._slots.forgive(worker.slot)
        seconds = self._slots.crashed(worker.slot, now)
        if seconds > 0:
            self._note("slot_blacklisted", slot=str(worker.slot), seconds=round(seconds, 3))

    # -- Decisions ------------------------------------------------------------------------------------------------

    @property
    def _finishing(self) -> bool:
        """Whether a worker is done: none is started any more, and whoever is left goes on, however few they are."""
        return self._succeeded or any(worker.finished and worker.alive for worker in self._roster)

    @property
    def _least(self) -> int:
        return 1 if self._finishing else self._settings.min_np

    def _local_ranks(self, ranked: Sequence[Worker]) -> list[int]:
        return local_ranks(ranked, self._slots)

    def _world(self, ranked: Sequence[Worker]) -> dict[str, Any]:
        """What a worker is told of a world."""
        places = [worker.place or Place("", "") for worker in ranked]
        return {
            "size": len(ranked),
            "hosts": [place[:2] for place in places],
            "pids": [place.pid for place in places],
            "addresses": [place.addresses for place in places],
            "places": self._local_ranks(ranked),
        }

    def _newcomers(self) -> list[Worker]:
        """Who waits to be in a world for the first time, oldest first."""
        return [
            worker
            for worker in self._roster
            if worker.taking_part and worker.ready and not self._generation.has(worker)
        ]

    def _decide(self, now: float) -> None:
        if self._over:
            return
        if self._settings.is_static:
            self._decide_static(now)
            return
        self._kill_late(now)
        self._ended(self._act_on_time(now), -signal.SIGKILL, {}, now)
        self._start(now)
        if self._is_over():
            return
        self._see_off(now)
        if self._generation.phase is Phase.TRAINING:
            self._tell_changes(now)
        if self._generation.phase is not Phase.MEETING:
            self._leave_out(now)
            self._form(now)

    def _start_static(self, now: float) -> None:
        """Start the next worker, one at a time: signals and failures count from the first one on."""
        slots, count = self.static_slots, len(list(self._roster))
        is_lost = any(worker.lost for worker in self._roster)
        if count < len(slots) and all(worker.pid for worker in self._roster.running) and not is_lost:
            self._actions.append(Start(self._roster.add(slots[count], now, NO_CHANGE).id, slots[count]))

    def _decide_static(self, now: float) -> None:
        """Nobody takes anybody's place: a failure ends the job, once the others have had their time to report it."""
        self._meet_static(now)
        if self._fail_at is None and any(worker.code for worker in self._roster):
            self._fail_at = now + self._settings.survivor_time_s
        are_all_done = len(list(self._roster)) == self._settings.max_np and not self._roster.running
        if are_all_done or (self._fail_at is not None and now >= self._fail_at):
            culprit = self._roster.culprit(self._roster)
            self._end(End(0) if culprit is None else because_of(culprit, self._settings))

    def _meet_static(self, now: float) -> None:
        """Workers on several hosts learn of each other once all that one waits for have called init()."""
        for number, (ranks, until) in list(self._meeting.items()):
            chosen = [self._roster.get(rank) for rank in ranks]
            there = [worker for worker in chosen if worker is not None and worker.place is not None]
            if len(there) < len(ranks) and now < until:
                continue
            del self._meeting[number]
            if len(there) == len(ranks):
                world = {**self._world(there), "generation": 0, "job": self._settings.job}
                self._tell(number, "world", rank=ranks.index(number), **world)
            else:
                absent = rank_list(rank for rank in ranks if rank not in {worker.id for worker in there})
                text = f"{absent} did not call init() within {self._settings.start_timeout_s:g} s."
                fix = "see whether they failed or create no store; KVHVD_START_TIMEOUT (seconds) gives them more time."
                self._tell(number, "fail", text=text, fix=fix)

    def _kill_late(self, now: float) -> None:
        if self._generation.kill_at is None:
            return
        late = self._generation.late()
        if not self._generation.begun:
            late = [worker for worker in self._roster if worker.taking_part and not worker.ready]
        if self._generation.wait.is_news(now) and late:
            seconds = round(self._generation.kill_at - now, 3)
            self._note("waiting", workers=[worker.id for worker in late], seconds=seconds)
        if now < self._generation.kill_at:
            return
        self._generation.wait_no_longer()
        for worker in late:
            self._kill(worker, "it did not answer while the others waited for it", now)
        if late:
            self._void("timeout", f"worker {late[0].id} ({late[0].slot}) was killed: {late[0].killed}", now)
        if not self._generation.begun:
            self._generation.expect(now, "start")  # of those that take the place of the killed ones

    def _start(self, now: float) -> None:
        """Fill the slots with workers."""
        if self._finishing or (self._generation.begun and not self._generation.left):
            return
        taken = {worker.slot for worker in self._roster.running}  # also by those that leave or were killed
        free = [slot for slot in self._slots if self._slots.usable(slot, now) and slot not in taken]
        if not self._begun:
            if len(free) < max(self._settings.first_np or 0, self._settings.min_np):
                return
            self._begun = True
        held = sum(worker.slot in self._slots and not worker.leaving for worker in self._roster.running)
        for slot in free[: max(0, self._settings.max_np - held)]:
            self._actions.append(Start(self._roster.add(slot, now, self._change).id, slot))

    def _is_over(self) -> bool:
        """End the job when nobody is left who could go on."""
        running, generation = self._roster.running, self._generation
        among = generation.members if generation.begun else self._last_of_slots()
        culprit = self._roster.culprit(among)
        if self._succeeded and not running:
            # A host that was lost, or never there, before its workers had called init() takes nothing from the success.
            culprit = self._roster.culprit(worker for worker in among if worker.place is not None or not worker.lost)
            self._end(because_of(culprit, self._settings) if culprit is not None else End(0))
        elif generation.begun and self._state_is_lost:
            if not self._succeeded:
                has_begun = any(worker.synced for worker in self._roster)
                what = " that has the state of the training." if has_begun else "."
                text = f"no worker of generation {generation.number} is left{what}"
                self._end(together_with(text, "First", culprit, self._settings))
        elif not generation.begun and self._begun and not running:
            culprit = self._roster.culprit(self._roster)
            if culprit is not None:
                self._end(because_of(culprit, self._settings))
        elif self._failures.too_many and not self._finishing:
            text = "workers keep failing, and so do their replacements soon after they start."
            self._end(together_with(text, "Most recently", culprit, self._settings))
        return self._over

    @property
    def _state_is_lost(self) -> bool:
        """Whether training could only begin anew. Before anybody has said that it has begun, any member will do."""
        having = [worker for worker in self._roster if worker.synced] or self._generation.members
        return all(worker.code is not None or worker.leaving for worker in having)

    def _last_of_slots(self) -> list[Worker]:
        """The last worker of each slot: before the first generation, only a crash that was not made good counts."""
        return list({worker.slot: worker for worker in self._roster}.values())

    def _see_off(self, now: float) -> None:
        """Have those leave who are in no world and will not be."""
        for worker in self._roster.running:
            useless = worker.slot not in self._slots or (self._finishing and self._generation.begun)
            if not (useless and worker.taking_part and not self._generation.has(worker)):
                continue
            if self._finishing and not worker.pid:  # its daemon has not come, and may never
                self._ended([worker], -signal.SIGKILL, {}, now, "it had not been started")
            else:
                self._dismiss(worker, now)

    def _newcomers_join_at(self) -> float | None:
        """When members are to hear of newcomers: once all are ready that were started, or after a brief wait."""
        # None when there is nothing to tell.
        ready = self._newcomers()
        are_coming = any(worker.ready for worker in self._generation.left)
        if not ready or self._finishing or are_coming or self._generation.told & ADDED:
            return None
        if self._generation.phase is not Phase.TRAINING:
            return None
        first = min(ready, key=lambda worker: worker.ready_at)
        if all(worker.ready for worker in self._roster if worker.taking_part and not self._generation.has(worker)):
            return first.ready_at
        took = first.ready_at - first.started_at
        return first.ready_at + min(max(took, _TOGETHER_S), self._settings.start_timeout_s)

    def _tell_changes(self, now: float) -> None:
        """Have the members of the generation come to their next commit, if the next world would be another one."""
        result = 0
        if any(worker.ready for worker in self._generation.left):
            return  # they are coming
        if any(worker.slot not in self._slots for worker in self._generation.left):
            result |= REMOVED
        join_at = self._newcomers_join_at()
        if join_at is not None and now >= join_at:
            result |= ADDED
        if result | self._generation.told == self._generation.told:
            return
        self._generation.told |= result
        self._updates += 1
        self._note("updated", generation=self._generation.number, number=self._updates, result=self._generation.told)
        for worker in self._generation.left:
            self._tell(worker.id, "updated", number=self._updates, result=self._generation.told)

    def _leave_out(self, now: float) -> None:
        """Go on without hosts that others have not reached in several meetings."""
        left = self._generation.left
        while all(worker.ready for worker in left):
            hosts, having = {worker.slot.host for worker in left}, Counter(w.slot.host for w in left if w.synced)
            pairs = [pair for pair, count in self._apart.items() if count >= _MOST_APART and pair <= hosts]
            unreached = Counter(host for pair in pairs for host in pair if set(having) != {host})
            if not unreached:
                return
            places = {host: self._slots.place_of(Slot(host, 0)) for host in hosts}
            out = max(unreached, key=lambda host: (unreached[host], -having[host], places[host]))
            others = sorted((host for pair in pairs if out in pair for host in pair - {out}), key=places.__getitem__)
            seconds = self._slots.crashed(out, now, had_begun=False)
            self._note("host_left_out", host=out, unreached=others, seconds=round(seconds, 3))
            for worker in self._roster.running:
                if worker.slot.host == out and not worker.leaving:
                    self._dismiss(worker, now)
            left = self._generation.left

    def _form(self, now: float) -> None:
        """Give the next generation out, if all are there who must be."""
        old = self._generation.left
        if self._generation.begun and not old:
            self._short.end()
            return  # all have finished
        awaited = old if self._generation.begun else [worker for worker in self._roster if worker.taking_part]
        complete = all(worker.ready for worker in awaited)
        if not complete and (self._generation.begun or len(awaited) >= self._least):
            self._short.end()
            return
        if complete and any(worker.synced for worker in self._roster) and not any(worker.synced for worker in old):
            # They could only begin anew. Those who have the state are done, or were killed and have not ended yet.
            self._short.end()
            for worker in old if self._succeeded else ():
                self._dismiss(worker, now)
            return
        newcomers = self._newcomers() if not (self._finishing and self._generation.begun) else []
        stay = [worker for worker in old if worker.slot in self._slots or self._finishing]
        having = [worker for worker in old if worker.synced] or old
        if (stay or newcomers) and not any(worker in stay for worker in having):
            # The state would go with the last one that has it.
            stay = [worker for worker in old if worker in stay or worker is having[0]]
        chosen = [*stay, *newcomers][: self._settings.max_np]
        if len(chosen) >= self._least and complete:
            self._give_out(chosen, now)
        else:
            self._wait_for_more(chosen, now)

    def _wait_for_more(self, waiting: Sequence[Worker], now: float) -> None:
        limit = self._settings.elastic_timeout_s
        since = self._short.begin(now)
        if self._begun:
            what, needed = f"{len(waiting)} workers are ready", self._least
        else:
            what, needed = f"there are {len(self._slots)} slots", max(self._least, self._settings.first_np or 0)
        if self._short.is_news(now):
            self._note("too_few", text=what, needed=needed, seconds=round(since + limit - now, 3))
        if now < since + limit:
            return
        details = [f"worker {w.id} ({w.slot}) has not called init()" for w in self._roster if w.alive and not w.place]
        details += [f"worker {w.id} ({w.slot}) {w.ending}" for w in self._last_of_slots() if w.code]
        details += self.hosts_fault.splitlines()
        text = f"{what}, {needed} are needed, and no more came within {limit:g} s."
        self._end(End(EXIT_FAILED, text, tuple(details)))

    def _give_out(self, chosen: Sequence[Worker], now: float) -> None:
        settings = self._settings
        number = self._generation.number + 1
        if self._generation.begun:
            come = {worker.change for worker in chosen if not self._generation.has(worker)}
            gone = {worker.removed_by for worker in self._generation.left if worker not in chosen}
            # A change of the hosts counts once, also where those that it brings come one by one.
            changes, is_loss = come | gone, self._generation.phase is Phase.VOID
            self._resets += is_loss or not changes or NO_CHANGE in changes or not changes <= self._counted
            self._counted |= changes
        if settings.reset_limit is not None and self._resets > settings.reset_limit:
            text = "Horovod was shutdown because number of resets during elastic job exceeded limit:"  # Horovod's words
            self._end(End(EXIT_FAILED, f"{text} {settings.reset_limit}"))
            return
        if self._failed_meetings >= _MAX_FAILED_MEETINGS:
            text = f"the rendezvous failed {self._failed_meetings} times in a row, the last time with:"
            self._end(End(EXIT_FAILED, f"{text} {self._failure or '?'}"))
            return
        if self._generation.begun:
            # The state comes from rank 0. One that is a member may not have it yet: when its world was lost at once.
            ranked = rank_order(sorted(chosen, key=lambda worker: not worker.synced))
        else:
            ranked = rank_order(sorted(chosen, key=lambda worker: self._slots.place_of(worker.slot)))
        before = self._generation.left
        self._generation = Generation(number, ranked, now, settings.start_timeout_s, settings.timeout_s)
        self._short.end()
        world = {"generation": number, **self._world(ranked), "job": settings.job}
        for rank, worker in enumerate(ranked):
            worker.ready, worker.generation = False, number
            self._tell(worker.id, "world", **world, rank=rank)
        self._note("generation_ready", generation=number, workers=[worker.id for worker in ranked])
        for worker in before:
            if worker not in ranked:
                self._dismiss(worker, now)

    def _void(self, cause: str, text: str, now: float) -> None:
        if self._generation.phase is Phase.VOID:
            return
        if self._generation.phase is Phase.MEETING:
            self._failed_meetings += 1
            self._failure = text
        self._generation.void(now)
        self._note("generation_void", generation=self._generation.number, cause=cause, text=text)
        for worker in self._generation.members:
            if worker.alive and not worker.ready and not worker.leaving:
                self._tell(worker.id, "void", generation=self._generation.number, text=text)

    def _end(self, end: End) -> None:
        self._over = True
        for worker in self._roster:
            if end.reason and worker.alive and worker.place is not None and not worker.leaving:
                self._tell(worker.id, "fail", text=end.reason, fix="see the message of kvhvdrun.")
        self._actions.append(end)

    # -- Workers that have to go: told to leave, then ended, then killed ------------------------------------------

    def _dismiss(self, worker: Worker, now: float) -> None:
        """This worker is not needed any more."""
        worker.leaving, worker.act_at = True, now
        if worker.place is not None:  # else there is nobody yet who could hear it
            trained = worker.joined_at is not None
            worker.act_at += self._settings.exit_timeout_s if trained else self._settings.survivor_time_s
            self._tell(worker.id, "leave", text=_NOT_NEEDED)

    def _kill(self, worker: Worker, why: str, now: float) -> None:
        """End a worker at once; it counts as crashed, unless it was to leave."""
        worker.killed, worker.act_at = why, now + _KILL_TAKES_S
        self._note("worker_killed", worker=worker.id, why=why)
        self._actions.append(Kill(worker.id, signal.SIGKILL, worker.leaving))

    def _act_on_time(self, now: float) -> list[Worker]:
        """Do the next step with workers that have not gone in time; returns those that are to be taken for gone."""
        gone = []
        for worker in self._roster.running:
            if worker.act_at is None or now < worker.act_at:
                continue
            if worker.killed:
                gone.append(worker)
            elif worker.told_to_end:
                self._kill(worker, "it did not leave", now)
            else:
                worker.told_to_end, worker.act_at = True, now + self._settings.kill_grace_s
                self._actions.append(Kill(worker.id, signal.SIGTERM, True))
        return gone

    def _note(self, event: str, **fields: Any) -> None:
        self._actions.append(Note(event, fields))

    def _tell(self, worker: int, kind: str, **fields: Any) -> None:
        self._actions.append(Tell(worker, {"t": kind, **fields}))


def _has_lived_long(worker: Worker, now: float) -> bool:
    return worker.joined_at is not None and now - worker.joined_at >= _LONG_LIFE_S


def _seat(rank: int, hosts: Sequence[str], places: Sequence[int]) -> Seat:
    """The place of a rank, by the hosts and local ranks of all."""
    column = [other for other, place in enumerate(places) if place == places[rank]]
    return Seat(rank, len(hosts), places[rank], hosts.count(hosts[rank]), column.index(rank), len(column))
