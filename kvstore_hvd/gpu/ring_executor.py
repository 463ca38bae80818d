"""Our kernels over memory that the GPUs of one host share: for ranks that have one GPU together, and small messages.

Tensors are gathered in staging memory that every rank maps; which kernel reduces them there depends on their size. One-
and two-shot kernels add in the order of ranks, so that results have the bits that the CPU engine gives. Only a tensor
that is larger than the staging memory, on GPUs that nobody shares, goes around a ring in place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from kvstore_hvd.errors import LaunchError, TransportError, message
from kvstore_hvd.gpu import kernels, shapes
from kvstore_hvd.gpu.devices import Device, Residents, activate, shared
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
from kvstore_hvd.gpu.launcher import GRACE_S, Launcher, Members, Reduction, Segment
from kvstore_hvd.gpu.memory import DeviceMemory, PeerMemory
from kvstore_hvd.gpu.module import Kernels
from kvstore_hvd.gpu.runtime import close_all
from kvstore_hvd.gpu.streams import Stream
from kvstore_hvd.gpu.tables import ENTRIES
from kvstore_hvd.native import ITEM_BYTES
from kvstore_hvd.native.records import DeviceOperation

_LINE = 128
_SLOT_VECTORS = 2048  # of a ring's slot: 32 KiB


class RingExecutor(Executor):
    """Reduces by kernels that read and write the memory of all ranks' GPUs. Collective: maps that memory."""

    def __init__(
        self,
        rank: int,
        devices: Sequence[Device],
        ordinal: int,
        staging_bytes: int,
        timeout_s: float,
        share: Callable[[str], list[str]],
        stream: Stream | None = None,
    ) -> None:
        if len(devices) > kernels.MAX_RANKS:
            raise LaunchError(
                message(
                    f"{len(devices)} workers have GPUs of one host; our kernels serve {kernels.MAX_RANKS}.",
                    fix="start fewer, or give each its own GPU and install NCCL.",
                )
            )
        self._rank, self._size, self._ordinal, self._timeout_s = rank, len(devices), ordinal, timeout_s
        activate(ordinal)
        self._residents = Residents(ordinal)
        self._owns_stream = stream is None
        self._stream = stream if stream is not None else Stream()
        self._is_shared = bool(shared(devices))
        self._half = staging_bytes // 2 // _LINE * _LINE
        self._flip = False
        fifo_bytes = 0 if self._is_shared else shapes.fifo_bytes(kernels.MAX_CHANNELS, _SLOT_VECTORS)
        places = [0, kernels.CONTROL_BYTES, kernels.CONTROL_BYTES + 2 * self._half]
        sharers = sum(device.uuid == devices[rank].uuid for device in devices)
        self.modules = Kernels(devices[rank].capability, devices[rank].multiprocessors, sharers)
        # Blocks of a ring are rings of their own, and so as many on every rank: what all have room for.
        self._ring_limits = shapes.Limits(min(device.multiprocessors for device in devices), 1)
        self._memory: DeviceMemory | None = None
        self._peers: list[PeerMemory] = []
        self._launcher: Launcher | None = None
        try:
            bases = self._exchange_memory(places[-1] + fifo_bytes, share)
            members = Members(
                rank,
                staging=[base + places[1] for base in bases],
                control=[base + places[0] for base in bases],
                fifo=[base + places[2] if fifo_bytes else 0 for base in bases],
                slot_vectors=_SLOT_VECTORS,
            )
            self._staging = members.staging[rank]
            self._launcher = Launcher(self.modules, self._stream, timeout_s, self._is_shared)
            self._world = self._launcher.world(members)
            fault = ""
        except (LaunchError, TransportError) as error:
            fault = str(error)
        # All have it, or nobody does.
        for other, text in enumerate(share(fault)):
            if text:
                self._give_back()
                raise LaunchError(message(f"rank {other} cannot use memory of the GPUs together.", details=[text]))

    def _exchange_memory(self, nbytes: int, share: Callable[[str], list[str]]) -> list[int]:
        """The addresses of all ranks' memory here."""
        own: dict[str, Any] = {"bytes": self._half}
        try:
            self._memory = DeviceMemory(nbytes)
            own["memory"] = self._memory.export()
        except TransportError as error:
            own["fault"] = str(error)
        everyone = [json.loads(text) for text in share(json.dumps(own))]
        for rank, told in enumerate(everyone):
            if "fault" in told:
                raise LaunchError(message(f"rank {rank} has no memory to share.", details=[told["fault"]]))
        if len({told["bytes"] for told in everyone}) > 1:
            amounts = ", ".join(str(told["bytes"] >> 19) for told in everyone)
            raise LaunchError(
                message(
                    f"the workers have {amounts} MiB of staging memory on their GPUs.",
                    fix="set KVHVD_GPU_STAGING_MIB alike on all workers.",
                )
            )
        bases = []
        for rank, told in enumerate(everyone):
            if rank == self._rank and self._memory is not None:
                bases.append(self._memory.address)
            else:
                self._peers.append(PeerMemory(told["memory"]))
                bases.append(self._peers[-1].address)
        return bases

    # -- Operations --------------------------------------------------------------------------------------------

    def allreduce(self, batch: Batch) -> Completion:
        """See `Executor.allreduce`."""
        self._enter(batch)
        reduction = reduction_of(batch[0])
        item = ITEM_BYTES[reduction.dtype]
        if self._size == 1 and reduction.is_plain:
            # Bit by bit: what a kernel computes of a NaN is another one.
            for request in batch:
                for output in request.outputs:
                    self._stream.copy(output, input_of(request), request.count * item)
            return self._completion()
        if self._size > 1 and len(batch) == 1 and batch[0].count * item > self._half and not self._is_shared:
            self._ring(batch[0], reduction)
            return self._completion()
        most = ENTRIES // (1 + max(len(request.outputs) for request in batch))
        for pieces in rounds([request.count for request in batch], item, self._half, most):
            nbytes = buffer_bytes(pieces, item)
            way = shapes.choose(self._size, nbytes, self._half)
            name = kernels.allreduce_kernel(
                way, reduction.dtype, reduction.op, as_half=reduction.as_half, ranks=self._size
            )
            outputs = [
                Segment(address + piece.start * item, piece.offset, piece.length * item)
                for piece in pieces
                for address in batch[piece.request].outputs
            ]
            self._launch(name, reduction, _inputs(batch, pieces, item), outputs, nbytes)
        return self._completion()

    def broadcast(self, batch: Batch) -> Completion:
        """See `Executor.broadcast`."""
        self._enter(batch)
        root, unit, bytewise = batch[0].root, ITEM_BYTES[batch[0].dtype], Reduction(batch[0].dtype, "sum")
        most = ENTRIES // (1 + max(len(request.outputs) for request in batch))
        for pieces in rounds([request.count * unit for request in batch], 1, self._half, most):
            inputs = _inputs(batch, pieces, 1) if self._rank == root else []
            sources = {segment.pointer for segment in inputs}
            outputs = [
                Segment(address + piece.start, piece.offset, piece.length, root)
                for piece in pieces
                for address in batch[piece.request].outputs
                if address + piece.start not in sources
            ]
            self._launch(kernels.exchange_kernel(), bytewise, inputs, outputs, buffer_bytes(pieces, 1))
        return self._completion()

    def exchange(self, batch: Batch) -> Completion:
        """See `Executor.exchange`."""
        self._enter(batch)
        unit, bytewise = ITEM_BYTES[batch[0].dtype], Reduction(batch[0].dtype, "sum")
        most = ENTRIES // (1 + max(self._size, *(len(request.parts) for request in batch)))
        # `count` is the largest of all ranks: so places in the staging memory are equal.
        for pieces in rounds([request.count * unit for request in batch], 1, self._half, most):
            inputs, outputs = [], []
            for piece in pieces:
                request = batch[piece.request]
                own = min(request.contributed * unit, piece.start + piece.length) - piece.start
                if own > 0:
                    inputs.append(Segment(input_of(request) + piece.start, piece.offset, own))
                for rank, start, nbytes, place in request.parts:
                    low, high = _overlap(piece, start, nbytes)
                    if low < high:
                        target = request.outputs[0] + place + low - start
                        outputs.append(Segment(target, piece.offset + low - piece.start, high - low, rank))
            self._launch(kernels.exchange_kernel(), bytewise, inputs, outputs, buffer_bytes(pieces, 1))
        return self._completion()

    def reducescatter(self, batch: Batch) -> Completion:
        """See `Executor.reducescatter`."""
        self._enter(batch)
        reduction = reduction_of(batch[0])
        unit = ITEM_BYTES[reduction.dtype]
        name = kernels.allreduce_kernel("oneshot", reduction.dtype, reduction.op)
        for pieces in rounds([request.count * unit for request in batch], 1, self._half, ENTRIES // 2):
            outputs, copies = [], []
            for piece in pieces:
                for _, start, nbytes, place in batch[piece.request].parts:
                    low, high = _overlap(piece, start, nbytes)
                    if low >= high:
                        continue
                    target = batch[piece.request].outputs[0] + place + low - start
                    offset, size = piece.offset + low - piece.start, high - low
                    head = offset % ALIGNMENT
                    if head:
                        # Kernels begin at whole vectors, so what is before the part is reduced, too. It goes to the
                        # half of the staging memory that nobody reads any more when the ranks have met.
                        beside = self._staging + self._half * self._flip + offset - head
                        outputs.append(Segment(beside, offset - head, size + head))
                        copies.append((target, beside + head, size))
                    else:
                        outputs.append(Segment(target, offset, size))
            self._launch(name, reduction, _inputs(batch, pieces, 1), outputs, buffer_bytes(pieces, 1))
            for copy in copies:
                self._stream.copy(*copy)
        return self._completion()

    def _enter(self, batch: Batch) -> None:
        activate(self._ordinal)
        self._residents.check(address for request in batch for address in (*request.inputs, *request.outputs))

    # -- How it goes -------------------------------------------------------------------------------------------

    def abort(self) -> None:
        """See `Executor.abort`."""
        self._launches.abort()

    def end(self, limit_s: float) -> bool:
        """See `Executor.end`."""
        self.abort()
        return self._stream.drain(limit_s)

    def close(self) -> None:
        """See `Executor.close`."""
        activate(self._ordinal)
        # Kernels that wait have ended, or end now: every one of them looks at the abort word. What does not end keeps
        # its memory: CUDA would wait for it without a limit.
        if self.end(END_S):
            self._give_back()

    # -- Inside ------------------------------------------------------------------------------------------------

    def _launch(
        self, name: str, reduction: Reduction, inputs: Sequence[Segment], outputs: Sequence[Segment], nbytes: int
    ) -> None:
        # Another rank may still read what the launch before has left: the halves take turns.
        self._flip = not self._flip
        self._launches.collective(name, self._world, reduction, inputs, outputs, nbytes, self._half * self._flip)

    def _ring(self, request: DeviceOperation, reduction: Reduction) -> None:
        nbytes = request.count * ITEM_BYTES[reduction.dtype]
        name = kernels.allreduce_kernel("ring", reduction.dtype, reduction.op, as_half=reduction.as_half)
        first, *others = request.outputs
        blocks = shapes.ring_channels(nbytes, _SLOT_VECTORS, self._ring_limits)
        inputs, outputs = [Segment(input_of(request), 0, nbytes)], [Segment(first, 0, nbytes)]
        self._launches.collective(name, self._world, reduction, inputs, outputs, nbytes, blocks=blocks)
        for other in others:
            self._stream.copy(other, first, nbytes)

    def _completion(self) -> Completion:
        # The kernels' own limit comes first: it knows who waits for whom.
        return EventCompletion(self._stream, self._launches.check, self.abort, self._timeout_s + GRACE_S)

    @property
    def _launches(self) -> Launcher:
        assert self._launcher is not None, "an executor that could not be made is not used"
        return self._launcher

    def _give_back(self) -> None:
        owned: list[Any] = [self._launcher, *self._peers, self._memory, self._stream if self._owns_stream else None]
        close_all(*(each.close for each in owned if each is not None))


def reduction_of(request: DeviceOperation) -> Reduction:
    """How the elements of a batch are combined, told by any of its requests."""
    return Reduction(request.dtype, request.op, request.prescale, request.postscale, request.as_half)


def _inputs(batch: Batch, pieces: Sequence[Piece], unit: int) -> list[Segment]:
    return [
        Segment(input_of(batch[piece.request]) + piece.start * unit, piece.offset, piece.length * unit)
        for piece in pieces
    ]


def _overlap(piece: Piece, start: int, nbytes: int) -> tuple[int, int]:
    """What a piece of bytes has of those from `start` on."""
    return max(piece.start, start), min(piece.start + piece.length, start + nbytes)
