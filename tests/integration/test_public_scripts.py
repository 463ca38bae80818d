"""Whole programs as users of Horovod write them, on real data: they know nothing of this package.

Each is started in all the ways that docs/unchanged-scripts.md names, and trains on the same global batches whatever the
number of workers. So the workers must end with equal bits, and near to one process that computes whole batches: there
only the rounding of sums differs.
"""

from __future__ import annotations

import functools
import itertools
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from support.digits import needs_sklearn
from support.jobs import variables_of
from support.launchers import environment, kvhvdrun, mpirun
from support.patience import patient

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow, needs_sklearn]

SCRIPTS = Path(__file__).resolve().parent / "scripts"
LIMIT_S = patient(180)
STARTS = ["mpirun -np 2", "kvhvdrun -np 2", "kvhvdrun -np 4"]
# The second reduces by itself, beside a plain Trainer.
ALL = [*itertools.product(STARTS, ["digits_trainer.py"]), *itertools.product(STARTS[::2], ["digits_self_reducing.py"])]

# Of the norm of each parameter. The optimizers are smooth enough not to enlarge a difference in the last bits.
NEAR = 1e-5


def train(command: list[str], folder: Path, env: dict[str, str], ranks: int) -> list[list[np.ndarray]]:
    """Run a job to its end, check the accuracy that every rank prints, and return every rank's parameters."""
    done = subprocess.run(
        [*command, "--save", str(folder / "params")],
        cwd=folder,
        env={**env, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.findall(r"rank (\d+) of (\d+): test accuracy ([\d.]+)", done.stdout)
    assert sorted(told) == [(str(rank), str(ranks), told[0][2]) for rank in range(ranks)], done.stdout
    assert float(told[0][2]) > 0.93, done.stdout
    parameters = []
    for rank in range(ranks):
        with np.load(folder / f"params{rank}.npz") as saved:
            parameters.append([saved[name] for name in saved.files])
    return parameters


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[np.ndarray]]:
    """Return what gives the parameters of a script that one process has trained."""

    @functools.cache
    def trained(script: str) -> list[np.ndarray]:
        command = [sys.executable, "-m", "kvstore_hvd", str(SCRIPTS / script)]
        (parameters,) = train(command, tmp_path_factory.mktemp("alone"), variables_of(), 1)
        return parameters

    return trained


@pytest.mark.parametrize(("start", "script"), ALL)
def test_script_written_for_horovod(
    marker: str, tmp_path: Path, alone: Callable[[str], list[np.ndarray]], start: str, script: str
) -> None:
    """Accuracy, equal parameters on all ranks, and the parameters of one process that computes whole batches."""
    name, _, count = start.split()
    ranks, program = int(count), str(SCRIPTS / script)
    if name == "mpirun":
        launcher = mpirun()
        if launcher is None:
            pytest.skip("no mpirun and mpi4py beside this interpreter")
        command = launcher.command(ranks, [sys.executable, "-m", "kvstore_hvd", program])
        env = {**environment(launcher), "PYTHONPATH": variables_of()["PYTHONPATH"]}
    else:
        command = [*kvhvdrun().prefix, "-np", count, "--as-horovod", "--no-prefix", sys.executable, program]
        env = variables_of(marker)
    check(train(command, tmp_path, env, ranks), alone(script))


def check(parameters: list[list[np.ndarray]], alone: list[np.ndarray]) -> None:
    """Fail unless all ranks have equal parameters, which are near to those of one process."""
    for others in parameters[1:]:
        for mine, first in zip(others, parameters[0]):
            assert mine.tobytes() == first.tobytes()
    assert len(parameters[0]) == len(alone)
    for many, one in zip(parameters[0], alone):
        assert np.linalg.norm(many - one) < NEAR * np.linalg.norm(one)
