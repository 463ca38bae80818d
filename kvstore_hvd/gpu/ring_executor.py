"""Our kernels over memory that the GPUs of one host share: for ranks that share a GPU, and for small messages.

Tensors are gathered in staging memory that every rank maps, and reduced there by a kernel for their size. One- and
two-shot kernels add in the order of ranks, so that results have the bits of the CPU engine. Only a tensor that is
larger than the staging memory, on GPUs that no ranks share, goes around a ring in place.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from kvstore_hvd.errors import LaunchError, TransportError, message
from kvstore_hvd.gpu import kernels
from kvstore_hvd.gpu.executor import (
    ALIGNMENT,
    Batch,
    DeviceExecutor,
    buffer_bytes,
    rounds,
    segments,
)
from kvstore_hvd.gpu.kernels import Segment
from kvstore_hvd.gpu.launcher import ENTRIES, GRACE_S, Kernels, Launcher
from kvstore_hvd.gpu.runtime import Device, close_all, shared
from kvstore_hvd.gpu.streams import DeviceMemory, PeerMemory, Stream
from kvstore_hvd.native import ITEM_BYTES, DeviceOperation

_LINE = 128
_SLOT_VECTORS = 2048  # of a ring's slot: 32 KiB
_ONESHOT_BYTES = 1 << 20  # of all ranks' buffers together


class RingExecutor(DeviceExecutor):
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
            fact = f"{len(devices)} workers have GPUs of one host; our kernels serve {kernels.MAX_RANKS}."
            raise LaunchError(message(fact, fix="start fewer, or give each its own GPU and install NCCL."))
        # The kernels end at their own limit first, with an error that names both ranks.
        super().__init__(ordinal, timeout_s + GRACE_S, stream)
        self._rank, self._size = rank, len(devices)
        self._is_shared = bool(shared(devices))
        self._half = staging_bytes // 2 // _LINE * _LINE
        self._flip = False
        sharers = sum(device.uuid == devices[rank].uuid for device in devices)
        self.modules = Kernels(devices[rank].capability, devices[rank].multiprocessors, sharers)
        # The number of blocks of a ring is the same on all ranks: it fits the smallest device.
        self._ring_limits = kernels.Limits(min(device.multiprocessors for device in devices), 1)
        try:
            # A rank's memory: control, two halves of staging memory, FIFO.
            fifo = kernels.CONTROL_BYTES + 2 * self._half
            fifo_bytes = 0 if self._is_shared else kernels.fifo_bytes(_SLOT_VECTORS)
            bases = self._map_memory(fifo + fifo_bytes, share)
            staging = [base + kernels.CONTROL_BYTES for base in bases]
            self._staging = staging[rank]
            self._launcher = Launcher(self.modules, self.stream, timeout_s, self._is_shared)
            self._closes.append(self._launcher.close)
            fifos = [base + fifo for base in bases] if fifo_bytes else ()
            self._world = self._launcher.world(rank, staging, bases, fifos, _SLOT_VECTORS)
            fault = ""
        except (LaunchError, TransportError) as error:
            fault = str(error)
        # One rank's failure is that of all ranks.
        for other, text in enumerate(share(fault)):
            if text:
                close_all(*reversed(self._closes))
                raise LaunchError(message(f"rank {other} cannot use memory of the GPUs together.", details=[text]))

    def _map_memory(self, nbytes: int, share: Callable[[str], list[str]]) -> list[int]:
        """The addresses of all ranks' memory in this process."""
        own: dict[str, Any] = {"bytes": self._half}
        try:
            memory = DeviceMemory(nbytes)
            self._closes.append(memory.close)
            own["memory"] = memory.export()
        except TransportError as error:
            own["fault"] = str(error)
        everyone = [json.loads(text) for text in share(json.dumps(own))]
        for rank, other in enumerate(everyone):
            if "fault" in other:
                raise LaunchError(message(f"rank {rank} has no memory to share.", details=[other["fault"]]))
        if len({other["bytes"] for other in everyone}) > 1:
            amounts = ", ".join(str(other["bytes"] >> 19) for other in everyone)
            fact = f"the workers have {amounts} MiB of staging memory on their GPUs."
            raise LaunchError(message(fact, fix="set KVHVD_GPU_STAGING_MIB alike on all workers."))
        bases = []
        for other in everyone:
            mapped = PeerMemory(other["memory"])
            self._closes.append(mapped.close)
            bases.append(mapped.address)
        return bases

    # -- Operations ----------------------------------------------------------------------------------------------------

    def allreduce(self, batch: Batch) -> None:
        first = batch[0]
        item, how = ITEM_BYTES[first.dtype], (first.dtype, first.op, first.as_half)
        if self._size == 1 and first.prescale == first.postscale == 1.0 and kernels.packed_dtype(*how) == first.dtype:
            # A copy keeps all bits; a kernel would change those of a NaN.
            for request in batch:
                for output in request.outputs:
                    self.stream.copy(output, request.inputs[0], request.count * item)
            return
        if self._size > 1 and len(batch) == 1 and first.count * item > self._half and not self._is_shared:
            self._ring(first)
            return
        most = ENTRIES // (1 + max(len(request.outputs) for request in batch))
        for pieces in rounds([request.count for request in batch], item, self._half, most):
            nbytes = buffer_bytes(pieces, item)
            # A one-shot reads the buffer of every rank. A two-shot reads a part of each, but its second meeting costs
            # about as much as the transfer of `_ONESHOT_BYTES`.
            way = "oneshot" if nbytes * self._size <= _ONESHOT_BYTES else "twoshot"
            name = kernels.allreduce_kernel(way, first.dtype, first.op, as_half=first.as_half, ranks=self._size)
            self._launch(name, first, *segments(batch, pieces, item, item), nbytes)

    def broadcast(self, batch: Batch) -> None:
        root, unit = batch[0].root, ITEM_BYTES[batch[0].dtype]
        most = ENTRIES // (1 + max(len(request.outputs) for request in batch))
        for pieces in rounds([request.count * unit for request in batch], 1, self._half, most):
            inputs, outputs = segments(batch, pieces, 1, 1)
            if self._rank != root:
                inputs = []
            sources = {segment.pointer for segment in inputs}
            outputs = [segment._replace(rank=root) for segment in outputs if segment.pointer not in sources]
            self._launch(kernels.EXCHANGE_KERNEL, batch[0], inputs, outputs, buffer_bytes(pieces, 1))

    def exchange(self, batch: Batch) -> None:
        unit = ITEM_BYTES[batch[0].dtype]
        most = ENTRIES // (1 + max(self._size, *(len(request.parts) for request in batch)))
        # `count` is the largest of all ranks, so places in the staging memory are equal on all of them.
        for pieces in rounds([request.count * unit for request in batch], 1, self._half, most):
            inputs, outputs = [], []
            for piece in pieces:
                request = batch[piece.request]
                own = min(request.contributed * unit, piece.start + piece.length) - piece.start
                if own > 0:
                    inputs.append(Segment(request.inputs[0] + piece.start, piece.offset, own))
                for rank, offset, nbytes, place in piece.parts(request.parts):
                    outputs.append(Segment(request.outputs[0] + place, offset, nbytes, rank))
            self._launch(kernels.EXCHANGE_KERNEL, batch[0], inputs, outputs, buffer_bytes(pieces, 1))

    def reducescatter(self, batch: Batch) -> None:
        first = batch[0]
        unit, name = ITEM_BYTES[first.dtype], kernels.allreduce_kernel("oneshot", first.dtype, first.op)
        for pieces in rounds([request.count * unit for request in batch], 1, self._half, ENTRIES // 2):
            outputs, copies = [], []
            for piece in pieces:
                for _, offset, nbytes, place in piece.parts(batch[piece.request].parts):
                    target, head = batch[piece.request].outputs[0] + place, offset % ALIGNMENT
                    if head:
                        # Kernels begin at whole vectors, so bytes before the part are reduced, too. The result goes to
                        # the half of the staging memory that no rank reads any more when the ranks have met.
                        beside = self._staging + self._half * self._flip + offset - head
                        outputs.append(Segment(beside, offset - head, nbytes + head))
                        copies.append((target, beside + head, nbytes))
                    else:
                        outputs.append(Segment(target, offset, nbytes))
            self._launch(name, first, segments(batch, pieces, 1, 1)[0], outputs, buffer_bytes(pieces, 1))
            for copy in copies:
                self.stream.copy(*copy)

    def _launch(
        self, name: str, how: DeviceOperation, inputs: Sequence[Segment], outputs: Sequence[Segment], nbytes: int
    ) -> None:
        # The halves take turns, because another rank may still read that of the launch before.
        self._flip = not self._flip
        self._launcher.collective(name, self._world, how, inputs, outputs, nbytes, self._half * self._flip)

    def _ring(self, request: DeviceOperation) -> None:
        nbytes = request.count * ITEM_BYTES[request.dtype]
        name = kernels.allreduce_kernel("ring", request.dtype, request.op, as_half=request.as_half)
        blocks = kernels.ring_channels(nbytes, _SLOT_VECTORS, self._ring_limits)
        inputs, outputs = [Segment(request.inputs[0], 0, nbytes)], [Segment(request.outputs[0], 0, nbytes)]
        self._launcher.collective(name, self._world, request, inputs, outputs, nbytes, blocks=blocks)
        self.copy_to_others(request)
