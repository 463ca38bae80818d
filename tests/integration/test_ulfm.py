"""Elastic training under `mpirun --with-ft ulfm`: those who live go on in place. Real processes, real signals."""

from __future__ import annotations

import dataclasses
import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.jobs import variables_of
from support.launchers import Launcher, mpirun, with_tests

WORKER = Path(__file__).resolve().parents[1] / "support" / "ulfm_worker.py"
LIMIT_S = 120
RANKS = 4
STEPS = 300


def ulfm() -> Launcher | None:
    """The mpirun beside this interpreter, where it can go on after deaths."""
    launcher = mpirun()
    if launcher is None or not launcher.version.startswith("Open MPI 5"):
        return None
    return Launcher("mpirun", (*launcher.prefix, "--with-ft", "ulfm"), launcher.version, launcher.environment)


pytestmark = [
    pytest.mark.timeout(2 * LIMIT_S),
    pytest.mark.skipif(ulfm() is None, reason="no mpirun of Open MPI 5 beside this interpreter"),
]


def run(marker: str, plan: dict[str, Any], *options: str, **variables: str) -> tuple[int, list[dict[str, Any]], str]:
    """Run a plan (see the worker): mpirun's exit code, what the workers reported, and all that was printed."""
    launcher = ulfm()
    assert launcher is not None
    launcher = dataclasses.replace(launcher, prefix=(*launcher.prefix, *options))
    program = [sys.executable, str(WORKER), json.dumps({"operation": "allreduce", "steps": STEPS, **plan})]
    own = {"OMP_NUM_THREADS": "1", "KVHVD_LOG_LEVEL": "info", **launcher.environment}
    process = subprocess.Popen(
        launcher.command(RANKS, program),
        env=with_tests({**variables_of(marker), **own, **variables}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        pytest.fail(f"the job hangs; plan {plan}; output:\n{output}")
    reports = [json.loads(line[line.index("@{") + 1 :]) for line in output.splitlines() if "@{" in line]
    return process.returncode, sorted(reports, key=lambda report: report["rank"]), output


def check(plan: dict[str, Any], code: int, reports: list[dict[str, Any]], output: str) -> None:
    """All who live have come to the end, in the old order, with every step counted once."""
    survivors = [rank for rank in range(RANKS) if str(rank) not in plan["victims"]]
    text = f"plan {plan}; code {code}; output:\n{output}"
    assert [report["before"] for report in reports] == survivors, text
    assert [report["rank"] for report in reports] == list(range(len(survivors))), text
    assert {report["size"] for report in reports} == {len(survivors)}, text
    assert len({report["epoch"] for report in reports}) == 1, text
    assert {(report["number"], report["total"]) for report in reports} == {(STEPS, float(sum(range(STEPS))))}, text
    assert code == 0, text


def random_plan(seed: int) -> dict[str, Any]:
    """One to three victims: at any time of training, and while the others recover from the first one."""
    source = random.Random(seed)
    victims = source.sample(range(RANKS), source.choice([1, 1, 2, 2, 3]))
    times = [f"{source.uniform(0.0, 0.15):.4f}"]
    for _ in victims[1:]:
        is_second_fault = source.random() < 0.7
        times.append(f"+{source.choice([0, 0.0005, 0.002, 0.005, 0.02]):g}" if is_second_fault else times[0])
    return {
        "victims": {str(victim): text for victim, text in zip(victims, times)},
        "operation": source.choice(["allreduce", "broadcast"]),
    }


@pytest.mark.parametrize("operation", ["allreduce", "broadcast"])
@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_worker_is_left_out(marker: str, victim: int, operation: str) -> None:
    plan = {"victims": {str(victim): "0.03"}, "operation": operation}
    check(plan, *run(marker, plan))


@pytest.mark.parametrize("after", ["+0", "+0.003", "+0.02"])
def test_a_second_one_is_killed_while_the_others_recover(marker: str, after: str) -> None:
    plan = {"victims": {"2": "0.03", "0": after}}
    check(plan, *run(marker, plan))


def test_one_is_left(marker: str) -> None:
    plan = {"victims": {"0": "0.02", "1": "0.02", "3": "+0.001"}}
    check(plan, *run(marker, plan))


def test_a_stopped_worker_is_killed_and_left_out(marker: str) -> None:
    """MPI can leave out the dead only."""
    plan = {"victims": {"1": "0.03"}, "fault": signal.SIGSTOP}
    code, reports, output = run(marker, plan, KVHVD_TIMEOUT="2")
    check(plan, code, reports, output)
    assert "warning: killed rank 1 (" in output
    assert "it is stopped, and the others have waited for it long enough" in output


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(50))
def test_random_kills(marker: str, seed: int) -> None:
    plan = random_plan(seed)
    check(plan, *run(marker, plan))
