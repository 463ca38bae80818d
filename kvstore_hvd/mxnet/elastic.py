"""`kvstore_hvd.elastic` under the name that it has in Horovod: ``horovod.mxnet.elastic``. Names only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore_hvd import elastic as _elastic

if TYPE_CHECKING:
    from kvstore_hvd.elastic import *  # noqa: F403
else:
    __all__ = list(_elastic.__all__)

    def __getattr__(name: str) -> Any:
        return getattr(_elastic, name)
