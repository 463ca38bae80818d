"""What the decisions about a job ask to be done, as data: tests look at it, the driver does it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Union

from kvstore_hvd.driver.slots import Slot

__all__ = ["Action", "End", "Kill", "Note", "Start", "Tell"]


@dataclass(frozen=True)
class Start:
    """Start this worker on its slot."""

    worker: int
    slot: Slot


@dataclass(frozen=True)
class Tell:
    """Send this worker a message."""

    worker: int
    message: dict[str, Any]


@dataclass(frozen=True)
class Kill:
    """Send the processes of this worker a signal; `ended`: how they end from now on is our doing."""

    worker: int
    number: int
    ended: bool


@dataclass(frozen=True)
class Note:
    """Put this into the event log."""

    event: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class End:
    """The job is over: end what still runs. `details` are lines under the reason; no reason: it went well."""

    code: int
    reason: str = ""
    details: tuple[str, ...] = ()


Action = Union[Start, Tell, Kill, Note, End]
