"""Workers that die, stop, come and go while a Gluon network is trained: real processes, real signals.

After each job that ends with success the workers have equal parameters, those of one process that has done the same
steps, to the last bit; each sample was counted once in each epoch; and nothing is left behind.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.elastic import ElasticJob
from support.elastic_schedule import assert_all_right
from support.patience import of_the_product, patient

SAMPLES = 240
# A slot whose workers crash again and again has to wait; not for long in tests.
SOON = ("--blacklist-cooldown-range", "1", "2")

Start = Callable[..., ElasticJob]


@pytest.fixture
def start(marker: str, tmp_path: Path) -> Iterator[Start]:
    """Start a job, and end it if the test does not."""
    jobs: list[ElasticJob] = []

    def start_one(**settings: Any) -> ElasticJob:
        settings.setdefault("options", SOON)
        jobs.append(ElasticJob(tmp_path, marker, **settings))
        return jobs[-1]

    yield start_one
    for job in jobs:
        job.close()


def end_well(job: ElasticJob) -> None:
    """Let the job finish, and check what it has done."""
    job.finish()
    code = job.end()
    assert code == 0, job.describe()
    assert_all_right(job, SAMPLES)


pytestmark = pytest.mark.timeout(400)


@pytest.mark.slow
def test_killed_workers(start: Start) -> None:
    """One worker, rank 0, two at once, all but one: the others go on without them, and new ones join."""
    job = start(workers=4, min_np=1)
    world = job.until_step(size=4)
    for ranks in ((2,), (0,), (1, 3), (0, 1, 2)):
        members = job.members()
        for rank in ranks:
            job.send(members[rank])
        survivors = [worker for rank, worker in enumerate(members) if rank not in ranks]
        job.until_step(size=len(survivors), after=world)
        (void,) = job.events("generation_void", generation=world)
        killed = {members[rank] for rank in ranks}
        # One that this test has not killed yet may be ready once more.
        later = [each for each in job.events("generation_ready") if each["generation"] > void["generation"]]
        ready = next(each for each in later if not killed & set(each["workers"]))
        assert ready["workers"] == survivors, "who was ready first, in the old order"
        world = job.until_step(size=4, after=world)
        assert job.members()[: len(survivors)] == survivors
        # Nobody has waited for the newcomers to start.
        came = [each["monotonic"] for each in job.events("newcomer_ready")]
        newcomer = min(time for time in came if time > void["monotonic"])
        alone = [line for line in job.done(survivors[0], ready["generation"]) if line["t"] < newcomer]
        assert len(alone) >= 3, f"only {len(alone)} steps before the newcomer was ready"
    assert {each["code"] for each in job.events("worker_exited")} == {-signal.SIGKILL}
    end_well(job)


@pytest.mark.slow
def test_stopped_workers(start: Start) -> None:
    """They are killed as soon as the others have waited for as long as an operation may take."""
    job = start(workers=3, variables={"KVHVD_TIMEOUT": str(of_the_product(3))})
    world = job.until_step(size=3)
    for rank in (2, 0):
        stopped = job.members()[rank]
        job.send(stopped, signal.SIGSTOP)
        job.until_step(after=world)
        assert job.events("worker_killed", worker=stopped)
        world = job.until_step(size=3, after=world)
    end_well(job)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["daemon", "launcher"])
def test_without_daemon_or_launcher_all_end(start: Start, who: str) -> None:
    """Every process ends, and it is said why."""
    job = start(workers=3)
    job.until_step(size=3)
    (daemon,) = job.daemons()
    job.belongings.note()
    os.kill(daemon if who == "daemon" else job.process.pid, signal.SIGKILL)
    code = job.process.wait(timeout=patient(30))
    job.assert_nothing_left(limit_s=30)
    assert code != 0
    assert who in job.text()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "begin"), [("DistributedTrainer", 1), ("DistributedOptimizer", 2)])
def test_slots_come_and_go(start: Start, kind: str, begin: int) -> None:
    """Newcomers join at a commit; workers whose slots are gone leave at one, rank 0 among them."""
    job = start(workers=4, min_np=1, slots=[("localhost", begin)], arguments=["--kind", kind])
    world = job.until_step(size=begin)
    first = job.members()
    job.set_slots([("localhost", begin), ("127.0.0.2", 4 - begin)])
    world = job.until_step(size=4, after=world)
    # One may have joined before the other.
    assert job.members()[:begin] == first
    job.set_slots([("127.0.0.2", 4 - begin)])
    world = job.until_step(size=4 - begin, after=world)
    assert not set(job.members()) & set(first)
    job.until(lambda: not [pid for pid in map(job.pid, first) if psutil.pid_exists(pid)], "workers that leave end")
    job.set_slots([("localhost", 1), ("127.0.0.2", 1)])
    job.until_step(size=2, after=world)
    # Nothing was lost in all this: no step was done twice.
    assert not job.events("generation_void")
    assert all(each["code"] == 0 for each in job.events("worker_exited")), job.events("worker_exited")
    end_well(job)


@pytest.mark.soak  # by hand: the random disturbances of the ordinary suite do the like
def test_second_losses_during_recovery(start: Start) -> None:
    """A worker is killed, and another one on the way back to training: the rest recovers from both."""
    job = start(workers=4, min_np=1)
    world = job.until_step(size=4)
    for point, rank, delay_s in (
        ("restore", 1, 0.0),  # it has noticed the loss
        ("restore", 0, 0.002),  # it waits for the others
        ("reset", 1, 0.0),  # they have met
        ("sync", 0, 0.0),  # the others wait for its state
        ("sync", 2, 0.001),
    ):
        members = job.members()
        job.arm(members[rank], point, delay_s=delay_s)
        job.send(members[3])
        job.until_step(after=world, size=2)
        exited = {each["worker"] for each in job.events("worker_exited")}
        assert {members[3], members[rank]} <= exited, f"{point} of rank {rank}"
        world = job.until_step(after=world, size=4)
    end_well(job)


@pytest.mark.soak  # by hand: the random disturbances of the ordinary suite do the like
def test_losses_during_commits(start: Start) -> None:
    """Some have saved a step, others have not: all go on from what the first of them has."""
    job = start(workers=3, min_np=1)
    world = job.until_step(size=3)
    for point, rank, delay_s in (
        ("save", 1, 0.0),  # before anything is saved
        ("save", 0, 0.0003),  # in the middle
        ("check", 0, 0.0),  # saved, not agreed
        ("check", 2, 0.0005),  # while agreeing
    ):
        victim = job.members()[rank]
        job.arm(victim, point, delay_s=delay_s)
        job.until_event("worker_exited", worker=victim)
        world = job.until_step(size=3, after=world)
    end_well(job)


@pytest.mark.soak  # by hand: the random disturbances of the ordinary suite do the like
def test_losses_while_workers_meet(start: Start) -> None:
    """Somebody dies as soon as a world has been given out; and a newcomer before it has the state."""
    points = [{"worker": 4, "point": "sync", "count": 0, "delay_s": 0.0, "signal": signal.SIGKILL}]
    job = start(workers=4, points=points, min_np=1)
    world = job.until_step(size=4)
    job.send(3)
    job.until(lambda: job.events("generation_ready")[-1]["generation"] > world, "the next world")
    job.send(job.members()[-1])
    job.until_event("worker_exited", worker=4)
    job.until_step(size=4, after=world)
    end_well(job)


@pytest.mark.soak  # by hand: the random disturbances of the ordinary suite do the like
def test_with_processes_that_load_data(start: Start) -> None:
    """A loader has read ahead when its worker's world is lost: what was not trained on comes again."""
    job = start(workers=3, arguments=["--loaders", "2"])
    world = job.until_step(size=3)
    job.send(1)
    world = job.until_step(size=3, after=world)
    job.send(job.members()[0])
    job.until_step(size=2, after=world)
    end_well(job)


@pytest.mark.slow
def test_when_nobody_is_left_the_job_ends(start: Start) -> None:
    """With all workers their state is lost: starting anew is for those who started the job to decide."""
    job = start(workers=2)
    job.until_step(size=2)
    for worker in job.members():
        job.send(worker)
    assert job.end() == 128 + signal.SIGKILL
    (end,) = job.events("job_end")
    assert end["code"] == 128 + signal.SIGKILL
    assert "SIGKILL" in job.text()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_newcomer_does_not_go_on_alone(start: Start, number: int) -> None:
    """The last one that has the state is lost before a newcomer has got it: that one must not begin anew."""
    points = [{"worker": 0, "point": "sync", "count": 2, "delay_s": 0.0, "signal": int(number)}]
    job = start(workers=2, min_np=1, points=points, variables={"KVHVD_TIMEOUT": str(of_the_product(3))})
    job.until_step(size=2)
    job.send(1)
    assert job.end() == 128 + signal.SIGKILL
    assert not job.lines("world", worker=2), "it has begun to train"


@pytest.mark.slow
def test_below_min_np_it_waits_then_ends(start: Start) -> None:
    """Too few workers, and no slot for new ones: an end after the time limit, with the reason."""
    job = start(workers=3, min_np=3, slots=[("localhost", 3)], options=(*SOON, "--elastic-timeout", "4"))
    job.until_step(size=3)
    job.set_slots([("localhost", 2)])
    code = job.end()
    assert code != 0
    (end,) = job.events("job_end")
    assert "3 are needed" in end["reason"]
    assert end["reason"] in job.text()
