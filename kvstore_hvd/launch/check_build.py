"""``--check-build``: what is installed here, and what of it can be used."""

from __future__ import annotations

import importlib
import platform
from collections.abc import Callable

import kvstore_hvd
from kvstore_hvd import mxnet_compat, native
from kvstore_hvd.errors import KVHvdError
from kvstore_hvd.gpu import nccl, runtime
from kvstore_hvd.horovod import alias as horovod_alias
from kvstore_hvd.world import mpi as mpi_world


def build_report() -> str:
    """What was found: one line each, with the reason where something cannot be used. Imports MXNet, MPI and CuPy."""
    which = " (for starting with mpirun only; kvhvdrun needs none)"
    mpi = _found(lambda: f"{mpi_world.library()}, for starting with its mpirun", which)
    rows = [
        ("MXNet", _found(lambda: mxnet_compat.require_mxnet().__version__)),
        ("native engine", _found(lambda: f"sums with {native.simd_target()}")),
        ("one host", "yes: workers meet in shared memory; needs no MPI"),
        ("several hosts", "yes: by ssh and TCP" + (", under mpirun by its MPI" if mpi.startswith("yes") else "")),
        ("MPI", mpi),
        ("GPUs", "no: there is no driver (libcuda.so.1)" if runtime.driver_version() is None else _found(_gpus)),
        ("NCCL", _found(_nccl, " (for workers that each have a GPU; others need none)")),
        ("horovod", _horovod()),
        ("--config-file", _found(lambda: f"PyYAML {importlib.import_module('yaml').__version__}")),
    ]
    head = f"kvstore_hvd {kvstore_hvd.__version__}, Python {platform.python_version()}, {platform.machine()}"
    return "\n".join([head, *(f"  {name + ':':<15} {text}" for name, text in rows)]) + "\n"


def _found(tell: Callable[[], str], if_not: str = "") -> str:
    try:
        return f"yes: {tell()}"
    except (KVHvdError, ImportError) as error:
        return "no: " + str(error).split("\n", 1)[0] + if_not


def _gpus() -> str:
    cupy, version = runtime.cupy(), runtime.version_text(runtime.driver_version() or 0)
    return f"{cupy.cuda.runtime.getDeviceCount()}, CuPy {cupy.__version__}, driver for CUDA up to {version}"


def _nccl() -> str:
    found = nccl.library()
    return f"{found.version_text} ({found.path})"


def _horovod() -> str:
    found = horovod_alias.installed_horovod()
    if found is None:
        return "not installed: with --as-horovod kvstore_hvd answers for it"
    return f"installed ({found.origin}): --as-horovod leaves `import horovod` to it"
