"""Starting the ranks of a benchmark, and keeping them in step without the help of anything that is measured."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import mmap
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = [
    "Gate",
    "Launcher",
    "find_launcher",
    "kvhvdrun",
    "load_mpi",
    "load_samples",
    "save_samples",
    "start_ranks",
    "this_python",
    "versions",
]

_KVHVDRUN = "import sys; from kvstore_hvd.launch import main; sys.exit(main())"
# Root, more ranks than cores, and no search for fabrics (which costs a second at exit): none of it changes results.
_MPI_ENVIRONMENT = {
    "Open MPI": {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "OMPI_MCA_btl": "^ofi",
        "OMPI_MCA_mtl": "^ofi",
    },
    "MPICH": {},
}


@dataclass(frozen=True)
class Launcher:
    """How to start ranks with one Python: the mpirun beside it, or kvhvdrun where there is none."""

    name: str  # of the MPI, 'no MPI' for kvhvdrun
    python: Path
    prefix: tuple[str, ...]
    environment: Mapping[str, str]


def kvhvdrun(python: Path) -> tuple[str, ...]:
    """Return the command of kvhvdrun under a Python interpreter, installed there or not."""
    return (str(python), "-c", _KVHVDRUN)


def find_launcher(python: Path) -> Launcher:
    """Return the launcher for a Python interpreter.

    Raises
    ------
    SystemExit
        The mpirun beside it is of an MPI that is not known here.
    """
    mpirun = python.parent / "mpirun"
    if not mpirun.exists():
        return Launcher("no MPI", python, kvhvdrun(python), {})
    answer = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    for name, environment in _MPI_ENVIRONMENT.items():
        if name in answer or (name == "MPICH" and "HYDRA" in answer.upper()):
            return Launcher(name, python, (str(mpirun),), environment)
    raise SystemExit(f"{mpirun} is of an unknown MPI: {answer[:200]!r}")


def start_ranks(
    launcher: Launcher, count: int, script: Path, arguments: Sequence[str], folder: Path, timeout_s: float = 600
) -> list[Any]:
    """Run `script` as `count` ranks with ``--folder FOLDER``, and return what each of them saved, in rank order.

    Raises
    ------
    SystemExit
        The ranks failed or took longer than `timeout_s` seconds.
    """
    gate = folder / "gate"
    gate.write_bytes(bytes(mmap.PAGESIZE * (1 + count * 64 // mmap.PAGESIZE)))
    command = [*launcher.prefix, "-np", str(count), str(launcher.python), str(script), *arguments]
    # One compute thread for each rank's share of the cores, as kvhvdrun does.
    share = max(1, len(os.sched_getaffinity(0)) // count)
    environment = {"OMP_NUM_THREADS": str(share), **os.environ, **launcher.environment}
    try:
        done = subprocess.run(
            [*command, "--folder", str(folder)],
            env=environment,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{launcher.name}: the ranks did not end within {timeout_s:g} s") from None
    if done.returncode != 0:
        raise SystemExit(f"{launcher.name}: the ranks ended with code {done.returncode}")
    return [load_samples(folder, rank) for rank in range(count)]


def save_samples(folder: Path, rank: int, samples: Any) -> None:
    """Leave what a rank measured, as JSON, for the process that started it."""
    (folder / f"rank{rank}.json").write_text(json.dumps(samples))


def load_samples(folder: Path, rank: int) -> Any:
    """Return what a rank has saved."""
    return json.loads((folder / f"rank{rank}.json").read_text())


def load_mpi(wanted: bool) -> Any:
    """Return ``mpi4py.MPI``, or None. Before MXNet: what MPI loads must be the library that started this process."""
    return importlib.import_module("mpi4py.MPI") if wanted else None


def versions(mpi: Any = None) -> dict[str, str]:
    """Return the versions of what this process measures; `mpi` is ``mpi4py.MPI`` where it is used."""
    found = {"Python": platform.python_version()}
    for name in ("mxnet", "numpy", "mpi4py"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if mpi is not None:
        found["MPI"] = mpi.Get_library_version().strip("\0 \n").splitlines()[0].partition(", package")[0]
        if found["MPI"].startswith("MPICH Version"):
            found["MPI"] = "MPICH " + found["MPI"].partition(":")[2].strip()
    return found


class Gate:
    """A barrier of the ranks of one host over a file that all of them map; about a microsecond when all are there.

    Parameters
    ----------
    folder : Path
        As `start_ranks` prepared it.
    rank, size : int
        This process, and how many there are.
    """

    _STEP = 8  # words from one rank's counter to the next: each has a cache line of its own
    _TIMEOUT_S = 120.0

    def __init__(self, folder: Path, rank: int, size: int) -> None:
        with (folder / "gate").open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._counters = memoryview(self._map).cast("q")
        self._mine = rank * self._STEP
        self._others = [other * self._STEP for other in range(size) if other != rank]
        self._passed = 0
        # With a core for each rank nothing is gained by giving it up; with fewer, the late one needs ours.
        self._patience = 10_000 if size <= len(os.sched_getaffinity(0)) else 0

    def wait(self) -> None:
        """Return once every rank has called it.

        Raises
        ------
        TimeoutError
            Some rank did not come within two minutes.
        """
        self._passed += 1
        counters, passed = self._counters, self._passed
        counters[self._mine] = passed
        for other in self._others:
            rounds = 0
            while counters[other] < passed:
                rounds += 1
                if rounds > self._patience:
                    self._wait_politely(other)

    def _wait_politely(self, other: int) -> None:
        deadline = time.monotonic() + self._TIMEOUT_S
        while self._counters[other] < self._passed:
            os.sched_yield()
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {other // self._STEP} did not come to the gate")


def this_python() -> Path:
    """Return the interpreter that runs this, by the path of its environment (links are not followed)."""
    return Path(sys.executable)
