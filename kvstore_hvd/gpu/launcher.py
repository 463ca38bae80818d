"""Launches of our kernels on one stream: copies of segments, and collectives over mapped memory.

A launch reads tables of segments, which the host writes to pinned memory and copies to the device. The tables of the
last launches stay in slots that are reused in turn, each behind an event.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvstore_hvd import errors
from kvstore_hvd.base.cores import Deadline
from kvstore_hvd.errors import TransportError, message
from kvstore_hvd.gpu import kernels
from kvstore_hvd.gpu.kernels import Segment
from kvstore_hvd.gpu.module import Kernels
from kvstore_hvd.gpu.runtime import close_all
from kvstore_hvd.gpu.streams import DeviceMemory, Event, PinnedMemory, Stream
from kvstore_hvd.native import ITEM_BYTES, OPS, DeviceOperation

# Places of the two words that host and kernels share, and bytes of their memory.
_ABORT, _STATUS, _WORDS_BYTES = 0, 64, 128
#: Seconds that the host waits longer than the kernels.
GRACE_S = 5.0
# Seconds between two queries of an event.
_PAUSE_S = 0.00002
# Number and bytes of the structures `kernels.WORLD` of a launcher.
_WORLDS, _WORLD_BYTES = 64, 1024
#: Segments that the tables of one launch may have together.
ENTRIES = 4096
# Launches whose tables are kept.
_SLOTS = 16
_SLOT_BYTES = ENTRIES * kernels.SEGMENT.itemsize


class Launcher:
    """Launches on one stream of the device that is current."""

    def __init__(self, modules: Kernels, stream: Stream, timeout_s: float, is_shared: bool = False) -> None:
        self.stream = stream
        self._is_shared = is_shared
        self._modules = modules
        self._timeout_s = timeout_s
        self._words_memory = PinnedMemory(_WORDS_BYTES)
        self._words = self._words_memory.view(np.uint32)
        self._words[:] = 0
        self._worlds = DeviceMemory(_WORLDS * _WORLD_BYTES)
        self._n_worlds = 0
        self._lock = threading.Lock()  # protects _words: other threads call abort
        self._device_tables, self._host_tables = DeviceMemory(_SLOTS * _SLOT_BYTES), PinnedMemory(_SLOTS * _SLOT_BYTES)
        self._tables = self._host_tables.view()
        self._events = [Event() for _ in range(_SLOTS)]
        self._slot = 0

    # -- Launches ------------------------------------------------------------------------------------------------------

    def world(
        self,
        rank: int,
        staging: Sequence[int],
        control: Sequence[int] = (),
        fifo: Sequence[int] = (),
        slot_vectors: int = 0,
    ) -> int:
        """Put every rank's addresses on the device, for `collective`; returns the address there."""
        table = np.zeros(1, kernels.WORLD)
        table["rank"], table["ranks"], table["slot_vectors"] = rank, len(staging), slot_vectors
        for field, addresses in (("staging", staging), ("control", control), ("fifo", fifo)):
            table[field][0, : len(addresses)] = addresses
        table["abort"] = self._words_memory.address + _ABORT
        table["status"] = self._words_memory.address + _STATUS
        if self._n_worlds == _WORLDS:
            raise ValueError(f"{_WORLDS} sets of members are known already")
        place = self._worlds.address + self._n_worlds * _WORLD_BYTES
        self._n_worlds += 1
        source = PinnedMemory(table.nbytes)
        source.view()[:] = table.view(np.uint8)
        self.stream.copy(place, source.address, table.nbytes)
        copied = Event().record(self.stream)
        self.wait(copied)
        close_all(copied.close, source.close)
        return place

    def copy(
        self,
        segments: Sequence[Segment],
        buffer: int,
        into_buffer: bool,
        dtype: str,
        buffer_dtype: str = "",
        scale: float = 1.0,
    ) -> None:
        """Pack segments into a buffer, or unpack them."""
        if not segments:
            return
        buffer_dtype = buffer_dtype or dtype
        if buffer_dtype == dtype and scale == 1.0:
            name = kernels.copy_kernel()
            table, tiles = kernels.table(segments, kernels.TILE_BYTES, size_unit=ITEM_BYTES[dtype])
        else:
            # These kernels count elements in the buffer, too.
            name = kernels.copy_kernel(dtype, buffer_dtype)
            table, tiles = kernels.table(segments, kernels.TILE_ELEMENTS, offset_unit=ITEM_BYTES[buffer_dtype])
        (address,) = self._put([table])
        arguments = np.zeros(1, kernels.COPY)
        arguments["segments"], arguments["buffer"], arguments["n_segments"] = address, buffer, len(table)
        arguments["scale"] = arguments["scale32"] = scale
        arguments["into_buffer"] = into_buffer
        blocks = kernels.copy_blocks(tiles, self._modules.limits(name, dtype))
        self._launch(name, dtype, blocks, (arguments,))

    def collective(
        self,
        name: str,
        world: int,
        operation: DeviceOperation,
        inputs: Sequence[Segment],
        outputs: Sequence[Segment],
        nbytes: int,
        staging_offset: int = 0,
        meet: bool = True,
        blocks: int = 0,
    ) -> None:
        """Launch a kernel of an allreduce or an exchange with the dtype, op and scales of an operation."""
        tables, tiles = zip(*(kernels.table(segments, kernels.TILE_BYTES) for segments in (inputs, outputs)))
        launch = np.zeros(1, kernels.LAUNCH)
        launch["inputs"], launch["outputs"] = self._put(tables)
        launch["n_inputs"], launch["n_outputs"] = len(inputs), len(outputs)
        launch["bytes"], launch["staging_offset"] = nbytes, staging_offset
        launch["timeout_ns"] = int(self._timeout_s * 1e9)
        launch["prescale"] = launch["prescale32"] = operation.prescale
        launch["postscale"] = launch["postscale32"] = operation.postscale
        launch["op"], launch["meet"] = OPS[operation.op], meet
        if not blocks:
            count = kernels.direct_blocks if meet else kernels.copy_blocks
            fused = -(-nbytes // kernels.TILE_BYTES)
            blocks = count(max(*tiles, fused), self._modules.limits(name, operation.dtype))
        self._launch(name, operation.dtype, blocks, (np.uint64(world), launch), waits=meet and not self._is_shared)

    def _put(self, tables: Sequence[Any]) -> list[int]:
        """Enqueue copies of tables for the next launch; their addresses on the device, 0 for an empty one."""
        if sum(map(len, tables)) > ENTRIES:
            raise ValueError(f"{sum(map(len, tables))} segments in one launch; at most {ENTRIES} have room")
        # This waits when the device is many launches behind.
        self.wait(self._events[self._slot])
        start = end = self._slot * _SLOT_BYTES
        addresses = []
        for table in tables:
            addresses.append(self._device_tables.address + end if len(table) else 0)
            self._tables[end : end + table.nbytes] = table.view(np.uint8)
            end += table.nbytes
        self.stream.copy(self._device_tables.address + start, self._host_tables.address + start, end - start)
        return addresses

    def _launch(self, name: str, dtype: str, blocks: int, arguments: tuple[Any, ...], waits: bool = False) -> None:
        """Launch a kernel that reads the tables of the last `_put`."""
        self._modules.launch(name, dtype, blocks, arguments, self.stream, waits)
        self._events[self._slot].record(self.stream)
        self._slot = (self._slot + 1) % _SLOTS

    # -- Ends of launches ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise why a kernel has ended early, on this rank or another."""
        stop = kernels.Stop.of(int(self._words[_STATUS // 4]))
        if stop is None:
            return
        if stop.cause == "timeout":
            fact = f"rank {stop.rank} waited {self._timeout_s:g} s for rank {stop.awaited}'s GPU ({stop.place})."
            fix = "see whether that rank, or its GPU, is stuck; KVHVD_TIMEOUT sets the limit."
            raise errors.TimeoutError(message(fact, fix=fix))
        raise TransportError(message(f"the GPUs' kernels were ended by rank {stop.rank} ({stop.cause})."))

    def wait(self, event: Event, check: Callable[[], None] | None = None) -> None:
        """Wait for an event of this stream, at most as long as kernels may wait."""
        deadline = Deadline(self._timeout_s + GRACE_S)
        while not event.done():
            self.check()
            if check is not None:
                check()
            if deadline.left() < 0:
                fact = f"the GPU has not finished its operations within {self._timeout_s:g} s."
                fix = "see whether a kernel of the program itself is stuck; KVHVD_TIMEOUT sets the limit."
                raise errors.TimeoutError(message(fact, fix=fix))
            time.sleep(_PAUSE_S)

    def abort(self) -> None:
        """End the kernels that wait, on every rank; from any thread, any number of times."""
        with self._lock:
            if self._words is not None:
                self._words[_ABORT // 4] = 1

    def close(self) -> None:
        """Free everything but the stream, whose work is done."""
        with self._lock:
            self._words = None
        self._tables = None
        memories = self._host_tables, self._device_tables, self._worlds, self._words_memory
        close_all(*(event.close for event in self._events), *(memory.close for memory in memories))
