"""How a part of a state is saved, restored and synchronised: what a handler is."""

from __future__ import annotations

from typing import Any

from kvstore_hvd.errors import InvalidRequestError, message


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
        """Keep a copy of the value, in place of the last one."""
        raise NotImplementedError

    def restore(self) -> None:
        """Restore the value that was saved last, in place: it stays the same object."""
        raise NotImplementedError

    def sync(self) -> None:
        """Take rank 0's value, and save it. Every worker calls it."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt the value to a new world; nothing here."""

    def content(self) -> Any:
        """What was saved last, for a file; can be pickled. Only handlers that have these three support files."""
        fact = f"a {type(self).__name__} does not say how its value is written to a file."
        fix = "define content(), misfit() and take() in it."
        raise InvalidRequestError(message(fact, operation="save", name=type(self.value).__name__, fix=fix))

    def misfit(self, content: Any) -> str:
        """Why the value cannot become like what `content` returned, as a sentence; '' if it can."""
        raise NotImplementedError

    def take(self, content: Any) -> None:
        """Take what `content` returned as saved last; a `StagedHandler`: as the first phase of that."""
        raise NotImplementedError

    def set_value(self, value: Any) -> None:
        """Take another value, and save it; without effect if that fails."""
        before, self.value = self.value, value
        try:
            self.save()
        except BaseException:
            self.value = before
            raise


class StagedHandler(StateHandler):
    """A handler that saves and synchronises in two phases.

    The first phase makes a copy; it may fail, and leaves the previously saved copy alone. The second phase makes the
    new copy the saved one, and cannot fail. A state runs the first phases of all its handlers before any second phase,
    so everything it restores is of one moment.
    """

    def stage(self) -> None:
        """The first phase of `save`."""
        raise NotImplementedError

    def receive(self) -> None:
        """The first phase of `sync`: as `stage`, with rank 0's value. Every worker calls it; the value itself is not
        changed."""
        raise NotImplementedError

    def adopt(self) -> None:
        """The second phase of both."""
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
