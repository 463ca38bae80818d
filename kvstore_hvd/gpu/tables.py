"""Tables of segments on their way to a device: written by the host, read by kernels, and then written again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvstore_hvd.gpu.kernels import SEGMENT
from kvstore_hvd.gpu.memory import DeviceMemory, PinnedMemory
from kvstore_hvd.gpu.streams import Event, Stream

#: Segments that the tables of one launch may have together.
ENTRIES = 4096
_SLOTS = 16
_SLOT_BYTES = ENTRIES * SEGMENT.itemsize


class Tables:
    """Room for the tables of the last launches, on the device that is current."""

    def __init__(self, wait: Callable[[Event], None]) -> None:
        self._wait = wait
        self._device = DeviceMemory(_SLOTS * _SLOT_BYTES)
        self._host = PinnedMemory(_SLOTS * _SLOT_BYTES)
        self._view = self._host.view()
        self._events = [Event() for _ in range(_SLOTS)]
        self._slot = 0

    def put(self, stream: Stream, tables: Sequence[Any]) -> list[int]:
        """Enqueue copies of tables for the next launch; their addresses on the device, 0 for an empty one."""
        # Waits when the device is many launches behind. After the launch comes `fence`.
        if sum(map(len, tables)) > ENTRIES:
            raise ValueError(f"{sum(map(len, tables))} segments in one launch; at most {ENTRIES} have room")
        self._wait(self._events[self._slot])
        start = end = self._slot * _SLOT_BYTES
        addresses = []
        for table in tables:
            addresses.append(self._device.address + end if len(table) else 0)
            self._view[end : end + table.nbytes] = table.view(np.uint8)
            end += table.nbytes
        stream.copy(self._device.address + start, self._host.address + start, end - start)
        return addresses

    def fence(self, stream: Stream) -> None:
        """The launch that reads what was last put is enqueued."""
        self._events[self._slot].record(stream)
        self._slot = (self._slot + 1) % _SLOTS

    def close(self) -> None:
        """Give everything back; nothing that is enqueued uses it."""
        for event in self._events:
            event.close()
        self._view = None
        self._host.close()
        self._device.close()
