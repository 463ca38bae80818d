"""`hvd.init(comm=...)` and process sets of communicators, under the mpirun that belongs to this interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvstore_hvd
from kvstore_hvd.horovod.variables import Seat, of_worker
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


def launch(ranks: int, program: str, variables: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Run a program on some ranks and return what they reported, in the order of their ranks in the job."""
    launcher = mpirun()
    assert launcher is not None
    done = subprocess.run(
        launcher.command(ranks, [sys.executable, "-c", PRELUDE + program]),
        env={**environment(launcher), "PYTHONPATH": str(PACKAGES), **(variables or {})},
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


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("comm", ["None", "world"])
def test_process_sets_of_a_split_communicator(ranks: int, comm: str) -> None:
    """Each worker names its own part, as Horovod documents; all parts are sets, in the order of their ranks."""
    program = f"""
mine = hvd.ProcessSet(world.Split(world.rank % 2, -world.rank))
try:
    hvd.init({comm}, process_sets=[mine])
    error = ''
except ValueError as caught:
    error = str(caught)
from kvstore_hvd.mxnet.process_sets import get_process_set_ids_and_ranks
again = hvd.ProcessSet(world.Split(world.rank % 2, world.rank))
if not error:
    hvd.init({comm}, process_sets=[again])
report(job=world.rank, error=error, number=mine.process_set_id, ranks=mine.ranks, again=again.process_set_id,
       sets=get_process_set_ids_and_ranks(), total=total(mine) if not error else None, all=total(),
       inside=mine.rank(), text=repr(mine))
"""
    even, odd = list(range(0, ranks, 2)), list(range(1, ranks, 2))
    for place, report in enumerate(launch(ranks, program)):
        assert report["all"] == [ranks * (ranks + 1) / 2] * 2
        if ranks == 1:  # the part is all workers: that set is there already
            assert "exists already" in report["error"]
            continue
        half = odd if place % 2 else even
        assert (report["error"], report["ranks"]) == ("", half)
        assert report["number"] == report["again"] == 1 + place % 2
        assert report["sets"] == {"0": list(range(ranks)), "1": even, "2": odd}
        assert report["total"] == [sum(each + 1 for each in half)] * 2
        assert report["inside"] == half.index(place)
        assert report["text"] == f"ProcessSet(process_set_id={1 + place % 2}, ranks={half})"


def test_training_in_the_parts_of_a_split_communicator() -> None:
    """Each worker trains with its part: a Trainer of the set, without a word about the other one."""
    program = """
import numpy as np
mine = hvd.ProcessSet(world.Split(world.rank // 2, world.rank))
hvd.init(world, process_sets=[mine])
weight = mx.gluon.Parameter('weight', shape=(2,))
weight.initialize(mx.init.Zero())
trainer = hvd.DistributedTrainer([weight], 'sgd', {'learning_rate': 1.0}, process_set=mine)
for _ in range(3):
    weight.grad()[:] = world.rank
    for each in weight.list_data():
        each._fresh_grad = True
    trainer.step(1)
report(job=world.rank, weight=weight.data().asnumpy().tolist())
"""
    for place, report in enumerate(launch(4, program)):
        assert report["weight"] == [-3 * (0.5 if place < 2 else 2.5)] * 2


def test_parts_that_leave_somebody_out() -> None:
    """Who is in no part cannot tell which one is meant; an error everywhere, and the sets can be named by ranks."""
    program = """
color = MPI.UNDEFINED if world.rank == 3 else world.rank % 2
mine = hvd.ProcessSet(world.Split(color, world.rank))
try:
    hvd.init(process_sets=[mine])
    error = ''
except Exception as caught:
    error = type(caught).__name__ + str(caught)
sets = [hvd.ProcessSet([0, 2]), hvd.ProcessSet([1])]
hvd.init(process_sets=sets)
report(job=world.rank, error=error, totals=[total(each) if each.included() else None for each in sets])
"""
    for place, report in enumerate(launch(4, program)):
        assert report["error"].startswith("MismatchError")
        assert "no ranks: rank 3" in report["error"]
        assert report["totals"] == [[4, 4] if place in (0, 2) else None, [2, 2] if place == 1 else None]


def test_a_communicator_with_others_than_the_workers() -> None:
    """Where the world is a part of the job, a set cannot have members outside of it."""
    program = """
hvd.init(world.Split(world.rank % 2, world.rank))
try:
    hvd.init(process_sets=[hvd.ProcessSet(world.Split(world.rank // 2, world.rank))])
    error = ''
except ValueError as caught:
    error = str(caught)
report(job=world.rank, error=error)
"""
    for report in launch(4, program):
        assert "processes that are none of the 2 workers" in report["error"]


def test_what_kvhvdrun_has_set_does_not_count() -> None:
    """As where a worker of kvhvdrun starts mpirun: MPI knows who the workers are, and nobody is told of anything."""
    left = of_worker("localhost", Seat(5, 7, 5, 7))
    for place, report in enumerate(
        launch(2, "hvd.init(); report(job=world.rank, rank=hvd.rank(), size=hvd.size())", left)
    ):
        assert (report["rank"], report["size"]) == (place, 2)
