"""What the kernels report of themselves, and values of all element types as bytes; the kernels are host_kernels.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvstore_hvd import native
from kvstore_hvd.gpu import kernels

_NUMPY = {name: np.dtype(name) for name in native.DTYPES if name != "bfloat16"}
# Carries a kernel out: its name, arguments and grid; inside of `host_kernels` only.
run: Callable[[str, list[Any], tuple[int, ...]], None] | None = None


def sizes() -> list[int]:
    """What the sizes kernel reports."""
    return [
        *kernels.STRUCTURES.values(),
        kernels.MAX_RANKS,
        kernels.MAX_CHANNELS,
        kernels.SLOTS,
        kernels.TILE_BYTES,
        kernels.TILE_ELEMENTS,
    ]


def values_of(raw: Any, dtype: str) -> Any:
    """The elements, as float32 where they are bfloat16."""
    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(_NUMPY[dtype])


def raw_of(values: Any, dtype: str) -> Any:
    """The bytes of elements, rounded to nearest even."""
    if dtype == "bfloat16":
        bits = np.asarray(values, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(np.uint8)
    return np.ascontiguousarray(values.astype(_NUMPY[dtype])).view(np.uint8)
