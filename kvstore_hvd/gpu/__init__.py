"""GPUs: kernels, streams, memory and NCCL. `cupy` is imported inside functions only: many have no GPU."""

from __future__ import annotations

import functools
import importlib.util

__all__ = ["is_installed"]


@functools.lru_cache(maxsize=1)
def is_installed() -> bool:
    """Whether CuPy is, without which nothing here works; whether it fits this machine shows when it is used."""
    return importlib.util.find_spec("cupy") is not None
