"""`hvd.init(comm=...)` and process sets of communicators, under the mpirun that belongs to this interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvstore_hvd
from support.launchers import environment, mpirun
from support.patience import patient

PACKAGES = Path(kvstore_hvd.__file__).resolve().parents[1]
LIMIT_S = patient(90)

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(mpirun() is None, reason="no mpirun and mpi4py beside this interpreter"),
]

# Each rank writes one line, in one piece: mpirun may mix the ranks' output otherwise.
PRELUDE = """
import json, os
import kvstore_hvd.mxnet as hvd
import mxnet as mx
from mpi4py import MPI
world = MPI.COMM_WORLD
def report(**fields):
    os.write(1, ('@' + json.dumps(fields) + '\\n').encode())
def total(process_set=hvd.global_process_set):
    return hvd.allreduce(mx.nd.ones((2,)) * (world.rank + 1), op=hvd.Sum, process_set=process_set).asnumpy().tolist()
"""


def launch(ranks: int, program: str) -> list[dict[str, Any]]:
    """Run a program on some ranks and return what they reported, in the order of their ranks in the job."""
    launcher = mpirun()
    assert launcher is not None
    done = subprocess.run(
        launcher.command(ranks, [sys.executable, "-c", PRELUDE + program]),
        env={**environment(launcher), "PYTHONPATH": str(PACKAGES)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    reports = [json.loads(line[line.index("@") + 1 :]) for line in done.stdout.splitlines() if "@" in line]
    return sorted(reports, key=lambda report: report["job"])


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_communicator_is_the_world(ranks: int) -> None:
    """Each half of the job is a world of its own, in the communicator's order; others are not needed."""
    program = """
hvd.init(comm=world.Split(world.rank % 2, -world.rank))
report(job=world.rank, rank=hvd.rank(), size=hvd.size(), total=total(), mpi=hvd.mpi_enabled(),
       threads=hvd.mpi_threads_supported() is (MPI.Query_thread() == MPI.THREAD_MULTIPLE))
"""
    for place, report in enumerate(launch(ranks, program)):
        half = list(range(place % 2, ranks, 2))
        assert (report["rank"], report["size"]) == (half[::-1].index(place), len(half))
        assert report["total"] == [sum(each + 1 for each in half)] * 2
        assert report["mpi"] and report["threads"]


def test_a_list_of_ranks_is_the_world() -> None:
    """The named ranks meet, in the order of the list; a rank that is not named is alone."""
    program = """
hvd.init(comm=[3, 0])
report(job=world.rank, rank=hvd.rank(), size=hvd.size(), total=total())
"""
    reports = launch(4, program)
    assert [(report["rank"], report["size"]) for report in reports] == [(1, 2), (0, 1), (0, 1), (0, 2)]
    assert [report["total"][0] for report in reports] == [5, 2, 3, 5]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_process_set_of_a_communicator(ranks: int) -> None:
    """Those that are not in the communicator learn who is."""
    program = """
comm = world.Split(0 if world.rank % 2 == 0 else MPI.UNDEFINED, world.rank)
even = hvd.ProcessSet(comm)
before = even.ranks
hvd.init(process_sets=[even])
report(job=world.rank, before=before, ranks=even.ranks, comm=even.mpi_comm is comm, included=even.included(),
       total=total(even) if even.included() else None, all=total())
"""
    even = list(range(0, ranks, 2))
    for place, report in enumerate(launch(ranks, program)):
        assert (report["before"], report["ranks"], report["comm"]) == (None, even, True)
        assert report["included"] is (place in even)
        assert report["total"] == ([sum(each + 1 for each in even)] * 2 if place in even else None)
        assert report["all"] == [ranks * (ranks + 1) / 2] * 2
