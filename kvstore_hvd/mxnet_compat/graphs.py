"""How MXNet may compile graphs that contain operators of ours."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = ["SYNC_BATCH_NORM", "checked_flags", "has_static_shape"]

#: What MXNet knows the operator of `SyncBatchNorm` by.
SYNC_BATCH_NORM = "kvstore_hvd_sync_batch_norm"


def has_static_shape(flags: Iterable[tuple[str, Any]]) -> bool:
    """Whether the flags of a graph have MXNet prepare its operators for arrays that stay where they are."""
    return any(_is_static_shape(*flag) for flag in flags)


def checked_flags(symbol: Any, flags: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """The flags that a graph is to be compiled with: without ``static_shape`` where `SyncBatchNorm` is in it.

    MXNet does not take note there that an operator changes its auxiliary states. If such a graph were applied twice,
    both forward passes of a layer would run at the same time, and each worker would number them in an order of its own.
    """
    flags = list(flags)
    if has_static_shape(flags) and SYNC_BATCH_NORM in symbol.tojson():  # also where it is part of another operator
        return [flag for flag in flags if not _is_static_shape(*flag)]
    return flags


def _is_static_shape(name: str, value: Any) -> bool:
    return name == "static_shape" and str(value).lower() in ("true", "1")
