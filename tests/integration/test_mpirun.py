"""Start by the mpirun that belongs to this interpreter's mpi4py, and by others that do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.launchers import Launcher, environment, mpirun
from support.patience import patient

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = patient(60)

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(mpirun() is None, reason="no mpirun and mpi4py beside this interpreter"),
]

# Each rank writes one line, in one piece: mpirun may mix the ranks' output otherwise.
REPORT = """
def report(**fields):
    import json, os
    os.write(1, ('@' + json.dumps(fields) + '\\n').encode())
"""

TOPOLOGY = """
import dataclasses, sys
from kvstore_hvd.worlds.bootstrap import discover
world = discover({comm})
report(mpi='mpi4py.MPI' in sys.modules, job=world.job, secret=world.secret.hex(), **dataclasses.asdict(world.topology))
"""

FAILURE = """
from kvstore_hvd.worlds.bootstrap import discover
from kvstore_hvd.errors import KVHvdError
try:
    discover()
except KVHvdError as error:
    report(kind=type(error).__name__, text=str(error))
"""


def launch(launcher: Launcher | None, ranks: int, program: str, **variables: str) -> list[dict[str, Any]]:
    """Run a program on some ranks (without a launcher: on one) and return what they reported."""
    command = [sys.executable, "-c", REPORT + program]
    if launcher is not None:
        command = launcher.command(ranks, command)
    done = subprocess.run(
        command,
        env={**environment(launcher), "PYTHONPATH": str(ROOT), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    # A launcher may put something of its own before or between lines; JSON tells what is ours.
    reports = [json.loads(line[line.index("@") + 1 :]) for line in done.stdout.splitlines() if "@" in line]
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return reports


@pytest.fixture(scope="module")
def own() -> Launcher:
    launcher = mpirun()
    assert launcher is not None
    return launcher


@pytest.mark.parametrize("ranks", [2, 4])
def test_topology(own: Launcher, ranks: int) -> None:
    reports = sorted(launch(own, ranks, TOPOLOGY.format(comm="")), key=lambda r: r["rank"])
    assert [r["rank"] for r in reports] == list(range(ranks))
    assert [r["local_rank"] for r in reports] == list(range(ranks))
    for report in reports:
        assert (report["size"], report["local_size"], report["source"]) == (ranks, ranks, "mpi")
        assert (report["cross_rank"], report["cross_size"], report["generation"]) == (0, 1, 0)
    assert len({(r["job"], r["secret"]) for r in reports}) == 1


def test_one_rank_does_not_load_mpi(own: Launcher) -> None:
    (report,) = launch(own, 1, TOPOLOGY.format(comm=""))
    assert (report["rank"], report["size"], report["source"], report["mpi"]) == (0, 1, "single", False)


def test_without_a_launcher_mpi_is_not_loaded() -> None:
    (report,) = launch(None, 1, TOPOLOGY.format(comm=""))
    assert (report["size"], report["source"], report["mpi"]) == (1, "single", False)


def test_an_application_that_started_mpi_by_itself(own: Launcher) -> None:
    program = "from mpi4py import MPI\n" + TOPOLOGY
    reports = launch(own, 2, program.format(comm="MPI.COMM_WORLD"))
    assert sorted(r["rank"] for r in reports) == [0, 1]
    # Without an mpirun nobody removes the file that Open MPI makes for other processes; one alone has no use for it.
    (alone,) = launch(None, 1, program.format(comm=""), **{**own.environment, "OMPI_MCA_btl": "self"})
    assert (alone["size"], alone["source"]) == (1, "mpi")


def test_a_communicator_orders_the_ranks(own: Launcher) -> None:
    program = "from mpi4py import MPI\nold = MPI.COMM_WORLD.rank\n" + TOPOLOGY + "report(old=old)\n"
    comm = "MPI.COMM_WORLD.Split(old % 2, -old)"
    reports = launch(own, 4, program.format(comm=comm))
    worlds = [r for r in reports if "rank" in r]
    assert sorted(r["rank"] for r in worlds) == [0, 0, 1, 1]
    assert all(r["size"] == 2 for r in worlds)
    assert len({r["job"] for r in worlds}) == 2


def test_a_list_of_ranks_leaves_the_others_alone(own: Launcher) -> None:
    reports = launch(own, 3, TOPOLOGY.format(comm="[2, 0]"))
    assert sorted((r["size"], r["rank"]) for r in reports) == [(1, 0), (2, 0), (2, 1)]


def test_ranks_share_memory(own: Launcher) -> None:
    program = """
import os
from kvstore_hvd.worlds.bootstrap import discover
from kvstore_hvd.worlds.rendezvous import share_segment
world = discover()
fds = [share_segment(w, lambda told: os.memfd_create('x')) for w in (world, world.next_generation())]
report(inodes=[os.fstat(fd).st_ino for fd in fds])
"""
    reports = launch(own, 4, program)
    assert len(reports) == 4
    assert len({tuple(r["inodes"]) for r in reports}) == 1
    assert len(set(reports[0]["inodes"])) == 2


def test_mpi4py_is_missing(own: Launcher, tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('no such module')")
    reports = launch(own, 2, f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + FAILURE)
    assert [r["kind"] for r in reports] == ["LaunchError"] * 2
    assert "mpi4py is not installed" in reports[0]["text"]
    assert "-m pip install mpi4py" in reports[0]["text"]


def test_the_mpi_library_cannot_be_loaded(own: Launcher) -> None:
    reports = launch(own, 2, FAILURE, MPI4PY_LIBMPI="/no/such/libmpi.so")
    assert [r["kind"] for r in reports] == ["LaunchError"] * 2
    assert "mpi4py cannot load an MPI library" in reports[0]["text"]


def test_the_variables_of_another_mpi(own: Launcher) -> None:
    # As another MPI's mpirun sets them; its processes would abort in MPI_Init or start as worlds of one.
    if "Open MPI" in own.version:
        variables, theirs = {"PMI_RANK": "0", "PMI_SIZE": "4"}, "MPICH"
    else:
        variables = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_VERSION": "5.0.11"}
        theirs = "Open MPI 5.0.11"
    (report,) = launch(None, 1, FAILURE, **variables)
    assert report["kind"] == "LaunchError"
    assert "4 workers were started by the mpirun of another MPI" in report["text"]
    assert f"mpirun: {theirs}; mpi4py loaded: " in report["text"]


SYSTEM = "/usr/bin/mpirun"


def system_mpirun() -> Launcher | None:
    """The system's mpirun, where it is an Open MPI 4."""
    if not os.access(SYSTEM, os.X_OK):
        return None
    answer = subprocess.run([SYSTEM, "--version"], capture_output=True, text=True, timeout=LIMIT_S).stdout
    if "Open MPI) 4" not in answer:
        return None
    names = ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_MCA_rmaps_base_oversubscribe")
    return Launcher("mpirun", (SYSTEM,), "Open MPI 4", dict.fromkeys(names, "1"))


@pytest.mark.skipif(system_mpirun() is None, reason="no Open MPI 4 on this system")
class TestSystemMPI:
    """Debian's Open MPI: with its own library, and with the one that mpi4py loads here by itself."""

    def test_its_own_library(self) -> None:
        libraries = sorted(Path("/usr/lib").glob("*/libmpi.so.40"))
        if not libraries:
            pytest.skip("its library is not installed")
        launcher = system_mpirun()
        reports = launch(launcher, 4, TOPOLOGY.format(comm=""), MPI4PY_LIBMPI=str(libraries[0]))
        assert sorted(r["local_rank"] for r in reports) == [0, 1, 2, 3]
        assert all((r["size"], r["source"]) == (4, "mpi") for r in reports)

    def test_our_library(self, own: Launcher) -> None:
        launcher = system_mpirun()
        if "Open MPI" in own.version:  # it starts the processes of newer ones
            reports = launch(launcher, 2, TOPOLOGY.format(comm=""))
            assert sorted(r["rank"] for r in reports) == [0, 1]
        else:
            reports = launch(launcher, 2, FAILURE)
            assert [r["kind"] for r in reports] == ["LaunchError"] * 2
            assert "mpirun: Open MPI 4 or older; mpi4py loaded: MPICH" in reports[0]["text"]

    def test_our_new_mpirun_with_its_old_library(self, own: Launcher) -> None:
        libraries = sorted(Path("/usr/lib").glob("*/libmpi.so.40"))
        if not libraries:
            pytest.skip("its library is not installed")
        reports = launch(own, 2, FAILURE, MPI4PY_LIBMPI=str(libraries[0]))
        assert [r["kind"] for r in reports] == ["LaunchError"] * 2
        assert "mpi4py loaded: Open MPI 4." in reports[0]["text"]
