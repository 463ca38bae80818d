"""``horovod.common.basics``."""

from __future__ import annotations

from kvstore_hvd.mxnet.basics_object import HorovodBasics

__all__ = ["HorovodBasics"]
