"""Says that MPI knows nothing of the workers that kvhvdrun has started: each of them is alone in ``MPI.COMM_WORLD``.

A program that mixes our operations with those of mpi4py would compute something else on each worker, silently. MPI is
never imported here.
"""

from __future__ import annotations

import functools
import logging
import sys
from typing import Any

from kvstore_hvd import log
from kvstore_hvd.errors import message
from kvstore_hvd.mxnet_compat import numpy_shim
from kvstore_hvd.worlds.mpi.world import initialised_mpi
from kvstore_hvd.worlds.topology import Topology

__all__ = ["look_for_mpi"]

_MODULE = "mpi4py.MPI"
_TAG = "kvstore_hvd: MPI beside kvhvdrun"
# The world that this process is in, if kvhvdrun has made it.
_topology: Topology | None = None


def look_for_mpi(topology: Topology) -> None:
    """Warn once if the program uses mpi4py beside a world of kvhvdrun's; now, or when it comes to that."""
    global _topology
    _topology = topology if topology.source == "launcher" else None
    if _topology is None:
        return
    if _MODULE in sys.modules:
        _look()
    elif numpy_shim.ImportHook.find(_TAG) is None:
        numpy_shim.ImportHook(_MODULE, lambda: None, _look, _TAG).install()


def _look() -> None:
    """Compare the two worlds, or have that done when MPI is initialised."""
    module = sys.modules[_MODULE]
    mpi = initialised_mpi()
    if mpi is None:
        for name in ("Init", "Init_thread"):
            _look_after(module, name)
    elif _topology is not None and mpi.COMM_WORLD.Get_size() < _topology.size and _topology.rank == 0:
        log.once("mpi-beside-kvhvdrun", logging.WARNING, "%s", _text(_topology, mpi.COMM_WORLD.Get_size()))


def _look_after(module: Any, name: str) -> None:
    original = getattr(module, name, None)
    if original is None or hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def initialise(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        _look()
        return result

    setattr(module, name, initialise)


def _text(topology: Topology, size: int) -> str:
    fact = (
        f"the program uses mpi4py, whose MPI.COMM_WORLD has size {size} here, while kvhvdrun has started "
        f"{topology.size} workers: what MPI broadcasts or reduces stays in this process."
    )
    fix = f"start with `mpirun -np {topology.size} python train.py`, or use kvstore_hvd's own operations throughout."
    return message(fact, **topology.speaker, fix=fix)
