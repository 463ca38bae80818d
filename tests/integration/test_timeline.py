"""Timelines of whole jobs: real trainings under kvhvdrun, also such that end badly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.jobs import PACKAGES
from support.launchers import environment, kvhvdrun
from support.patience import patient
from support.timeline import Trace, parts_of

pytestmark = pytest.mark.slow

TESTS = Path(__file__).resolve().parents[1]
WORKER = TESTS / "support" / "timeline_worker.py"
LIMIT_S = patient(90)
PARAMETERS = 6  # of the network
STEPS = 5


def run(how: str, ranks: int, target: Path, **variables: str) -> tuple[int, str]:
    """Run the job with HOROVOD_TIMELINE; returns its exit code and what it printed."""
    command = [sys.executable, str(WORKER), how, str(target), str(STEPS)]
    path = os.pathsep.join([str(PACKAGES), str(TESTS)])
    result = subprocess.run(
        kvhvdrun().command(ranks, command) if ranks > 1 else command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        cwd=target.parent,
        env={**environment(), "PYTHONPATH": path, "HOROVOD_TIMELINE": str(target), **variables},
        check=False,
    )
    return result.returncode, result.stdout


def merge(target: Path) -> str:
    """Run ``python -m kvstore_hvd.timeline merge``; returns what it printed."""
    command = [sys.executable, "-m", "kvstore_hvd.timeline", "merge", str(target)]
    variables = {**environment(), "PYTHONPATH": str(PACKAGES)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=variables, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check_training(trace: Trace, ranks: int, steps: int) -> None:
    """Every rank has broadcast and then summed each parameter."""
    assert trace.ranks() == list(range(ranks))
    for rank in range(ranks):
        rows = [name for name in trace.names(rank) if "weight" in name or "bias" in name]
        assert len(rows) == PARAMETERS
        for name in rows:
            spans = [span["name"] for span in trace.row(rank, name)]
            assert spans[:2] == ["NEGOTIATE_BROADCAST", "BROADCAST"]
            assert spans[2:4] == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE"]
            assert len(spans) >= 2 + 2 * steps


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_training_leaves_one_file(ranks: int, tmp_path: Path) -> None:
    """Nothing in the program: the variables alone; each step is marked."""
    target = tmp_path / "timeline.json"
    code, output = run("ends", ranks, target, HOROVOD_TIMELINE_MARK_CYCLES="1")
    assert code == 0, output
    trace = Trace(target)
    check_training(trace, ranks, STEPS)
    assert trace.about["lost_operations"] == 0
    for rank in range(ranks):
        assert len(trace.cycles(rank)) >= STEPS
    assert os.listdir(tmp_path) == [target.name]


def test_a_path_relative_to_the_job(tmp_path: Path) -> None:
    """The file is where the job was started; our own variable does the same as Horovod's."""
    target = tmp_path / "timeline.json"
    code, output = run("ends", 2, target, HOROVOD_TIMELINE="", KVHVD_TIMELINE=target.name)
    assert code == 0, output
    check_training(Trace(target), 2, STEPS)


def test_dynamic_waits_for_the_program(tmp_path: Path) -> None:
    """DYNAMIC is not a file."""
    code, output = run("ends", 2, tmp_path / "timeline.json", HOROVOD_TIMELINE="DYNAMIC")
    assert code == 0, output
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_path_that_cannot_be_written_ends_the_job(ranks: int, tmp_path: Path) -> None:
    """Every rank says why, before it trains; nothing is left behind."""
    target = tmp_path / "missing" / "timeline.json"
    code, output = run("ends", ranks, tmp_path / "x", HOROVOD_TIMELINE=str(target), KVHVD_SURVIVOR_TIME="30")
    assert code == 1, output
    assert "trained" not in output
    for rank in range(ranks):
        assert f"InvalidRequestError: [rank {rank}/{ranks}] start_timeline: " in output
    assert os.listdir(tmp_path) == []


def test_one_worker_has_nothing_to_record(tmp_path: Path) -> None:
    """The file is there, and the program is told."""
    target = tmp_path / "timeline.json"
    code, output = run("ends", 1, target)
    assert code == 0, output
    assert "there is only one worker" in output
    assert Trace(target).rows() == {}
    assert os.listdir(tmp_path) == [target.name]


def test_a_forked_child_that_ends_changes_nothing(tmp_path: Path) -> None:
    """The child runs the exit handlers of the program, and the parent's timeline is whole."""
    target = tmp_path / "timeline.json"
    code, output = run("forks", 2, target)
    assert code == 0, output
    assert output.count("trained") == 4
    check_training(Trace(target), 2, STEPS)
    assert os.listdir(tmp_path) == [target.name]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_raises_leaves_its_part(ranks: int, tmp_path: Path) -> None:
    """All ranks end by themselves: the last of them makes the file, with what failed."""
    target = tmp_path / "timeline.json"
    code, output = run("raises", ranks, target, KVHVD_SURVIVOR_TIME="30")
    assert code == 1, output
    trace = Trace(target)
    check_training(trace, ranks, 1)
    assert trace.about["unfinished_ranks"] == []
    assert os.listdir(tmp_path) == [target.name]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_parts_of_a_killed_job_can_be_merged(ranks: int, tmp_path: Path) -> None:
    """What each worker had written until then is there; the parts stay."""
    target = tmp_path / "timeline.json"
    code, output = run("killed", ranks, target, KVHVD_SURVIVOR_TIME="30")
    assert code == 128 + signal.SIGKILL, output
    assert not target.exists()
    parts = [f"{target.name}.rank-{rank}.part" for rank in range(ranks)]
    assert parts_of(target) == parts
    said = merge(target)
    assert "did not end in good order: rank 1" in said
    trace = Trace(target)
    check_training(trace, ranks, 1)
    assert trace.about["unfinished_ranks"] == [1]
    assert parts_of(target) == parts
