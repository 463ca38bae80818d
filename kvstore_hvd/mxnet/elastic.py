"""`kvstore_hvd.elastic` under the name that it has in Horovod: ``horovod.mxnet.elastic``. Names only."""

from __future__ import annotations

from typing import Any

from kvstore_hvd import elastic as _elastic

__all__ = list(_elastic.__all__)


def __getattr__(name: str) -> Any:
    return getattr(_elastic, name)
