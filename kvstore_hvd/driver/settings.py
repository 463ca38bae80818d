"""What the user of an elastic job asked for."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstore_hvd.driver.slots import Cooldown
from kvstore_hvd.launcher.capacity import MAX_WORKERS

__all__ = ["Settings"]


@dataclass(frozen=True)
class Settings:
    """What the user asked for. Times in seconds."""

    job: str
    min_np: int
    max_np: int = MAX_WORKERS
    first_np: int | None = None  # slots to wait for at the start; None: min_np
    reset_limit: int | None = None
    elastic_timeout_s: float = 600.0
    timeout_s: float = 600.0
    start_timeout_s: float = 30.0
    survivor_time_s: float = 2.0
    exit_timeout_s: float = 30.0  # for a worker that has trained, from being told to leave to its end
    kill_grace_s: float = 5.0
    lease_s: float = 60.0
    cooldown: Cooldown = field(default_factory=Cooldown)
