"""Elastic training in jobs whose workers nobody replaces: what it recovers from, and what it says where it cannot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.jobs import variables_of
from support.launchers import Launcher, kvhvdrun, mpirun, with_tests
from support.patience import of_the_product, patient

WORKER = Path(__file__).resolve().parents[1] / "support" / "recovering_worker.py"
LIMIT_S = patient(90)
STEPS = 100
TOTAL = float(sum(range(STEPS)))
LAUNCHERS = {launcher.name: launcher for launcher in (kvhvdrun(), mpirun()) if launcher is not None}

pytestmark = pytest.mark.timeout(240)


def run(launcher: Launcher, marker: str, plan: dict[str, object], **variables: str) -> tuple[int, str]:
    """Run three workers by a plan (see the worker): exit code of the launcher, and all that was printed."""
    program = [
        sys.executable,
        str(WORKER),
        json.dumps({"steps": STEPS, **plan}),
    ]
    done = subprocess.run(
        launcher.command(3, program),
        env=with_tests({**variables_of(marker), "OMP_NUM_THREADS": "1", **launcher.environment, **variables}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("name", LAUNCHERS)
def test_workers_that_all_live_meet_again(marker: str, name: str) -> None:
    """One sleeps for longer than an operation may wait."""
    deadline_s = of_the_product(1)
    plan = {"sleeps": [1, 3 * deadline_s]}
    # The others wait for the sleeper in the next world.
    limits = {"KVHVD_TIMEOUT": str(deadline_s), "KVHVD_START_TIMEOUT": str(30 + 3 * deadline_s)}
    code, output = run(LAUNCHERS[name], marker, plan, **limits, KVHVD_LOG_LEVEL="info")
    assert code == 0, output
    assert "the world is lost, back to the last commit" in output
    reports = [json.loads(line[line.index("@{") + 1 :]) for line in output.splitlines() if "@{" in line]
    assert sorted(report["before"] for report in reports) == [0, 1, 2], output
    for report in reports:
        assert (report["rank"], report["size"]) == (report["before"], 3), output
        assert (report["generation"], report["number"], report["total"]) == (1, STEPS, TOTAL), output


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_worker_that_dies_is_not_replaced_and_the_job_says_so(marker: str, name: str) -> None:
    """First in the log, once; under kvhvdrun, which lets the others speak, in the error too."""
    code, output = run(LAUNCHERS[name], marker, {"dies": 1})
    assert output.count("this job cannot replace workers that die: start with `kvhvdrun --min-np 1") == 1, output
    assert code == 128 + 9 if name == "kvhvdrun" else code != 0, output
    if name == "kvhvdrun":
        said = "PeerLostError: training cannot recover: a worker has died, and this job cannot go on without it."
        assert output.count(said) >= 2, output
        assert "died (SIGKILL)" in output
        assert "Fix: start with `kvhvdrun --min-np 1 --max-np N python train.py`, which replaces workers." in output
