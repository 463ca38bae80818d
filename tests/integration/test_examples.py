import os
import re
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.gluon import is_mxnet_2
from support.launchers import kvhvdrun, mpirun

needs_sklearn = pytest.mark.skipif(find_spec("sklearn") is None, reason="needs scikit-learn")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def example(name, *arguments):
    return [sys.executable, str(EXAMPLES / name), *arguments]


@needs_sklearn
def test_uneven(run):
    """All samples of all workers count, and all workers end with the same parameters."""
    out = run("-np 3", example("uneven.py", "--epochs", "3")).out
    assert "worker 2: 719 images, 45 batches in an epoch" in out
    assert "135 on every worker" in out
    assert "parameters     equal on all workers" in out
    # What MXNet computes has other bits on another processor: they are no result to print.
    assert not re.search(r"\b[0-9a-f]{16}\b", out), out


@needs_sklearn
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


@needs_sklearn
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


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("estimator.py", r"201 samples, validation accuracy 0\.[89]"),
        ("module.py", r"\('accuracy', (1\.0|0\.9)"),
        ("accumulation.py", r"weights 0\.9(\d+ 0\.9){3}"),
        ("evaluation.py", r"accuracy 0\.\d{4}, loss "),
        ("rnn.py", r"epoch 15: loss 0\.00"),
        ("gan.py", r"mean of what it makes: [23]\."),
    ],
)
def test_short_examples(run, name, expected):
    """All workers print the same kind of result; only rank 0 writes files."""
    if name == "module.py" and is_mxnet_2():
        pytest.skip("MXNet 2 has no Module")
    out = run("-np 2", example(name)).out
    assert len(re.findall(expected, out)) >= 2, out


@pytest.mark.parametrize("name", ["constant_batch.py", "estimator_elastic.py"])
def test_the_same_steps_whatever_becomes_of_the_workers(run, start, name):
    """Weights are those of one worker, but for rounding, also after two kills."""
    weights = re.compile(r"weights(( -?\d+\.\d+)+)")
    alone = run("-np 1", example(name)).out
    job = start("--min-np 1 --max-np 3 --blacklist-cooldown-range 1 1", example(name))
    for epoch in (5, 15):
        job.until_printed(f"epoch {epoch}\n")
        os.kill(int(re.findall(r"pid (\d+) is rank 1,", job.out)[-1]), signal.SIGKILL)
    found = [[float(each) for each in match[1].split()] for match in weights.finditer(job.end().out)]
    assert found
    expected = [float(each) for each in weights.search(alone)[1].split()]
    for each in found:
        assert each == pytest.approx(expected, abs=2e-4)
