"""How a part of a state is saved, restored and synchronised: what a handler is."""

from __future__ import annotations

from typing import Any

__all__ = ["StagedHandler", "StateHandler"]


class StateHandler:
    """Saves, restores and synchronises one value of a `GluonState`. Base of others.

    Parameters
    ----------
    value : object
        The value; it is saved now.
    """

    def __init__(self, value: Any) -> None:
        self.value = value
        self.save()

    def save(self) -> None:
        """Keep a copy of what the value is like, in place of the last one."""
        raise NotImplementedError

    def restore(self) -> None:
        """Make the value what it was like when it was saved last. In place: it stays the same object."""
        raise NotImplementedError

    def sync(self) -> None:
        """Make the value what it is like on rank 0, and save it. Every worker calls it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt the value to a new world; nothing here."""

    def set_value(self, value: Any) -> None:
        """Take another value, and save it; without effect if that fails."""
        before, self.value = self.value, value
        try:
            self.save()
        except BaseException:
            self.value = before
            raise


class StagedHandler(StateHandler):
    """A handler that saves and synchronises in two halves.

    The first one copies, may fail, and leaves alone what was saved before. The second one makes the copy the saved one,
    and cannot fail. A state takes the first halves of all its handlers before any second one, so that what it goes back
    to is of one moment.
    """

    def stage(self) -> None:
        """The first half of `save`."""
        raise NotImplementedError

    def receive(self) -> None:
        """The first half of `sync`: as `stage`, of rank 0's value. Every worker calls it; the value stays as it is."""
        raise NotImplementedError

    def adopt(self) -> None:
        """The second half of both."""
        raise NotImplementedError

    def settle(self) -> None:
        """The end of `sync`: make the value what was received."""
        self.restore()

    def save(self) -> None:
        """See `StateHandler.save`; what was saved last is still there if it fails."""
        self.stage()
        self.adopt()

    def sync(self) -> None:
        """See `StateHandler.sync`."""
        self.receive()
        self.adopt()
        self.settle()
