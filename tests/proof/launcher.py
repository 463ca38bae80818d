"""All histories of an elastic job within bounds: the real `Job`, and workers that know only what they were told.

A state is a job, its workers, and how many faults may still happen. Each move is an event of the job: a word of a
worker is heard, time passes until the next deadline, or a fault happens. Workers take no moves of their own, because
their steps touch nothing else. A step is taken when the job hears of it; or before something reaches the worker: a
message, a signal, or the end of another member of its world. So messages cross on the way in each possible manner.

Jobs that decide alike are one: see `Jobs.key`. An event of a job is played once, whatever the workers know; and what
it does with workers is found once, whatever else the job does.
"""

import contextlib
import functools
import math
import pickle
import signal
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Optional

from kvstore_hvd.launch import jobs, phases
from kvstore_hvd.launch.hosts import Slot
from kvstore_hvd.launch.jobs import Job
from kvstore_hvd.launch.phases import Generation
from kvstore_hvd.launch.state import Action, End, Kill, Note, Settings, Start, Tell
from proof.search import Result, State, search
from support.elastic_workers import Worker, check, message_of, runs, steps, told

HOSTS = {"a": 2, "b": 1}
# Times are chosen so that few of them differ.
SETTINGS = Settings(
    job="proof",
    min_np=2,
    elastic_timeout_s=40.0,
    timeout_s=20.0,
    start_timeout_s=2.0,
    survivor_time_s=10.0,
    exit_timeout_s=10.0,
    kill_grace_s=5.0,
    cooldown=(0.0, 0.0),
)
LIMIT = 20_000_000  # states: memory of about 3 GB

Workers = tuple[Optional[Worker], ...]  # in the order of `Node.ids`; None: the job knows of its end


class Bounds(NamedTuple):
    """So many faults may happen at most."""

    worker_faults: int  # crashes, hangs, timeouts that a worker reports; and that time passes while a worker is late
    host_faults: int  # losses of a host, with and without a notice
    cooldown_s: float = 0.0  # without a worker in a slot after repeated crashes
    min_np: int = 2
    max_np: int = 3

    def __str__(self) -> str:
        workers = f"{self.min_np}-{self.max_np}-workers" + (f"-cooldown-{self.cooldown_s:g}" if self.cooldown_s else "")
        return f"{self.worker_faults}-and-{self.host_faults}-faults-{workers}"


class Place(NamedTuple):
    """What decides about a job which events may happen. Workers are named by their position."""

    worlds: tuple[int, ...]  # of each, by the first worker in it; -1 without one
    hosts: tuple[str, ...]  # of each
    has_deadline: bool
    leaving: tuple[str, ...]  # hosts
    bereft: tuple[int, ...]  # who could go on when a job ends because nobody has its state


class Node(NamedTuple):
    """A job; equal ones are one node."""

    job: bytes  # pickled
    now: float
    ids: tuple[int, ...]  # of the workers, by position
    place: int
    end: Optional[End]


class Effect(NamedTuple):
    """What an event does with workers, by their positions in the next job."""

    before: tuple[Optional[int], ...]  # the position of each until then; None: new or ended
    started: tuple[int, ...]
    told: tuple[tuple[int, str], ...]
    worlds: tuple[int, ...]  # as in Place
    is_end: bool
    bereft: tuple[int, ...]  # as in Place


class Numbers(dict[Any, int]):
    """Values, numbered as they come."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Any] = []

    def __missing__(self, value: Any) -> int:
        self.all.append(value)
        return self.setdefault(value, len(self))


def no_lines(_: int) -> tuple[str, ...]:
    return ()


class Jobs:
    """The jobs that have been reached, and what events do with them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.nodes: list[Node] = []
        self.places, self.events, self.effects = Numbers(), Numbers(), Numbers()
        self._numbers: dict[Any, int] = {}
        self._steps: dict[tuple[int, int], tuple[int, int]] = {}
        self._deadlines: list[float] = []
        job = Job(settings, 0.0, no_lines)
        before = job.generation
        job.hosts(HOSTS, 0.0)
        self.root = self._next(job, before, 0.0, ())

    def after(self, number: int, event_number: int) -> tuple[int, int]:
        """Play an event: ("hears", worker, word), ("time",), ("host lost", host) or ("notice", host).

        Returns the number of the next node, and that of the effect.
        """
        step = self._steps.get((number, event_number))
        if step is None:
            node, event = self.nodes[number], self.events.all[event_number]
            job, now = pickle.loads(node.job), node.now
            before, was_lost = job.generation, job.generation.phase == "lost"
            if event[0] == "time":
                now = max(now, job.wake_at)
                job.tick(now)
                assert job.wake_at > now or job._over, "a deadline that has been acted on stays"
            elif event[0] == "host lost":
                job.host_lost(event[1], "a storm", now)
            elif event[0] == "notice":
                job.host_leaves(event[1], "a notice", 143, now)
            else:
                worker, word = job.workers[node.ids[event[1]]], event[2]
                if isinstance(word, int):
                    job.exited(worker.id, word, now)
                else:
                    message = message_of(word, worker.id, worker.generation, worker.slot.host)
                    job.heard(worker.id, message, now)
            step = self._steps[number, event_number] = self._next(job, before, now, node.ids, was_lost)
        return step

    def _next(
        self, job: Job, before: Generation, now: float, ids: tuple[int, ...], was_lost: bool = False
    ) -> tuple[int, int]:
        actions: list[Action] = []
        while new := job.take():
            actions += new
            for action in new:
                if isinstance(action, Start) and not job._over:
                    job.started(action.worker, 100 + action.worker, now)
        hosts = {host: count for host, count in HOSTS.items() if host not in job._leaving}
        check(job, before, actions, hosts, self._settings)
        number, kept = self._number(job, now, next((each for each in actions if isinstance(each, End)), None))
        names = {worker: name for name, worker in enumerate(kept)}
        known = {worker: name for name, worker in enumerate(ids)}
        said = [(names[each.worker], each.message["t"]) for each in actions if isinstance(each, Tell)]
        signals = [each for each in actions if isinstance(each, Kill) and each.worker in names]
        said += [(names[each.worker], signal.Signals(each.number).name) for each in signals]
        late = {member.id for member in before.members if was_lost and member.phase == "late"}
        said = [(name, "SIGKILL late" if kind == "SIGKILL" and kept[name] in late else kind) for name, kind in said]
        starts = tuple(names[each.worker] for each in actions if isinstance(each, Start) and each.worker in names)
        was = tuple(known.get(worker) if job.workers[worker].code is None else None for worker in kept)
        place, is_end = self.places.all[self.nodes[number].place], self.nodes[number].end is not None
        return number, self.effects[Effect(was, starts, tuple(said), place.worlds, is_end, place.bereft)]

    def _number(self, job: Job, now: float, end: Optional[End]) -> tuple[int, list[int]]:
        key, kept = self.key(job, now)
        is_lost = end is not None and end.reason.startswith("no worker of generation")
        key = key, is_lost
        ids = [worker.id for worker in kept]
        wait_s = round(job.wake_at - now, 3)
        number = self._numbers.setdefault(key, len(self.nodes))
        if number == len(self.nodes):
            worlds = [worker.generation if worker.code is None else -1 for worker in kept]
            hosts = tuple(worker.slot.host for worker in kept)
            bereft = tuple(name for name, worker in enumerate(kept) if is_lost and worker.taking_part)
            firsts = tuple(worlds.index(world) if world >= 0 else -1 for world in worlds)
            place = Place(firsts, hosts, job.wake_at < math.inf, tuple(job._leaving), bereft)
            blob = pickle.dumps(job, pickle.HIGHEST_PROTOCOL)
            self.nodes.append(Node(blob, now, tuple(ids), self.places[place], end))
            self._deadlines.append(wait_s)
            if end is not None:
                _check_end(pickle.loads(blob), now)
        assert job._over or self._deadlines[number] == wait_s, "jobs that are taken for alike wait for different times"
        return number, ids

    def key(self, job: Job, now: float) -> tuple[Any, list[Any]]:
        """What a job decides by, and its workers in an order: alike for jobs that do the same from here on.

        Times are relative to now. Once there are ranks (the first go by slots), slots of a host are numbered as they
        appear. Left out are numbers that only grow and are only told, and counts that end a job after more faults than
        are played.
        """
        generation = job.generation
        others = [worker for worker in job.running if worker not in generation.members]
        coming = [worker for worker in others if worker.taking_part]  # in the order of their ages
        if not generation.begun:
            coming.sort(key=lambda worker: worker.slot)
        going = sorted((worker for worker in others if not worker.taking_part), key=lambda each: (each.slot, each.id))
        kept = [*generation.members, *coming, *going]
        names = {worker.id: name for name, worker in enumerate(kept)}
        usable = {where: at for where, at in job.slots._usable_from.items() if at > now}
        crashed = {where for where, count in job.slots._crashes.items() if count and self._settings.cooldown[1]}
        labels: dict[Slot, tuple[str, int]] = {}
        free = sorted(job.slots, key=lambda slot: (usable.get(slot, 0.0), slot in crashed))
        for slot in dict.fromkeys([*(worker.slot for worker in kept), *free]):
            index = sum(host == slot.host for host, _ in labels.values()) if generation.begun else slot.index
            labels[slot] = slot.host, index

        def label(where: Any) -> tuple[str, int]:
            return (where, -1) if isinstance(where, str) else labels.get(where, (where.host, 100 + where.index))

        def until(at: float) -> float:
            return max(round(at - now, 3), 0.0)

        def of(worker: Any) -> tuple[Any, ...]:
            place = labels[worker.slot], worker.slot in job.slots
            if worker.code is not None:
                return (*place, worker.synced)
            about = (*place, worker.phase, worker.synced, worker.entry is None)
            if not worker.taking_part:
                return (*about, until(worker.act_at))
            ready_at, took = 0.0, 0.0
            if generation.begun and worker in coming:
                limit, is_ready = SETTINGS.start_timeout_s, worker.phase == "ready"
                ready_at = max(round((worker.ready_at if is_ready else worker.started_at) - now, 3), -limit)
                took = min(max(worker.ready_at - worker.started_at, jobs._TOGETHER_S), limit) if is_ready else 0.0
            return (*about, ready_at, took)

        members = {worker.id for worker in generation.members}
        may_sync = {worker.id for worker in generation.members if worker.code is None} | generation.synced
        can_all_sync = not job._has_state and members <= may_sync
        world = (
            len(members),
            generation.begun,
            generation.phase,
            generation.announced if generation.phase == "training" else 0,
            until(generation.kill_at),
            sorted(map(sorted, generation.apart)),
            sorted(names[each] for each in generation.joined & members) if generation.phase == "meeting" else (),
            sorted(names[each] for each in generation.synced & members) if can_all_sync else (),
            can_all_sync,
        )
        ended = [worker for worker in job.workers.values() if worker.code is not None]
        past = (
            job._succeeded,
            job._has_state,
            any(worker.synced for worker in ended),
            not generation.begun and any(each.phase == "failed" and not each.lost for each in ended),
            round(job._short_since - now, 3) if job._short_since < math.inf else None,
            job._over,
        )
        pauses = sorted((label(each), until(at)) for each, at in usable.items())
        slots = job.slots._hosts, pauses, sorted(map(label, crashed))
        apart = sorted((sorted(pair), count) for pair, count in job._apart.items())
        # Who shares a world notices the end of a mate.
        given = [worker.generation if worker.code is None else -1 for worker in kept]
        mates = [given.index(number) if number >= 0 else -1 for number in given]
        return repr(([*map(of, kept)], mates, world, past, slots, sorted(job._leaving), apart)), kept


class Table(dict[tuple[str, str], str]):
    """The table of phases, which knows the transitions that were taken."""

    def __init__(self, table: dict[tuple[str, str], str]) -> None:
        super().__init__(table)
        self.taken: set[tuple[str, str]] = set()

    def get(self, key: Any, default: Any = None) -> Any:
        if key in self:
            self.taken.add(key)
        return super().get(key, default)


class Histories:
    """The states of a search, as numbers: job, workers, and the faults that may still happen."""

    def __init__(self, bounds: Bounds) -> None:
        phases._NEXT = self.table = Table(phases._NEXT)
        # Waits that are only reported, and lives that are long, make no difference here.
        jobs._REPORT_AFTER_S = jobs._SOON_S = phases._LONG_LIFE_S = math.inf
        cooldown = bounds.cooldown_s, bounds.cooldown_s
        self._jobs = Jobs(SETTINGS._replace(min_np=bounds.min_np, max_np=bounds.max_np, cooldown=cooldown))
        self._workers = Numbers()
        self._moves: dict[int, list[tuple[Any, ...]]] = {}  # by place, workers and faults
        self._after: dict[int, list[int]] = {}  # by effect and workers
        node, effect = self._jobs.root
        workers = tuple(Worker() for _ in self._jobs.effects.all[effect].started)
        self.root = node << 32 | self._workers[workers] << 4 | bounds.host_faults << 2 | bounds.worker_faults

    def _parts(self, state: State) -> tuple[Node, Workers, int, int]:
        return self._jobs.nodes[state >> 32], self._workers.all[state >> 4 & 0xFFFFFFF], state & 3, state >> 2 & 3

    def is_end(self, state: State) -> bool:
        return self._jobs.nodes[state >> 32].end is not None

    def show(self, state: State) -> str:
        node, workers, faults, host_faults = self._parts(state)
        texts = []
        for number, worker in zip(node.ids, workers):
            signs = [sign for sign in ("synced", "asked", "stuck") if getattr(worker, sign, False)]
            words = f" (unheard: {', '.join(map(str, worker.words))})" if worker and worker.words else ""
            texts.append(f"{number} {', '.join((worker.phase if worker else 'ended', *signs))}{words}")
        ending = f" | end: {node.end.code} {node.end.reason}" if node.end else ""
        return f"| {' | '.join(texts)} | left: {faults} faults, {host_faults} of hosts{ending}"

    def name(self, state: State, move: tuple[str, int]) -> str:
        return f"{move[0]} {self._jobs.nodes[state >> 32].ids[move[1]]}" if move[1] >= 0 else move[0]

    def moves(self, state: State) -> Iterator[tuple[tuple[str, int], State]]:
        job, place = state >> 32, self._jobs.nodes[state >> 32].place
        key = place << 32 | state & 0xFFFFFFFF
        moves = self._moves.get(key)
        if moves is None:
            moves = self._moves[key] = list(self._find(self._jobs.places.all[place], *self._parts(state)[1:]))
        for move, event, workers, left in moves:
            if event is None:
                yield move, job << 32 | workers << 4 | left
                continue
            try:
                number, effect = self._jobs.after(job, event)
                after = self._after.get(effect << 28 | workers)
                if after is None:
                    found = self._affect(self._jobs.effects.all[effect], self._workers.all[workers])
                    after = self._after[effect << 28 | workers] = [self._workers[each] << 4 for each in found]
            except AssertionError as error:
                text = " ".join(map(str, self._jobs.events.all[event]))
                raise AssertionError(f"{text}: {str(error).splitlines()[0]}") from None
            for each in after:
                yield move, number << 32 | each | left

    def _find(
        self, place: Place, workers: Workers, faults: int, host_faults: int
    ) -> Iterator[tuple[tuple[str, int], Optional[int], int, int]]:
        """What may happen: its name, the event, the workers before it, and the faults left."""
        events, numbers, left = self._jobs.events, self._workers, host_faults << 2 | faults
        is_busy = False
        for name, worker in enumerate(workers):
            if worker is None:
                continue
            for word, other in _says(worker):
                is_busy = True
                event = events["hears", name, word]
                yield (f"{word} of", name), event, numbers[_with(workers, name, other)], left
            if worker.phase == "hung":
                mates = [each for each, world in zip(workers, place.worlds) if world == place.worlds[name]]
                if all(each is None or each.phase in ("hung", "gone") for each in mates):
                    # Nobody in its world is left to notice it. The launcher waits, as it may be at work.
                    yield ("end of", name), None, numbers[_with(workers, name, worker.ends(1))], left
            if faults and worker.phase not in ("gone", "hung"):
                for kind, become in (("crash", _crashes), ("hang", _hangs), ("timeout", _times_out)):
                    for other in become(worker):
                        for after in _break(place.worlds, _with(workers, name, other), [name], kind == "hang"):
                            yield (f"{kind} of", name), None, numbers[after], left - 1
        if place.has_deadline and (not is_busy or faults):
            yield ("time passes", -1), events["time",], numbers[workers], left - is_busy
        for host in HOSTS:
            is_leaving, there = host in place.leaving, [name for name, each in enumerate(place.hosts) if each == host]
            if is_leaving or (there and host_faults):
                lost = [name for name in there if (worker := workers[name]) is not None and worker.phase != "gone"]
                for after in _break(place.worlds, workers, lost):
                    event = events["host lost", host]
                    yield (f"host {host} lost", -1), event, numbers[after], left - (0 if is_leaving else 4)
            if there and not is_leaving and host_faults:
                yield (f"notice of {host}", -1), events["notice", host], numbers[workers], left - 4

    def _affect(self, effect: Effect, workers: Workers) -> list[Workers]:
        """What the workers may be after it."""
        after: list[Workers] = [tuple([None if name is None else workers[name] for name in effect.before])]
        for name in effect.started:
            after = [_with(after[0], name, Worker())]
        if effect.is_end:
            for name in effect.bereft:
                worker = after[0][name]
                has_it = worker is not None and worker.phase != "gone" and worker.synced
                assert not has_it, "the state is lost although a worker has it"
            return after
        for name, kind in effect.told:
            found: dict[Workers, None] = {}
            for each in after:
                if (worker := each[name]) is None:
                    found[each] = None
                    continue
                for other in _told(worker, kind):
                    now = _with(each, name, other)
                    has_left = other.phase == "gone" and worker.phase != "gone" and "finished" not in other.words
                    found.update(dict.fromkeys(_break(effect.worlds, now, [name]) if has_left else [now]))
            after = list(found)
        return after


def _with(workers: Workers, name: int, worker: Worker) -> Workers:
    return (*workers[:name], worker, *workers[name + 1 :])


@functools.cache
def _says(worker: Worker) -> tuple[tuple[Any, Worker], ...]:
    """What may be heard next of a worker, and the worker then."""
    saying = (worker,) if worker.words else steps(worker).values()
    return tuple((said.words[0], said._replace(words=said.words[1:])) for said in saying)


@functools.cache
def _told(worker: Worker, kind: str) -> tuple[Worker, ...]:
    if kind.startswith("SIGKILL"):  # nothing but its exit code is heard any more
        is_untold = kind == "SIGKILL late" and worker.stuck
        assert not is_untold, "a worker is killed for being late, and was not told that its world is lost"
        gone = (before.words[-1:] if before.phase == "gone" else (-signal.SIGKILL,) for before in runs(worker))
        return tuple(Worker("gone", words=words) for words in dict.fromkeys(gone))
    return tuple(dict.fromkeys(after for before in runs(worker) for after in told(before, kind)))


@functools.cache
def _crashes(worker: Worker) -> tuple[Worker, ...]:
    return tuple(before.ends(-signal.SIGKILL) for before in runs(worker) if before.phase != "gone")


@functools.cache
def _hangs(worker: Worker) -> tuple[Worker, ...]:
    return tuple(Worker("hung", words=before.words) for before in runs(worker) if before.phase != "gone")


@functools.cache
def _times_out(worker: Worker) -> tuple[Worker, ...]:
    return tuple(
        before.waits("timeout") if before.phase == "training" else before.loses()
        for before in runs(worker)
        if before.in_world
    )


@functools.cache
def _loses_peer(worker: Worker, hangs: bool) -> tuple[Worker, ...]:
    """What a worker may become whose world loses a member: it notices it, or waits without an end; for one that hangs,
    until it times out."""
    if not worker.in_world or worker.stuck:
        return (worker,)
    found = [before for before in runs(worker) if not before.in_world]
    for before in runs(worker):
        if before.in_world:
            found += _times_out(before) if hangs else [before._replace(stuck=True), before.loses()]
    return tuple(dict.fromkeys(found))


def _break(worlds: tuple[int, ...], workers: Workers, lost: Iterable[int], hangs: bool = False) -> list[Workers]:
    """What the workers may become after these have left their worlds."""
    after = [workers]
    for name in lost:
        for mate, world in enumerate(worlds):
            if world == worlds[name] >= 0 and mate != name:
                after = [_with(each, mate, now) for each in after if (w := each[mate]) for now in _loses_peer(w, hangs)]
    return after


def _check_end(job: Job, now: float) -> None:
    """Check that a job that has ended does nothing any more."""
    for worker in list(job.running):
        for word in ("enter", "synced", "finished", "ready lost"):
            with contextlib.suppress(ValueError):
                job.heard(worker.id, message_of(word, worker.id, worker.generation, ""), now)
        job.exited(worker.id, 1, now)
    job.hosts({}, now)
    job.tick(now + 1000.0)
    assert all(isinstance(action, Note) for action in job.take()), "something is done after the end"


def prove(bounds: Bounds) -> tuple[Result, set[tuple[str, str]]]:
    """Search all histories; returns also the transitions of phases that no history has taken."""
    histories = Histories(bounds)
    result = search(histories.root, histories.moves, histories.is_end, histories.name, histories.show, LIMIT)
    return result, set(histories.table) - histories.table.taken
