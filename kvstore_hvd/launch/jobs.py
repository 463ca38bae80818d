"""All decisions about a job, without processes, sockets or a clock of its own.

Events go in, each with its time; what is to be done comes out as `actions`. Whatever the order of events, the
decisions depend only on what is known of the workers and slots: after each event they are taken anew.
"""

from __future__ import annotations

import itertools
import math
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvstore_hvd.errors import message, rank_list
from kvstore_hvd.horovod.variables import Seat
from kvstore_hvd.launch.hosts import machine_of
from kvstore_hvd.launch.state import (
    ADDED,
    EXIT_FAILED,
    NO_CHANGE,
    REMOVED,
    Action,
    End,
    Generation,
    Kill,
    Note,
    Place,
    Settings,
    Slot,
    Slots,
    Start,
    Tell,
    Worker,
    local_ranks,
    machines,
    rank_order,
)

# Why a worker waits that tells of a lost world; with the others ('updated', 'reset') all come on their own.
_LOST = ("lost", "timeout", "meeting")
# How long the others may take to say that they wait, too, once one of them has said why: from then on they have been
# told, and nothing but the wait itself can hold them. For other causes it is `Settings.timeout_s`.
_OTHERS_S = {"timeout": 0.5, "meeting": 5.0}
# A meeting has a deadline of its own, in the workers. This much later all of them must have said how it went.
_MEETING_EXTRA_S = 10.0
# A wait is told to the user once it has lasted for so long.
_TELL_AFTER_S = 10.0
# Newcomers that fail within this time after they have joined, in so many generations in a row, tell of the program. The
# first workers of a job do not count: on a bad host many of them may fail, one after the other, while the rest could go
# on. Nor does SIGKILL, which comes from outside.
_SOON_S = 60.0
_MAX_FAILING = 5
# How long newcomers that are ready wait for others at least; and at most as long as it took the first of them itself.
_TOGETHER_S = 2.0
_NOT_NEEDED = "this worker is not needed any more"
# A worker that the kernel has not ended so long after SIGKILL is taken for gone: it will not run again.
_KILL_TAKES_S = 5.0
# So many worlds in a row that are lost before their workers have met and have the state: there is no end to that.
_MAX_FAILED_WORLDS = 20
# One of two hosts that have not reached each other in so many meetings is left out.
_MOST_APART = 3


class Job:
    """The state of a job. What has no `_` before its name is for all to read."""

    def __init__(self, settings: Settings, now: float, last_lines: Callable[[int], Sequence[str]]) -> None:
        self._settings, self._last_lines = settings, last_lines  # the latter: of a worker on stderr
        self.slots = Slots(settings.cooldown)  # that there are now
        self.workers: dict[int, Worker] = {}  # by number, those that have ended too
        self.generation = Generation(-1, ())  # the last one that was given out
        self.wake_at = math.inf  # when `tick` must be called even if nothing happens
        self.hosts_fault = ""  # what is wrong with the discovery of hosts, as the driver says
        self._ended_workers: list[Worker] = []  # in the order of their ends
        self._begun = False  # there were slots enough to start
        self._succeeded = False  # a worker has ended with 0
        self._short_since = now  # workers are waited for, of which there are too few
        self._told: set[tuple[str, float]] = set()  # of long waits: what is waited for, and since when
        # In a static job, by worker: the ranks that it waits for, and until when.
        self._meeting: dict[int, tuple[list[int], float]] = {}
        self._known: Mapping[str, int] = {}  # the hosts that were discovered last
        self._leaving: dict[str, str] = {}  # those that will be lost, and why
        self._changes = 0  # of the hosts
        self._change = NO_CHANGE  # the one that is being attended to
        self._resets = 0  # how often the workers have met again, as `--reset-limit` counts it
        self._counted: set[int] = set()  # changes of the hosts that are in that number
        self._updates = 0
        self._first_joined_at: float | None = None  # when the first world was joined
        self._failing: set[int] = set()  # generations in a row in which a newcomer has failed soon
        self._failed_worlds = 0  # in a row
        self._failure = ""  # of the last of them
        # In how many meetings two hosts have not reached each other, since they last met.
        self._apart: Counter[frozenset[str]] = Counter()
        self._fail_at = math.inf  # of a static job: when the others have had their time
        self._over = False
        self._actions: list[Action] = []
        self._note("job_start", job=settings.job, min_np=settings.min_np, max_np=settings.max_np)

    # -- What can be asked ----------------------------------------------------------------------------------------

    def take(self) -> list[Action]:
        """What is to be done, in order; told once."""
        actions, self._actions = self._actions, []
        return actions

    @property
    def running(self) -> list[Worker]:
        """The workers whose end is not known."""
        return [worker for worker in self.workers.values() if worker.code is None]

    def seat(self, number: int) -> Seat:
        """Where a worker will be in its first world, if nothing happens until then; asked when it is started."""
        if self._settings.is_static:
            hosts = [machine_of(slot.host) for slot in self.static_slots]
            counts = {host: itertools.count() for host in hosts}
            return _seat(number, hosts, [next(counts[host]) for host in hosts])
        worker = self.workers[number]
        coming = [each for each in self._outside() if each is worker or each.taking_part]
        if not self.generation.begun:
            coming.sort(key=lambda each: self.slots.place_of(each.slot))
        ranked = rank_order([*(each for each in self.generation.left if each.slot in self.slots), *coming])
        return _seat(ranked.index(worker), machines(ranked), local_ranks(ranked, self.slots))

    @property
    def static_slots(self) -> list[Slot]:
        """The slots of all ranks of a static job."""
        return list(self.slots)[: self._settings.max_np]

    # -- Events ---------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        if self._settings.is_static and not self._over:
            self._start_static(now)
        self._decide(now)

    def hosts(self, hosts: Mapping[str, int], now: float) -> None:
        """These are the hosts now, with so many slots each."""
        self._known = hosts
        changes = self.slots.update({host: count for host, count in hosts.items() if host not in self._leaving})
        for event, host, count in changes:
            self._note(event, host=host, slots=count)
        if changes:
            self._changes += 1
            self._change = self._changes
        for worker in self.generation.left:
            gone = worker.slot not in self.slots
            worker.removed_by = (worker.removed_by or self._change) if gone else NO_CHANGE
        self._decide(now)
        self._change = NO_CHANGE

    def host_leaves(self, host: str, text: str, now: float) -> None:
        """A host will be lost soon, because of what `text` says: its workers leave in good order, if they have time."""
        if not self._over:
            self._leaving[host] = text
            self._note("host_leaves", f"host {host} leaves: {text}.", host=host, text=text)
            self.hosts(self._known, now)

    def host_lost(self, host: str, text: str, now: float) -> None:
        """All workers of a host are gone, because of what `text` says."""
        workers = [worker for worker in self.running if worker.slot.host == host]
        if not self._over:
            if any(worker.has_lived_long(now) for worker in workers):
                self.slots.forgive(host)
            had_begun = any(worker.pid for worker in workers) and host not in self._leaving
            seconds = self.slots.crashed(host, now, had_begun=had_begun)
            text = self._leaving.pop(host, text)
            cooldown = f" It gets no worker for {seconds:.0f} s." if seconds else ""
            news = f"host {host} is lost: {text}.{cooldown}"
            self._note("host_lost", news, host=host, text=text, seconds=round(seconds, 3))
        self._ended(workers, -signal.SIGKILL, now, text)
        self.hosts(self._known, now)

    def give_up(self, text: str, code: int = EXIT_FAILED) -> None:
        """There is a reason outside of it to end the job."""
        if not self._over:
            self._end(End(code, text))

    def started(self, number: int, pid: int, now: float) -> None:
        self.workers[number].pid = pid
        self._note("worker_started", worker=number, slot=str(self.workers[number].slot), pid=pid)
        self._decide(now)

    def exited(self, number: int, code: int, now: float) -> None:
        """A worker has ended, with the exit code or minus the signal that killed it."""
        worker = self.workers[number]
        if worker.code is None:
            self._ended([worker], code, now)
        self._decide(now)

    def heard(self, number: int, message: Mapping[str, Any], now: float) -> None:
        """A worker says something. Raises ValueError, and changes nothing, if that makes no sense."""
        worker = self.workers[number]
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
            self.generation.synced.add(worker.id)
        elif kind != "finished":
            raise ValueError(f"worker {number} says '{kind}'")
        elif not worker.finished:
            worker.finished = True
            self._note("worker_finished", worker=worker.id)
        self._decide(now)

    # -- What workers say -----------------------------------------------------------------------------------------

    def _on_enter(self, worker: Worker, message: Mapping[str, Any], now: float) -> None:
        ranks, is_static = message["ranks"], self._settings.is_static
        are_ranks = {worker.id} <= set(ranks) <= set(range(self._settings.max_np)) and len(set(ranks)) == len(ranks)
        if is_static and not are_ranks:
            raise ValueError(f"worker {worker.id} is to meet {rank_list(ranks)}")
        name, identity = message["host"]
        worker.place = Place(name, identity, message["pid"], tuple(message["addresses"]))
        self._note("worker_entered", worker=worker.id)
        if is_static:
            self._meeting[worker.id] = ranks, now + self._settings.start_timeout_s
        elif worker.leaving:
            self._tell(worker.id, "leave", text=_NOT_NEEDED)
        elif not self.generation.begun:
            # There is nobody yet whom it could keep waiting while it prepares: it waits for the first world at once.
            worker.ready = True
            self._expect(now, "start")
        elif worker not in self.generation.members:
            others = [newcomer for newcomer in self._newcomers() if newcomer is not worker]
            ranked = rank_order([*self.generation.left, *others, worker])
            self._tell(worker.id, "place", rank=ranked.index(worker), **self._world(ranked))

    def _on_ready(self, worker: Worker, message: Mapping[str, Any], now: float) -> None:
        if worker.ready or worker.leaving or message["generation"] < worker.generation:
            return  # said before it knew of the world that it has been given since
        cause, text, members = message["cause"], message["text"], self.generation.members
        if worker in members and not set(message["unreached"]) <= set(range(len(members))):
            raise ValueError(f"worker {worker.id} has not reached {rank_list(message['unreached'])}")
        worker.ready, worker.finished = True, False
        if worker in members:
            pairs = {frozenset((worker.slot.host, members[rank].slot.host)) for rank in message["unreached"]}
            # A meeting counts once for each two hosts.
            self._apart.update(pair for pair in pairs - self.generation.apart if len(pair) == 2)
            self.generation.apart |= pairs
            if self.generation.phase == "meeting" or cause in _LOST:
                self._void(cause, text, now)
            if cause == "updated":
                self._failing.clear()  # all workers come to a commit
            self._expect(now, cause)
        else:
            worker.ready_at = now
            self._note("newcomer_ready", worker=worker.id)

    def _on_joined(self, worker: Worker, number: int, now: float) -> None:
        generation = self.generation
        if number != generation.number or generation.phase != "meeting":
            return
        generation.joined.add(worker.id)
        if all(member.id in generation.joined for member in generation.members):
            generation.phase, generation.joined_at = "training", now
            generation.kill_at = generation.waits_since = math.inf
            self._first_joined_at = now if self._first_joined_at is None else self._first_joined_at
            for member in generation.members:
                member.joined_at = now if member.joined_at is None else member.joined_at
            hosts = {member.slot.host for member in generation.members}
            self._apart = Counter({pair: count for pair, count in self._apart.items() if not pair <= hosts})
            self._note("generation_joined", generation=number)

    def _ended(self, workers: Sequence[Worker], code: int, now: float, lost: str = "") -> None:
        missed = [worker for worker in workers if worker in self.generation.members and not worker.killed]
        for worker in workers:
            worker.code, worker.lines, worker.lost = code, tuple(self._last_lines(worker.id)), lost
            self._ended_workers.append(worker)
            news = f"{worker} {worker.ending}." if code and not worker.leaving and not lost else ""
            self._note("worker_exited", news, worker=worker.id, code=code, lines=list(worker.lines))
            if worker.leaving:
                continue
            if code == 0:
                self._succeeded = True
            elif not lost:
                self._on_crash(worker, now)
        for worker in missed:
            # A finished worker had met the others, also if not all of them have said so yet, and takes nothing with it
            # that they need; if it does, they say so.
            is_meeting = self.generation.phase == "meeting"
            if not worker.finished and (is_meeting or code != 0):
                self._void("lost", f"{worker} {worker.ending}", now)

    def _on_crash(self, worker: Worker, now: float) -> None:
        if worker.joined_at is not None and not worker.killed and worker.code != -signal.SIGKILL:
            if now - worker.joined_at >= _SOON_S:
                self._failing.clear()
            elif worker.joined_at != self._first_joined_at:
                self._failing.add(worker.generation)
        if worker.has_lived_long(now):
            self.slots.forgive(worker.slot)
        seconds = self.slots.crashed(worker.slot, now)
        if seconds > 0:
            news = f"slot {worker.slot} gets no worker for {seconds:.0f} s: they crash there."
            self._note("slot_blacklisted", news, slot=str(worker.slot), seconds=round(seconds, 3))

    # -- Decisions ------------------------------------------------------------------------------------------------

    @property
    def _finishing(self) -> bool:
        """Whether a worker is done: none is started any more, and whoever is left goes on, however few they are."""
        return self._succeeded or any(worker.finished and worker.alive for worker in self.workers.values())

    @property
    def _least(self) -> int:
        return 1 if self._finishing else self._settings.min_np

    def _world(self, ranked: Sequence[Worker]) -> dict[str, Any]:
        """What a worker is told of a world."""
        places = [worker.place or Place("", "") for worker in ranked]
        return {
            "size": len(ranked),
            "hosts": [place[:2] for place in places],
            "pids": [place.pid for place in places],
            "addresses": [place.addresses for place in places],
            "places": local_ranks(ranked, self.slots),
        }

    def _newcomers(self) -> list[Worker]:
        """Who waits to be in a world for the first time, oldest first."""
        return [worker for worker in self._outside() if worker.taking_part and worker.ready]

    def _outside(self) -> list[Worker]:
        """The workers of no world, or of earlier ones."""
        return [worker for worker in self.workers.values() if worker not in self.generation.members]

    def _culprit(self, among: Iterable[Worker]) -> Worker | None:
        """Who of these failed first, not counting those that failed because another did."""
        chosen = set(among)
        failed = [worker for worker in self._ended_workers if worker in chosen and worker.code and not worker.leaving]
        # Who ends with this error tells of another's end.
        first = [worker for worker in failed if not any("PeerLostError" in line for line in worker.lines)]
        return next(iter(first or failed), None)

    def _due(self, at: float, now: float) -> bool:
        """Whether it is time; if not, `wake_at` is then at the latest."""
        if now < at:
            self.wake_at = min(self.wake_at, at)
        return now >= at

    def _takes_long(self, what: str, since: float, now: float) -> bool:
        """Whether a wait takes long by now: true once."""
        if (what, since) in self._told or not self._due(since + _TELL_AFTER_S, now):
            return False
        self._told.add((what, since))
        return True

    def _expect(self, now: float, cause: str) -> None:
        """A worker waits for its next world, and said why: from now on the others' time runs."""
        generation = self.generation
        generation.kill_at = min(generation.kill_at, now + _OTHERS_S.get(cause, self._settings.timeout_s))
        generation.waits_since = min(generation.waits_since, now)

    def _decide(self, now: float) -> None:
        self.wake_at, count = math.inf, -1
        while not self._over and count < len(self._actions):  # what has been decided may take decisions of its own
            self.wake_at, count = math.inf, len(self._actions)
            if self._settings.is_static:
                self._decide_static(now)
            else:
                self._decide_elastic(now)

    def _decide_elastic(self, now: float) -> None:
        self._kill_late(now)
        self._ended(self._act_on_time(now), -signal.SIGKILL, now)
        self._start(now)
        if self._is_over():
            return
        self._see_off(now)
        if self.generation.phase == "training":
            self._tell_changes(now)
        if self.generation.phase != "meeting":
            self._leave_out(now)
            waiting = self._form(now)
            if waiting is None:
                self._short_since = math.inf
            else:
                self._wait_for_more(waiting, now)

    def _start_static(self, now: float) -> None:
        """Start the next worker, one at a time: signals and failures count from the first one on."""
        slots, count = self.static_slots, len(self.workers)
        is_lost = any(worker.lost for worker in self.workers.values())
        if count < len(slots) and all(worker.pid for worker in self.running) and not is_lost:
            self._add(slots[count], now)

    def _decide_static(self, now: float) -> None:
        """Nobody takes anybody's place: a failure ends the job, once the others have had their time to report it."""
        self._meet_static(now)
        if self._fail_at == math.inf and any(worker.code for worker in self.workers.values()):
            self._fail_at = now + self._settings.survivor_time_s
        are_all_done = len(self.workers) == self._settings.max_np and not self.running
        if are_all_done or self._due(self._fail_at, now):
            self._end(self._because_of(self._culprit(self.workers.values())))

    def _meet_static(self, now: float) -> None:
        """Workers on several hosts learn of each other once all that one waits for have called init()."""
        for number, (ranks, until) in list(self._meeting.items()):
            chosen = [self.workers.get(rank) for rank in ranks]
            there = [worker for worker in chosen if worker is not None and worker.place is not None]
            if len(there) < len(ranks) and not self._due(until, now):
                continue
            del self._meeting[number]
            if len(there) == len(ranks):
                world = {**self._world(there), "generation": 0, "job": self._settings.job}
                self._tell(number, "world", rank=ranks.index(number), **world)
            else:
                absent = [rank for rank in ranks if rank not in {worker.id for worker in there}]
                hosts = ", ".join(dict.fromkeys(self.static_slots[rank].host for rank in absent))
                limit = f"within {self._settings.start_timeout_s:g} s."
                text = f"{rank_list(absent)} on {hosts} did not call init() {limit}"
                fix = "see whether they failed or create no store; KVHVD_START_TIMEOUT (seconds) gives them more time."
                self._tell(number, "fail", text=text, fix=fix)

    def _kill_late(self, now: float) -> None:
        generation, late = self.generation, self.generation.late()
        if not generation.begun:
            late = [worker for worker in self.workers.values() if worker.taking_part and not worker.ready]
        if late and self._takes_long("late", generation.waits_since, now):
            seconds = generation.kill_at - now
            names = f"worker {', '.join(f'{worker.id} ({worker.slot})' for worker in late)}"
            news = f"the others wait for {names}, and kill what has not come in {seconds:.0f} s."
            self._note("waiting", news, workers=[worker.id for worker in late], seconds=round(seconds, 3))
        if not self._due(generation.kill_at, now):
            return
        generation.kill_at = generation.waits_since = math.inf
        for worker in late:
            self._kill(worker, "it did not answer while the others waited for it", now)
        if late:
            self._void("timeout", f"{late[0]} was killed: {late[0].killed}", now)
        if not generation.begun:
            self._expect(now, "start")  # of those that take the place of the killed ones

    def _start(self, now: float) -> None:
        """Fill the slots with workers."""
        if self._finishing or (self.generation.begun and not self.generation.left):
            return
        taken = {worker.slot for worker in self.running}  # also by those that leave or were killed
        free = [slot for slot in self.slots if slot not in taken and self._due(self.slots.usable_from(slot), now)]
        if not self._begun:
            if len(free) < max(self._settings.first_np or 0, self._settings.min_np):
                return
            self._begun = True
        held = sum(worker.slot in self.slots and not worker.leaving for worker in self.running)
        for slot in free[: max(0, self._settings.max_np - held)]:
            self._add(slot, now)

    def _add(self, slot: Slot, now: float) -> None:
        worker = Worker(len(self.workers), slot, now, self._change)
        self.workers[worker.id] = worker
        self._actions.append(Start(worker.id, slot))

    def _is_over(self) -> bool:
        """End the job when nobody is left who could go on."""
        running, generation = self.running, self.generation
        among = generation.members if generation.begun else self._last_of_slots()
        culprit = self._culprit(among)
        if self._succeeded and not running:
            # A host that was lost, or never there, before its workers had called init() takes nothing from the success.
            culprit = self._culprit(worker for worker in among if worker.place is not None or not worker.lost)
            self._end(self._because_of(culprit))
        elif generation.begun and self._state_is_lost:
            if not self._succeeded:
                has_begun = any(worker.synced for worker in self.workers.values())
                what = " that has the state of the training." if has_begun else "."
                text = f"no worker of generation {generation.number} is left{what}"
                self._end(self._because_of(culprit, text, "First"))
        elif not generation.begun and self._begun and not running:
            # Not those that were lost with their hosts, which are tried again.
            culprit = self._culprit(worker for worker in self.workers.values() if not worker.lost)
            if culprit is not None:
                self._end(self._because_of(culprit))
        elif len(self._failing) >= _MAX_FAILING and not self._finishing:
            text = "workers keep failing, and so do their replacements soon after they start."
            self._end(self._because_of(culprit, text, "Most recently"))
        return self._over

    def _because_of(self, culprit: Worker | None, text: str = "", which: str = "") -> End:
        """The job ends with this worker, or for another reason, and then it is the ``'First'`` that failed, or so."""
        if culprit is None:
            return End(EXIT_FAILED if text else 0, text)
        before = f"{text} {which}, " if text else ""
        name = str(culprit)
        if self._settings.is_static:
            name = f"rank {culprit.id} of {self._settings.max_np} (pid {culprit.pid})"
        code = culprit.code or EXIT_FAILED
        # As a shell gives it: 128 + n when signal n killed a process.
        return End(code if code > 0 else 128 - code, f"{before}{name} {culprit.ending}.", lines=tuple(culprit.lines))

    @property
    def _state_is_lost(self) -> bool:
        """Whether training could only begin anew. Before anybody has said that it has begun, any member will do."""
        having = [worker for worker in self.workers.values() if worker.synced] or self.generation.members
        return all(worker.code is not None or worker.leaving for worker in having)

    def _last_of_slots(self) -> list[Worker]:
        """The last worker of each slot: before the first generation, only a crash that was not made good counts."""
        return list({worker.slot: worker for worker in self.workers.values()}.values())

    def _see_off(self, now: float) -> None:
        """Have those leave who are in no world and will not be."""
        for worker in self.running:
            useless = worker.slot not in self.slots or (self._finishing and self.generation.begun)
            if not (useless and worker.taking_part and worker not in self.generation.members):
                continue
            if self._finishing and not worker.pid:  # its daemon has not come, and may never
                self._ended([worker], -signal.SIGKILL, now, "it had not been started")
            else:
                self._dismiss(worker, now)

    def _newcomers_may_join(self, now: float) -> bool:
        """Whether members are to hear of newcomers: once all are ready that were started, or after a brief wait."""
        ready = self._newcomers()
        if not ready or self._finishing:
            return False
        first = min(ready, key=lambda worker: worker.ready_at)
        took = first.ready_at - first.started_at
        join_at = first.ready_at + min(max(took, _TOGETHER_S), self._settings.start_timeout_s)
        return all(worker.ready for worker in self._outside() if worker.taking_part) or self._due(join_at, now)

    def _tell_changes(self, now: float) -> None:
        """Have the members of the generation come to their next commit, if the next world would be another one."""
        generation = self.generation
        if any(worker.ready for worker in generation.left):
            return  # they are coming
        result = generation.told
        if any(worker.slot not in self.slots for worker in generation.left):
            result |= REMOVED
        if self._newcomers_may_join(now):
            result |= ADDED
        if result == generation.told:
            return
        generation.told = result
        self._updates += 1
        self._note("updated", generation=generation.number, number=self._updates, result=result)
        for worker in generation.left:
            self._tell(worker.id, "updated", number=self._updates, result=result)

    def _leave_out(self, now: float) -> None:
        """Go on without hosts that others have not reached in several meetings."""
        left = self.generation.left
        while all(worker.ready for worker in left):
            hosts, having = {worker.slot.host for worker in left}, Counter(w.slot.host for w in left if w.synced)
            pairs = [pair for pair, count in self._apart.items() if count >= _MOST_APART and pair <= hosts]
            unreached = Counter(host for pair in pairs for host in pair if set(having) != {host})
            if not unreached:
                return
            places = {host: self.slots.place_of(Slot(host, 0)) for host in hosts}
            out = max(unreached, key=lambda host: (unreached[host], -having[host], places[host]))
            others = sorted((host for pair in pairs if out in pair for host in pair - {out}), key=places.__getitem__)
            seconds = self.slots.crashed(out, now, had_begun=False)
            pair = f"it and {', '.join(others)} do not reach each other"
            fact = f"host {out} is left out for {seconds:.0f} s: {pair}."
            fix = "see whether a firewall lets workers connect; --network-interfaces chooses what they use."
            news = message(fact, fix=fix)
            self._note("host_left_out", news, host=out, unreached=others, seconds=round(seconds, 3))
            for worker in self.running:
                if worker.slot.host == out and not worker.leaving:
                    self._dismiss(worker, now)
            left = self.generation.left

    def _form(self, now: float) -> list[Worker] | None:
        """Give the next generation out, if all are there who must be; returns those who are, if they are too few."""
        old = self.generation.left
        if self.generation.begun and not old:
            return None  # all have finished
        awaited = old if self.generation.begun else [worker for worker in self.workers.values() if worker.taking_part]
        complete = all(worker.ready for worker in awaited)
        if not complete and (self.generation.begun or sum(worker.pid > 0 for worker in awaited) >= self._least):
            return None
        if (
            complete
            and any(worker.synced for worker in self.workers.values())
            and not any(worker.synced for worker in old)
        ):
            # They could only begin anew. Those who have the state are done, or were killed and have not ended yet.
            for worker in old if self._succeeded else ():
                self._dismiss(worker, now)
            return None
        newcomers = self._newcomers() if not (self._finishing and self.generation.begun) else []
        stay = [worker for worker in old if worker.slot in self.slots or self._finishing]
        if old and not (stay or newcomers) and all(worker.slot.host in self._leaving for worker in old):
            for worker in old:
                self._dismiss(worker, now)
            return None
        having = [worker for worker in old if worker.synced] or old
        if (stay or newcomers) and not any(worker in stay for worker in having):
            # The state would go with the last one that has it.
            stay = [worker for worker in old if worker in stay or worker is having[0]]
        chosen = [*stay, *newcomers][: self._settings.max_np]
        if len(chosen) < self._least or not complete:
            return chosen
        self._give_out(chosen, now)
        return None

    def _wait_for_more(self, waiting: Sequence[Worker], now: float) -> None:
        limit = self._settings.elastic_timeout_s
        since = self._short_since = min(self._short_since, now)
        if self._begun:
            what, needed = f"{len(waiting)} workers are ready", self._least
        else:
            what, needed = f"there are {len(self.slots)} slots", max(self._least, self._settings.first_np or 0)
        if self._takes_long("short", since, now):
            seconds = since + limit - now
            news = f"{what}, {needed} are needed: waiting for more, for {seconds:.0f} s."
            self._note("too_few", news, text=what, needed=needed, seconds=round(seconds, 3))
        if not self._due(since + limit, now):
            return
        details = [
            f"{worker} has not called init()" for worker in self.workers.values() if worker.alive and not worker.place
        ]
        details += [f"{worker} {worker.ending}" for worker in self._last_of_slots() if worker.code]
        details += self.hosts_fault.splitlines()
        text = f"{what}, {needed} are needed, and no more came within {limit:g} s."
        self._end(End(EXIT_FAILED, text, tuple(details)))

    def _give_out(self, chosen: Sequence[Worker], now: float) -> None:
        settings = self._settings
        number = self.generation.number + 1
        if self.generation.begun:
            come = {worker.change for worker in chosen if worker not in self.generation.members}
            gone = {worker.removed_by for worker in self.generation.left if worker not in chosen}
            # A change of the hosts counts once, also where those that it brings come one by one.
            changes, is_loss = come | gone, self.generation.phase == "void"
            self._resets += is_loss or not changes or NO_CHANGE in changes or not changes <= self._counted
            self._counted |= changes
        if settings.reset_limit is not None and self._resets > settings.reset_limit:
            text = "Horovod was shutdown because number of resets during elastic job exceeded limit:"  # Horovod's words
            self._end(End(EXIT_FAILED, f"{text} {settings.reset_limit}"))
            return
        if self._has_worked(now):
            self._failed_worlds = 0
        if self._failed_worlds >= _MAX_FAILED_WORLDS:
            text = f"{self._failed_worlds} worlds in a row were lost before they had begun, the last one with:"
            self._end(End(EXIT_FAILED, f"{text} {self._failure or '?'}"))
            return
        if self.generation.begun:
            # The state comes from rank 0. One that is a member may not have it yet: when its world was lost at once.
            ranked = rank_order(sorted(chosen, key=lambda worker: not worker.synced))
        else:
            ranked = rank_order(sorted(chosen, key=lambda worker: self.slots.place_of(worker.slot)))
        before = self.generation.left
        self.generation = Generation(number, ranked, now + settings.start_timeout_s + _MEETING_EXTRA_S)
        world = {"generation": number, **self._world(ranked), "job": settings.job}
        for rank, worker in enumerate(ranked):
            worker.ready, worker.generation = False, number
            self._tell(worker.id, "world", **world, rank=rank)
        members = [worker.id for worker in ranked]
        text = f"generation {number}: {len(members)} workers ({', '.join(map(str, members))})."
        self._note("generation_ready", text if number > 0 else "", generation=number, workers=members)
        for worker in before:
            if worker not in ranked:
                self._dismiss(worker, now)

    def _has_worked(self, now: float) -> bool:
        """Whether the members of this generation have met, and have the state of the training or some time behind."""
        has_state = self.generation.synced.issuperset(worker.id for worker in self.generation.members)
        return has_state or now - self.generation.joined_at >= _SOON_S

    def _void(self, cause: str, text: str, now: float) -> None:
        generation = self.generation
        if generation.phase == "void":
            return
        self._failed_worlds = 0 if self._has_worked(now) else self._failed_worlds + 1
        self._failure = text
        is_news = cause == "meeting" or self._failed_worlds > 1
        news = f"generation {generation.number} has not begun: {text}" if is_news else ""
        if generation.phase == "meeting":
            generation.kill_at = generation.waits_since = math.inf
        generation.phase = "void"
        self._expect(now, "lost")
        self._note("generation_void", news, generation=generation.number, cause=cause, text=text)
        for worker in generation.members:
            if worker.alive and not worker.ready and not worker.leaving:
                self._tell(worker.id, "void", generation=generation.number, text=text)

    def _end(self, end: End) -> None:
        self._over = True
        for worker in self.workers.values():
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
        self._note("worker_killed", f"{worker} is killed: {why}.", worker=worker.id, why=why)
        self._actions.append(Kill(worker.id, signal.SIGKILL, worker.leaving))

    def _act_on_time(self, now: float) -> list[Worker]:
        """Do the next step with workers that have not gone in time; returns those that are to be taken for gone."""
        gone = []
        for worker in self.running:
            if not self._due(worker.act_at, now):
                continue
            if worker.killed:
                gone.append(worker)
            elif worker.told_to_end:
                self._kill(worker, "it did not leave", now)
            else:
                worker.told_to_end, worker.act_at = True, now + self._settings.kill_grace_s
                self._actions.append(Kill(worker.id, signal.SIGTERM, True))
        return gone

    def _note(self, event: str, news: str = "", **fields: Any) -> None:
        self._actions.append(Note(event, fields, news))

    def _tell(self, worker: int, kind: str, **fields: Any) -> None:
        self._actions.append(Tell(worker, {"t": kind, **fields}))


def _seat(rank: int, hosts: Sequence[str], places: Sequence[int]) -> Seat:
    """The place of a rank, by the hosts and local ranks of all."""
    column = [other for other, place in enumerate(places) if place == places[rank]]
    return Seat(rank, len(hosts), places[rank], hosts.count(hosts[rank]), column.index(rank), len(column))
