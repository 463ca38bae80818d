"""Arrays on GPUs in jobs of real processes, from end to end; stand-ins take the place of the GPUs and of CUDA.

The kernels are the real ones, compiled for this machine, and meet in memory that the processes share.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.host_kernels import COMPILER, compiled
from support.jobs import LIMIT_S, variables_of
from support.launchers import kvhvdrun, with_tests

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(120),
    pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler"),
]

SCRIPT = Path(__file__).resolve().parents[1] / "support" / "gpu_worker.py"


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("kernels"))


@pytest.fixture
def run(marker: str, kernels: Path, tmp_path: Path) -> Any:
    """Run a job to its end: exit code, stdout, stderr."""

    def start(ranks: int, gpus: int, what: str, *options: str, **variables: str) -> tuple[int, str, str]:
        environment = {**variables_of(marker), "TMPDIR": str(tmp_path), "KVHVD_GPU_STAGING_MIB": "2", **variables}
        command = [*kvhvdrun().prefix, "-np", str(ranks), *options, sys.executable, str(SCRIPT)]
        done = subprocess.run(
            [*command, str(kernels), str(gpus), what],
            env=with_tests(environment),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        return done.returncode, done.stdout, done.stderr

    return start


@pytest.mark.parametrize(("ranks", "gpus"), [(1, 1), (2, 1), (3, 1), (2, 2), (4, 4)])
def test_results_are_those_of_the_cpu(run: Any, ranks: int, gpus: int) -> None:
    """Workers that share a GPU, or have one each; their processes end right after the last operation."""
    code, out, err = run(ranks, gpus, "reduce")
    assert code == 0, err
    assert out.count("the end") == ranks
    assert "Traceback" not in err


@pytest.mark.parametrize("gpus", [1, 3])
def test_a_worker_dies_while_kernels_wait_for_its(run: Any, gpus: int) -> None:
    """They are ended, and the others learn whose death it was."""
    code, out, err = run(3, gpus, "die")
    assert code != 0
    for rank in (0, 1):
        assert f"rank {rank}: PeerLostError: [rank {rank}/3]" in out, out + err
        assert f"rank {rank}: the end" in out
    assert out.count("rank 2 ") >= 2
    assert "Traceback" not in err


def test_a_worker_stands_still_while_kernels_wait_for_its(run: Any) -> None:
    """At the deadline, and by its name."""
    deadline_s = 3
    code, out, err = run(2, 1, "stop", KVHVD_TIMEOUT=str(deadline_s), KVHVD_KILL_GRACE="1")
    assert code != 0
    assert "rank 0: TimeoutError: [rank 0/2]" in out, out + err
    assert f"waited {deadline_s} s for rank 1's GPU" in out
    assert "another worker's GPU has not finished the last operations" in err


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_launch_fails(run: Any, gpus: int) -> None:
    """All workers get the error, also those whose kernels wait; afterwards they can start anew."""
    code, out, err = run(2, gpus, "recover")
    assert code == 0, err
    for rank in (0, 1):
        assert f"rank {rank}: TransportError: [rank {rank}/2]" in out
        assert f"rank {rank}: the end" in out
    assert out.count("planted; look for a failed kernel") == 2
    assert ".." not in out
