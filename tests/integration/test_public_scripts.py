"""A whole program as users of Horovod write it, on real data: it knows nothing of this package.

It is started in all the ways that docs/unchanged-scripts.md names, and trains on the same global batches whatever the
number of workers. So the workers must end with equal bits, and near to one process that computes whole batches: there
only the rounding of sums differs.
"""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from support.digits import needs_sklearn
from support.jobs import variables_of
from support.launchers import environment, kvhvdrun, mpirun
from support.patience import patient

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow, needs_sklearn]

SCRIPT = str(Path(__file__).with_name("digits_trainer.py"))
LIMIT_S = patient(180)
# Of the norm of each parameter. The optimizers are smooth enough not to enlarge a difference in the last bits.
NEAR = 1e-5


def train(command, folder, env, ranks):
    """Run a job to its end, check the accuracy that every rank prints, and return every rank's parameters."""
    env = {**env, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    command = [*command, SCRIPT, "--save", str(folder / "params")]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    told = re.findall(r"rank (\d+) of (\d+): test accuracy ([\d.]+)", done.stdout)
    assert sorted(told) == [(str(rank), str(ranks), told[0][2]) for rank in range(ranks)], done.stdout
    assert float(told[0][2]) > 0.93, done.stdout
    saved = [np.load(folder / f"params{rank}.npz") for rank in range(ranks)]
    return [[of_rank[name] for name in of_rank.files] for of_rank in saved]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The parameters that one process has trained."""
    command = [sys.executable, "-m", "kvstore_hvd"]
    return train(command, tmp_path_factory.mktemp("alone"), variables_of(), 1)[0]


@pytest.mark.parametrize("start", ["mpirun -np 2", "kvhvdrun -np 2", "kvhvdrun -np 4"])
def test_a_script_written_for_horovod(marker, tmp_path, alone, start):
    """Accuracy, equal parameters on all ranks, and the parameters of one process that computes whole batches."""
    name, _, ranks = start.split()
    if name == "mpirun":
        launcher = mpirun()
        if launcher is None:
            pytest.skip("no mpirun and mpi4py beside this interpreter")
        command = launcher.command(int(ranks), [sys.executable, "-m", "kvstore_hvd"])
        env = {**environment(launcher), "PYTHONPATH": variables_of()["PYTHONPATH"]}
    else:
        command = [*kvhvdrun().prefix, "-np", ranks, "--as-horovod", "--no-prefix", sys.executable]
        env = variables_of(marker)
    first, *others = train(command, tmp_path, env, int(ranks))
    assert all(mine.tobytes() == theirs.tobytes() for each in others for mine, theirs in zip(each, first))
    assert len(first) == len(alone)
    for many, one in zip(first, alone):
        assert np.linalg.norm(many - one) < NEAR * np.linalg.norm(one)
