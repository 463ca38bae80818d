"""Fixtures and header of all tests.

Parallel tests run as ``kvhvdrun -np N pytest tests/parallel`` (or under mpirun): every rank runs the same tests in the
same order, and goes on by itself when one of its tests fails. There is no barrier between tests. If a rank leaves a
test early, the others fail in it at the time limit of operations; from then on the world is lost, and every later test
that needs it fails at once and says so.
"""

import importlib
import importlib.util
import os
import sys

import pytest

from support.launchers import launched
from support.patience import patient

# Worlds are lost on purpose here.
os.environ.setdefault("KVHVD_FAILURE_FILE", "0")


def pytest_report_header():
    package = importlib.util.find_spec("kvstore_hvd")
    launcher, rank, size = launched()
    return [
        f"kvstore_hvd: {package.origin if package else 'not found'}",
        f"launcher: {launcher or 'none'}, rank {rank} of {size}",
    ]


def pytest_collection_modifyitems(config, items):
    """Lengthen the time that a test may take, as all limits are; parallel tests have to be started as ranks."""
    if not launched().launcher and any(item.path.parent.name == "parallel" for item in items):
        raise pytest.UsageError("parallel tests need ranks: ./t parallel/NAME, or kvhvdrun -np 3 python -m pytest ...")
    usual = float(config.getini("timeout") or 0)
    for item in items:
        marker = item.get_closest_marker("timeout")
        limit = float(marker.args[0]) if marker is not None and marker.args else usual
        if limit > 0:
            item.add_marker(pytest.mark.timeout(patient(limit)), append=False)


def pytest_terminal_summary(terminalreporter):
    """Say which MPI was loaded: only at the end is it known whether any was, and it must not be loaded for this."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        version = mpi.Get_library_version().splitlines()[0].split(",")[0].strip("\0 ")
        rank, size = mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size()
        terminalreporter.write_line(f"MPI: {version}, rank {rank} of {size}")


@pytest.fixture(scope="session")
def _process():
    process = importlib.import_module("kvstore_hvd.world.process").current()
    process.init()
    yield process
    process.shutdown()


@pytest.fixture
def fresh_log(monkeypatch):
    """Say once more what is said once."""
    monkeypatch.setattr(importlib.import_module("kvstore_hvd.log"), "_logged", set())


@pytest.fixture
def world(_process):
    """Return the `Place` of the initialised world; fails when an earlier test has lost that world."""
    lost = importlib.import_module("kvstore_hvd.errors").HorovodInternalError
    try:
        _process.member.check()
    except lost as error:
        pytest.fail(f"an earlier test has lost the world: {error}", pytrace=False)
    return _process.topology


@pytest.fixture
def rank(world):
    return int(world.rank)


@pytest.fixture
def size(world):
    return int(world.size)
