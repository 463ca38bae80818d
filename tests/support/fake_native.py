"""A world of several workers that only this one is in, without native code: what was asked of it is recorded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvstore_hvd import native
from kvstore_hvd.comm.base import Communicator, Request
from kvstore_hvd.errors import KVHvdError
from kvstore_hvd.process import process
from kvstore_hvd.worlds.topology import Host, Topology, World

__all__ = ["FakeAdapter", "FakeCommunicator", "fake_world"]


class FakeAdapter:
    """Lists the names of operations, and carries none out."""

    def __init__(self) -> None:
        self.operations: list[str] = []
        self.unread: list[KVHvdError] = []

    def is_dense(self, handle: int) -> bool:
        """Every array may be handed over as it is."""
        return True

    def chunk_id(self, handle: int) -> int:
        """Every array has a storage of its own."""
        return handle

    def pushpull(self, name: str, *arguments: Any) -> None:
        """Note it."""
        self.operations.append(name)

    def pushpull_in_place(self, name: str, *arguments: Any) -> int | None:
        """Every case needs a closer look: unit tests are about what the store does then."""
        return None

    broadcast = pushpull

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
    communicator = FakeCommunicator(FakeAdapter())
    mine._member._world = World(topology, "fake", b"")
    mine._member._communicator = communicator
    before = process._current
    process._current = mine
    try:
        yield communicator
    finally:
        process._current = before
