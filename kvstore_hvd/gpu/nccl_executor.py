"""NCCL, for workers that each have a GPU of their own.

NCCL reduces large tensors where they lie, if they need no factor, or one that NCCL applies as exactly as our kernels.
Our kernels pack other tensors into a buffer, which scales and rounds them; NCCL reduces the buffer, and our kernels
unpack it. NCCL chooses the order of additions: all workers get the same bits, but not always those of the CPU engine.

Small tensors, and minima and maxima of floats (NCCL's lose NaN), are gathered from all workers. Every worker reduces
them itself in the order of ranks, with the bits of the CPU engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore_hvd.errors import KVHvdError, TransportError
from kvstore_hvd.gpu import kernels
from kvstore_hvd.gpu.executor import (
    ALIGNMENT,
    Batch,
    DeviceExecutor,
    Piece,
    Steps,
    buffer_bytes,
    rounds,
    segments,
)
from kvstore_hvd.gpu.kernels import Segment
from kvstore_hvd.gpu.launcher import ENTRIES, Kernels, Launcher
from kvstore_hvd.gpu.nccl import PREMULTIPLIED, NcclCommunicator, NcclLibrary
from kvstore_hvd.gpu.ring_executor import RingExecutor
from kvstore_hvd.gpu.runtime import Device, activate, close_all
from kvstore_hvd.gpu.streams import DeviceMemory, Event, PinnedMemory
from kvstore_hvd.native import ITEM_BYTES, DeviceOperation

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_SUMS = ("sum", "average")
# Bytes from which a tensor is reduced where it lies.
_DIRECT_BYTES = 1 << 20
# Bytes of all workers' parts up to which gathering and reducing them costs no more than NCCL's reduction.
_GATHERED_BYTES = 256 << 10
# Bytes of a batch up to which our kernels end sooner than NCCL begins.
_SMALL_BYTES = 64 << 10


class NcclExecutor(DeviceExecutor):
    """Reduces by NCCL. Collective: returns when all workers have come."""

    #: Executor of small batches, on the same stream. All workers enqueue in the same order, so kernels of one executor
    #: never wait beside those of the other.
    small: RingExecutor | None = None

    def __init__(
        self,
        library: NcclLibrary,
        unique_id: str,
        rank: int,
        size: int,
        device: Device,
        ordinal: int,
        staging_bytes: int,
        timeout_s: float,
        start_timeout_s: float,
    ) -> None:
        # The stream comes first: up to CUDA 11 a thread that has only chosen its device has no context, and NCCL would
        # take GPU 0.
        super().__init__(ordinal, timeout_s)
        self._rank, self._size = rank, size
        try:
            self._nccl = NcclCommunicator(library, unique_id, rank, size, self.stream.address, start_timeout_s)
        except KVHvdError:
            self.stream.close()
            raise
        self._nccl.timeout_s = timeout_s
        self._capacity = staging_bytes // ALIGNMENT * ALIGNMENT
        try:
            self._launcher = Launcher(Kernels(device.capability, device.multiprocessors), self.stream, timeout_s)
            self._staging = DeviceMemory(self._capacity)
        except TransportError:
            self._nccl.abort()
            raise
        self._closes += self._staging.close, self._launcher.close
        # The staging memory holds this worker's part, and behind it the gathered parts.
        self._part = 1 << (self._capacity // (size + 1)).bit_length() - 1
        self._gathered = self._staging.address + self._part
        self._worlds: dict[int, int] = {}  # by the bytes between the parts of two workers
        self._rows: tuple[PinnedMemory, DeviceMemory] | None = None

    # -- Operations ----------------------------------------------------------------------------------------------------

    def start(self, collective: str, batch: Batch) -> Steps:
        nbytes = sum(request.count * ITEM_BYTES[request.dtype] for request in batch)
        if self.small is not None and nbytes <= _SMALL_BYTES:
            return self.small.start(collective, batch)
        return super().start(collective, batch)

    def allreduce(self, batch: Batch) -> None:
        how = batch[0]
        nbytes = sum(each.count for each in batch) * ITEM_BYTES[how.dtype]
        if _must_gather(how) or nbytes * self._size <= _GATHERED_BYTES:
            self._allreduce_gathered(batch)
            return
        before, after = _factors(how)
        can_be_direct = kernels.packed_dtype(how.dtype, how.op, how.as_half) == how.dtype and after == 1.0
        can_be_direct = can_be_direct and (before == 1.0 or (how.op in _SUMS and how.dtype in PREMULTIPLIED))
        direct: list[DeviceOperation] = []
        packed: list[DeviceOperation] = []
        for request in batch:
            is_direct = can_be_direct and request.count * ITEM_BYTES[how.dtype] >= _DIRECT_BYTES
            (direct if is_direct else packed).append(request)
        if direct:
            with self._nccl.group():
                for request in direct:
                    source, target = request.inputs[0], request.outputs[0]
                    self._nccl.allreduce(source, target, request.count, how.dtype, how.op, before)
            for request in direct:
                self.copy_to_others(request)
        if packed:
            self._allreduce_packed(packed)

    def broadcast(self, batch: Batch) -> None:
        root, unit = batch[0].root, ITEM_BYTES[batch[0].dtype]
        with self._nccl.group():
            for request in batch:
                if request.count:
                    # NCCL reads it on the root only.
                    source = request.inputs[0] if self._rank == root else request.outputs[0]
                    self._nccl.broadcast(source, request.outputs[0], request.count * unit, root)
        for request in batch:
            self.copy_to_others(request)

    def exchange(self, batch: Batch) -> None:
        for request in batch:
            parts_of_all = self._parts_of_all(request)
            source, target = request.inputs[0], request.outputs[0]
            with self._nccl.group():
                for rank, parts in enumerate(parts_of_all):
                    for giver, start, nbytes, _ in parts:
                        if giver == self._rank != rank and nbytes:
                            self._nccl.send(source + start, nbytes, rank)
                for giver, _, nbytes, place in request.parts:
                    if giver != self._rank and nbytes:
                        self._nccl.receive(target + place, nbytes, giver)
            for giver, start, nbytes, place in request.parts:
                if giver == self._rank:
                    self.stream.copy(target + place, source + start, nbytes)

    def reducescatter(self, batch: Batch) -> None:
        how = batch[0]
        item = ITEM_BYTES[how.dtype]
        for request in batch:
            of_all = self._parts_of_all(request)
            parts = [(rank, *each[0][1:]) if each else (rank, 0, 0, 0) for rank, each in enumerate(of_all)]
            even = request.count * item // self._size
            # Every rank takes as much, in their order, and together all.
            is_even = all((start, nbytes) == (rank * even, even) for rank, start, nbytes, _ in parts)
            if _must_gather(how):
                self._scatter_gathered(request)
            elif how.prescale == how.postscale == 1.0 and is_even:
                target = request.outputs[0] + parts[self._rank][3]
                self._nccl.reduce_scatter(request.inputs[0], target, even // item, how.dtype, how.op)
            else:
                self._scatter_packed(request, parts)

    # -- Packed --------------------------------------------------------------------------------------------------------

    def _allreduce_packed(self, batch: Batch) -> None:
        dtype, op = batch[0].dtype, batch[0].op
        packed = kernels.packed_dtype(dtype, op, batch[0].as_half)
        item, unit = ITEM_BYTES[packed], ITEM_BYTES[dtype]
        before, after = _factors(batch[0])
        buffer = self._staging.address
        most = ENTRIES // max(len(request.outputs) for request in batch)
        for pieces in rounds([request.count for request in batch], item, self._capacity, most):
            inputs, outputs = segments(batch, pieces, unit, 1)
            self._launcher.copy(inputs, buffer, True, dtype, packed, before)
            self._nccl.allreduce(buffer, buffer, buffer_bytes(pieces, item) // item, packed, op)
            self._launcher.copy(outputs, buffer, False, dtype, packed, after)

    def _scatter_packed(self, request: DeviceOperation, parts: Sequence[tuple[int, int, int, int]]) -> None:
        dtype, unit = request.dtype, ITEM_BYTES[request.dtype]
        before, after = _factors(request)
        buffer = self._staging.address
        for (piece,) in rounds([request.count], unit, self._capacity, 1):
            self._launcher.copy(segments([request], [piece], unit, 1)[0], buffer, True, dtype, dtype, before)
            found = list(piece.parts(parts, unit))
            with self._nccl.group():
                for rank, offset, nbytes, _ in found:
                    self._nccl.reduce(buffer + offset, buffer + offset, nbytes // unit, dtype, request.op, rank)
            for rank, offset, nbytes, place in found:
                if rank == self._rank:
                    # Copies that convert begin at whole vectors, so each has a buffer of its own.
                    own = [Segment(request.outputs[0] + place, 0, nbytes // unit)]
                    self._launcher.copy(own, buffer + offset, False, dtype, dtype, after)

    # -- Gathered ------------------------------------------------------------------------------------------------------

    def _allreduce_gathered(self, batch: Batch) -> None:
        unit = ITEM_BYTES[batch[0].dtype]
        most = ENTRIES // max(len(request.outputs) for request in batch)
        for pieces in rounds([request.count for request in batch], unit, self._part, most):
            self._reduce_gathered(batch[0], self._gather(batch, pieces), segments(batch, pieces, unit, unit)[1])

    def _scatter_gathered(self, request: DeviceOperation) -> None:
        unit = ITEM_BYTES[request.dtype]
        for pieces in rounds([request.count], unit, self._part, 1):
            world = self._gather([request], pieces)
            for _, offset, nbytes, place in pieces[0].parts(request.parts, unit):
                head = offset % ALIGNMENT
                # Kernels begin at whole vectors: the bytes before the part go, with it, to this worker's own part of
                # the staging memory, which has been gathered.
                beside = Segment(self._staging.address, offset - head, nbytes + head)
                self._reduce_gathered(request, world, [beside])
                self.stream.copy(request.outputs[0] + place, self._staging.address + head, nbytes)

    def _gather(self, batch: Batch, pieces: Sequence[Piece]) -> int:
        """Gather all workers' pieces; returns the world whose staging memory they are."""
        unit = ITEM_BYTES[batch[0].dtype]
        inputs, _ = segments(batch, pieces, unit, 1)
        self._launcher.copy(inputs, self._staging.address, True, batch[0].dtype)
        # A few distances serve all sizes, so that few worlds are written to the device.
        nbytes = min(self._part, max(512, 1 << (buffer_bytes(pieces, unit) - 1).bit_length()))
        self._nccl.all_gather(self._staging.address, self._gathered, nbytes)
        if nbytes not in self._worlds:
            staging = [self._gathered + rank * nbytes for rank in range(self._size)]
            self._worlds[nbytes] = self._launcher.world(self._rank, staging)
        return self._worlds[nbytes]

    def _reduce_gathered(self, how: DeviceOperation, world: int, outputs: Sequence[Segment]) -> None:
        name = kernels.allreduce_kernel("oneshot", how.dtype, how.op, as_half=how.as_half)
        nbytes = max(each.offset + each.size for each in outputs)
        self._launcher.collective(name, world, how, [], outputs, nbytes, meet=False)

    # -- Parts of the other workers ------------------------------------------------------------------------------------

    def _parts_of_all(self, request: DeviceOperation) -> list[list[tuple[int, int, int, int]]]:
        """Every worker's parts of a request, which only the worker itself knows; waits for all workers."""
        room = self._size
        while True:
            rows = np.zeros((room + 1, 4), np.int64)
            rows[0, 0] = len(request.parts)
            for row, part in zip(rows[1:], request.parts):
                row[:] = part
            all_rows = self._all_rows(rows)
            room = int(all_rows[:, 0, 0].max())
            if room < len(rows):
                return [[tuple(row) for row in each[1 : each[0, 0] + 1].tolist()] for each in all_rows]

    def _all_rows(self, rows: Any) -> Any:
        """All workers' rows, of equal shape on all workers."""
        nbytes = rows.nbytes
        if self._rows is None or self._rows[0].nbytes < nbytes * (self._size + 1):
            # The previous buffers are idle.
            close_all(*(memory.close for memory in self._rows or ()))
            self._rows = PinnedMemory(nbytes * (self._size + 1)), DeviceMemory(nbytes * (self._size + 1))
            self._closes += (memory.close for memory in self._rows)
        host, device = self._rows
        view = host.view(np.int64)
        view[: rows.size] = rows.ravel()
        self.stream.copy(device.address, host.address, nbytes)
        self._nccl.all_gather(device.address, device.address + nbytes, nbytes)
        self.stream.copy(host.address + nbytes, device.address + nbytes, nbytes * self._size)
        event = Event().record(self.stream)
        self._launcher.wait(event, self._nccl.check)
        event.close()
        return view[rows.size : rows.size * (self._size + 1)].reshape(self._size, *rows.shape).copy()

    # -- End -----------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        self._nccl.check()
        super().check()

    def abort(self) -> None:
        if self.small is not None:
            self.small.abort()
        self._nccl.abort()
        super().abort()

    def close(self) -> None:
        if self.small is not None:
            self.small.close()
        activate(self.ordinal)
        self._nccl.close()
        super().close()


def _must_gather(how: DeviceOperation) -> bool:
    return how.op in ("min", "max") and how.dtype in _FLOATS


def _factors(how: DeviceOperation) -> tuple[float, float]:
    """The factors before and after the reduction."""
    # In sums of floats a factor up to 1 comes before, so that no sum overflows unless the result does.
    before, after = how.prescale, how.postscale
    if how.op in _SUMS and how.dtype in _FLOATS and abs(after) <= 1.0:
        return before * after, 1.0
    return before, after
