"""``--check-build``: what is installed here, and what of it can be used."""

from __future__ import annotations

import importlib.util
import platform
from importlib import metadata
from typing import Any

import kvstore_hvd
from kvstore_hvd import mxnet_compat, native
from kvstore_hvd.errors import KVHvdError
from kvstore_hvd.gpu import nccl_library, runtime
from kvstore_hvd.horovod import alias as horovod_alias
from kvstore_hvd.worlds.mpi import world as mpi_world

__all__ = ["build_report"]


def build_report() -> str:
    """What was found: one line each, with the reason where something cannot be used. Imports MXNet, MPI and CuPy."""
    mpi = _mpi()
    rows = [
        ("MXNet", _mxnet()),
        ("native engine", _engine()),
        ("one host", "yes: workers meet in shared memory; needs no MPI"),
        ("several hosts", "yes: under mpirun" if mpi.startswith("yes") else "no: needs mpirun, and its MPI in mpi4py"),
        ("MPI", mpi),
        ("GPUs", _gpus()),
        ("NCCL", _nccl()),
        ("horovod", _horovod()),
        ("--config-file", _yaml()),
    ]
    head = f"kvstore_hvd {kvstore_hvd.__version__}, Python {platform.python_version()}, {platform.machine()}"
    return "\n".join([head, *(f"  {name + ':':<15} {text}" for name, text in rows)]) + "\n"


def _mxnet() -> str:
    try:
        return f"yes: {mxnet_compat.require_mxnet().__version__}"
    except KVHvdError as error:
        return _no(error)


def _engine() -> str:
    try:
        return f"yes: sums with {native.simd_target()}"
    except ImportError as error:
        return _no(error)


def _mpi() -> str:
    try:
        return f"yes: {mpi_world.library()}, for starting with its mpirun"
    except KVHvdError as error:
        return f"{_no(error)} (for starting with mpirun only; kvhvdrun needs none)"


def _gpus() -> str:
    version = runtime.driver_version()
    if version is None:
        return "no: there is no driver (libcuda.so.1)"
    try:
        cupy = runtime.cupy()
    except KVHvdError as error:
        return _no(error)
    count = cupy.cuda.runtime.getDeviceCount()
    return f"yes: {count}, CuPy {cupy.__version__}, driver for CUDA up to {runtime.version_text(version)}"


def _nccl() -> str:
    try:
        found = nccl_library.library()
    except KVHvdError as error:
        return f"{_no(error)} (for workers that each have a GPU; others need none)"
    return f"yes: {found.version_text} ({found.path})"


def _horovod() -> str:
    found = horovod_alias.installed_horovod()
    if found is None:
        return "not installed: with --as-horovod kvstore_hvd answers for it"
    return f"installed ({found.origin}): --as-horovod leaves `import horovod` to it"


def _yaml() -> str:
    if importlib.util.find_spec("yaml") is None:
        return "no: PyYAML is not installed"
    return f"yes: PyYAML {metadata.version('PyYAML')}"


def _no(error: Any) -> str:
    return "no: " + str(error).split("\n", 1)[0]
