"""The native extension, loaded at its first use: importing this package never fails for want of it.

This module alone imports ``kvstore_hvd._native``, whose stub describes its names. Its records are defined here.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstore_hvd import errors

if TYPE_CHECKING:
    from kvstore_hvd._native import *

# Codes of native/base/types.hpp, also in the kernels for GPUs.
DTYPES = {"float16": 0, "bfloat16": 1, "float32": 2, "float64": 3, "int8": 4, "uint8": 5, "int32": 6, "int64": 7}
#: Bytes of an element.
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int8": 1, "uint8": 1, "int32": 4, "int64": 8}
OPS = {"sum": 0, "average": 1, "min": 2, "max": 3, "product": 4}
#: Prefix of the names of requests without timeout and stall report: native/request/request.hpp.
PATIENT = "~"
#: Names that a world knows at a time: native/shm/world.hpp.
MAX_NAMES = 8192


class NotBuiltError(errors.KVHvdError, ImportError):
    """The native extension is missing."""


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):  # of Python's own look-ups, which must not load the extension
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            extension = importlib.import_module("kvstore_hvd._native")
        except ModuleNotFoundError as error:
            if error.name != "kvstore_hvd._native":
                raise
            raise NotBuiltError(_why_not_built()) from None
        value = globals()[name] = getattr(extension, name)
        return value


def _why_not_built() -> str:
    here = Path(__file__).parent
    fact = f"the native extension of kvstore_hvd is missing: {here} belongs to a source tree that was not built."
    fix = "run `pip install .` (or `pip install -e .`) in the source tree."
    # Python looks into the script's folder first: a script in the source tree never finds the installed copy.
    installed = next((path.parent for entry in sys.path for path in Path(entry).glob("kvstore_hvd/_native.*.so")), None)
    if installed is not None:
        fact += f" It hides the copy that is installed in {installed}."
        fix = "keep (or start) your script in another folder, or run `pip install -e .` in the source tree."
    return errors.message(fact, fix=fix)


# -- Records -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Threshold:
    """An algorithm selection threshold in bytes: a multiple of `unit` from `least` to `most`."""

    value: int
    unit: int
    least: int
    most: int


@dataclass(frozen=True)
class Times:
    """Seconds of operations on this worker."""

    queued: float
    reducing: float
    exposed: float


@dataclass(frozen=True)
class Statistics:
    """A worker's measurements of the operations of one name."""

    operations: int
    bytes: int
    algorithm: str
    total: Times
    last: Times
    submitted: float


@dataclass(frozen=True)
class EngineStatistics:
    """A worker's measurements since it joined its world."""

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
    begins_round: bool
    bytes: int
    submitted: int
    since: int
    scheduled: int
    completed: int
    on_link: int  # from the first bytes to other hosts until the last from them; 0 on one host


@dataclass(frozen=True)
class Waiting:
    """A pending operation of this worker."""

    name: str
    operation: str
    age_s: float
    since: float
    late: tuple[int, ...]
    announced_by_all: bool


@dataclass(frozen=True)
class Announced:
    """Another worker's request under a name: some fields of its `Request`."""

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
    """An operation that other workers have submitted and this one has not."""

    name: str
    operation: int  # distinguishes operations of one name
    announced: Announced | None = None  # only on demand


@dataclass(frozen=True)
class DeviceOperation:
    """One operation of a batch for a device, with fields of its `Request`.

    The operations of a batch are of one collective, and equal from `dtype` on. `postscale` has the divisor of an
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


# Of a `Snapshot`. Times in nanoseconds on the clock of ``time.monotonic()`` of its host; 0: not yet.


class Operation(NamedTuple):
    """One of a worker's last operations. On all workers, `number` counts those of one `name` alike."""

    name: str  # '' if it is not known any more
    label: str
    number: int
    collective: str
    dtype: str
    op: str
    algorithm: str  # '' before it is over
    bytes: int
    announced: int
    scheduled: int
    completed: int


class Counts(NamedTuple):
    """What a worker has done since it joined its world. Those after `waited_ns` are about its arrivals."""

    operations: int
    bytes: int
    waited_ns: int  # in which it only waited for others
    compared: int  # operations in which the arrivals of workers were compared
    last: int  # those in which it came last
    behind_ns: int  # in these, behind the median worker


class Worker(NamedTuple):
    """One worker of any host."""

    rank: int
    host: str
    pid: int
    state: str  # 'absent', 'joined' or 'left'; of another host: ''
    is_stopped: bool
    doing: str  # where its program is, and in which operation it waits; '' if that is not known
    counts: Counts
    operations: list[Operation]  # the last ones, oldest first; of workers of this host


class Snapshot(NamedTuple):
    """What the workers of a world do and have done, as one host knows."""

    job: str
    generation: int
    host: int  # of `hosts`
    hosts: int
    set_number: int  # of the process set; 0: the world of all
    created: int
    now: int
    failure: tuple[str, str] | None  # class of the error, and the fact
    workers: list[Worker]
