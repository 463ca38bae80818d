"""Random disturbances of an elastic job: who is killed, stopped or paused, and which slots come and go, and when. A
seed chooses everything that a test can choose; which instruction of a worker a signal meets is up to the machine."""

import contextlib
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hosts.network import HostsJob, Network
from support.elastic import KINDS, ElasticJob, assert_all_right
from support.jobs import stopped

HOSTS = ("localhost", "127.0.0.2", "127.0.0.3")
NODES = ("node0", "node1", "node2")  # namespaces
PAUSED = ("all", "launcher", "daemon", "worker")
POINTS = ("save", "check", "restore", "reset", "sync")
# Operations that wait for a stopped worker fail after these seconds.
TIMEOUT_S = 5
# Of a launcher and a daemon over hosts: longer than a pause, shorter than some cuts.
LEASE_S = 6
#: Why a job may end without success: nobody is left who knows the state.
LOST = "lost"


@dataclass(frozen=True)
class Disturbance:
    """One thing that happens. `kind` is ``'kill'``, ``'stop'`` (a worker), ``'slots'`` (the discovery script says
    something else), ``'meeting'`` (a worker is killed as soon as a world has been given out), or ``'pause'``: all
    processes, or one of them (the launcher, a daemon, a worker), are stopped for `pause_s` seconds, and continued. Over
    hosts also ``'cut'`` and ``'crash'``: a host is cut off, or ended, and there again after `pause_s`. `calm` ones wait
    until the newest world has made steps, the others only for `delay_s`."""

    kind: str
    calm: bool
    delay_s: float
    who: int = 0  # the place among the members, modulo their number
    slots: tuple[tuple[str, int], ...] = ()
    pause_s: float = 0.0
    whom: str = ""  # is paused: one of PAUSED


@dataclass
class Plan:
    """A job and what happens to it."""

    seed: int
    workers: int
    commit_every: int
    batch_size: int
    slots: tuple[tuple[str, int], ...]
    disturbances: list[Disturbance] = field(default_factory=list)
    points: list[dict[str, Any]] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """How the workers train: each seed in another way than the one before."""
        return KINDS[self.seed % len(KINDS)]


def plan_of(seed: int, *, over_hosts: bool = False) -> Plan:
    """Draw a job of four to six workers, and one to five disturbances."""
    draw, hosts = random.Random(seed), NODES if over_hosts else HOSTS
    workers = draw.randint(4, 6)
    plan = Plan(seed, workers, draw.randint(1, 6), draw.randint(3, 9), _slots(draw, hosts, workers, workers))
    kinds = {"kill": 5, "stop": 1, "slots": 3, "meeting": 2, "pause": 4}
    kinds |= {"cut": 4, "crash": 3} if over_hosts else {}
    for _ in range(draw.randint(1, 5)):
        kind = draw.choices(list(kinds), list(kinds.values()))[0]
        slots = _slots(draw, hosts, 2, workers) if kind == "slots" else ()
        calm = draw.random() < 0.6
        pause_s, whom = (1 + 9 * draw.random() ** 2, draw.choice(PAUSED)) if kind == "pause" else (0.0, "")
        if kind == "pause" and over_hosts:
            pause_s /= 2  # less than the lease
        elif kind in ("cut", "crash"):
            pause_s, whom = 0.2 + 10 * draw.random() ** 2, draw.choice(hosts)
        when, who = draw.random() ** 3, draw.randrange(workers)
        plan.disturbances.append(Disturbance(kind, calm, when, who, slots, pause_s, whom))
    for _ in range(draw.choice((0, 0, 1, 2))):
        plan.points.append(
            {
                "worker": draw.randrange(workers + 2),
                "point": draw.choice(POINTS),
                "count": draw.randrange(3),
                "delay_s": draw.choice((0.0, 0.0, draw.random() * 0.005)),
                "signal": int(draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP))),
            }
        )
    return plan


def _slots(draw: random.Random, hosts: Sequence[str], least: int, most: int) -> tuple[tuple[str, int], ...]:
    """Draw hosts, in some order, and how many slots they have."""
    counts = dict.fromkeys(draw.sample(hosts, len(hosts)), 0)
    for _ in range(draw.randint(least, most)):
        counts[draw.choice(hosts)] += 1
    return tuple((host, number) for host, number in counts.items() if number)


def run(seed: int, folder: Path, marker: str, *, over_hosts: bool = False) -> str:
    """Carry a plan out, and check what came of it; `over_hosts`: which are namespaces. Returns ``'finished'``, or
    `LOST`: all workers that had the state were killed, and the job's end says so."""
    plan = plan_of(seed, over_hosts=over_hosts)
    settings: dict[str, Any] = {"workers": plan.workers, "slots": plan.slots, "points": plan.points}
    sizes = ["--commit-every", str(plan.commit_every), "--batch-size", str(plan.batch_size)]
    settings |= {"arguments": [*sizes, "--kind", plan.kind], "KVHVD_TIMEOUT": str(TIMEOUT_S)}
    options = ["--blacklist-cooldown-range", "1", "2", "--elastic-timeout", "60"]
    if not over_hosts:
        return _run(plan, ElasticJob(folder, marker, options=options, **settings))
    (folder / "network").mkdir()
    with Network(folder / "network", len(NODES)) as network:
        return _run(plan, HostsJob(folder, marker, network, options=options, KVHVD_LEASE=str(LEASE_S), **settings))


def _run(plan: Plan, job: ElasticJob) -> str:
    try:
        _disturb(job, plan)
        job.finish()
        code = job.end(None).process.returncode
        if code == 0:
            assert_all_right(job)
            return "finished"
        _assert_state_was_lost(job, code)
        return LOST
    except Exception as error:
        again = f"KVHVD_TEST_FUZZ_SEED={plan.seed} KVHVD_TEST_FUZZ_ELASTIC=1"
        again += " python -m pytest -m fuzz -k elastic tests/integration/test_fuzz.py"
        again = f"KVHVD_TEST_FUZZ_HOSTS={int(isinstance(job, HostsJob))} {again}"
        raise AssertionError(f"{plan}\nreplay: {again}\n{error}\n{job.describe()}") from error
    finally:
        job.close()


def _disturb(job: ElasticJob, plan: Plan) -> None:
    """Let everything happen, unless the job ends before."""
    with contextlib.suppress(_Ended):
        _until(job, lambda: job.events("generation_ready"))
        for each in plan.disturbances:
            generation = _newest_world(job)
            if each.calm:
                _until(job, lambda: _steps_of_newest_world(job) >= 2)
            time.sleep(each.delay_s)
            if each.kind == "slots":
                job.set_slots(each.slots)
                continue
            if each.kind == "meeting":
                # There may be no other world any more: then it is a kill at any time.
                limit = time.monotonic() + 3
                _until(job, lambda: time.monotonic() > limit or _newest_world(job) > generation)  # noqa: B023
            if each.kind == "pause":
                _pause(job, each)
                continue
            if isinstance(job, HostsJob) and each.kind in ("cut", "crash"):
                _lose_host(job.network, each)
                continue
            members = job.members()
            if len(members) < 2:
                continue  # with the last one the state would be lost
            with contextlib.suppress(ProcessLookupError):
                number = signal.SIGSTOP if each.kind == "stop" else signal.SIGKILL
                job.kill(members[each.who % len(members)], number=number)
        _until(job, lambda: _steps_of_newest_world(job) >= 2)


def _pause(job: ElasticJob, each: Disturbance) -> None:
    members, daemons = job.members(), job.daemons() if job.process.poll() is None else []
    if each.whom == "all":
        held = stopped(*job.everything()) if isinstance(job, HostsJob) else stopped(marker=job.marker)
    elif each.whom == "launcher":
        held = stopped(job.process.pid)
    elif each.whom == "daemon":
        held = stopped(*daemons[each.who % len(daemons) :][:1] if daemons else ())
    else:
        held = stopped(job.pid(members[each.who % len(members)]))
    with held:
        time.sleep(each.pause_s)


def _lose_host(network: Network, each: Disturbance) -> None:
    if each.kind == "cut":
        network.cut(each.whom)
        time.sleep(each.pause_s)
        network.heal(each.whom)
    else:
        network.crash(each.whom, is_silent=each.who % 2 == 0)
        time.sleep(each.pause_s)
        network.boot(each.whom)


class _Ended(Exception):
    """The job has ended."""


def _until(job: ElasticJob, condition: Any) -> None:
    true_or_ended = lambda: condition() or (job.process.poll() is not None and _Ended)  # noqa: E731
    if job.until(true_or_ended, "the next moment for a disturbance") is _Ended:
        raise _Ended


def _newest_world(job: ElasticJob) -> int:
    return int(job.events("generation_ready")[-1]["generation"])


def _steps_of_newest_world(job: ElasticJob) -> int:
    """Count the steps of the newest world, unless it is void."""
    generation = _newest_world(job)
    if job.events("generation_void", generation=generation):
        return 0
    return len(job.done(job.members()[0], generation))


def _assert_state_was_lost(job: ElasticJob, code: int) -> None:
    """Fail unless every worker that could have gone on from the state of the training has died."""
    (end,) = job.events("job_end")
    assert end["code"] == code
    assert end["reason"], "no reason was given"
    assert not job.events("worker_finished"), end
    exited = {each["worker"] for each in job.events("worker_exited")}
    worlds = job.lines("world")
    newest = max((line["generation"] for line in worlds), default=-1)
    alive = {line["worker"] for line in worlds if line["generation"] == newest} - exited
    assert not alive, f"the workers {alive} had the state, and lived"
