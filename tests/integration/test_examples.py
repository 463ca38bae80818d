"""The examples that documents refer to run as they stand there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.digits import needs_sklearn
from support.jobs import LIMIT_S, variables_of
from support.launchers import kvhvdrun, mpirun

pytestmark = needs_sklearn

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.timeout(120)
def test_uneven(marker):
    """All samples of all workers count, and all workers end with the same parameters."""
    command = [*kvhvdrun().prefix, "-np", "3", sys.executable, str(EXAMPLES / "uneven.py"), "--epochs", "3"]
    done = subprocess.run(
        command, env=variables_of(marker), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "worker 2: 719 images, 45 batches in an epoch" in done.stdout
    assert "135 on every worker" in done.stdout
    assert "parameters     equal on all workers" in done.stdout
    # What MXNet computes has other bits on another processor: they are no result to print.
    assert not re.search(r"\b[0-9a-f]{16}\b", done.stdout), done.stdout


@pytest.mark.timeout(120)
@pytest.mark.parametrize("launcher", [kvhvdrun, mpirun])
def test_digits_cupy(marker, launcher, tmp_path):
    """Two workers come to the parameters of one on the CPU, but for rounding; without a GPU, on arrays of NumPy."""
    way = launcher()
    if way is None:
        pytest.skip("no mpirun beside this interpreter")
    program = [sys.executable, str(EXAMPLES / "digits_cupy.py"), "--epochs", "5"]
    alone = [*program, "--cpu", "--save", str(tmp_path / "one.npz")]
    both = way.command(2, [*program, "--compare", str(tmp_path / "one.npz")])
    text = ""
    for command in (alone, both):
        variables = {**variables_of(marker), **way.environment}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.returncode == 0, done.stderr
        text += done.stdout
    assert "2 workers" in text
    difference = re.search(r"largest difference to one.npz: (\S+)", text)
    assert difference is not None, text
    assert float(difference[1]) < 1e-5, text


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_elastic_digits(marker):
    """A worker is killed, another takes its place, and all end with the same network."""
    command = [
        *kvhvdrun().prefix,
        "--min-np",
        "2",
        "--max-np",
        "3",
        sys.executable,
        str(EXAMPLES / "elastic_digits.py"),
    ]
    command += ["--epochs", "30"]
    process = subprocess.Popen(
        command,
        env={**variables_of(marker), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    assert process.stdout is not None
    lines: list[str] = []
    killed = 0
    for line in process.stdout:
        lines.append(line)
        if "epoch 10/30" in line and not killed:
            killed = int(re.search(r"worker with pid (\d+) is rank 1 of", "".join(lines))[1])  # type: ignore[index]
            os.kill(killed, signal.SIGKILL)
    text = "".join(lines)
    assert process.wait(timeout=LIMIT_S) == 0, text
    assert killed, text
    assert "going on with 2 workers" in text
    results = re.findall(r"test accuracy ([\d.]+) %, parameters sha256 (\w+)", text)
    assert len(results) >= 2, text
    assert len(set(results)) == 1, text
    assert float(results[0][0]) > 95, text
