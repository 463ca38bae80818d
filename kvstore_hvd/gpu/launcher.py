"""Launches of our kernels on one stream, and what they tell: copies of segments, and collectives over mapped memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvstore_hvd import errors, native
from kvstore_hvd.base.clocks import Deadline
from kvstore_hvd.errors import TransportError, message
from kvstore_hvd.gpu import kernels, shapes
from kvstore_hvd.gpu.memory import DeviceMemory, PinnedMemory
from kvstore_hvd.gpu.module import Kernels
from kvstore_hvd.gpu.runtime import close_all
from kvstore_hvd.gpu.streams import Event, Stream
from kvstore_hvd.gpu.tables import Tables

_ABORT, _STATUS, _WORDS_BYTES = 0, 64, 128  # of the words that host and kernels share
#: How much longer than the kernels the host waits for them.
GRACE_S = 5.0
_PAUSE_S = 0.00002
_WORLDS, _WORLD_BYTES = 64, 1024  # room for what kernels know of the ranks


class Segment(NamedTuple):
    """A part of a tensor and its place in a buffer, in bytes (elements where a copy converts them)."""

    pointer: int
    offset: int
    size: int
    rank: int = 0  # exchange: whose buffer


@dataclass(frozen=True)
class Reduction:
    """How elements are combined: the fields of a request that decide it."""

    dtype: str
    op: str
    prescale: float = 1.0
    postscale: float = 1.0
    as_half: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether one input alone stays as it is."""
        return self.prescale == self.postscale == 1.0 and not (
            self.as_half and self.op in ("sum", "average") and self.dtype in ("float32", "float64")
        )


@dataclass(frozen=True)
class Members:
    """Every rank's memory, as this process sees it; 0 where the kernels that are launched need none."""

    rank: int
    staging: Sequence[int]
    control: Sequence[int]
    fifo: Sequence[int]
    slot_vectors: int = 0


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
        self._lock = threading.Lock()  # of the words: abort comes from other threads
        self._tables = Tables(self.wait)

    # -- Launches ----------------------------------------------------------------------------------------------

    def world(self, members: Members) -> int:
        """Put what `collective` needs to know of the ranks on the device; returns its address there."""
        table = np.zeros(1, kernels.WORLD)
        table["rank"], table["ranks"], table["slot_vectors"] = members.rank, len(members.staging), members.slot_vectors
        for field in ("staging", "control", "fifo"):
            addresses = getattr(members, field)
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
            table, tiles = _table(segments, kernels.TILE_BYTES, size_unit=native.ITEM_BYTES[dtype])
        else:
            # These kernels count elements in the buffer, too.
            name = kernels.copy_kernel(dtype, buffer_dtype)
            table, tiles = _table(segments, kernels.TILE_ELEMENTS, offset_unit=native.ITEM_BYTES[buffer_dtype])
        (address,) = self._tables.put(self.stream, [table])
        arguments = np.zeros(1, kernels.COPY)
        arguments["segments"], arguments["buffer"], arguments["n_segments"] = address, buffer, len(table)
        arguments["scale"] = arguments["scale32"] = scale
        arguments["into_buffer"] = into_buffer
        blocks = shapes.copy_blocks(tiles, self._modules.limits(name, dtype))
        self._modules.launch(name, dtype, blocks, (arguments,), self.stream)
        self._tables.fence(self.stream)

    def collective(
        self,
        name: str,
        world: int,
        reduction: Reduction,
        inputs: Sequence[Segment],
        outputs: Sequence[Segment],
        nbytes: int,
        staging_offset: int = 0,
        meet: bool = True,
        blocks: int = 0,
    ) -> None:
        """Launch a kernel of an allreduce or an exchange (see `kernels`)."""
        tables, tiles = zip(*(_table(segments, kernels.TILE_BYTES) for segments in (inputs, outputs)))
        addresses = self._tables.put(self.stream, tables)
        launch = np.zeros(1, kernels.LAUNCH)
        launch["inputs"], launch["outputs"] = addresses
        launch["n_inputs"], launch["n_outputs"] = len(inputs), len(outputs)
        launch["bytes"], launch["staging_offset"] = nbytes, staging_offset
        launch["timeout_ns"] = int(self._timeout_s * 1e9)
        launch["prescale"] = launch["prescale32"] = reduction.prescale
        launch["postscale"] = launch["postscale32"] = reduction.postscale
        launch["op"], launch["meet"] = native.OPS[reduction.op], meet
        if not blocks:
            count = shapes.direct_blocks if meet else shapes.copy_blocks
            fused = -(-nbytes // kernels.TILE_BYTES)
            blocks = count(max(*tiles, fused), self._modules.limits(name, reduction.dtype))
        arguments = np.uint64(world), launch
        waits = meet and not self._is_shared
        self._modules.launch(name, reduction.dtype, blocks, arguments, self.stream, waits)
        self._tables.fence(self.stream)

    # -- How it goes -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise why a kernel has ended early, on this rank or another."""
        stop = kernels.Stop.of(int(self._words[_STATUS // 4]))
        if stop is None:
            return
        if stop.cause == "timeout":
            raise errors.TimeoutError(
                message(
                    f"rank {stop.rank} waited {self._timeout_s:g} s for rank {stop.awaited}'s GPU ({stop.place}).",
                    fix="see whether that rank, or its GPU, is stuck; KVHVD_TIMEOUT sets the limit.",
                )
            )
        raise TransportError(message(f"the GPUs' kernels were ended by rank {stop.rank} ({stop.cause})."))

    def wait(self, event: Event, check: Callable[[], None] | None = None) -> None:
        """Until an event of this stream is done, for as long as kernels may wait."""
        deadline = Deadline(self._timeout_s + GRACE_S)
        while not event.done():
            self.check()
            if check is not None:
                check()
            if deadline.left() < 0:
                raise errors.TimeoutError(
                    message(
                        f"the GPU has not finished its operations within {self._timeout_s:g} s.",
                        fix="see whether a kernel of the program itself is stuck; KVHVD_TIMEOUT sets the limit.",
                    )
                )
            time.sleep(_PAUSE_S)

    def abort(self) -> None:
        """Have the kernels that wait end soon, on every rank; from any thread, any number of times."""
        with self._lock:
            if self._words is not None:
                self._words[_ABORT // 4] = 1

    def close(self) -> None:
        """Give everything back but the stream, on which nothing is enqueued any more."""
        with self._lock:
            self._words = None
        close_all(self._tables.close, self._worlds.close, self._words_memory.close)


def _table(segments: Sequence[Segment], tile: int, size_unit: int = 1, offset_unit: int = 1) -> tuple[Any, int]:
    columns = zip(*segments) if segments else ((), (), (), ())
    pointers, offsets, sizes, ranks = (np.array(column, np.int64) for column in columns)
    return shapes.segments(pointers, offsets // offset_unit, sizes * size_unit, tile=tile, ranks=ranks)
