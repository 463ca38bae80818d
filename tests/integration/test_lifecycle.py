"""Worlds that are left and met again, and processes that are not part of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.launchers import environment, kvhvdrun
from support.patience import patient

WORKER = Path(__file__).resolve().parents[1] / "support" / "lifecycle_worker.py"
LIMIT_S = patient(90)


def run(program: str, ranks: int, *arguments: str, code: int = 0) -> str:
    """Run the program under kvhvdrun, which must end with the code; returns what it printed."""
    result = subprocess.run(
        kvhvdrun().command(ranks, [sys.executable, str(WORKER), program, *arguments]),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        env=environment(),
    )
    assert result.returncode == code, result.stdout
    return result.stdout


@pytest.mark.parametrize("ranks", [2, 4])
def test_workers_meet_again_however_often_some_of_them_failed_to(tmp_path: Path, ranks: int) -> None:
    """A reset that timed out on some workers does not keep them from meeting at the next attempt."""
    output = run("late_reset", ranks, str(tmp_path))
    for rank in range(ranks):
        assert f"rank {rank} generation 1 total {ranks}" in output, output
    assert output.count("failures some") >= ranks - 1, output


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_forked_child_can_neither_join_nor_reset(ranks: int) -> None:
    """Every way into the world is closed to a child at once, and the parents go on."""
    output = run("forked_child", ranks)
    for rank in range(ranks):
        assert f"rank {rank} refused 3 total {ranks}" in output, output


@pytest.mark.parametrize("submits", ["soon", "late"])
def test_ctrl_c_ends_the_wait_of_a_worker_that_leaves(submits: str) -> None:
    """It is heard long before the deadline of ten minutes, and the others are told why nobody comes any more."""
    output = run("interrupted", 2, submits)
    assert "rank 0 was interrupted" in output, output
    assert "rank 1 got: [rank 1/2] allreduce" in output, output
    assert "interrupted" in output.partition("rank 1 got: ")[2].partition("\n")[0], output


@pytest.mark.parametrize(("own_code", "code"), [("0", 1), ("7", 7)])
def test_a_worker_whose_last_operation_failed_does_not_end_in_good_order(own_code: str, code: int) -> None:
    """The error that nobody has read is logged at exit, and the exit code tells of it unless the program's own does."""
    output = run("pending_at_exit", 2, own_code, code=code)
    assert "submitted" in output, output
    assert "its result was never read" in output, output
    assert "left before it submitted" in output, output


@pytest.mark.parametrize("how", ["exit", "shutdown"])
def test_what_mxnet_has_not_come_to_is_waited_for(how: str) -> None:
    """A layer that needs the other workers submits what it exchanges as MXNet computes it: there is a world then."""
    output = run("layers_at_exit", 2, how)
    assert output.count("submitted") == 2, output
    assert "Error" not in output, output
