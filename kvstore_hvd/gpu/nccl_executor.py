"""NCCL, for workers that each have a GPU of their own.

Large tensors that need no factor, or one that NCCL applies as exactly as we do, are reduced where they lie. Others are
packed by our kernels, which scale and round them, reduced together, and unpacked. NCCL chooses the order of additions:
all workers get the same bits, but not always those of the CPU engine. Where little is sent, and where NCCL means
something else (its minimum and maximum lose NaN), all workers' parts are gathered and every worker reduces them itself,
in the order of ranks and with the CPU engine's bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvstore_hvd.errors import KVHvdError, TransportError
from kvstore_hvd.gpu import kernels
from kvstore_hvd.gpu.devices import Device, Residents, activate
from kvstore_hvd.gpu.executor import (
    ALIGNMENT,
    END_S,
    Batch,
    Completion,
    EventCompletion,
    Executor,
    Piece,
    buffer_bytes,
    input_of,
    rounds,
)
from kvstore_hvd.gpu.launcher import Launcher, Members, Reduction, Segment
from kvstore_hvd.gpu.memory import DeviceMemory, PinnedMemory
from kvstore_hvd.gpu.module import Kernels
from kvstore_hvd.gpu.nccl import PREMULTIPLIED, NcclCommunicator
from kvstore_hvd.gpu.nccl_library import NcclLibrary
from kvstore_hvd.gpu.ring_executor import reduction_of
from kvstore_hvd.gpu.runtime import close_all
from kvstore_hvd.gpu.streams import Event, Stream
from kvstore_hvd.gpu.tables import ENTRIES
from kvstore_hvd.native import ITEM_BYTES
from kvstore_hvd.native.records import DeviceOperation

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_SUMS = ("sum", "average")
#: From this size on a tensor is worth an operation of its own.
_DIRECT_BYTES = 1 << 20
#: Up to this size, of all workers' parts together, gathering and reducing them costs no more than NCCL's reduction.
_GATHERED_BYTES = 256 << 10


class NcclExecutor(Executor):
    """Reduces by NCCL. Collective: returns when all workers have come."""

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
        activate(ordinal)
        self._residents = Residents(ordinal)
        self._rank, self._size, self._ordinal, self._timeout_s = rank, size, ordinal, timeout_s
        # First: up to CUDA 11 a thread that has only named its device has no context, and NCCL would take GPU 0.
        self.stream = Stream()
        try:
            self._nccl = NcclCommunicator(library, unique_id, rank, size, start_timeout_s)
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
        self._address = self.stream.address
        # What is gathered lies behind this worker's own part.
        self._part = 1 << (self._capacity // (size + 1)).bit_length() - 1
        self._gathered = self._staging.address + self._part
        self._worlds: dict[int, int] = {}  # by the bytes between the parts of two workers
        self._told: tuple[PinnedMemory, DeviceMemory] | None = None

    # -- Operations --------------------------------------------------------------------------------------------

    def allreduce(self, batch: Batch) -> Completion:
        """See `Executor.allreduce`."""
        self._enter(batch)
        reduction = reduction_of(batch[0])
        item = ITEM_BYTES[reduction.dtype]
        if self._must_gather(reduction) or sum(each.count for each in batch) * item * self._size <= _GATHERED_BYTES:
            self._allreduce_gathered(batch, reduction)
            return self._completion()
        direct: list[DeviceOperation] = []
        packed: list[DeviceOperation] = []
        for request in batch:
            (direct if self._is_direct(request, reduction) else packed).append(request)
        if direct:
            with self._nccl.group():
                for request in direct:
                    self._reduce_in_place(request, reduction)
            for request in direct:
                self._spread(request)
        self._allreduce_packed(packed, reduction)
        return self._completion()

    def broadcast(self, batch: Batch) -> Completion:
        """See `Executor.broadcast`."""
        self._enter(batch)
        root, unit = batch[0].root, ITEM_BYTES[batch[0].dtype]
        with self._nccl.group():
            for request in batch:
                if request.count:
                    # NCCL reads it on the root only.
                    source = input_of(request) if self._rank == root else request.outputs[0]
                    self._nccl.broadcast(source, request.outputs[0], request.count * unit, root, self._address)
        for request in batch:
            self._spread(request)
        return self._completion()

    def exchange(self, batch: Batch) -> Completion:
        """See `Executor.exchange`. Waits until all workers have told what they take."""
        self._enter(batch)
        for request in batch:
            taken = self._parts_of_all(request)
            source, target = input_of(request), request.outputs[0]
            with self._nccl.group():
                for rank, parts in enumerate(taken):
                    for giver, start, nbytes, _ in parts:
                        if giver == self._rank != rank and nbytes:
                            self._nccl.send(source + start, nbytes, rank, self._address)
                for giver, _, nbytes, place in request.parts:
                    if giver != self._rank and nbytes:
                        self._nccl.receive(target + place, nbytes, giver, self._address)
            for giver, start, nbytes, place in request.parts:
                if giver == self._rank:
                    self.stream.copy(target + place, source + start, nbytes)
        return self._completion()

    def reducescatter(self, batch: Batch) -> Completion:
        """See `Executor.reducescatter`. Waits until all workers have told which part they take."""
        self._enter(batch)
        reduction = reduction_of(batch[0])
        item = ITEM_BYTES[reduction.dtype]
        scales = reduction.prescale, reduction.postscale
        for request in batch:
            parts = [each[0] if each else (0, 0, 0, 0) for each in self._parts_of_all(request)]
            even = request.count * item // self._size
            if scales == (1.0, 1.0) and not self._must_gather(reduction) and _is_even(parts, even):
                target, place = request.outputs[0], parts[self._rank][3]
                arguments = even // item, reduction.dtype, reduction.op, self._address
                self._nccl.reduce_scatter(input_of(request), target + place, *arguments)
            elif self._must_gather(reduction):
                self._scatter_gathered(request, reduction)
            else:
                self._scatter_packed(request, reduction, parts)
        return self._completion()

    def _enter(self, batch: Batch) -> None:
        activate(self._ordinal)
        self._residents.check(address for request in batch for address in (*request.inputs, *request.outputs))

    # -- How it goes -------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """See `Executor.abort`."""
        self._nccl.abort()
        self._launcher.abort()

    def end(self, limit_s: float) -> bool:
        """See `Executor.end`."""
        self.abort()
        return self.stream.drain(limit_s)

    def close(self) -> None:
        """See `Executor.close`."""
        activate(self._ordinal)
        self._nccl.close()
        told = [memory.close for memory in self._told or ()]
        # What does not end keeps its memory: CUDA would wait for it without a limit.
        if self.stream.drain(END_S):
            close_all(self._launcher.close, self._staging.close, *told, self.stream.close)

    def _check(self) -> None:
        self._nccl.check()
        self._launcher.check()

    def _completion(self) -> Completion:
        return EventCompletion(self.stream, self._check, self.abort, self._timeout_s)

    # -- In place ----------------------------------------------------------------------------------------------

    @staticmethod
    def _is_direct(request: DeviceOperation, reduction: Reduction) -> bool:
        if request.count * ITEM_BYTES[request.dtype] < _DIRECT_BYTES or _packed_dtype(reduction) != request.dtype:
            return False
        before, after = _factors(reduction)
        return after == 1.0 and (before == 1.0 or (reduction.op in _SUMS and request.dtype in PREMULTIPLIED))

    def _reduce_in_place(self, request: DeviceOperation, reduction: Reduction) -> None:
        place = input_of(request), request.outputs[0]
        factor, _ = _factors(reduction)
        self._nccl.allreduce(*place, request.count, request.dtype, reduction.op, self._address, factor)

    def _spread(self, request: DeviceOperation) -> None:
        first, *others = request.outputs
        for other in others:
            self.stream.copy(other, first, request.count * ITEM_BYTES[request.dtype])

    # -- Packed ------------------------------------------------------------------------------------------------

    def _allreduce_packed(self, batch: Batch, reduction: Reduction) -> None:
        dtype, packed = reduction.dtype, _packed_dtype(reduction)
        item, unit = ITEM_BYTES[packed], ITEM_BYTES[dtype]
        before, after = _factors(reduction)
        buffer = self._staging.address
        most = ENTRIES // max((len(request.outputs) for request in batch), default=1)
        for pieces in rounds([request.count for request in batch], item, self._capacity, most):
            self._launcher.copy(_segments(batch, pieces, unit), buffer, True, dtype, packed, before)
            count = buffer_bytes(pieces, item) // item
            self._nccl.allreduce(buffer, buffer, count, packed, reduction.op, self._address)
            outputs = [
                Segment(address + piece.start * unit, piece.offset, piece.length)
                for piece in pieces
                for address in batch[piece.request].outputs
            ]
            self._launcher.copy(outputs, buffer, False, dtype, packed, after)

    def _scatter_packed(self, request: DeviceOperation, reduction: Reduction, parts: Sequence[Sequence[int]]) -> None:
        dtype, unit = reduction.dtype, ITEM_BYTES[reduction.dtype]
        before, after = _factors(reduction)
        buffer = self._staging.address
        for pieces in rounds([request.count], unit, self._capacity, 1):
            self._launcher.copy(_segments([request], pieces, unit), buffer, True, dtype, dtype, before)
            (piece,) = pieces
            own: list[tuple[int, int, int]] = []
            with self._nccl.group():
                for rank, (_, start, nbytes, place) in enumerate(parts):
                    low = max(piece.start, start // unit)
                    high = min(piece.start + piece.length, (start + nbytes) // unit)
                    if low >= high:
                        continue
                    address = buffer + (low - piece.start) * unit
                    self._nccl.reduce(address, address, high - low, dtype, reduction.op, rank, self._address)
                    if rank == self._rank:
                        own.append((request.outputs[0] + place + low * unit - start, address, high - low))
            for target, address, count in own:
                # Copies that convert begin at whole vectors, so each has a buffer of its own.
                self._launcher.copy([Segment(target, 0, count)], address, False, dtype, dtype, after)

    # -- Gathered ----------------------------------------------------------------------------------------------

    @staticmethod
    def _must_gather(reduction: Reduction) -> bool:
        return reduction.op in ("min", "max") and reduction.dtype in _FLOATS

    def _allreduce_gathered(self, batch: Batch, reduction: Reduction) -> None:
        unit = ITEM_BYTES[reduction.dtype]
        most = ENTRIES // max(len(request.outputs) for request in batch)
        for pieces in rounds([request.count for request in batch], unit, self._part, most):
            outputs = [
                Segment(address + piece.start * unit, piece.offset, piece.length * unit)
                for piece in pieces
                for address in batch[piece.request].outputs
            ]
            world = self._gather(batch, pieces, reduction)
            self._reduce_gathered(world, reduction, outputs)

    def _scatter_gathered(self, request: DeviceOperation, reduction: Reduction) -> None:
        unit = ITEM_BYTES[reduction.dtype]
        for pieces in rounds([request.count], unit, self._part, 1):
            (piece,) = pieces
            world = self._gather([request], pieces, reduction)
            for _, start, nbytes, place in request.parts:
                low = max(piece.start * unit, start)
                high = min((piece.start + piece.length) * unit, start + nbytes)
                if low >= high:
                    continue
                offset = low - piece.start * unit
                head = offset % ALIGNMENT
                # Kernels begin at whole vectors: the packed part, which is no longer needed, takes what is before.
                beside = Segment(self._staging.address, offset - head, high - low + head)
                self._reduce_gathered(world, reduction, [beside])
                target = request.outputs[0] + place + low - start
                self.stream.copy(target, self._staging.address + head, high - low)

    def _gather(self, batch: Batch, pieces: Sequence[Piece], reduction: Reduction) -> int:
        """Gather all workers' pieces; returns where the kernels read of it."""
        unit = ITEM_BYTES[reduction.dtype]
        self._launcher.copy(_segments(batch, pieces, unit), self._staging.address, True, reduction.dtype)
        # A few distances serve all sizes: what a kernel knows of the workers' memory need not be written each time.
        nbytes = min(self._part, max(512, 1 << (buffer_bytes(pieces, unit) - 1).bit_length()))
        self._nccl.all_gather(self._staging.address, self._gathered, nbytes, self._address)
        if nbytes not in self._worlds:
            staging = [self._gathered + rank * nbytes for rank in range(self._size)]
            nothing = [0] * self._size
            self._worlds[nbytes] = self._launcher.world(Members(self._rank, staging, nothing, nothing))
        return self._worlds[nbytes]

    def _reduce_gathered(self, world: int, reduction: Reduction, outputs: Sequence[Segment]) -> None:
        name = kernels.allreduce_kernel("oneshot", reduction.dtype, reduction.op, as_half=reduction.as_half)
        nbytes = max(each.offset + each.size for each in outputs)
        self._launcher.collective(name, world, reduction, [], outputs, nbytes, meet=False)

    # -- What the others take ----------------------------------------------------------------------------------

    def _parts_of_all(self, request: DeviceOperation) -> list[list[tuple[int, int, int, int]]]:
        """Every worker's parts of a request, which only the worker itself knows."""
        room = self._size
        while True:
            rows = np.zeros((room + 1, 4), np.int64)
            rows[0, 0] = len(request.parts)
            known = min(room, len(request.parts))
            if known:
                rows[1 : known + 1] = list(request.parts)[:known]
            told = self._tell(rows)
            most = int(told[:, 0, 0].max())
            if most <= room:
                return [[tuple(row) for row in each[1 : each[0, 0] + 1].tolist()] for each in told]
            room = most

    def _tell(self, rows: Any) -> Any:
        """All workers' rows, which are as many on each."""
        nbytes = rows.nbytes
        if self._told is None or self._told[0].nbytes < nbytes * (self._size + 1):
            # The last ones are free: what came with them has been read.
            close_all(*(memory.close for memory in self._told or ()))
            self._told = PinnedMemory(nbytes * (self._size + 1)), DeviceMemory(nbytes * (self._size + 1))
        host, device = self._told
        view = host.view(np.int64)
        view[: rows.size] = rows.ravel()
        self.stream.copy(device.address, host.address, nbytes)
        self._nccl.all_gather(device.address, device.address + nbytes, nbytes, self._address)
        self.stream.copy(host.address + nbytes, device.address + nbytes, nbytes * self._size)
        event = Event().record(self.stream)
        self._launcher.wait(event, self._nccl.check)
        event.close()
        return view[rows.size : rows.size * (self._size + 1)].reshape(self._size, *rows.shape).copy()


def _packed_dtype(reduction: Reduction) -> str:
    is_half = reduction.as_half and reduction.op in _SUMS and reduction.dtype in ("float32", "float64")
    return "float16" if is_half else reduction.dtype


def _factors(reduction: Reduction) -> tuple[float, float]:
    """What to multiply with before, and after."""
    # In sums of floats a factor up to 1 comes before: then nothing overflows on the way that does not at the end.
    before, after = reduction.prescale, reduction.postscale
    if reduction.op in _SUMS and reduction.dtype in _FLOATS and abs(after) <= 1.0:
        return before * after, 1.0
    return before, after


def _segments(batch: Batch, pieces: Sequence[Piece], unit: int) -> list[Segment]:
    return [
        Segment(input_of(batch[piece.request]) + piece.start * unit, piece.offset, piece.length) for piece in pieces
    ]


def _is_even(parts: Sequence[Sequence[int]], nbytes: int) -> bool:
    """Whether every rank takes as much, in their order, and all of it is taken."""
    return all((start, size) == (rank * nbytes, nbytes) for rank, (_, start, size, _) in enumerate(parts))
