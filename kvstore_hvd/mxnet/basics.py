"""Who takes part, in Horovod's words: joining and leaving the world, ranks and sizes, and what this build can do."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from typing import Any, Union

from kvstore_hvd import gpu
from kvstore_hvd.errors import InvalidRequestError, KVHvdError, NotInitializedError, message
from kvstore_hvd.gpu import runtime
from kvstore_hvd.gpu.nccl import library
from kvstore_hvd.mxnet import process_sets as sets
from kvstore_hvd.timeline import start_timeline, stop_timeline
from kvstore_hvd.world import process
from kvstore_hvd.world.discover import initialised_mpi
from kvstore_hvd.world.topology import Place

__all__ = [
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "report",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]


def init(comm: Any = None, process_sets: Union[Sequence[sets.ProcessSet], str, None] = None) -> None:
    """Join the world of workers; does nothing when this process is in it already. Collective.

    Parameters
    ----------
    comm : mpi4py communicator or list of int, optional
        The workers, or their ranks among those that the launcher started. By default those of the last world, or all.
    process_sets : list of ProcessSet or 'dynamic', optional
        Process sets to add, the same ones on all workers; or ``'dynamic'``: sets may be added and removed later. Sets
        that are registered already are used again. If a communicator was split, each worker passes the set of its own
        part, and the sets of all parts are added.

    Raises
    ------
    LaunchError
        The workers could not find each other.
    InvalidRequestError, MismatchError
        An argument is wrong, or the workers name different sets. If it is about `process_sets`, every worker raises
        this: it has joined the world, but no set has been added.
    ConfigError
        The environment has settings that cannot be used.
    """
    dynamic = isinstance(process_sets, str) and process_sets.lower() == "dynamic"
    given: Any = () if dynamic or process_sets is None else process_sets
    chosen = list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(each, sets.ProcessSet) for each in chosen):
        fix = "pass a list of hvd.ProcessSet, or 'dynamic'."
        raise InvalidRequestError(message(f"process_sets is {process_sets!r}.", operation="init", fix=fix))
    process.current().init(comm)
    if dynamic:
        sets.allow_dynamic()
    if any(each.process_set_id is None for each in chosen):
        sets.register(chosen, "init")


def shutdown() -> None:
    """Leave the world, after this worker's pending operations; does nothing without one. `init` joins a fresh one.

    Process sets end with it. Exceptions as `kvstore_hvd.shutdown`.
    """
    process.current().shutdown()


def is_initialized() -> bool:
    """Whether this process is in a world of workers, or was forked by one that is."""
    return process.everybody.is_initialized or process.everybody.is_forked


def _topology() -> Place:
    # A forked child, such as a worker process of a DataLoader, may ask what its part of the data is.
    if not is_initialized():
        raise NotInitializedError(message("Horovod has not been initialized.", fix="call hvd.init() first."))
    return process.everybody.topology


def size() -> int:
    """Number of workers. Raises NotInitializedError (a ValueError) before `init` and after `shutdown`."""
    return _topology().size


def local_size() -> int:
    """Number of workers on this host. Raises as `size`."""
    return _topology().local_size


def cross_size() -> int:
    """Number of hosts that have a worker with this one's local rank. Raises as `size`."""
    return _topology().cross_size


def rank() -> int:
    """This worker's rank: 0 to ``size() - 1``. Raises as `size`."""
    return _topology().rank


def report() -> dict[int, dict[str, float]]:
    """What each worker has done since the workers met, by rank: the ``'ranks'`` of `Horovod.report`. Raises as `size`.

    Empty with one worker. Not collective.
    """
    _topology()
    return process.everybody.figures()


def local_rank() -> int:
    """This worker's rank on its host: 0 to ``local_size() - 1``. Raises as `size`.

    Use it to choose a GPU: ``mx.gpu(hvd.local_rank())``.
    """
    return _topology().local_rank


def cross_rank() -> int:
    """This host's number, among the hosts that have a worker with this local rank. Raises as `size`."""
    return _topology().cross_rank


def is_homogeneous() -> bool:
    """Whether all hosts have the same number of workers. Raises as `size`."""
    hosts = _topology().hosts
    return len({hosts.count(host) for host in hosts}) == 1


def mpi_threads_supported() -> bool:
    """Whether the MPI in use lets several threads call it; False where the world was not found through MPI.

    Raises as `size`.
    """
    source = _topology().source
    mpi = initialised_mpi()
    return source == "mpi" and mpi is not None and bool(mpi.Query_thread() == mpi.THREAD_MULTIPLE)


def mpi_enabled() -> bool:
    """Whether the workers have found each other through MPI."""
    return is_initialized() and _topology().source == "mpi"


def mpi_built() -> bool:
    """Whether MPI can be used here: mpi4py is installed."""
    return importlib.util.find_spec("mpi4py") is not None


def gloo_built() -> bool:
    """False: neither Gloo nor DDL, oneCCL or ROCm is used here."""
    return False


gloo_enabled = ddl_built = ccl_built = rocm_built = gloo_built


def nccl_built() -> int:
    """The version of the NCCL that can reduce arrays on GPUs here, as 22304 for 2.23.4; 0 where there is none."""
    if not cuda_built():
        return 0
    try:
        return library().version
    except KVHvdError:
        return 0


def cuda_built() -> bool:
    """Whether arrays on GPUs can be reduced there: CuPy is installed, and this machine has a driver."""
    return gpu.is_installed() and runtime.driver_version() is not None
