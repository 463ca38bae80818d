"""Elastic training under `mpirun --with-ft ulfm`: those who live go on in place. Real processes, real signals."""

from __future__ import annotations

import dataclasses
import json
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.elastic import ElasticJob
from support.elastic_schedule import assert_all_right
from support.jobs import processes, variables_of
from support.launchers import Launcher, mpirun, with_tests
from support.patience import of_the_product, patient

WORKER = Path(__file__).resolve().parents[1] / "support" / "recovering_worker.py"
LIMIT_S = patient(120)
RANKS = 4
STEPS = 300
TOTAL = float(sum(range(STEPS)))
# Without it a worker that ends with another code than 0 ends the job.
ANY_CODE = ("--runtime-options", "error-nonzero-status=0")


def ulfm() -> Launcher | None:
    """The mpirun beside this interpreter, where it can go on after deaths."""
    launcher = mpirun()
    if launcher is None or not launcher.version.startswith("Open MPI 5"):
        return None
    return Launcher("mpirun", (*launcher.prefix, "--with-ft", "ulfm"), launcher.version, launcher.environment)


pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(ulfm() is None, reason="no mpirun of Open MPI 5 beside this interpreter"),
]


class Job:
    """A plan (see the worker) that runs, with what it printed so far."""

    def __init__(self, folder: Path, marker: str, plan: dict[str, Any], *options: str, **variables: str) -> None:
        launcher = ulfm()
        assert launcher is not None
        launcher = dataclasses.replace(launcher, prefix=(*launcher.prefix, *options))
        self.plan = plan
        self._output = folder / "output"
        worker = [sys.executable, str(WORKER), json.dumps({"operation": "allreduce", "steps": STEPS, **plan})]
        # mpirun's exit code does not tell much, and of its processes it tells the others of ends by signals only.
        again = "if [ $code -gt 128 ]; then kill -$((code - 128)) $$; fi; if [ $code = 3 ]; then exit 3; fi"
        program = ["/bin/sh", "-c", f"{shlex.join(worker)}; code=$?; echo exit code $code.; {again}"]
        own = {"OMP_NUM_THREADS": "1", "KVHVD_LOG_LEVEL": "info", **launcher.environment}
        with self._output.open("wb") as file:
            self.process = subprocess.Popen(
                launcher.command(RANKS, program),
                env=with_tests({**variables_of(marker), **own, **variables}),
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        """What was printed so far."""
        return self._output.read_text(errors="replace")

    def reports(self) -> list[dict[str, Any]]:
        """What the workers that have come to the end have reported, in the order of their last ranks."""
        lines = self.output.splitlines()
        found = [json.loads(line[line.index("@{") + 1 :]) for line in lines if "@{" in line and "}" in line]
        return sorted(found, key=lambda report: report["rank"])

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until something is so, for the job prints it."""
        end = time.monotonic() + LIMIT_S
        while not condition():
            assert time.monotonic() < end, f"time limit; output:\n{self.output}"
            time.sleep(0.02)  # between two looks at a file; no event tells of its growth

    def end(self) -> int:
        """Wait for the end; returns the exit code of mpirun."""
        try:
            return self.process.wait(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the job hangs; plan {self.plan}; output:\n{self.output}")

    def codes(self) -> list[int]:
        """The exit codes of the workers."""
        return sorted(int(code) for code in re.findall(r"^exit code (\d+)\.$", self.output, re.MULTILINE))


@pytest.fixture
def start(tmp_path: Path, marker: str) -> Iterator[Callable[..., Job]]:
    """Start jobs; at the end, none of their processes may be there."""
    jobs: list[Job] = []

    def start_one(plan: dict[str, Any], *options: str, **variables: str) -> Job:
        jobs.append(Job(tmp_path, marker, plan, *options, **variables))
        return jobs[-1]

    yield start_one
    for job in jobs:
        if job.process.poll() is None:
            job.process.kill()


def check(job: Job, victims: Sequence[int]) -> None:
    """All who live have come to the end, in the old order, with every step counted once."""
    code, reports = job.end(), job.reports()
    survivors = [rank for rank in range(RANKS) if rank not in victims]
    text = f"plan {job.plan}; code {code}; output:\n{job.output}"
    assert [report["before"] for report in reports] == survivors, text
    assert [report["rank"] for report in reports] == list(range(len(survivors))), text
    assert {report["size"] for report in reports} == {len(survivors)}, text
    assert len({report["generation"] for report in reports}) == 1, text
    assert {(report["number"], report["total"]) for report in reports} == {(STEPS, TOTAL)}, text
    assert [each for each in job.codes() if each < 128] == [job.plan.get("code", 0)] * len(survivors), text


def random_plan(seed: int) -> dict[str, Any]:
    """One to three victims: at any time of training, and while the others recover from the first one."""
    source = random.Random(seed)
    victims = source.sample(range(RANKS), source.choice([1, 1, 2, 2, 3]))
    times = [f"{source.uniform(0.0, 0.15):.4f}"]
    for _ in victims[1:]:
        is_second_fault = source.random() < 0.7
        times.append(f"+{source.choice([0, 0.0005, 0.002, 0.005, 0.02]):g}" if is_second_fault else times[0])
    return {
        "victims": dict(zip(victims, times)),
        "operation": source.choice(["allreduce", "broadcast"]),
    }


Start = Callable[..., Job]


@pytest.mark.parametrize("operation", ["allreduce", "broadcast"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_worker_is_left_out(start: Start, victim: int, operation: str) -> None:
    check(start({"victims": {victim: "0.03"}, "operation": operation}), [victim])


@pytest.mark.parametrize("after", ["+0", "+0.003", "+0.02"])
def test_a_second_one_is_killed_while_the_others_recover(start: Start, after: str) -> None:
    check(start({"victims": {2: "0.03", 0: after}}), [0, 2])


def test_one_is_left(start: Start) -> None:
    check(start({"victims": {0: "0.02", 1: "0.02", 3: "+0.001"}}), [0, 1, 3])


def test_a_stopped_worker_is_killed_and_left_out(start: Start) -> None:
    """MPI can leave out the dead only."""
    job = start({"victims": {1: "0.03"}, "fault": signal.SIGSTOP}, KVHVD_TIMEOUT=str(of_the_product(2)))
    check(job, [1])
    assert "warning: killed rank 1 (" in job.output
    assert "it is stopped, and the others have waited for it long enough" in job.output


@pytest.mark.parametrize("mpi", [False, True])
def test_survivors_end_with_the_code_of_their_program(start: Start, mpi: bool) -> None:
    """Also where mpi4py, which the program has imported first, would wait for the dead at the end."""
    check(start({"victims": {0: "0.03"}, "code": 5, "mpi": mpi}, *ANY_CODE), [0])


def test_a_worker_that_raises_is_left_out(start: Start) -> None:
    """It ends by a signal, because mpirun tells the others of nothing else."""
    job = start({"victims": {}, "raises": [2]})
    job.end()
    assert "ValueError: the data set is empty" in job.output
    assert [report["before"] for report in job.reports()] == [0, 1, 3], job.output
    assert {(report["size"], report["total"]) for report in job.reports()} == {(3, TOTAL)}, job.output
    assert job.codes() == [0, 0, 0, 128 + signal.SIGKILL]


def test_workers_that_all_raise_end_with_their_code(start: Start) -> None:
    job = start({"victims": {}, "raises": [0, 1, 2, 3]})
    job.end()
    assert job.codes() == [1] * RANKS, job.output


def test_an_end_that_mpirun_does_not_tell_of(start: Start, marker: str) -> None:
    """The others do not wait for MPI to hear of it."""
    job = start({"victims": {}, "leaves": 1})
    job.end()
    # mpirun may end before its processes do.
    job.until(lambda: not processes(marker))
    fact = "LaunchError: [rank 0/4] rank 1 ended, but mpirun has not reported it, so MPI still waits for it."
    assert fact in job.output
    assert set(job.codes()) <= {1, 3, 128 + signal.SIGTERM, 128 + signal.SIGKILL}


def test_the_others_go_on_without_one_that_has_finished(start: Start) -> None:
    """A loss at the very end may be seen by some only; who has finished neither waits nor is waited for."""
    job = start({"victims": {}, "late": True})
    job.until(lambda: len(job.reports()) == 3)
    assert job.process.poll() is None
    job.process.communicate(b"\n", timeout=LIMIT_S)
    assert sorted((report["before"], report["size"]) for report in job.reports()) == [(0, 4), (1, 2), (2, 2)]
    assert {report["total"] for report in job.reports()} == {TOTAL}
    assert [code for code in job.codes() if code < 128] == [0, 0, 0], job.output


def test_a_worker_that_dies_before_mpi_starts(start: Start) -> None:
    """MPI itself would wait for it for ever."""
    job = start({"victims": {}, "stillborn": 2}, *ANY_CODE, KVHVD_START_TIMEOUT="3")
    job.end()
    fact = "LaunchError: the workers did not find each other by MPI within 3 s. One has died, or does not call init()."
    assert job.output.count(fact) == RANKS - 1, job.output
    assert [code for code in job.codes() if code < 128] == [1] * (RANKS - 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "points",
    [[(2, "save", 2), (0, "restore", 0)], [(0, "check", 2), (1, "reset", 0)], [(3, "save", 3), (0, "sync", 1)]],
    ids=["restore", "reset", "sync"],
)
def test_gluon_training_goes_on(marker: str, tmp_path: Path, points: list[tuple[int, str, int]]) -> None:
    """Of a real network; also when another worker dies while the others go back, meet, and get the state."""
    launcher = ulfm()
    assert launcher is not None
    deaths = [
        {"worker": worker, "point": point, "count": count, "delay_s": 0.0, "signal": signal.SIGKILL}
        for worker, point, count in points
    ]
    command = launcher.command(RANKS, [])
    job = ElasticJob(tmp_path, marker, launcher=command, points=deaths, variables=launcher.environment)
    try:
        job.until(lambda: any(line["size"] == RANKS - 2 for line in job.lines("world")), "a world of two")
        job.finish()
        assert job.end() == 0, job.describe()
        assert [line["worker"] for line in job.lines("end")] != [], job.describe()
        assert_all_right(job, samples=240)
    finally:
        job.close()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(50))
def test_random_kills(start: Start, seed: int) -> None:
    plan = random_plan(seed)
    check(start(plan), list(plan["victims"]))
