"""Operations on arrays of GPUs. Only `gpu.runtime` imports `cupy`, inside a function: many machines have no GPU."""

from __future__ import annotations

import functools
import importlib.util


@functools.lru_cache(maxsize=1)
def is_installed() -> bool:
    """Whether CuPy is installed, which every operation on a GPU needs; its first use shows whether it fits."""
    return importlib.util.find_spec("cupy") is not None
