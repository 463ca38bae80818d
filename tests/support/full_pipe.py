"""A pipe whose reader stands still."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def full_pipe() -> Iterator[int]:
    """Yield the end of a pipe that writing to blocks."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, bytes(4096))
    os.set_blocking(write, True)
    try:
        yield write
    finally:
        os.close(read)
        os.close(write)
