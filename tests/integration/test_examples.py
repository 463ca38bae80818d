"""The examples that documents refer to, whole programs on real data."""

import os
import re
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.launchers import kvhvdrun, mpirun

needs_sklearn = pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), needs_sklearn]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name, *arguments):
    return [sys.executable, str(EXAMPLES / name), *arguments]


def test_uneven(run):
    """All samples of all workers count, and all workers end with the same parameters."""
    out = run("-np 3", example("uneven.py", "--epochs", "3")).out
    assert "worker 2: 719 images, 45 batches in an epoch" in out
    assert "135 on every worker" in out
    assert "parameters     equal on all workers" in out
    # What MXNet computes has other bits on another processor: they are no result to print.
    assert not re.search(r"\b[0-9a-f]{16}\b", out), out


@pytest.mark.parametrize("launcher", [kvhvdrun, mpirun])
def test_digits_cupy(run, launcher):
    """Two workers come to the parameters of one on the CPU, but for rounding; without a GPU, on arrays of NumPy."""
    way = launcher()
    if way is None:
        pytest.skip("no mpirun beside this interpreter")
    run("-np 1", example("digits_cupy.py", "--epochs", "5", "--cpu", "--save", "one.npz"))
    out = run("-np 2", example("digits_cupy.py", "--epochs", "5", "--compare", "one.npz"), launcher=way).out
    assert "2 workers" in out
    difference = re.search(r"largest difference to one.npz: (\S+)", out)
    assert difference is not None, out
    assert float(difference[1]) < 1e-5, out


def test_elastic_digits(start):
    """A worker is killed, another takes its place, and all end with the same network."""
    job = start("--min-np 2 --max-np 3", example("elastic_digits.py", "--epochs", "30"), PYTHONUNBUFFERED="1")
    job.until_printed("epoch 10/30")
    os.kill(int(re.findall(r"worker with pid (\d+) is rank 1 of", job.out)[0]), signal.SIGKILL)
    out = job.end().out
    assert "going on with 2 workers" in out
    results = re.findall(r"test accuracy ([\d.]+) %, parameters sha256 (\w+)", out)
    assert len(results) >= 2, out
    assert len(set(results)) == 1, out
    assert float(results[0][0]) > 95, out
