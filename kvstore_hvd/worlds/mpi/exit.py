"""The end of a process whose MPI has survived deaths.

MPI_Finalize may wait for the dead, for ever, and mpi4py calls it at the very end of the process. It is never called
where mpi4py was loaded by this package (see `mpi_world`). Where the program itself has loaded it, MPI is finalised
here, in a thread that is left behind: as soon as MPI counts as finalised mpi4py lets the process go, with the exit code
that the program ends with.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
from typing import Any

__all__ = ["finalize_without_waiting"]

_USUAL_S = 0.5
_AT_MOST_S = 5.0


def finalize_without_waiting(mpi: Any) -> None:
    """Have MPI finalised at exit in this way, if mpi4py would do so otherwise."""
    import mpi4py

    wanted = mpi4py.rc.finalize if mpi4py.rc.finalize is not None else mpi4py.rc.initialize
    if wanted in (True, "yes"):
        atexit.register(_Finalizer(mpi).finalize)


class _Finalizer:
    def __init__(self, mpi: Any) -> None:
        self._mpi = mpi
        self._pid = os.getpid()
        # mpi4py's own function keeps Python's lock while MPI waits.
        self._library = ctypes.CDLL(mpi.__file__)
        self._begin, self._end = threading.Event(), threading.Event()
        # Started beforehand: Python starts no threads once it ends.
        threading.Thread(target=self._run, name="kvstore_hvd-finalize", daemon=True).start()

    def finalize(self) -> None:
        """Return once MPI counts as finalised, and has had some time for it."""
        if self._pid != os.getpid() or self._mpi.Is_finalized():
            return
        self._begin.set()
        if not self._end.wait(_USUAL_S) and not self._mpi.Is_finalized():
            self._end.wait(_AT_MOST_S)

    def _run(self) -> None:
        self._begin.wait()
        self._library.MPI_Finalize()
        self._end.set()
