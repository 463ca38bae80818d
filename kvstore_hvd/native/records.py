"""What the native extension tells: thresholds, what was measured, recorded operations, and who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class Threshold:
    """An algorithm selection threshold in bytes: a multiple of `unit` from `least` to `most`."""

    value: int
    unit: int
    least: int
    most: int


@dataclass(frozen=True)
class Times:
    """Seconds on this worker."""

    queued: float
    reducing: float
    exposed: float


@dataclass(frozen=True)
class Statistics:
    """What a worker measured of the operations under one name."""

    operations: int
    bytes: int
    algorithm: str
    total: Times
    last: Times
    submitted: float


@dataclass(frozen=True)
class EngineStatistics:
    """What a worker measured since it joined its world."""

    names: dict[str, Statistics] = field(default_factory=dict)
    rounds: int = 0
    exposed: float = 0.0
    reducing: float = 0.0


class TimelineEvent(NamedTuple):
    """One operation of a worker, completed or failed. Times are in nanoseconds on the clock of ``time.monotonic()``."""

    name: str
    label: str
    collective: str
    algorithm: str
    dtype: str
    op: str
    failed: bool
    round: int
    bytes: int
    submitted: int
    since: int
    scheduled: int
    completed: int
    on_link: int  # from the first bytes that went to other hosts until the last that came; 0 on one host


@dataclass(frozen=True)
class Waiting:
    """An operation that this worker has submitted and that is not over."""

    name: str
    operation: str
    age_s: float
    since: float
    late: tuple[int, ...]
    announced_by_all: bool


@dataclass(frozen=True)
class Announced:
    """What another worker wants to do under a name: fields of its request, see `native.Request`."""

    collective: str
    dtype: str
    op: str
    prescale: float
    postscale: float
    as_half: bool
    group: int
    count: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Missed:
    """An operation that other workers have submitted and this one has not; `operation` tells those of a name apart."""

    # `announced` is None unless it was asked for and can be told.

    name: str
    operation: int
    announced: Announced | None = None


@dataclass(frozen=True)
class DeviceOperation:
    """One operation of a batch for a device: fields of its request, see `native.Request`."""

    # The operations of a batch are of one collective, and equal from `dtype` on; `postscale` has the divisor of an
    # average.

    name: str
    label: str
    inputs: Sequence[int]
    outputs: Sequence[int]
    count: int
    contributed: int
    parts: Sequence[tuple[int, int, int, int]]
    dtype: str
    op: str
    prescale: float
    postscale: float
    as_half: bool
    root: int
