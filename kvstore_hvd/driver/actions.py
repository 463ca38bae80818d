"""What the decisions about a job ask to be done, as data: tests look at it, the driver does it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Union

from kvstore_hvd.driver.slots import Slot

__all__ = ["Action", "Actions", "End", "Kill", "Note", "Start", "Tell"]


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


class Actions:
    """What is to be done, in order."""

    def __init__(self) -> None:
        self._waiting: list[Action] = []

    def take(self) -> list[Action]:
        """All of them; told once."""
        waiting, self._waiting = self._waiting, []
        return waiting

    def start(self, worker: int, slot: Slot) -> None:
        """Add a `Start`."""
        self._waiting.append(Start(worker, slot))

    def tell(self, worker: int, kind: str, **fields: Any) -> None:
        """Add a `Tell` of a message of this type."""
        self._waiting.append(Tell(worker, {"t": kind, **fields}))

    def kill(self, worker: int, number: int, *, ended: bool) -> None:
        """Add a `Kill`."""
        self._waiting.append(Kill(worker, number, ended))

    def note(self, event: str, **fields: Any) -> None:
        """Add a `Note`."""
        self._waiting.append(Note(event, fields))

    def end(self, code: int, reason: str, details: tuple[str, ...]) -> None:
        """Add an `End`."""
        self._waiting.append(End(code, reason, details))
