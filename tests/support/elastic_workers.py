"""Workers of an elastic job that know only what they were told, and the promises of the launcher to them.

A worker is a value. Each function returns the workers that it may become, so that a test can take one at random, or all
of them. What a worker says waits in `words` until the launcher hears it.
"""

import functools
import signal
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kvstore_hvd.base.channel import TO_WORKER, take
from kvstore_hvd.launch.jobs import Job
from kvstore_hvd.launch.phases import Generation
from kvstore_hvd.launch.state import Action, Note, Settings, Start, Tell


class Worker(NamedTuple):
    # "starting", "waiting" (for a rank or a world), "ranked" (it has a rank, and waits for no world yet), "meeting",
    # "training", "hung" (nothing but SIGKILL changes that) or "gone"
    phase: str = "starting"
    synced: bool = False  # it has the state of the training
    asked: bool = False  # to come to a commit
    stuck: bool = False  # in an operation that another worker has not joined, or deaf to SIGTERM
    words: tuple[Any, ...] = ()  # messages, as `message_of` takes them; then perhaps an exit code

    def says(self, word: str, phase: str) -> "Worker":
        return self._replace(phase=phase, stuck=False, words=(*self.words, word))

    def waits(self, cause: str) -> "Worker":
        """It asks for its next world."""
        return self.says(f"ready {cause}", "waiting")._replace(asked=False)

    def ends(self, code: int) -> "Worker":
        return self if self.phase == "gone" else Worker("gone", words=(*self.words, code))

    @property
    def in_world(self) -> bool:
        return self.phase in ("meeting", "training")

    def loses(self) -> "Worker":
        """It notices that its world is lost."""
        return self.waits("lost" if self.phase == "training" else "meeting")


@functools.cache
def steps(worker: Worker) -> dict[str, Worker]:
    """What a worker may do by itself when all goes well, by name."""
    if worker.stuck:
        return {}
    if worker.phase == "starting":
        return {"enter": worker.says("enter", "waiting")}
    if worker.phase == "ranked":
        return {"start": worker.waits("start")}
    if worker.phase == "meeting":
        return {"join": worker.says("joined", "training")}
    if worker.phase != "training":
        return {}
    if not worker.synced:
        return {"sync": worker.says("synced", "training")._replace(synced=True)}
    commit = {"commit": worker.waits("updated")} if worker.asked else {}
    return {"finish": worker.says("finished", "training").ends(0), **commit}


@functools.cache
def runs(worker: Worker) -> tuple[Worker, ...]:
    """What a worker may have become before it looks at a message: any number of steps."""
    found = [worker]
    for each in found:
        found += [step for step in steps(each).values() if step not in found]
    return tuple(found)


def told(worker: Worker, kind: str) -> list[Worker]:
    """What a worker may become that looks at a message, or gets a signal."""
    if worker.phase in ("gone", "hung"):
        return [worker]
    if kind in ("world", "rank"):
        assert worker.phase == "waiting" and not worker.words, f"a {kind} for a worker that does not wait"
        return [worker._replace(phase="meeting" if kind == "world" else "ranked")]
    if kind == "lost":
        return [worker.loses() if worker.in_world else worker]
    if kind == "updated":
        return [worker._replace(asked=worker.in_world)]
    if kind == "leave":
        # One that does not wait may not get so far.
        return [worker.ends(0), *([] if worker.phase == "waiting" else [worker._replace(stuck=True)])]
    if kind == "fail":
        return [worker.ends(1)]
    assert kind == "SIGTERM", kind
    return [worker.ends(-signal.SIGTERM), worker._replace(stuck=True)]


def message_of(word: str, number: int, generation: int, identity: str, unreached: Sequence[int] = ()) -> dict[str, Any]:
    kind, _, cause = word.partition(" ")
    if kind == "enter":
        return {"t": "enter", "host": ["name", identity], "pid": 100 + number, "addresses": [], "ranks": []}
    if kind == "ready":
        missing = list(unreached) if cause == "meeting" else []
        return {"t": "ready", "generation": generation, "cause": cause, "text": "", "unreached": missing}
    return {"t": kind} if kind == "finished" else {"t": kind, "generation": generation}


def check(job: Job, before: Generation, actions: Iterable[Action], hosts: Mapping[str, int], asked: Settings) -> None:
    """Check what a job asks for after an event; `before` is its generation until then. `hosts`: those that stay."""
    workers = job.workers
    has_ended = {worker.id for worker in workers.values() if worker.code is not None}
    dismissed = {worker.id for worker in workers.values() if worker.leaving}
    gone_well = any(worker.code == 0 and not worker.leaving for worker in workers.values())
    worlds: dict[int, dict[str, Any]] = {}
    for action in actions:
        if isinstance(action, Start):
            slots = [worker.slot for worker in job.running]
            assert action.slot.index < hosts.get(action.slot.host, 0), "no such slot"
            assert slots.count(action.slot) == 1, "two workers on a slot"
            assert sum(w.slot in job.slots for w in job.running if not w.leaving) <= asked.max_np, "more than --max-np"
            assert not gone_well, "a worker is started after a success"
        elif isinstance(action, Tell):
            kind = action.message["t"]
            assert action.worker not in has_ended, "words to a dead worker"
            assert take(action.message, TO_WORKER) == action.message
            if kind == "world":
                assert action.worker not in dismissed, "a world for a worker that has to leave"
                worlds[action.worker] = action.message
            assert kind != "lost" or action.message["generation"] == before.number, "another world is lost"
        elif isinstance(action, Note) and action.event == "generation_ready":
            finishing = gone_well or any(worker.phase == "finished" for worker in workers.values())
            check_generation(job, before, worlds)
            assert len(worlds) <= asked.max_np, "more than --max-np"
            assert len(worlds) >= asked.min_np or finishing, "below --min-np"
            before, worlds = job.generation, {}
    assert not worlds, "a world without a generation"


def check_generation(job: Job, before: Generation, worlds: dict[int, dict[str, Any]]) -> None:
    """Check the worlds that the members of a new generation are told."""
    generation, members = job.generation, list(job.generation.members)
    assert generation.number == before.number + 1, "a number of a generation is used twice, or left out"
    assert len(set(members)) == len(members)
    assert list(worlds) == [member.id for member in members], "not all members are told, or others"
    machines = [member.entry["host"][1] for member in members if member.entry]
    for rank, member in enumerate(members):
        world, first = dict(worlds[member.id]), dict(worlds[members[0].id])
        assert (world.pop("rank"), first.pop("rank"), world) == (rank, 0, first), "members disagree"
        assert (world["generation"], world["size"]) == (generation.number, len(members))
        assert [host for _, host in world["hosts"]] == machines
    old = [member for member in members if member in before.members]
    assert not before.begun or (old and members[0] in old), "rank 0 is new"
    runs_of = [m for rank, m in enumerate(machines) if rank == 0 or machines[rank - 1] != m]
    assert len(runs_of) == len(set(runs_of)), "workers of one machine are torn apart"
    having = [member for member in members if member.synced]
    assert not having or members[0] == having[0], "rank 0 has not the state"
    had_it = job._has_state and any(worker.synced for worker in job.workers.values())
    assert having or not had_it, "nobody has the state"
    groups: dict[Any, set[Any]] = {}
    for member in old:
        groups.setdefault((member in having, machines[members.index(member)]), set()).add(member)
    alike = len({has_state for has_state, _ in groups}) == 1
    for same in (*groups.values(), *([set(old)] if alike else [])):
        kept = [member for member in members if member in same]
        assert kept == [member for member in before.members if member in same], "the order has changed"
    for machine in set(machines):
        here = [rank for rank, other in enumerate(machines) if other == machine]
        news = [members[rank] in old for rank in here]
        assert news == sorted(news, reverse=True), "a newcomer comes before an old worker of its machine"
        here.sort(key=lambda rank: job.slots.order(members[rank].slot))
        local_ranks = worlds[members[0].id]["local_ranks"]
        assert [local_ranks[rank] for rank in here] == list(range(len(here))), "not in the order of slots"
