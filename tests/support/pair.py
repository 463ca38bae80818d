"""The adapter between MXNet's engine and ours, with a second rank in the same process."""

import threading
from typing import Any

import numpy as np
import pytest

from kvstore_hvd import mxnet_compat, native
from support.arrays import Array, request_of
from support.patience import patient

mx = pytest.importorskip("mxnet")

from kvstore_hvd.mxnet_compat.hooks import register_errors  # noqa: E402

TIMEOUT_S = patient(30.0)
register_errors(mx)


def handles(arrays: list[Any]) -> list[int]:
    return [mxnet_compat.handle_of(array) for array in arrays]


class World:
    """Rank 0 is the adapter's, rank 1 works on NumPy arrays."""

    def __init__(self, naive: bool = False) -> None:
        self.segment = native.Segment.create(2)
        self.engine = native.Engine(self.segment, 0, TIMEOUT_S, False)
        self.other = native.Engine(self.segment, 1, TIMEOUT_S, False)
        self.adapter = native.MXNetAdapter(self.engine, mxnet_compat.libmxnet_path(), naive)
        self.submitted: list[Array] = []  # must live until their requests are done

    def pushpull(self, name: str, inputs: list[Any], outputs: list[Any]) -> None:
        self.adapter.pushpull(name, repr(name), handles(inputs), handles(outputs))

    def broadcast(self, name: str, array: Any, root: int) -> None:
        self.adapter.broadcast(name, repr(name), mxnet_compat.handle_of(array), root, 0)

    def prepare(self, arrays: list[Any]) -> Any:
        return self.adapter.prepare([(f"g{i}", f"'g{i}'", handle, -i) for i, handle in enumerate(handles(arrays))])

    def submit(self, name: str, array: Array, root: int = -1) -> native.Work:
        """Let rank 1 take part, in place; a broadcast when there is a root."""
        self.submitted.append(array)
        collective = "allreduce" if root < 0 else "broadcast"
        return self.other.submit(request_of(array, name, collective, root=max(root, 0)))

    def close(self) -> None:
        """Leave, with both ranks at once: neither has to wait for the other."""
        other = threading.Thread(target=self.other.shutdown)
        other.start()
        self.engine.shutdown()
        other.join()


def ramp(shape: tuple[int, ...], dtype: str = "float32", start: int = 1) -> Array:
    """Return whole numbers below 50 that differ from one element to the next, so that sums are exact."""
    return (np.arange(start, start + int(np.prod(shape))) % 50).reshape(shape).astype(dtype)
