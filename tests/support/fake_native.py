"""A world of several workers in which all the others are echoes of this one, without native code.

Every other worker contributes what this one does, so a sum over n workers is n times this worker's. What was asked of
the engine is recorded, to be compared with what should have been asked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvstore_hvd import native
from kvstore_hvd.comm.base import Communicator, Request
from kvstore_hvd.errors import KVHvdError
from kvstore_hvd.process import process
from kvstore_hvd.worlds.topology import Host, Topology, World

__all__ = ["FakeAdapter", "FakeCommunicator", "Submitted", "fake_world"]


@dataclass
class Submitted:
    """One operation that reached the adapter."""

    collective: str
    name: str
    label: str
    inputs: list[int]
    outputs: list[int]
    priority: int
    dtype: str
    as_half: bool = False


class FakeAdapter:
    """Carries operations out in this process, at once; `operations` lists them."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.operations: list[Submitted] = []
        self.unread: list[KVHvdError] = []
        self.unreachable: set[int] = set()  # storages that is_dense() denies

    def is_dense(self, handle: int) -> bool:
        """Whether the array may be handed over as it is."""
        return self.chunk_id(handle) not in self.unreachable

    def chunk_id(self, handle: int) -> int:
        """The first word of an array is the address of its storage."""
        return ctypes.c_void_p.from_address(handle).value or 0

    def pushpull(
        self,
        name: str,
        label: str,
        inputs: list[int],
        outputs: list[int],
        op: str,
        prescale: float,
        postscale: float,
        priority: int,
        as_half: bool,
        weight: float,
        group: int,
    ) -> None:
        """Write size times the sum of the inputs to every output."""
        assert (op, prescale, postscale, weight) == ("sum", 1.0, 1.0, 1.0)
        sources = [_array(handle).asnumpy() for handle in inputs]
        dtype = str(sources[0].dtype)
        self.operations.append(Submitted("allreduce", name, label, inputs, outputs, priority, dtype, as_half))
        total = sum(sources) * self._size
        for handle in outputs:
            target = _array(handle)
            assert str(target.asnumpy().dtype) == dtype, "inputs and outputs differ in dtype"
            target[:] = total

    def pushpull_in_place(self, name: str, label: str, array: int, priority: int, as_half: bool) -> int | None:
        """Every case needs a closer look: unit tests are about what the store does then."""
        return None

    def broadcast(self, name: str, label: str, array: int, root: int, priority: int) -> None:
        """Leave the array as it is: the root is an echo too."""
        assert root == 0
        dtype = str(_array(array).asnumpy().dtype)
        self.operations.append(Submitted("broadcast", name, label, [array], [array], priority, dtype))

    def take_unread_error(self) -> KVHvdError | None:
        """Give out the errors that a test has put into `unread`, one by one."""
        return self.unread.pop(0) if self.unread else None

    def after_fork_in_child(self) -> None:
        """Nothing to let go of."""


@dataclass
class FakeCommunicator(Communicator):
    """Records; everything succeeds at once."""

    adapter: FakeAdapter
    requests: list[Request] = field(default_factory=list)
    failure: KVHvdError | None = None
    left: list[str] = field(default_factory=list)
    interrupted: BaseException | None = None
    is_pending: bool = False

    def submit(self, request: Request) -> native.Work:
        """Not needed by stores."""
        raise NotImplementedError

    def run(self, request: Request) -> None:
        """Record the request."""
        self.requests.append(request)

    def prepare(self, request: Request, result: Any, owner: Any) -> Callable[[], Any]:
        """Not needed by stores."""
        raise NotImplementedError

    def wait(self, work: native.Work) -> None:
        """Not needed by stores."""
        raise NotImplementedError

    def wait_for_all(self) -> bool:
        """Nothing is pending, unless the test says so; raises what it has set."""
        if self.interrupted is not None:
            raise self.interrupted
        return not self.is_pending

    def health(self) -> KVHvdError | None:
        """The failure that the test has set."""
        return self.failure

    def abort(self, text: str) -> None:
        """Record it as leaving."""
        self.left.append(f"abort: {text}")

    def shutdown(self, reason: str = "") -> None:
        """Record it."""
        self.left.append(reason)

    def mxnet_adapter(self, library_path: str, naive: bool) -> Any:
        """Return the adapter that records."""
        return self.adapter


@contextmanager
def fake_world(rank: int = 0, size: int = 2) -> Iterator[FakeCommunicator]:
    """Put this process into a fake world for the duration; stores created inside belong to it."""
    mine = process.Process()
    topology = Topology.of(rank, [Host.here()] * size, source="launcher")
    communicator = FakeCommunicator(FakeAdapter(size))
    mine._member._world = World(topology, "fake", b"")
    mine._member._communicator = communicator
    before = process._current
    process._current = mine
    try:
        yield communicator
    finally:
        process._current = before


def _array(handle: int) -> Any:
    import mxnet as mx

    copied = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.MXShallowCopyNDArray(ctypes.c_void_p(handle), ctypes.byref(copied)))
    return mx.nd.NDArray(copied)
