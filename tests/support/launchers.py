"""Command lines that start several ranks on this host, by kvhvdrun or this interpreter's mpirun; and who is one."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Optional

_TESTS = Path(__file__).resolve().parents[1]
# Root, more ranks than cores, and no search for fabrics (which costs a second at exit): none of it changes results.
# All for Open MPI; MPICH needs none and takes no notice.
_MPI_ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": "slot:oversubscribe",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_btl": "^ofi",
    "OMPI_MCA_mtl": "^ofi",
}


@dataclass(frozen=True)
class Launcher:
    """One way to start ranks. ``prefix`` is the command without the number of ranks and the program, ``version`` what
    it says about itself, and ``environment`` what it needs in addition to the variables of the caller."""

    name: str
    prefix: tuple[str, ...]
    version: str
    environment: dict[str, str] = field(default_factory=dict)

    def command(self, ranks: int, program: Sequence[str]) -> list[str]:
        return [*self.prefix, "-np", str(ranks), *program]


def kvhvdrun() -> Launcher:
    """Return the launcher of this package, run by this interpreter (also when the package is not installed)."""
    script = Path(sys.executable).with_name("kvhvdrun")
    start = "import sys; from kvstore_hvd.launch.command import main; sys.exit(main())"
    return Launcher("kvhvdrun", (str(script),) if script.exists() else (sys.executable, "-c", start), "kvhvdrun")


def mpirun() -> Optional[Launcher]:
    """Return the mpirun installed beside this interpreter; None when it has no mpirun or no mpi4py. Another mpirun on
    the path is of no use: it would start ranks of an MPI that mpi4py does not load."""
    path = Path(sys.executable).with_name("mpirun")
    if not path.exists() or importlib.util.find_spec("mpi4py") is None:
        return None
    answer = subprocess.run([str(path), "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    # Open MPI begins with 'mpirun (Open MPI) 5.0.11', MPICH's Hydra has a line 'Version:    4.3.2'.
    found = re.search(r"\((Open MPI)\) (\S+)|^ *Version: *(\S+)", answer, re.MULTILINE)
    if found is None:
        raise RuntimeError(f"{path} is of an unknown MPI: {answer[:200]!r}")
    version = f"Open MPI {found[2]}" if found[1] else f"MPICH {found[3]}"
    return Launcher("mpirun", (str(path),), version, _MPI_ENVIRONMENT)


def with_tests(variables: dict[str, str]) -> dict[str, str]:
    """Return the variables with this folder's parent in Python's path: for workers that import `support`."""
    path = ":".join(filter(None, [str(_TESTS), variables.get("PYTHONPATH")]))
    return {**variables, "PYTHONPATH": path}


def environment(launcher: Optional[Launcher] = None) -> dict[str, str]:
    """Return the variables for a child: this process's, less those of any launcher it was itself started by."""
    foreign = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "HYDI_", "MPI_LOCAL", "SLURM_")
    own = ("KVHVD_RANK", "KVHVD_SIZE", "KVHVD_LOCAL_", "KVHVD_SLOT", "KVHVD_JOB", "KVHVD_SECRET", "KVHVD_GENERATION")
    theirs = ("RANK", "SIZE", "LOCAL_", "CROSS_", "HOSTNAME", "CONTROLLER", "CPU_OPERATIONS")
    names = (*foreign, *own, *(f"HOROVOD_{name}" for name in theirs))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(names)}
    return {**kept, **(launcher.environment if launcher else {})}


# launcher, variable of the rank, variable of the size; the first one that is set counts, as in the package itself.
_VARIABLES = (
    ("kvhvdrun", "KVHVD_RANK", "KVHVD_SIZE"),
    ("mpirun of Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("mpirun of MPICH", "PMI_RANK", "PMI_SIZE"),
)


class Launched(NamedTuple):
    """The launcher that started this process (empty: none), its rank and the number of ranks."""

    launcher: str
    rank: int
    size: int


def launched(environ: Mapping[str, str] = os.environ) -> Launched:
    """Find out who this process is; a process without a launcher is rank 0 of 1."""
    for launcher, rank, size in _VARIABLES:
        if rank in environ and size in environ:
            return Launched(launcher, int(environ[rank]), int(environ[size]))
    return Launched("", 0, 1)
