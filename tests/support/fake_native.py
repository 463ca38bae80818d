"""A world of several workers that only this one is in, without native code: what was asked of it is recorded."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Optional

from kvstore_hvd import native
from kvstore_hvd.errors import KVHvdError
from kvstore_hvd.world import process
from kvstore_hvd.world.topology import Host, Place, World


class FakeAdapter:
    """Lists the names of operations, and carries none out; gives out the errors in `unread`, one by one."""

    def __init__(self) -> None:
        self.operations: list[str] = []
        self.unread: list[KVHvdError] = []

    def is_dense(self, handle: int) -> bool:
        return True

    def chunk_id(self, handle: int) -> int:
        return handle  # every array has a storage of its own

    def pushpull(self, name: str, *arguments: Any) -> None:
        self.operations.append(name)

    def pushpull_in_place(self, name: str, *arguments: Any) -> Optional[int]:
        return None  # every case needs a closer look: unit tests are about what the store does then

    broadcast = pushpull

    def take_unread_error(self) -> Optional[KVHvdError]:
        return self.unread.pop(0) if self.unread else None

    def after_fork_in_child(self) -> None:
        """Nothing to let go of."""


@dataclass
class FakeConnection:
    """Records, as connection and engine; everything succeeds at once, unless the test has set something else."""

    adapter: FakeAdapter
    requests: list[native.Request] = field(default_factory=list)
    failure: Optional[KVHvdError] = None
    left: list[str] = field(default_factory=list)
    interrupted: Optional[BaseException] = None
    pending: list[bool] = field(default_factory=list)

    arena = None

    @property
    def engine(self) -> Any:
        return self

    def start_device(self, device: int) -> None:
        """There are no devices."""

    def process(self, rank: int) -> tuple[int, str]:
        return 0, f"rank {rank}"

    def run(self, request: native.Request) -> None:
        self.requests.append(request)

    def wait_for_all(self, limit_s: float) -> bool:
        if self.interrupted is not None:
            raise self.interrupted
        return not (self.pending and self.pending.pop())

    def waiting(self, age_s: float) -> list[Any]:
        return []

    def health(self) -> Optional[KVHvdError]:
        return self.failure

    def abort(self, text: str) -> None:
        self.left.append(f"abort: {text}")

    def close(self, reason: str = "") -> None:
        self.left.append(reason)

    def mxnet_adapter(self) -> Any:
        return self.adapter


@contextmanager
def fake_world(rank: int = 0, size: int = 2) -> Iterator[FakeConnection]:
    """Put this process into a fake world for the duration; stores created inside belong to it."""
    mine = process.Process()
    topology = Place.of(rank, [Host.here()] * size, source="launcher")
    connection = FakeConnection(FakeAdapter())
    mine._member.world = World(topology, "fake", b"")
    mine._member._connection = connection  # type: ignore[assignment]
    before = process._current
    process._current, process.everybody = mine, mine._member
    try:
        yield connection
    finally:
        process._current, process.everybody = before, before._member
