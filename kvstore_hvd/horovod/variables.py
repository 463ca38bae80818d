"""Variables of Horovod without effect here, with the reason for the user; and the variables of workers.

Variables with an effect are fields of `kvstore_hvd.config.Config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

_NO_CYCLES = "operations are carried out as soon as all workers have submitted them; there are no cycles"
_NO_CACHE = "what was agreed on once is kept for every name, without a limit"
_MEMORY = "the workers of a host always meet in shared memory"
_GPU = "operations on GPUs have one stream, where small arrays are always copied together"
_ELASTIC = "options of kvhvdrun say whether a job is elastic"
_NO_TUNING = "nothing is tuned while training; benchmarks/tune.py finds sizes for KVHVD_THRESHOLDS"
_NO_GLOO = "there is no Gloo here"
_BUILD = "it configures the build of Horovod"
_LAUNCHER = "Horovod's launcher sets it for its workers"

_REASONS = {
    "HOROVOD_FUSION_THRESHOLD": "small tensors are carried out at once and large ones in parts, so none waits",
    "HOROVOD_DISABLE_GROUP_FUSION": "results do not depend on what is carried out together",
    "HOROVOD_CYCLE_TIME": _NO_CYCLES,
    "HOROVOD_CACHE_CAPACITY": _NO_CACHE,
    "HOROVOD_HIERARCHICAL_ALLREDUCE": _MEMORY,
    "HOROVOD_HIERARCHICAL_ALLGATHER": _MEMORY,
    "HOROVOD_TORUS_ALLREDUCE": _MEMORY,
    "HOROVOD_NUM_NCCL_STREAMS": _GPU,
    "HOROVOD_BATCH_D2D_MEMCOPIES": _GPU,
    "HOROVOD_ENABLE_ASYNC_COMPLETION": "an operation is complete when the GPU has finished it",
    "HOROVOD_DISABLE_NVTX_RANGES": "there are no NVTX ranges here",
    "HOROVOD_MPI_THREADS_DISABLE": "one host needs no MPI to reduce, and several under mpirun need its threads",
    "HOROVOD_ENABLE_XLA_OPS": "it is for TensorFlow",
    "HOROVOD_ADASUM_MPI_CHUNK_SIZE": "there is no Adasum here",
    "HOROVOD_CPU_OPERATIONS": "arrays are reduced in shared memory, between hosts by TCP (kvhvdrun) or MPI (mpirun)",
    "HOROVOD_CONTROLLER": "workers agree in shared memory, between hosts by TCP (kvhvdrun) or MPI (mpirun)",
}
_PREFIXES = {
    "HOROVOD_AUTOTUNE": _NO_TUNING,
    "HOROVOD_ELASTIC": _ELASTIC,
    "HOROVOD_GLOO_": _NO_GLOO,
    "HOROVOD_CCL_": "there is no oneCCL here",
    "HOROVOD_WITH_": _BUILD,
    "HOROVOD_WITHOUT_": _BUILD,
    "HOROVOD_BUILD_": _BUILD,
    "HOROVOD_GPU": _BUILD,
    "HOROVOD_CUDA_": _BUILD,
    "HOROVOD_NCCL_": _BUILD,
    "HOROVOD_ROCM_": _BUILD,
    "HOROVOD_ALLOW_MIXED_GPU_IMPL": _BUILD,
    "HOROVOD_RANK": _LAUNCHER,
    "HOROVOD_SIZE": _LAUNCHER,
    "HOROVOD_LOCAL_": _LAUNCHER,
    "HOROVOD_CROSS_": _LAUNCHER,
    "HOROVOD_HOSTNAME": _LAUNCHER,
}

#: Variables that kvhvdrun, like Horovod's launcher, sets for workers.
OF_WORKERS = (
    "HOROVOD_RANK",
    "HOROVOD_SIZE",
    "HOROVOD_LOCAL_RANK",
    "HOROVOD_LOCAL_SIZE",
    "HOROVOD_CROSS_RANK",
    "HOROVOD_CROSS_SIZE",
    "HOROVOD_HOSTNAME",
    "HOROVOD_CONTROLLER",
    "HOROVOD_CPU_OPERATIONS",
)


class Ranks(NamedTuple):
    """The rank of a worker among all workers, among those of its host, and among those with its local rank."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int = 0
    cross_size: int = 1


def of_worker(host: str, ranks: Ranks) -> dict[str, str]:
    """The variables of a worker; `host` is the user's name of its host."""
    # The last two have the values that Horovod's launcher sets without MPI.
    return dict(zip(OF_WORKERS, map(str, (*ranks, host, "gloo", "gloo"))))


def are_ours(environ: Mapping[str, str], job: str) -> bool:
    """Whether kvhvdrun has set the variables of workers, for this process or its parent."""
    # Horovod's launcher sets an address for its workers, too.
    is_complete = all(name in environ for name in OF_WORKERS)
    return bool(job) or (is_complete and "HOROVOD_GLOO_RENDEZVOUS_ADDR" not in environ)


def reason(variable: str) -> str:
    """Why a variable of Horovod has no effect here, as the rest of a line."""
    if variable in _REASONS:
        return _REASONS[variable]
    fitting = (why for prefix, why in _PREFIXES.items() if variable.startswith(prefix))
    return next(fitting, "kvstore_hvd does not know it")
