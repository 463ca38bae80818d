"""MXNet's engine that refuses a push when a test says so; everything else is MXNet's own."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

__all__ = ["COMPILER", "RefusingEngine"]

COMPILER = shutil.which(os.environ.get("CXX", "g++"))
SOURCE = Path(__file__).with_name("refusing_engine.cpp")


class RefusingEngine:
    """To be given to an adapter as MXNet's library, which `libmxnet` is; `folder` is this process's own."""

    def __init__(self, folder: Path, libmxnet: str) -> None:
        self.path = str(folder / "librefusing.so")
        flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-Wl,--no-as-needed"]
        subprocess.run([str(COMPILER), *flags, "-o", self.path, str(SOURCE), libmxnet, "-ldl"], check=True)
        self._library = ctypes.CDLL(self.path)

    def refuse(self, after: int = 0, has_taken: bool = False) -> None:
        """Refuse one push, after some others; before or after the engine has taken the operation."""
        self._library.refuse(after, int(has_taken))

    @property
    def has_refused(self) -> bool:
        """Whether the push that `refuse` meant has come."""
        return int(self._library.remaining()) < 0
