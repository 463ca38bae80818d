"""Starting the ranks of a benchmark, and keeping them in step without the help of anything that is measured."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import mmap
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT, shape

__all__ = [
    "BUSY_PROCESSES",
    "TIMEOUT_S",
    "Gate",
    "Rank",
    "arguments_of_launches",
    "busy_processes",
    "environment_of_ranks",
    "kvhvdrun",
    "load_samples",
    "prepare_gate",
    "save_samples",
    "start_launches",
    "start_or_be_a_rank",
    "start_over_hosts",
    "this_python",
    "versions",
]

TIMEOUT_S = 600.0  # of one launch
BUSY_PROCESSES = 4
_KVHVDRUN = "import sys; from kvstore_hvd.launch.command import main; sys.exit(main())"
# Root, more ranks than cores, and no search for fabrics (which costs a second at exit): none of it changes results. All
# for Open MPI; MPICH needs none and takes no notice.
_MPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_btl": "^ofi",
    "OMPI_MCA_mtl": "^ofi",
}


@dataclass(frozen=True)
class _Launcher:
    """How to start ranks with one Python: the mpirun beside it, or kvhvdrun where there is none."""

    name: str  # of the MPI, 'no MPI' for kvhvdrun
    python: Path
    prefix: tuple[str, ...]
    environment: Mapping[str, str]


def kvhvdrun(python: Path) -> tuple[str, ...]:
    """Return the command of kvhvdrun under a Python interpreter, installed there or not."""
    return (str(python), "-c", _KVHVDRUN)


def start_or_be_a_rank(
    options: argparse.Namespace,
    start: Callable[[argparse.Namespace], None],
    be_a_rank: Callable[[argparse.Namespace], None],
) -> None:
    """Run as one of the ranks, which are told their folder, or as the one that starts them."""
    (start if options.folder is None else be_a_rank)(options)


def arguments_of_launches(script: Path, description: str) -> argparse.ArgumentParser:
    """Return a parser of the arguments that `start_launches` needs; a benchmark adds its own.

    Results go by default to the file of the script's name in the folder ``results`` beside it.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("-np", "--ranks", type=int, default=2)
    parser.add_argument("--launches", type=int, default=2, help="how often the ranks are started afresh [2]")
    parser.add_argument(
        "--python", type=Path, action="append", default=[], help="another environment's Python, with another MPI"
    )
    results = script.parent / "results" / f"{script.stem}.json"
    parser.add_argument("--json", type=Path, default=results, help="where results go; the table goes beside it (.txt)")
    # What ranks are told.
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--mpi", action="store_true", help=argparse.SUPPRESS)
    return parser


def start_launches(script: Path, options: argparse.Namespace, arguments: Sequence[str]) -> dict[str, list[list[Any]]]:
    """Run `script` as ranks, as often as `options` say, under each of their launchers in turn.

    Ranks are given `arguments`, ``--folder FOLDER``, and ``--mpi`` when mpirun has started them.

    Returns
    -------
    dict
        By the name of the MPI: for each launch what its ranks saved, in rank order.

    Raises
    ------
    SystemExit
        There is only one rank, an MPI is not known here, or ranks failed or took longer than ten minutes.
    """
    if options.ranks < 2:
        raise SystemExit("one rank has nobody to talk to: -np 2 or more")
    launchers = [_find_launcher(python) for python in (this_python(), *options.python)]
    saved: dict[str, list[list[Any]]] = {launcher.name: [] for launcher in launchers}
    for number in range(options.launches):
        for launcher in launchers:
            print(f"launch {number + 1} of {options.launches}, {launcher.name} ...", file=sys.stderr, flush=True)
            mpi = ["--mpi"] if launcher.name != "no MPI" else []
            with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
                saved[launcher.name].append(
                    _start_ranks(launcher, options.ranks, [str(script), *arguments, *mpi], Path(folder))
                )
    return saved


def start_over_hosts(
    script: str, ranks: Sequence[int], rate: str, jobs: Sequence[Sequence[object]]
) -> tuple[str, list[Any]]:
    """Run a script on so many ranks of each host, once for each list of arguments: the MPI, and what each job printed.

    Hosts are namespaces (needs root). `rate` is that of each host's network, as 1gbit; '' leaves it as it is. A job
    prints one line of JSON.
    """
    sys.path.insert(0, str(ROOT / "tests"))
    from hosts.network import Network
    from support.launchers import mpirun

    mpi, found = mpirun(), []
    assert mpi is not None, "no mpirun beside this Python"
    with tempfile.TemporaryDirectory() as folder, Network(Path(folder), len(ranks)) as network:
        if rate:
            shape(network, rate)
        for arguments in jobs:
            job = network.mpirun(mpi, ranks, Path(script).resolve(), *arguments)
            try:
                code = job.wait(TIMEOUT_S)
            except BaseException:
                job.kill()
                raise
            assert code == 0, (network.folder / "err").read_text()
            (line,) = (line for line in (network.folder / "out").read_text().splitlines() if line.startswith("{"))
            found.append(json.loads(line))
    return mpi.version, found


def _find_launcher(python: Path) -> _Launcher:
    mpirun = python.parent / "mpirun"
    if not mpirun.exists():
        return _Launcher("no MPI", python, kvhvdrun(python), {})
    answer = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    for mark, name in (("Open MPI", "Open MPI"), ("HYDRA", "MPICH")):
        if mark in answer:
            return _Launcher(name, python, (str(mpirun),), _MPI_ENVIRONMENT)
    raise SystemExit(f"{mpirun} is of an unknown MPI: {answer[:200]!r}")


def _start_ranks(launcher: _Launcher, count: int, program: Sequence[str], folder: Path) -> list[Any]:
    prepare_gate(folder, count)
    try:
        done = subprocess.run(
            [*launcher.prefix, "-np", str(count), str(launcher.python), *program, "--folder", str(folder)],
            env={**environment_of_ranks(count), **launcher.environment},
            timeout=TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SystemExit(f"{launcher.name}: the ranks did not end within {TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        raise SystemExit(f"{launcher.name}: the ranks ended with code {done.returncode}")
    return [load_samples(folder, rank) for rank in range(count)]


@contextmanager
def busy_processes(count: int) -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Have processes that compute in the body of what this gives, and are stopped outside of it."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]

    def tell(number: int) -> None:
        for process in processes:
            os.kill(process.pid, number)

    @contextmanager
    def computing() -> Iterator[None]:
        tell(signal.SIGCONT)
        try:
            yield
        finally:
            tell(signal.SIGSTOP)

    tell(signal.SIGSTOP)
    try:
        yield computing
    finally:
        for process in processes:
            process.kill()
            process.wait()


def environment_of_ranks(count: int) -> dict[str, str]:
    """Return the variables of ranks: one compute thread for each core of a rank's share, as with kvhvdrun."""
    return {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // count)), **os.environ}


def _saved(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.json"


def save_samples(folder: Path, rank: int, samples: Any) -> None:
    """Leave what a rank measured, as JSON, for the process that started it."""
    _saved(folder, rank).write_text(json.dumps(samples))


def load_samples(folder: Path, rank: int) -> Any:
    """Return what a rank left."""
    return json.loads(_saved(folder, rank).read_text())


def prepare_gate(folder: Path, count: int) -> None:
    """Make the file of a `Gate` for `count` ranks."""
    (folder / "gate").write_bytes(bytes(mmap.PAGESIZE * (1 + count * 64 // mmap.PAGESIZE)))


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
        As `prepare_gate` left it; `start_launches` does that.
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


class Rank:
    """This process as one of the ranks that `start_launches` has started; making it starts our world.

    Attributes
    ----------
    mpi : module or None
        ``mpi4py.MPI`` where mpirun has started the ranks.
    rank, size : int
        Who this is, and of how many.
    gate : Gate
        Where the ranks meet.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        # Before MXNet: what MPI loads must be the library that started this process.
        self.mpi: Any = importlib.import_module("mpi4py.MPI") if options.mpi else None
        import kvstore_hvd

        # isort: split
        import mxnet  # noqa: F401 - before the world starts, as in most programs

        place = kvstore_hvd.topology()
        self.rank, self.size = place.rank, place.size
        self.gate = Gate(options.folder, self.rank, self.size)
        self._folder: Path = options.folder

    def save(self, **found: Any) -> None:
        """Leave what was found, and the versions it was found with, for the process that started this one."""
        save_samples(self._folder, self.rank, {**found, "versions": versions(self.mpi)})


def this_python() -> Path:
    """Return the interpreter that runs this, by the path of its environment (links are not followed)."""
    return Path(sys.executable)
