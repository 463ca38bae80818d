"""Where workers can go on without one that died, and the words where they cannot. Real deaths: tests/integration."""

from __future__ import annotations

import os
import subprocess
import threading
import types
from typing import Any

import pytest

from kvstore_hvd.config import MPILaunch
from kvstore_hvd.worlds.mpi import recovery as mpi_recovery
from kvstore_hvd.worlds.mpi.calls import call_within
from kvstore_hvd.worlds.mpi.members import Members
from kvstore_hvd.worlds.mpi.world import Introduction, start_time
from kvstore_hvd.worlds.topology import Host

SURVIVES = MPILaunch("Open MPI", 0, 4, "OMPI_COMM_WORLD_SIZE", "5.0.11", recovers=True)
PLAIN = MPILaunch("Open MPI", 0, 4, "OMPI_COMM_WORLD_SIZE", "5.0.11")


def fake_mpi(vendor: str = "Open MPI", version: tuple[int, ...] = (5, 0, 11), **more: Any) -> Any:
    shrinks = more.get("shrinks", True)
    return types.SimpleNamespace(
        get_vendor=lambda: (vendor, version),
        Comm=type("Comm", (), {"Shrink": None} if shrinks else {}),
        Query_thread=lambda: more.get("threads", 3),
        THREAD_MULTIPLE=3,
    )


@pytest.mark.parametrize(
    ("mpi", "launch", "why"),
    [
        (fake_mpi(), SURVIVES, ""),
        (None, None, "it is not elastic, nor started by an mpirun that survives deaths"),
        (fake_mpi("MPICH", (5, 0, 2)), MPILaunch("MPICH", 0, 4, "PMI_SIZE"), "MPICH 5.0.2 ends the whole job"),
        (fake_mpi(version=(4, 1, 4)), PLAIN, "Open MPI 4.1.4 ends the whole job when a process dies"),
        (fake_mpi(), PLAIN, "Open MPI 5.0.11 was started without `--with-ft ulfm`"),
        (fake_mpi(), None, "was started without `--with-ft ulfm`"),
        (fake_mpi(shrinks=False), SURVIVES, "mpi4py 4.1 does"),
        (fake_mpi(threads=1), SURVIVES, "without MPI_THREAD_MULTIPLE"),
    ],
)
def test_why_workers_cannot_go_on(
    monkeypatch: pytest.MonkeyPatch, mpi: Any, launch: MPILaunch | None, why: str
) -> None:
    monkeypatch.setattr(mpi_recovery, "initialised_mpi", lambda: mpi)
    told = mpi_recovery.why_unavailable(launch)
    assert (why in told) if why else told == ""


@pytest.mark.parametrize(("value", "recovers"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_the_launcher_tells_whether_deaths_are_survived(value: str, recovers: bool) -> None:
    variables = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0", "OMPI_MCA_mpi_ft_enable": value}
    launch = MPILaunch.from_environ(variables)
    assert launch is not None
    assert launch.recovers is recovers


def test_a_call_that_does_not_return_is_left_behind() -> None:
    forever = threading.Event()
    looks: list[None] = []
    with pytest.raises(TimeoutError):
        call_within(0.2, forever.wait, lambda: looks.append(None))
    assert looks
    forever.set()


def test_a_call_returns_and_raises_what_the_function_does() -> None:
    assert call_within(10.0, lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        call_within(10.0, lambda: 1 // 0)


def test_a_number_that_is_another_process_by_now_is_neither_watched_nor_killed() -> None:
    with subprocess.Popen(["sleep", "1000"]) as process:
        began = start_time(process.pid)

        def introduction(started: int) -> Introduction:
            return Introduction(Host.here(), process.pid, started, os.geteuid(), 0, False, "", b"")

        communicator = types.SimpleNamespace(rank=0, Iprobe=lambda *_: False)
        mpi = types.SimpleNamespace(BYTE=None, Exception=RuntimeError)
        members = Members(mpi, communicator, [introduction(0), introduction(began), introduction(began - 1)])
        assert members.living() == [1]
        assert members.kill(2)
        assert process.poll() is None
        assert not members.kill(1)
        assert process.wait(60) == -9
