"""How often a worker that follows others looks at what they have submitted."""

from __future__ import annotations

import time

# At first, and at most.
_SHORTEST_S, _LONGEST_S = 5e-5, 1e-3


class Pauses:
    """Short ones while the others are busy; longer and longer ones while they are not."""

    def __init__(self) -> None:
        self._next_s = _SHORTEST_S

    def after(self, found: bool) -> None:
        """Pause after a look, unless it found something."""
        if found:
            self._next_s = _SHORTEST_S
            return
        time.sleep(self._next_s)
        self._next_s = min(self._next_s * 1.05, _LONGEST_S)
