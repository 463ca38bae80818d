"""What the native extension tells: thresholds, what was measured, recorded operations, and who waits for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = [
    "Announced",
    "DeviceOperation",
    "EngineStatistics",
    "Missed",
    "Statistics",
    "Threshold",
    "TimelineEvent",
    "Times",
    "Waiting",
]


@dataclass(frozen=True)
class Threshold:
    """An algorithm selection threshold in bytes: a multiple of `unit` from `least` to `most`."""

    value: int
    unit: int
    least: int
    most: int


@dataclass(frozen=True)
class Times:
    """Seconds on this worker.

    Parameters
    ----------
    queued : float
        From the submission (with MXNet: when the array is ready) until all workers have submitted the operation and
        its first chunk is scheduled.
    reducing : float
        From then on until it is complete.
    exposed : float
        The part of both that nothing else of this worker was hidden behind. A round is a row of submissions in which
        no name comes twice: in training, a step. An operation is exposed from the last submission of its round (its
        own, if that is the last) until it is complete or the next round begins, whichever comes first; what completes
        before that last submission is not exposed at all.
    """

    queued: float
    reducing: float
    exposed: float


@dataclass(frozen=True)
class Statistics:
    """What a worker measured of the operations under one name.

    Parameters
    ----------
    operations : int
        Completed ones, failed ones included.
    bytes : int
        Of this worker's array, over all operations that did not fail.
    algorithm : str
        Of the last one: ``'inline'``, ``'one-shot'``, ``'two-shot'``, ``'direct'``, ``'broadcast'``, ``'exchange'``,
        ``'reducescatter'``, ``'device'`` (of arrays on a GPU), ``'failed'``.
    total, last : Times
        Over all operations, and of the last one.
    submitted : float
        When the last one was submitted, on the clock of ``time.monotonic()``.
    """

    operations: int
    bytes: int
    algorithm: str
    total: Times
    last: Times
    submitted: float


@dataclass(frozen=True)
class EngineStatistics:
    """What a worker measured since it joined its world.

    Parameters
    ----------
    names : dict of str to Statistics
        By the operations' names. The engine remembers some 8192; under ``''`` is the sum over those it had to forget.
    rounds : int
        How many are over, see `Times`.
    exposed : float
        Seconds, of all rounds: from the last submission of each until none of its operations is in flight, or the next
        one begins. In training: how long the steps waited for communication. All operations of the worker count, also
        barriers and those on NumPy arrays.
    reducing : float
        The part of it in which something was being reduced; the rest was spent waiting for other workers.
    """

    names: dict[str, Statistics] = field(default_factory=dict)
    rounds: int = 0
    exposed: float = 0.0
    reducing: float = 0.0


class TimelineEvent(NamedTuple):
    """One operation of a worker, completed or failed. Times are in nanoseconds on the clock of ``time.monotonic()``.

    Parameters
    ----------
    name, label : str
        What the workers match, and how messages name the tensor.
    collective, algorithm, dtype, op : str
        As in requests and `Statistics`.
    failed : bool
    round : int
        Equal for the operations of one round, see `Times`.
    bytes : int
        Of this worker's array.
    submitted : int
    since : int
        It was submitted, and those before it under its name were over.
    scheduled : int
        As `Times.queued` ends.
    completed : int
    """

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


@dataclass(frozen=True)
class Waiting:
    """An operation that this worker has submitted and that is not over.

    Parameters
    ----------
    name : str
        On the wire.
    operation : str
        As errors name it: ``"allreduce 'dense0_weight' (key 3)"``.
    age_s : float
        Seconds since it was submitted, or became the first of its name.
    since : float
        When that was, on the clock of ``time.monotonic()``; with the name it tells operations apart.
    late : tuple of int
        Ranks that have not submitted it. When all have: those that are behind inside it, if any is.
    announced_by_all : bool
        Whether all ranks have submitted it.
    """

    name: str
    operation: str
    age_s: float
    since: float
    late: tuple[int, ...]
    announced_by_all: bool


@dataclass(frozen=True)
class Announced:
    """What another worker wants to do under a name: fields of its request, see `comm.base.Request`."""

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
    """An operation that other workers have submitted and this one has not; `operation` tells those of a name apart.

    `announced` is None unless it was asked for and can be told.
    """

    name: str
    operation: int
    announced: Announced | None = None


@dataclass(frozen=True)
class DeviceOperation:
    """One operation of a batch for a device: fields of its request, see `comm.base.Request`.

    The operations of a batch are of one collective, and equal from `dtype` on; `postscale` has the divisor of an
    average.
    """

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
