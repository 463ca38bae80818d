"""How often the workers of a job have met again, as `--reset-limit` counts it."""

from __future__ import annotations

from collections.abc import Set

__all__ = ["NO_CHANGE", "Resets"]

#: Stands for another reason than a change of the hosts.
NO_CHANGE = 0


class Resets:
    """Counts losses, and changes of the hosts: each of these once, also where those that it brings come one by one."""

    def __init__(self) -> None:
        self.count = 0
        self._known: set[int] = set()

    def add(self, changes: Set[int], is_loss: bool) -> None:
        """The workers meet again."""
        if is_loss or not changes or NO_CHANGE in changes or not changes <= self._known:
            self.count += 1
        self._known |= changes
