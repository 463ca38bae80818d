"""Two executors for one world: our kernels for what is small, NCCL for what is large.

Both enqueue on one stream, in the same order on all workers: kernels of the one never wait beside those of the other.
"""

from __future__ import annotations

from kvstore_hvd.comm.device.executor import Batch, Completion, Executor
from kvstore_hvd.native import ITEM_BYTES

__all__ = ["SplitExecutor"]


class SplitExecutor(Executor):
    """Chooses by the size of a batch, which is the same on all workers."""

    def __init__(self, small: Executor, large: Executor, limit: int) -> None:
        self._small, self._large, self._limit = small, large, limit

    def allreduce(self, batch: Batch) -> Completion:
        """See `Executor.allreduce`."""
        return self._for(batch).allreduce(batch)

    def broadcast(self, batch: Batch) -> Completion:
        """See `Executor.broadcast`."""
        return self._for(batch).broadcast(batch)

    def exchange(self, batch: Batch) -> Completion:
        """See `Executor.exchange`."""
        return self._for(batch).exchange(batch)

    def reducescatter(self, batch: Batch) -> Completion:
        """See `Executor.reducescatter`."""
        return self._for(batch).reducescatter(batch)

    def abort(self) -> None:
        """See `Executor.abort`."""
        self._small.abort()
        self._large.abort()

    def end(self, limit_s: float) -> bool:
        """See `Executor.end`."""
        self._small.abort()
        return self._large.end(limit_s)

    def close(self) -> None:
        """See `Executor.close`."""
        # What both have enqueued ends with the stream, which the second one gives back.
        self._small.close()
        self._large.close()

    def _for(self, batch: Batch) -> Executor:
        nbytes = sum(request.count * ITEM_BYTES[request.dtype] for request in batch)
        return self._small if nbytes <= self._limit else self._large
