"""The real kernels on `fake_cuda`: g++ compiles them for this machine."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvstore_hvd.gpu import kernels
from support import fake_cuda

__all__ = ["COMPILER", "compiled", "host_kernels", "loaded"]

ROOT = Path(__file__).resolve().parents[2]
COMPILER = shutil.which(os.environ.get("CXX", "g++"))


def compiled(folder: Path) -> Path:
    """The kernels as a library in the folder."""
    path = folder / "libkernels.so"
    includes = [f"-I{ROOT / each}" for each in ("native/cuda", "native", "tests/native/cuda")]
    flags = ["-std=c++17", "-O0", "-ffp-contract=off", "-fPIC", "-shared", "-pthread"]
    source = ROOT / "tests" / "support" / "host_kernels.cpp"
    subprocess.run([str(COMPILER), *flags, *includes, "-o", str(path), str(source)], check=True)
    return path


def loaded(path: Path) -> Any:
    """What `compiled` made, for `host_kernels`."""
    library = ctypes.CDLL(str(path))
    library.run_kernel.restype = ctypes.c_bool
    library.run_kernel.argtypes = [ctypes.c_char_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p]
    return library


@contextmanager
def host_kernels(library: Any) -> Iterator[None]:
    """Let the stand-in launch these inside."""

    def run(name: str, arguments: list[Any], grid: tuple[int, ...]) -> None:
        world = int(arguments[0]) if len(arguments) == 2 else None
        assert library.run_kernel(name.encode(), grid[0], grid[1], world, arguments[-1].ctypes.data), name

    # Tiles are small there, so that small arrays have many.
    sizes = (ctypes.c_uint * 2)()
    library.constants(ctypes.byref(sizes, 0), ctypes.byref(sizes, 4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "TILE_BYTES", sizes[0])
        patch.setattr(kernels, "TILE_ELEMENTS", sizes[1])
        patch.setattr(fake_cuda, "run_kernel", run)
        yield
