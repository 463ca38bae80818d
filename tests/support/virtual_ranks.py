"""Several ranks on one GPU that a single launch plays: for tests of the kernels, and to measure them."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import numpy as np

from kvstore_hvd import native
from kvstore_hvd.gpu import kernels
from kvstore_hvd.gpu.kernels import Segment
from kvstore_hvd.gpu.launcher import Kernels
from kvstore_hvd.gpu.runtime import Device, cupy
from kvstore_hvd.gpu.streams import DeviceMemory, Event, PinnedMemory, Stream

_LINE = 128


class Reduction(NamedTuple):
    dtype: str
    op: str
    prescale: float = 1.0
    postscale: float = 1.0
    as_half: bool = False


class VirtualRanks:
    def __init__(
        self, size: int, device: Device, staging_bytes: int, slot_vectors: int = 1024, timeout_s: float = 20.0
    ) -> None:
        self.size, self.stream, self._timeout_s = size, Stream(), timeout_s
        self.staging_bytes, self.slot_vectors, self._flip = -(-staging_bytes // _LINE) * _LINE, slot_vectors, False
        self.modules = Kernels(device.capability, device.multiprocessors, size)
        fifo = kernels.fifo_bytes(slot_vectors)
        self._memory = [DeviceMemory(kernels.CONTROL_BYTES + fifo + 2 * self.staging_bytes) for _ in range(size)]
        self._words = PinnedMemory(2 * _LINE * size)
        self.words = self._words.view(np.uint32)
        self.words[:] = 0
        worlds = np.zeros(size, kernels.WORLD)
        for rank in range(size):
            worlds[rank]["rank"], worlds[rank]["ranks"], worlds[rank]["slot_vectors"] = rank, size, slot_vectors
            starts = {"control": 0, "fifo": kernels.CONTROL_BYTES, "staging": kernels.CONTROL_BYTES + fifo}
            for field, start in starts.items():
                worlds[rank][field][:size] = [memory.address + start for memory in self._memory]
            worlds[rank]["abort"] = self._words.address + 2 * _LINE * rank
            worlds[rank]["status"] = self._words.address + 2 * _LINE * rank + _LINE
        self._host, self._device = PinnedMemory(8 << 20), DeviceMemory(8 << 20)
        self._worlds = self._put(worlds, 0)
        self._tables = 1 << 20  # where the tables begin there

    def statuses(self) -> list[Optional[kernels.Stop]]:
        return [kernels.Stop.of(int(self.words[(2 * _LINE * rank + _LINE) // 4])) for rank in range(self.size)]

    def prepare(self, inputs: Sequence[Sequence[Segment]], outputs: Sequence[Sequence[Segment]]) -> tuple[int, int]:
        """Put the ranks' tables on the device; for `launch`, any number of times."""
        addresses, place = [], self._tables
        for tables in (inputs, outputs):
            whole = np.concatenate([kernels.table(table, kernels.TILE_BYTES)[0] for table in tables])
            addresses.append(self._put(whole, place) if len(whole) else 0)
            place += whole.nbytes
        return addresses[0], addresses[1]

    def launch(
        self,
        name: str,
        reduction: Reduction,
        tables: tuple[int, int],
        inputs: Sequence[Sequence[Segment]],
        outputs: Sequence[Sequence[Segment]],
        nbytes: int,
        blocks: int = 0,
    ) -> None:
        """Enqueue one launch of all ranks; every rank has as many segments."""
        self._flip = not self._flip
        launch = np.zeros(1, kernels.LAUNCH)
        launch["inputs"], launch["outputs"] = tables
        launch["n_inputs"], launch["n_outputs"] = len(inputs[0]), len(outputs[0])
        launch["bytes"], launch["staging_offset"] = nbytes, self.staging_bytes * self._flip
        launch["timeout_ns"] = int(self._timeout_s * 1e9)
        launch["prescale"] = launch["prescale32"] = reduction.prescale
        launch["postscale"] = launch["postscale32"] = reduction.postscale
        launch["op"], launch["meet"] = native.OPS[reduction.op], 1
        limits = self.modules.limits(name, reduction.dtype)
        if not blocks and "_ring_" in name:
            blocks = kernels.ring_channels(nbytes, self.slot_vectors, limits)
        elif not blocks:
            tiles = [kernels.table(table, kernels.TILE_BYTES)[1] for table in (*inputs, *outputs)]
            blocks = limits.blocks(max(*tiles, -(-nbytes // kernels.TILE_BYTES)))
        arguments = np.uint64(self._worlds), launch
        self.modules.launch(name, reduction.dtype, blocks, arguments, self.stream, waits=True, players=self.size)

    def reset(self) -> None:
        """Begin anew after a kernel that ended early: until then the counters of the ranks differ."""
        self.stream.synchronize()
        runtime = cupy().cuda.runtime
        for memory in self._memory:
            runtime.memset(memory.address, 0, kernels.CONTROL_BYTES)
        runtime.streamSynchronize(0)
        self.words[:] = 0

    def close(self) -> None:
        self.stream.synchronize()
        self.words = None
        owned: list[Any] = [*self._memory, self._words, self._host, self._device, self.stream]
        for each in owned:
            each.close()

    def _put(self, table: Any, place: int) -> int:
        self._host.view()[place : place + table.nbytes] = table.view(np.uint8)
        self.stream.copy(self._device.address + place, self._host.address + place, table.nbytes)
        event = Event().record(self.stream)
        while not event.done():
            pass
        event.close()
        return self._device.address + place
