"""What the launcher tells of workers that come or go, and how the workers agree about it."""

from __future__ import annotations

import enum
import queue

import numpy as np

from kvstore_hvd.world import process

#: For the workers only; other operations' names begin otherwise.
_NAME = "elastic/updates"


class HostUpdateResult(enum.IntFlag):
    """What has changed about the hosts; Horovod's numbers."""

    no_update = 0
    removed = 1
    added = 2
    mixed = removed | added


class HostUpdates:
    """The updates that one worker was told of, until all have agreed to act."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
        self._last = 0  # the number that the workers have acted on

    def put(self, number: int, result: int) -> None:
        """Note an update. Any thread."""
        self._messages.put((int(number), int(result)))

    def clear(self) -> None:
        """Forget what nobody has acted on."""
        self._messages = queue.SimpleQueue()

    def agree(self) -> HostUpdateResult | None:
        """What any worker was told since the last time, equal on all; None if nothing. Every worker calls it.

        Raises
        ------
        HorovodInternalError
            The world is lost.
        InvalidRequestError
            A worker is in ``hvd.join()``.
        """
        newest, result = self._last, HostUpdateResult.no_update
        while not self._messages.empty():
            number, told = self._messages.get()
            if number > self._last:
                newest, result = max(newest, number), result | told
        world = process.current().member
        with world.submitting():
            row = np.array([self._last, newest, result], np.int64)
            rows = world.all_rows("check_host_updates", _NAME, "check_host_updates", row)
        # Workers that have come later know of fewer updates.
        self._last, newest = int(rows[:, 0].max()), int(rows[:, 1].max())
        if newest <= self._last:
            return None
        self._last = newest
        return HostUpdateResult(int(np.bitwise_or.reduce(rows[:, 2])))
