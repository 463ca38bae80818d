"""Where a worker's next world comes from, when others may come and go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from kvstore_hvd.worlds.topology import World

__all__ = ["Membership"]


class Membership(ABC):
    """Gives out worlds, one after the other. Any thread may call its methods."""

    def __init__(self) -> None:
        #: Called when a generation is lost, with it and the reason. From another thread, as the next one.
        self.on_void: Callable[[int, str], None] = lambda generation, text: None
        #: Called when workers are to come or go, with a number that grows and a `HostUpdateResult`.
        self.on_update: Callable[[int, int], None] = lambda number, result: None

    @abstractmethod
    def next_world(self, cause: str, text: str) -> World:
        """Wait for the next world, after the present one was lost or left."""

    @abstractmethod
    def finished(self) -> None:
        """Tell that training is over here: nobody need take this worker's place, or wait for it."""

    def joined(self, world: World) -> None:  # noqa: B027 - nobody need know
        """Tell that the meeting has succeeded."""

    def synced(self) -> None:  # noqa: B027 - where all have started together, nobody need know either
        """Tell that this worker has the state of the training, and could hand it on."""

    @property
    def update(self) -> tuple[int, int] | None:
        """Number and result of an update that came after the present world was given out, if any did."""
        return None
