"""Who this process is, told by its launcher's variables alone: nothing is imported and nothing is initialised."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

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
