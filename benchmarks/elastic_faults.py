"""The faults that benchmarks/elastic.py times: each is done to a job in which a Gluon network is trained.

The times come from what the workers write into their files after each step, with a clock that all processes share.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import ROOT

# The jobs are those of the tests, which check afterwards that training has gone on as it has to.
sys.path.insert(0, str(ROOT / "tests"))

from support.elastic import ElasticJob, assert_all_right
from support.jobs import processes

__all__ = ["NO_LIMIT", "ROWS"]

TIMEOUT_S = 2  # of operations, in jobs with a stopped worker
# A slot whose workers are killed again and again: soon used again, or most of the time would be spent waiting.
OPTIONS = ("--blacklist-cooldown-range", "1", "2")
SETTLING_S = 0.3  # some steps, before the next fault

Times = Iterator[float]


def next_step(job: ElasticJob, since: float, world: int) -> float:
    """Return the seconds until all members of a world after the given one have made a step."""

    def made() -> float:
        for ready in job.events("generation_ready"):
            if ready["generation"] > world:
                steps = [job.done(worker, ready["generation"]) for worker in ready["workers"]]
                if all(steps) and min(each[0]["t"] for each in steps) > since:
                    return float(max(each[0]["t"] for each in steps))
        return 0.0

    return float(job.until(made, f"a step after world {world}")) - since


def settle(job: ElasticJob, workers: int, world: int) -> int:
    """Wait until all workers are there, and the training runs; returns the world."""
    world = job.until_step(size=workers, after=world)
    time.sleep(SETTLING_S)
    return world


def kill(job: ElasticJob, worker: int, number: int = signal.SIGKILL) -> float:
    """Send a worker a signal; returns when."""
    job.kill(worker, number=number)
    return time.monotonic()


# -- One job, many faults -----------------------------------------------------------------------------------------


def killed(job: ElasticJob, workers: int, count: int, places: Callable[[int], tuple[int, ...]]) -> Times:
    """Kill the workers of these ranks, wait until others have replaced them, and so on."""
    world = -1
    for number in range(count):
        world = settle(job, workers, world)
        members = job.members()
        since = max(kill(job, members[rank]) for rank in places(number))
        yield next_step(job, since, world)


def stopped(job: ElasticJob, workers: int, count: int) -> Times:
    """Stop workers, one after the other."""
    world = -1
    for number in range(count):
        world = settle(job, workers, world)
        yield next_step(job, kill(job, job.members()[number % workers], signal.SIGSTOP), world)


def killed_twice(job: ElasticJob, workers: int, count: int) -> Times:
    """Kill a worker, and another one while the rest meets; the time is since the second."""
    world = -1
    for number in range(count):
        world = settle(job, workers, world)
        members = job.members()
        kill(job, members[number % workers])
        time.sleep(0.02 * (number % 5))
        yield next_step(job, kill(job, members[(number + 1) % workers]), world)


def slots_changed(job: ElasticJob, workers: int, count: int, *, added: bool) -> Times:
    """Add and remove a slot in turns; the time is between two steps of a worker that stays."""
    world, size, done = settle(job, workers - 1, -1), workers - 1, 0
    while done < count:
        size = 2 * workers - 1 - size
        job.set_slots([("localhost", size)])
        world = settle(job, size, world)
        if added == (size == workers):
            stayed = job.members()[0]
            yield job.done(stayed, world)[0]["t"] - last_step_before(job, stayed, world)
            done += 1


def last_step_before(job: ElasticJob, worker: int, world: int) -> float:
    """Return when a worker made its last step before this world."""
    return float(max(line["t"] for line in job.lines("done", worker) if line["generation"] < world))


# -- A job for each fault -----------------------------------------------------------------------------------------


def ended(job: ElasticJob, workers: int, who: str) -> float:
    """Kill the daemon or the launcher; returns the seconds until no process is left."""
    settle(job, workers, -1)
    pid = job.process.pid if who == "launcher" else job.daemons()[0]
    since = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    while processes(job.marker):
        job.process.poll()
        time.sleep(0.01)
    return time.monotonic() - since


# -- All of them --------------------------------------------------------------------------------------------------


def in_one_job(faults: Callable[..., Times], **more: Any) -> Callable[[int, int], list[float]]:
    """Return a function that times the fault so many times, in one job that then ends as it has to."""

    def times(workers: int, count: int) -> list[float]:
        changing = faults is slots_changed
        variables: Any = {"KVHVD_TIMEOUT": str(TIMEOUT_S)} if faults is stopped else {}
        with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
            job = ElasticJob(
                Path(folder),
                f"BENCHMARK_MARK={uuid.uuid4().hex}",
                workers=workers,
                min_np=1,
                slots=[("localhost", workers - 1)] if changing else None,
                options=OPTIONS,
                **variables,
            )
            try:
                found = list(faults(job, workers, count, **more))
                job.finish()
                job.end()
                assert_all_right(job)
            finally:
                job.close()
        return found

    return times


def in_many_jobs(who: str) -> Callable[[int, int], list[float]]:
    """Return a function that times the end of so many jobs."""

    def times(workers: int, count: int) -> list[float]:
        found = []
        for _ in range(count):
            with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
                job = ElasticJob(Path(folder), f"BENCHMARK_MARK={uuid.uuid4().hex}", workers=workers, options=OPTIONS)
                try:
                    found.append(ended(job, workers, who))
                finally:
                    job.close()
        return found

    return times


NO_LIMIT = float("inf")  # it has to recover, in whatever time

#: What is timed, by name, with its median and worst limit in seconds.
ROWS: dict[str, tuple[Callable[[int, int], list[float]], float, float]] = {
    "SIGKILL a worker": (in_one_job(killed, places=lambda number: (1 + number % 3,)), 0.3, 2.0),
    "SIGKILL rank 0": (in_one_job(killed, places=lambda number: (0,)), 0.3, 2.0),
    "SIGKILL two at once": (in_one_job(killed, places=lambda number: (number % 2, 2 + number % 2)), 0.3, 2.0),
    "SIGSTOP a worker": (in_one_job(stopped), TIMEOUT_S + 1.0, TIMEOUT_S + 1.0),
    "a slot more": (in_one_job(slots_changed, added=True), 1.0, 1.0),
    "a slot less": (in_one_job(slots_changed, added=False), 1.0, 1.0),
    "SIGKILL a second one meanwhile": (in_one_job(killed_twice), NO_LIMIT, NO_LIMIT),
    "SIGKILL the daemon: end of all": (in_many_jobs("daemon"), 5.0, 5.0),
    "SIGKILL the launcher: end of all": (in_many_jobs("launcher"), 5.0, 5.0),
}
