"""``horovod.common.exceptions``."""

from __future__ import annotations

from kvstore_hvd.errors import HorovodInternalError, HostsUpdatedInterrupt

__all__ = ["HorovodInternalError", "HostsUpdatedInterrupt"]
