"""The decisions about a job. It has no processes, sockets or clock of its own.

Events go in, each with its time. Actions come out, by `Job.take`. Each event has all decisions taken anew from what is
known of workers and slots, so the order of events does not matter.

An elastic job fills its slots again when workers fail. Its workers form one generation after another: a generation is
given out when all workers that may be in it are ready; it is lost with a member; the others are then ready again.
A job that replaces no worker fills each slot once and ends after a failure. Its workers know their ranks from the
start and meet by themselves, so it has no generations.
"""

from __future__ import annotations

import math
import signal
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from kvstore_hvd.errors import message as text_of
from kvstore_hvd.errors import rank_list
from kvstore_hvd.horovod.variables import Ranks
from kvstore_hvd.launch.hosts import Slot, Slots
from kvstore_hvd.launch.phases import Generation, Worker, rank_order, ranks_of, world_of
from kvstore_hvd.launch.state import EXIT_FAILED, NO_CHANGE, Action, End, Kill, Note, Settings, Start, Tell

# Bits of an 'updated' message, as in Horovod's HostUpdateResult.
_REMOVED, _ADDED = 1, 2
# Causes of 'ready' that report a lost world. After the others ('updated', 'reset') all members come by themselves.
_LOST = ("lost", "timeout", "meeting")
# By cause: seconds in which the other members have to be ready, too. They know of it, so that only the wait itself can
# hold them up. For other causes it is `Settings.timeout_s`.
_OTHERS_S = {"timeout": 0.5, "meeting": 5.0}
# Workers have a deadline of their own for a meeting. The job waits this much longer.
_MEETING_EXTRA_S = 10.0
_REPORT_AFTER_S = 10.0  # wait that is reported to the user
# Newcomers that fail within this time after joining, in so many generations in a row, end the job: the program is at
# fault. The first workers do not count (many may fail on a bad host while the rest could go on), nor does SIGKILL.
_SOON_S = 60.0
_MAX_FAILING = 5
# Newcomers wait for others at least this long, and at most as long as the first of them took to be ready.
_TOGETHER_S = 2.0
# A worker that the kernel has not ended in this time after SIGKILL counts as ended: it will not run again.
_KILL_TAKES_S = 5.0
_MAX_FAILED_WORLDS = 20  # generations in a row that are lost before all members have the state: they end the job
_MOST_APART = 3  # meetings in which two hosts have not reached each other, until one of them is left out


class Job:
    """The state of a job. Attributes without `_` may be read by all."""

    def __init__(self, settings: Settings, now: float, last_lines: Callable[[int], Sequence[str]]) -> None:
        self._settings, self._last_lines = settings, last_lines  # `last_lines`: of a worker on stderr
        self.slots = Slots(settings.cooldown)
        self.workers: dict[int, Worker] = {}  # by number, with those that have ended
        self.generation = Generation(-1, ())  # the latest one
        self.wake_at = math.inf  # when `tick` must be called even if nothing happens
        self.hosts_fault = ""  # of the discovery of hosts, set by the driver
        self._ended_workers: list[Worker] = []  # in the order of their ends
        self._short_since = now  # time from which there are too few workers
        self._fail_at = math.inf  # end of a job without replacements, after its first failure
        self._reported: set[tuple[str, float]] = set()  # long waits: which, and since when
        # In a job without replacements, by worker in init(): the ranks that it waits for, and its deadline.
        self._meeting: dict[int, tuple[list[int], float]] = {}
        self._known: Mapping[str, int] = {}  # the hosts that were discovered last
        self._leaving: dict[str, str] = {}  # hosts that will be lost, and why
        self._changes = 0  # of the hosts, so far
        self._change = NO_CHANGE  # the one that is being handled
        self._resets = 0  # as `--reset-limit` counts them
        self._counted: set[int] = set()  # changes of the hosts that are in `_resets`
        self._updates = 0
        self._first_joined_at = math.inf
        self._failing: set[int] = set()  # generations in a row in which a newcomer failed soon
        self._failed_worlds = 0  # in a row
        self._failure = ""  # of the last of them
        self._apart: Counter[frozenset[str]] = Counter()  # meetings in which two hosts did not reach each other
        self._has_state = False  # all members of some world have got the state of the training, or one has finished
        self._over = False
        self._actions: list[Action] = []
        self._note("job_start", job=settings.job, min_np=settings.min_np, max_np=settings.max_np)

    def take(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions

    @property
    def running(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.code is None]

    @property
    def status(self) -> str:
        generation, workers = self.generation, f"{len(self.running)} workers"
        left = f"generation {generation.number}, {len(generation.left)} of {workers}"
        return left if generation.begun else f"{workers} start"

    def ranks_of(self, number: int) -> Ranks:
        """The ranks of a worker that starts in its first world, as far as known now."""
        if self._settings.replaces:
            worker, outside = self.workers[number], self._outside()
            coming = [each for each in self.workers.values() if each is worker or each in outside]
            if not self.generation.begun:
                coming.sort(key=lambda each: self.slots.order(each.slot))
            ranked = rank_order([*(each for each in self.generation.left if each.slot in self.slots), *coming])
        else:
            ranked = [Worker(rank, slot, 0.0, NO_CHANGE) for rank, slot in enumerate(self.slots)]
            worker = ranked[number]
        return ranks_of(ranked.index(worker), ranked, self.slots)

    # -- Events ---------------------------------------------------------------------------------------------------

    def hosts(self, hosts: Mapping[str, int], now: float) -> None:
        """The hosts are these now, with so many slots each."""
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
        self.tick(now)
        self._change = NO_CHANGE

    def host_leaves(self, host: str, text: str, code: int, now: float) -> None:
        """A host will be lost soon, for the reason `text`: its workers leave, if they have time."""
        if not self._settings.replaces:
            self.give_up(f"{text}.\n  Fix: to end a job, send the signal to kvhvdrun.", code)
        elif not self._over:
            self._leaving[host] = text
            self._note("host_leaves", f"host {host} leaves: {text}.", host=host, text=text)
            self.hosts(self._known, now)

    def host_lost(self, host: str, text: str, now: float) -> None:
        """All workers of a host are gone, for the reason `text`."""
        workers = [worker for worker in self.running if worker.slot.host == host]
        if not self._over:
            had_begun = any(worker.pid for worker in workers) and host not in self._leaving
            lived_long = any(worker.has_lived_long(now) for worker in workers)
            seconds = self.slots.crashed(host, now, had_begun=had_begun, lived_long=lived_long)
            text = self._leaving.pop(host, text)
            cooldown = f" It gets no worker for {seconds:.0f} s." if seconds else ""
            news = f"host {host} is lost: {text}.{cooldown}"
            self._note("host_lost", news, host=host, text=text, seconds=round(seconds, 3))
        self._ended(workers, -signal.SIGKILL, now, text)
        self.hosts(self._known, now)

    def give_up(self, text: str, code: int = EXIT_FAILED, details: Sequence[str] = ()) -> None:
        if not self._over:
            self._end(End(code, text, tuple(details)))

    def started(self, number: int, pid: int, now: float) -> None:
        self.workers[number].pid = pid
        self._note("worker_started", worker=number, slot=str(self.workers[number].slot), pid=pid)
        self.tick(now)

    def exited(self, number: int, code: int, now: float) -> None:
        if self.workers[number].code is None:
            self._ended([self.workers[number]], code, now)
        self.tick(now)

    def heard(self, number: int, message: Mapping[str, Any], now: float) -> None:
        """A worker has sent a message. Raises ValueError, and changes nothing, if that cannot be."""
        worker = self.workers[number]
        if not worker.alive or self._over:
            return
        kind = message["t"]
        if kind != "enter" and worker.entry is None:
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
            worker.synced = True
            worker.takes("synced")
            self.generation.synced.add(worker.id)
            self._has_state = self._has_state or self._all_synced
        elif worker.takes("finished"):
            self._has_state = True
            self._note("worker_finished", worker=worker.id)
        self.tick(now)

    # -- Messages of workers --------------------------------------------------------------------------------------

    def _on_enter(self, worker: Worker, message: Mapping[str, Any], now: float) -> None:
        ranks, replaces = message["ranks"], self._settings.replaces
        are_ranks = {worker.id} <= set(ranks) <= set(range(self._settings.max_np)) and len(set(ranks)) == len(ranks)
        if not replaces and not are_ranks:
            raise ValueError(f"worker {worker.id} is to meet {rank_list(ranks)}")
        worker.entry = message
        worker.takes("enter")
        self._note("worker_entered", worker=worker.id)
        if not replaces:
            self._meeting[worker.id] = ranks, now + self._settings.start_timeout_s
        elif worker.leaving:
            self._tell(worker.id, "leave")
        elif not self.generation.begun:
            # Nobody waits while it prepares: it waits for the first world at once.
            worker.takes("ready")
            self._expect(now, "start")
        elif worker not in self.generation.members:
            others = [each for each in self._outside() if each.phase == "ready" and each is not worker]
            ranked = rank_order([*self.generation.left, *others, worker])
            self._tell(worker.id, "rank", rank=ranked.index(worker), **world_of(ranked, self.slots))
        else:
            text = f"its workers run one program each, and worker {worker.id} has run one before."
            self._tell(worker.id, "fail", text=text, fix="start each program with a kvhvdrun of its own.")

    def _on_ready(self, worker: Worker, message: Mapping[str, Any], now: float) -> None:
        if message["generation"] < worker.generation:
            return  # sent before the world that it has been given since arrived
        cause, generation, members = message["cause"], self.generation, self.generation.members
        if worker in members and not set(message["unreached"]) <= set(range(len(members))):
            raise ValueError(f"worker {worker.id} has not reached {rank_list(message['unreached'])}")
        if not worker.takes("ready"):
            return
        if worker not in members:
            worker.ready_at = now
            self._note("newcomer_ready", worker=worker.id)
            return
        # A meeting counts once for two hosts.
        pairs = {frozenset((worker.slot.host, members[rank].slot.host)) for rank in message["unreached"]}
        self._apart.update(pair for pair in pairs - generation.apart if len(pair) == 2)
        generation.apart |= pairs
        if generation.phase == "meeting" or cause in _LOST:
            self._lose(cause, message["text"], now)
        if cause == "updated":
            self._failing.clear()  # all workers come to a commit
        self._expect(now, cause)

    def _on_joined(self, worker: Worker, number: int, now: float) -> None:
        generation = self.generation
        if number == generation.number:
            generation.joined.add(worker.id)
        if not generation.joined.issuperset(each.id for each in generation.members) or not generation.takes("joined"):
            return
        generation.joined_at, generation.kill_at, generation.waits_since = now, math.inf, math.inf
        self._first_joined_at = min(self._first_joined_at, now)
        for member in generation.members:
            member.joined_at = now if member.joined_at is None else member.joined_at
        hosts = {member.slot.host for member in generation.members}
        self._apart = Counter({pair: count for pair, count in self._apart.items() if not pair <= hosts})
        self._note("generation_joined", generation=number)

    # -- Ends of workers ------------------------------------------------------------------------------------------

    def _ended(self, workers: Collection[Worker], code: int, now: float, lost: str = "") -> None:
        # A finished worker had met the others, even if not all of them have said so yet. If it takes something with it
        # that they need, they say so.
        members = [worker for worker in workers if worker in self.generation.members and worker.alive]
        missed = [worker for worker in members if worker.phase != "finished"]
        for worker in workers:
            worker.takes("failure" if code else "success")
            worker.code, worker.lines, worker.lost = code, tuple(self._last_lines(worker.id)), lost
            self._ended_workers.append(worker)
            is_news = code and not (worker.leaving or worker.killed or lost)  # else it has been said
            news = f"{worker} {worker.ending}." if is_news else ""
            self._note("worker_exited", news, worker=worker.id, code=code, lines=list(worker.lines))
        for worker in workers:
            if worker.phase == "failed" and not lost:
                self._on_crash(worker, now)
            if worker in missed and (code != 0 or self.generation.phase == "meeting"):
                self._lose("lost", f"{worker} {worker.ending}", now)

    def _on_crash(self, worker: Worker, now: float) -> None:
        if worker.joined_at is not None and not worker.killed and worker.code != -signal.SIGKILL:
            if now - worker.joined_at >= _SOON_S:
                self._failing.clear()
            elif worker.joined_at != self._first_joined_at:
                self._failing.add(worker.generation)
        seconds = self.slots.crashed(worker.slot, now, lived_long=worker.has_lived_long(now))
        if seconds > 0:
            news = f"slot {worker.slot} gets no worker for {seconds:.0f} s: they crash there."
            self._note("slot_blacklisted", news, slot=str(worker.slot), seconds=round(seconds, 3))

    # -- Questions that decisions ask -----------------------------------------------------------------------------

    @property
    def _succeeded(self) -> bool:
        """Whether a worker has ended with 0 by itself."""
        return any(worker.phase == "done" for worker in self._ended_workers)

    @property
    def _finishing(self) -> bool:
        """Whether a worker is done: no worker starts any more, and the others go on, however few they are."""
        return any(worker.phase in ("done", "finished") for worker in self.workers.values())

    def _with_state(self) -> list[Worker]:
        """The workers with the state of the training, also ended ones; none before a whole world has it."""
        return [worker for worker in self.workers.values() if worker.synced and self._has_state]

    @property
    def _all_synced(self) -> bool:
        return self.generation.synced.issuperset(worker.id for worker in self.generation.members)

    def _outside(self) -> list[Worker]:
        """The workers that may be in the next world, and are not in this one, oldest first."""
        others = (worker for worker in self.workers.values() if worker not in self.generation.members)
        return [worker for worker in others if worker.taking_part]

    def _last_of_slots(self) -> list[Worker]:
        """The last worker of each slot: before the first generation, a replaced worker does not count."""
        return list({worker.slot: worker for worker in self.workers.values()}.values())

    def _due(self, at: float, now: float) -> bool:
        """Whether it is time; if not, `wake_at` is then at the latest."""
        if now < at:
            self.wake_at = min(self.wake_at, at)
        return now >= at

    def _takes_long(self, what: str, since: float, now: float) -> bool:
        """Whether a wait has become long: true once."""
        if (what, since) in self._reported or not self._due(since + _REPORT_AFTER_S, now):
            return False
        self._reported.add((what, since))
        return True

    def _has_worked(self, now: float) -> bool:
        """Whether all members of this generation have the state, or have trained for some time."""
        return self._all_synced or now - self.generation.joined_at >= _SOON_S

    def _expect(self, now: float, cause: str) -> None:
        """Give the workers that are not ready a deadline: one waits, for this cause."""
        generation = self.generation
        generation.kill_at = min(generation.kill_at, now + _OTHERS_S.get(cause, self._settings.timeout_s))
        generation.waits_since = min(generation.waits_since, now)
        self.wake_at = min(self.wake_at, generation.kill_at)

    # -- Decisions about workers ----------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        # Ends come first, as starts need the slots, and a generation the workers that are left.
        self.wake_at, count = math.inf, -1
        while not self._over and count < len(self._actions):  # decisions may call for further ones
            self.wake_at, count = math.inf, len(self._actions)
            self._kill_late(now)
            self._hasten(now)
            self._start(now)
            if self._is_over(now):
                return
            if not self._settings.replaces:
                self._meet_ranks(now)
                continue
            self._see_off(now)
            if self.generation.phase == "training":
                self._tell_changes(now)
            if self.generation.phase != "meeting":
                self._leave_out(now)
                self._form(now)

    def _kill_late(self, now: float) -> None:
        """Kill the workers that the others wait for once their deadline is over."""
        generation = self.generation
        if generation.phase == "meeting":
            late = [worker for worker in generation.left if worker.id not in generation.joined]
        else:
            awaited = generation.left if generation.begun else self._outside()
            late = [worker for worker in awaited if worker.phase != "ready"]
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
            self._lose("timeout", f"{late[0]} was killed: {late[0].killed}", now)
        if not generation.begun:
            self._expect(now, "start")  # of the replacements

    def _start(self, now: float) -> None:
        """Fill the slots with workers; again, where they are replaced."""
        if self._settings.replaces and (self._finishing or (self.generation.begun and not self.generation.left)):
            return
        holders = self.running if self._settings.replaces else list(self.workers.values())
        taken = {worker.slot for worker in holders}  # also by workers that leave or were killed
        free = [slot for slot in self.slots if slot not in taken and self._due(self.slots.usable_from(slot), now)]
        if not self.workers and len(free) < max(self._settings.first_np or 0, self._settings.min_np):
            return
        room = self._settings.max_np - sum(worker.slot in self.slots and not worker.leaving for worker in holders)
        if not self._settings.replaces:  # one at a time: signals and failures count from the first one on
            room = min(room, all(worker.pid for worker in self.running) and not any(worker.lost for worker in holders))
        for slot in free[: max(0, room)]:
            worker = Worker(len(self.workers), slot, now, self._change)
            self.workers[worker.id] = worker
            self._actions.append(Start(worker.id, slot))

    def _is_over(self, now: float) -> bool:
        """End the job when no worker is left that could go on."""
        running, generation = self.running, self.generation
        among = generation.members if generation.begun else self._last_of_slots()
        having = self._with_state()
        # Before a whole world has it, each member begins it; a member that has not answered may have got it.
        may_have = [*(having or generation.members), *(worker for worker in generation.left if worker.phase != "ready")]
        state_is_lost = all(worker.code is not None or worker.leaving for worker in may_have)
        if not self._settings.replaces:
            if any(worker.code for worker in among):  # the others may still report the failure
                self._fail_at = min(self._fail_at, now + self._settings.survivor_time_s)
            are_all_done = len(self.workers) == self._settings.max_np and not running
            if are_all_done or self._due(self._fail_at, now):
                self._end(self._because_of(among))
        elif self._succeeded and not running:
            # A host that was lost before its workers had called init() takes nothing from the success.
            self._end(self._because_of(worker for worker in among if worker.entry is not None or not worker.lost))
        elif generation.begun and state_is_lost:
            if not self._succeeded:
                what = " that has the state of the training." if having else "."
                text = f"no worker of generation {generation.number} is left{what}"
                self._end(self._because_of(among, text, "First"))
        elif not generation.begun and self.workers and not running:
            # Workers that were lost with their hosts are tried again.
            end = self._because_of(worker for worker in self.workers.values() if not worker.lost)
            if end.code:
                self._end(end)
        elif len(self._failing) >= _MAX_FAILING and not self._finishing:
            text = "workers keep failing, and so do their replacements soon after they start."
            self._end(self._because_of(among, text, "Most recently"))
        return self._over

    def _because_of(self, among: Iterable[Worker], text: str = "", which: str = "") -> End:
        """The end of the job by the first failure of these workers; `which` relates the failure to a `text`."""
        chosen = set(among)
        failed = [worker for worker in self._ended_workers if worker in chosen and worker.phase == "failed"]
        # PeerLostError reports the end of another worker.
        first = [worker for worker in failed if not any("PeerLostError" in line for line in worker.lines)]
        if not failed:
            return End(EXIT_FAILED if text else 0, text)
        culprit = (first or failed)[0]
        before = f"{text} {which}, " if text else ""
        name = str(culprit)
        if not self._settings.replaces:
            name = f"rank {culprit.id} of {self._settings.max_np} (pid {culprit.pid})"
        code = culprit.code or EXIT_FAILED
        # As a shell gives it: 128 + n when signal n killed a process.
        reason = f"{before}{name} {culprit.ending}."
        return End(code if code > 0 else 128 - code, reason, lines=tuple(culprit.lines), worker=culprit.id)

    def _meet_ranks(self, now: float) -> None:
        """In a job without replacements: send workers on several hosts their world once all its ranks are in init()."""
        there = {worker.id: worker for worker in self.workers.values() if worker.entry is not None}
        for number, (ranks, until) in list(self._meeting.items()):
            absent = [rank for rank in ranks if rank not in there]
            if absent and not self._due(until, now):
                continue
            del self._meeting[number]
            if absent:
                hosts = ", ".join(dict.fromkeys(list(self.slots)[rank].host for rank in absent))
                limit_s = self._settings.start_timeout_s
                text = f"{rank_list(absent)} on {hosts} did not call init() within {limit_s:g} s."
                fix = "see whether they failed or create no store; KVHVD_START_TIMEOUT (seconds) gives them more time."
                self._tell(number, "fail", text=text, fix=fix)
            else:
                world = world_of([there[rank] for rank in ranks], self.slots)
                self._tell(number, "world", rank=ranks.index(number), **world, generation=0, job=self._settings.job)

    # -- Decisions about generations ------------------------------------------------------------------------------

    def _see_off(self, now: float) -> None:
        """Have workers leave that are in no world and will not be."""
        for worker in self._outside():
            if worker.slot in self.slots and not (self._finishing and self.generation.begun):
                continue
            if self._finishing and not worker.pid:  # its daemon has not come, and may never
                self._ended([worker], -signal.SIGKILL, now, "it had not been started")
            else:
                self._dismiss([worker], now)

    def _newcomers_may_join(self, now: float) -> bool:
        """Whether to announce newcomers to the members: once all that started are ready, or after a brief wait."""
        outside = self._outside()
        ready = [worker for worker in outside if worker.phase == "ready"]
        if not ready or self._finishing:
            return False
        first = min(ready, key=lambda worker: worker.ready_at)
        took = first.ready_at - first.started_at
        join_at = first.ready_at + min(max(took, _TOGETHER_S), self._settings.start_timeout_s)
        return len(ready) == len(outside) or self._due(join_at, now)

    def _tell_changes(self, now: float) -> None:
        """Tell the members when the next world would be another one, so that they come to their next commit."""
        generation = self.generation
        if any(worker.phase == "ready" for worker in generation.left):
            return  # they are coming
        result = generation.announced
        if any(worker.slot not in self.slots for worker in generation.left):
            result |= _REMOVED
        if self._newcomers_may_join(now):
            result |= _ADDED
        if result == generation.announced:
            return
        generation.announced = result
        self._updates += 1
        self._note("updated", generation=generation.number, number=self._updates, result=result)
        for worker in generation.left:
            self._tell(worker.id, "updated", number=self._updates, result=result)

    def _leave_out(self, now: float) -> None:
        """Go on without hosts that others have not reached in several meetings."""
        while True:
            left = self.generation.left
            hosts, having = {worker.slot.host for worker in left}, Counter(w.slot.host for w in left if w.synced)
            pairs = [pair for pair, count in self._apart.items() if count >= _MOST_APART and pair <= hosts]
            unreached = Counter(host for pair in pairs for host in pair if set(having) != {host})
            if not unreached or not all(worker.phase == "ready" for worker in left):
                return
            order = {host: self.slots.order(Slot(host, 0)) for host in hosts}
            out = max(unreached, key=lambda host: (unreached[host], -having[host], order[host]))
            others = sorted((host for pair in pairs if out in pair for host in pair - {out}), key=order.__getitem__)
            seconds = self.slots.crashed(out, now, had_begun=False)
            pair = f"it and {', '.join(others)} do not reach each other"
            fix = "see whether a firewall lets workers connect; --network-interfaces chooses what they use."
            news = text_of(f"host {out} is left out for {seconds:.0f} s: {pair}.", fix=fix)
            self._note("host_left_out", news, host=out, unreached=others, seconds=round(seconds, 3))
            self._dismiss((worker for worker in self.running if worker.slot.host == out and worker.taking_part), now)

    def _form(self, now: float) -> None:
        """Give the next generation out when all its workers are ready; wait for more if they are too few."""
        begun, old, outside = self.generation.begun, self.generation.left, self._outside()
        short_since, self._short_since = self._short_since, math.inf
        if begun and not old:
            return  # all have finished
        awaited, finishing = old if begun else outside, self._finishing
        least = 1 if finishing else self._settings.min_np
        complete = all(worker.phase == "ready" for worker in awaited)
        if not complete and (begun or sum(worker.pid > 0 for worker in awaited) >= least):
            return
        if complete and self._with_state() and not any(worker.synced for worker in old):
            # They could only begin anew. The workers with the state are done, or were killed and have not ended yet.
            self._dismiss(old if self._succeeded else (), now)
            return
        newcomers = [worker for worker in outside if worker.phase == "ready" and not (finishing and begun)]
        stay = [worker for worker in old if worker.slot in self.slots or finishing]
        if old and not (stay or newcomers) and all(worker.slot.host in self._leaving for worker in old):
            self._dismiss(old, now)
            return
        having = [worker for worker in old if worker.synced] or old
        if (stay or newcomers) and not any(worker in stay for worker in having):
            # The state would go with the last worker that has it.
            stay = [worker for worker in old if worker in stay or worker is having[0]]
        chosen = [*stay, *newcomers][: self._settings.max_np]
        if complete and len(chosen) >= least:
            self._give_out(chosen, now)
        else:
            self._short_since = min(short_since, now)
            self._wait_for_more(len(chosen), least, now)

    def _wait_for_more(self, ready: int, least: int, now: float) -> None:
        limit, since = self._settings.elastic_timeout_s, self._short_since
        if self.workers:
            what, needed = f"{ready} workers are ready", least
        else:
            what, needed = f"there are {len(self.slots)} slots", max(least, self._settings.first_np or 0)
        if self._takes_long("short", since, now):
            seconds = since + limit - now
            news = f"{what}, {needed} are needed: waiting for more, for {seconds:.0f} s."
            self._note("too_few", news, text=what, needed=needed, seconds=round(seconds, 3))
        if self._due(since + limit, now):
            absent = [worker for worker in self.workers.values() if worker.alive and not worker.entry]
            details = [f"{worker} has not called init()" for worker in absent]
            details += [f"{worker} {worker.ending}" for worker in self._last_of_slots() if worker.code]
            details += self.hosts_fault.splitlines()
            self.give_up(f"{what}, {needed} are needed, and no more came within {limit:g} s.", details=details)

    def _give_out(self, chosen: Sequence[Worker], now: float) -> None:
        settings, old, left = self._settings, self.generation, self.generation.left
        if old.begun:
            come = {worker.change for worker in chosen if worker not in old.members}
            gone = {worker.removed_by for worker in left if worker not in chosen}
            # A change of the hosts counts once, also where its workers come one by one.
            changes = come | gone
            is_other = not changes or NO_CHANGE in changes or not changes <= self._counted
            self._resets += old.phase == "lost" or is_other
            self._counted |= changes
        if settings.reset_limit is not None and self._resets > settings.reset_limit:
            text = "Horovod was shutdown because number of resets during elastic job exceeded limit:"  # Horovod's words
            self.give_up(f"{text} {settings.reset_limit}")
            return
        if self._has_worked(now):
            self._failed_worlds = 0
        if self._failed_worlds >= _MAX_FAILED_WORLDS:
            text = f"{self._failed_worlds} worlds in a row were lost before they had begun, the last one with:"
            self.give_up(f"{text} {self._failure or '?'}")
            return
        if old.begun:
            # The state comes from rank 0. One that is a member may not have it yet: when its world was lost at once.
            ranked = rank_order(sorted(chosen, key=lambda worker: not worker.synced))
        else:
            ranked = rank_order(sorted(chosen, key=lambda worker: self.slots.order(worker.slot)))
        number = old.number + 1
        self.generation = Generation(number, ranked, now + settings.start_timeout_s + _MEETING_EXTRA_S)
        world = {"generation": number, **world_of(ranked, self.slots), "job": settings.job}
        for rank, worker in enumerate(ranked):
            worker.takes("world")
            worker.generation = number
            self._tell(worker.id, "world", **world, rank=rank)
        members = [worker.id for worker in ranked]
        text = f"generation {number}: {len(members)} workers ({', '.join(map(str, members))})."
        self._note("generation_ready", text if number > 0 else "", generation=number, workers=members)
        self._dismiss((worker for worker in left if worker not in ranked), now)

    def _lose(self, cause: str, text: str, now: float) -> None:
        """Declare the present generation lost to its members, which have to be ready for the next one."""
        generation = self.generation
        was_meeting = generation.phase == "meeting"
        if not generation.takes("lost"):
            return
        self._failed_worlds = 0 if self._has_worked(now) else self._failed_worlds + 1
        self._failure = text
        is_news = cause == "meeting" or self._failed_worlds > 1
        news = f"generation {generation.number} has not begun: {text}" if is_news else ""
        if was_meeting:
            generation.kill_at = generation.waits_since = math.inf
        self._expect(now, "lost")
        self._note("generation_void", news, generation=generation.number, cause=cause, text=text)
        for worker in generation.members:
            if worker.phase in ("member", "finished"):
                self._tell(worker.id, "lost", generation=generation.number, text=text)

    # -- The end of the job, and of workers: asked to leave, then SIGTERM, then SIGKILL ---------------------------

    def _end(self, end: End) -> None:
        self._over = True
        for start in [action for action in self._actions if isinstance(action, Start)]:
            self._actions.remove(start)
            del self.workers[start.worker]
        for worker in self.workers.values():
            if end.reason and worker.alive and worker.entry is not None and not worker.leaving:
                self._tell(worker.id, "fail", text=end.reason, fix="see the message of kvhvdrun.")
        waits = end.reason and self._settings.replaces  # else the others have had their time
        self._actions.append(end._replace(grace_s=self._settings.survivor_time_s if waits else 0.0))

    def _dismiss(self, workers: Iterable[Worker], now: float) -> None:
        for worker in workers:
            worker.takes("leave")
            worker.act_at = now
            if worker.entry is not None:  # else no connection leads to it yet
                trained = worker.joined_at is not None
                worker.act_at += self._settings.exit_timeout_s if trained else self._settings.survivor_time_s
                self._tell(worker.id, "leave")

    def _hasten(self, now: float) -> None:
        """Take the next step with workers that do not leave: SIGTERM, SIGKILL, and to count them as ended."""
        for worker in self.running:
            if not self._due(worker.act_at, now):
                continue
            if worker.killed:
                self._ended([worker], -signal.SIGKILL, now)
            elif worker.takes("SIGTERM"):
                worker.act_at = now + self._settings.kill_grace_s
                self._actions.append(Kill(worker.id, signal.SIGTERM))
            else:
                self._kill(worker, "it did not leave", now)

    def _kill(self, worker: Worker, why: str, now: float) -> None:
        """Kill a worker; it counts as crashed, unless it was to leave."""
        worker.takes("SIGKILL")
        worker.killed, worker.act_at = why, now + _KILL_TAKES_S
        self._note("worker_killed", f"{worker} is killed: {why}.", worker=worker.id, why=why)
        self._actions.append(Kill(worker.id, signal.SIGKILL))

    def _note(self, event: str, news: str = "", **fields: Any) -> None:
        self._actions.append(Note(event, fields, news))

    def _tell(self, worker: int, kind: str, **fields: Any) -> None:
        self._actions.append(Tell(worker, {"t": kind, **fields}))
