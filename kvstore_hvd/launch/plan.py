"""What an elastic job consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore_hvd.launch.discovery import HostDiscovery
from kvstore_hvd.launch.state import Settings
from kvstore_hvd.launcher.plan import Caller

__all__ = ["ElasticPlan"]


@dataclass(frozen=True)
class ElasticPlan:
    """How to run an elastic job. `environment` is that of the workers, but for what differs between them."""

    settings: Settings
    discovery: HostDiscovery
    command: Sequence[str]
    environment: dict[str, str]
    event_log: str | None = None
    bind_cores: bool = False
    prefix: bool = True
    verbose: bool = False
    caller: Caller | None = None
