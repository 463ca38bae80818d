"""A wait that is news when it takes long."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Wait"]

_TELL_AFTER_S = 10.0


@dataclass
class Wait:
    """Since when something is waited for, and whether that was told. Times are of a `JobClock`."""

    since: float | None = None  # None: it is not
    told: bool = False

    def begin(self, now: float) -> float:
        """Wait from now on, unless it does already; returns since when."""
        if self.since is None:
            self.since = now
        return self.since

    def end(self) -> None:
        """Wait no longer."""
        self.since, self.told = None, False

    @property
    def tell_at(self) -> float | None:
        """When `is_news` is to be asked."""
        return None if self.since is None or self.told else self.since + _TELL_AFTER_S

    def is_news(self, now: float) -> bool:
        """Whether it takes long by now, and nobody was told yet: true once."""
        if self.tell_at is None or now < self.tell_at:
            return False
        self.told = True
        return True
