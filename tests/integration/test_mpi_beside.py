"""mpi4py in a worker of kvhvdrun, where MPI knows nothing of the other workers: the program is told, once."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import kvstore_hvd
from support.jobs import run
from support.launchers import environment, kvhvdrun, mpirun

TEXT = b"MPI.COMM_WORLD has size 1 here, while kvhvdrun has started 2 workers"

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="no mpi4py beside this interpreter"),
    pytest.mark.skipif(mpirun() is None, reason="no MPI beside this interpreter"),
]

BEFORE = "from mpi4py import MPI\nimport kvstore_hvd\nkvstore_hvd.init()\nkvstore_hvd.reset()\n"


def test_it_is_said_once(marker: str) -> None:
    """With both sizes and what to do."""
    code, _, err = run(marker, 2, BEFORE, variables=variables())
    assert code == 0, err
    assert err.count(TEXT) == 1, err
    assert b"mpirun -np 2" in err


def test_it_is_said_in_an_elastic_job() -> None:
    """Whose launcher gives out worlds."""
    program = "from mpi4py import MPI\nimport kvstore_hvd\nkvstore_hvd.init()\nkvstore_hvd.barrier()\n"
    command = [*kvhvdrun().prefix, "-np", "2", "--min-np", "1", "--max-np", "2", sys.executable, "-c", program]
    path = str(Path(kvstore_hvd.__file__).resolve().parents[1])
    environ = {**os.environ, **variables(), "PYTHONPATH": path}
    done = subprocess.run(command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(TEXT) == 1, done.stderr


@pytest.mark.parametrize(
    "ranks, program",
    [
        (1, BEFORE),
        (2, "import kvstore_hvd, sys, mpi4py\nkvstore_hvd.init()\nassert 'mpi4py.MPI' not in sys.modules\n"),
    ],
    ids=["one worker", "not imported"],
)
def test_nothing_is_said_where_nothing_is_wrong(marker: str, ranks: int, program: str) -> None:
    """With one worker, and of a package that is there but is not used; MPI is not imported for the question."""
    code, _, err = run(marker, ranks, program, variables=variables())
    assert code == 0, err
    assert b"COMM_WORLD" not in err


def test_nothing_is_said_under_mpirun() -> None:
    """Nor without a launcher."""
    launcher = mpirun()
    assert launcher is not None
    program = BEFORE + "assert MPI.COMM_WORLD.size == kvstore_hvd.allreduce(numpy.ones(1), 'x')[0]\n"
    for command in (launcher.command(2, [sys.executable]), [sys.executable]):
        done = subprocess.run(
            [*command, "-c", "import numpy\n" + program],
            env={**environment(launcher), "PYTHONPATH": str(Path(kvstore_hvd.__file__).resolve().parents[1])},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stderr
        assert b"COMM_WORLD has size" not in done.stderr


def variables() -> dict[str, str]:
    """What MPI needs to start as root, alone."""
    launcher = mpirun()
    return environment(launcher) if launcher is not None else {}
