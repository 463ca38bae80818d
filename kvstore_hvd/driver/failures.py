"""Whether a job gets any further, or whoever takes the place of a failed worker soon fails as well."""

from __future__ import annotations

import signal

from kvstore_hvd.driver.roster import Worker

__all__ = ["Failures"]

# One that has trained for longer has done something worth the trouble.
_SOON_S = 60.0
_MAX_EPOCHS = 5


class Failures:
    """Counts generations, one after the other, in which a newcomer has failed soon after it had joined."""

    # The first workers of a job do not count: on a bad host many of them may fail, one after the other, while the rest
    # could go on. Nor does SIGKILL, which comes from outside.

    def __init__(self) -> None:
        self._first_at: float | None = None  # when the first world was joined
        self._generations: set[int] = set()

    def joined(self, now: float) -> None:
        """The workers of a generation have met."""
        if self._first_at is None:
            self._first_at = now

    def committed(self) -> None:
        """All workers have come to a commit."""
        self._generations.clear()

    def crashed(self, worker: Worker, now: float) -> None:
        """A worker has ended with another code than 0."""
        if worker.joined_at is None or worker.killed or worker.code == -signal.SIGKILL:
            return
        if now - worker.joined_at >= _SOON_S:
            self._generations.clear()
        elif worker.joined_at != self._first_at:
            self._generations.add(worker.generation)

    @property
    def too_many(self) -> bool:
        """Whether there is no hope left."""
        return len(self._generations) >= _MAX_EPOCHS
