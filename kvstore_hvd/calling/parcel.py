"""Objects on their way to another process: pickled, in a file that has no name."""

from __future__ import annotations

import mmap
import os
import pickle
import tempfile
from collections.abc import Iterator
from typing import Any

__all__ = ["pack", "unpack"]


def pack(*values: Any) -> int:
    """Write values by cloudpickle; returns the descriptor of the file, which is the caller's to close."""
    import cloudpickle

    with tempfile.TemporaryFile(prefix="kvstore_hvd-") as file:
        for value in values:
            cloudpickle.dump(value, file)
        file.flush()
        return os.dup(file.fileno())


def unpack(fd: int) -> Iterator[Any]:
    """Read the values one after the other, each when it is asked for; other processes may read them meanwhile."""
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as memory:
        while memory.tell() < len(memory):
            yield pickle.load(memory)
