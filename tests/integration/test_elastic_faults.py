"""Workers that die, stop, come and go while a Gluon network is trained: real processes, real signals.

After each job that ends with success the workers have equal parameters, those of one process that has done the same
steps, to the last bit; each sample was counted once in each epoch; and nothing is left behind.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.elastic import ElasticJob
from support.elastic_schedule import assert_all_right
from support.jobs import status_of, stopped

SAMPLES = 240
pytestmark = pytest.mark.timeout(400)
Train = Callable[..., ElasticJob]


@pytest.fixture
def train(marker, tmp_path):
    """Start a training, and end it if the test does not."""
    started = []

    def start(**settings):
        started.append(ElasticJob(tmp_path, marker, **settings))
        return started[-1]

    yield start
    for job in started:
        job.close()


def end_well(job):
    """Let the job finish, and check what it has done."""
    job.finish()
    job.end()
    assert_all_right(job, SAMPLES)


def test_killed_workers(train):
    """All but one, rank 0 among them: that one goes on at once, and a new one joins."""
    job = train(workers=2)
    world = job.until_step(size=2)
    members = job.members()
    job.kill(members[0])
    world = job.until_step(size=2, after=world)
    assert job.members()[0] == members[1]
    assert members[1:2] in [each["workers"] for each in job.events("generation_ready")]
    assert {each["code"] for each in job.events("worker_exited")} == {-signal.SIGKILL}
    end_well(job)


@pytest.mark.slow
def test_stopped_workers(train):
    """They are killed as soon as the others have waited for as long as an operation may take."""
    job = train(KVHVD_TIMEOUT="3")
    world = job.until_step(size=3)
    for rank in (2, 0):
        worker = job.members()[rank]
        job.kill(worker, number=signal.SIGSTOP)
        job.until_event("worker_killed", worker=worker)
        world = job.until_step(size=3, after=world)
    end_well(job)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "begin"), [("DistributedTrainer", 1), ("DistributedOptimizer", 2)])
def test_slots_come_and_go(train, kind, begin):
    """Newcomers join at a commit; workers whose slots are gone leave at one, rank 0 among them; no step is lost."""
    job = train(slots=[("localhost", begin)], arguments=["--kind", kind])
    world = job.until_step(size=begin)
    first = job.members()
    job.set_slots([("localhost", begin), ("127.0.0.2", 3 - begin)])
    world = job.until_step(size=3, after=world)
    assert job.members()[:begin] == first
    job.set_slots([("127.0.0.2", 3 - begin)])
    world = job.until_step(size=3 - begin, after=world)
    assert not set(job.members()) & set(first)
    assert not job.events("generation_void")
    assert all(each["code"] == 0 for each in job.events("worker_exited")), job.events("worker_exited")
    end_well(job)


def test_a_host_that_is_preempted_leaves_at_a_commit(train):
    """SIGTERM to its daemon, which has rank 0, costs no step; after its cooldown the host is used again."""
    options = ["-H", "localhost:1,127.0.0.2:1", "--blacklist-cooldown-range", "1", "2"]
    job = train(workers=2, options=options, KVHVD_KILL_GRACE="60")
    world = job.until_step(size=2)
    daemon = int(status_of(job.pid(0))[1])
    assert Path(f"/proc/{daemon}/cmdline").read_bytes().startswith(b"job-daemon ")  # by which docs/elastic.md finds it
    os.kill(daemon, signal.SIGTERM)
    world = job.until_step(size=1, after=world)
    assert job.until_event("worker_exited", worker=0)["code"] == 0
    job.until_step(size=2, after=world)
    end_well(job)
    steps = [line["step"] for line in job.lines("done", worker=1)]
    assert steps == list(range(len(steps))), "a step was made twice"
    assert not job.events("generation_void")
    text = f"the daemon on localhost (pid {daemon}) was ended by SIGTERM"
    assert f"host localhost leaves: {text}." in job.err
    assert f"host localhost is lost: {text}. It gets no worker for " in job.err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_newcomer_does_not_go_on_alone(train, number):
    """The last one that has the state is lost before a newcomer has got it: that one must not begin anew."""
    points = [{"worker": 0, "point": "sync", "count": 2, "delay_s": 0.0, "signal": int(number)}]
    job = train(workers=2, points=points, KVHVD_TIMEOUT="3")
    job.until_step(size=2)
    job.kill(1)
    job.end(128 + signal.SIGKILL)
    assert not job.lines("world", worker=2), "it has begun to train"
    assert "SIGKILL" in job.err


@pytest.mark.alike
def test_below_min_np_it_waits_then_ends(start, tmp_path):
    """Too few workers, and no slot for new ones: an end after the time limit, with the reason."""
    (tmp_path / "hosts").write_text("localhost:3\n")
    script = f"--host-discovery-script 'cat {tmp_path}/hosts'"
    job = start(f"--min-np 3 --elastic-timeout 2 {script}", acts="steps=100000")
    job.until_joined(0, 1, 2)
    (tmp_path / "hosts").write_text("localhost:2\n")
    job.end(1)
    (end,) = job.events("job_end")
    assert "3 are needed" in end["reason"]
    assert end["reason"] in job.err


@pytest.mark.timing
@pytest.mark.slow
@pytest.mark.parametrize("longer_s", [-2, 1])
def test_a_job_is_stopped(train, marker, longer_s):
    """For so much longer than the lease and than an operation may wait for others: that time stands still meanwhile."""
    job = train(KVHVD_TIMEOUT="4", KVHVD_LEASE="4", arguments=["--pause", "0.05"])
    world = job.until_step(size=3)
    with stopped(marker=marker):
        time.sleep(4 + longer_s)
    steps = len(job.done(0, world))
    job.until(lambda: len(job.done(0, world)) >= steps + 10, "steps after the pause")
    assert not job.events("generation_void"), job.describe()
    end_well(job)
