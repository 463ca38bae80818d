"""What the workers and the launcher tell the program that has started them: the results, or what went wrong.

A report is one message of a socket that has no name, which they inherit, and comes with the file of what is reported:
it arrives as a whole or not at all, whatever happens to the sender.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from kvstore_hvd.calling.parcel import pack, unpack
from kvstore_hvd.errors import RunError, message

__all__ = ["Kind", "Report", "Reporter", "Reports", "Sender"]

_LONGEST = 4096


class Kind(enum.Enum):
    """What a report is about."""

    RESULT = "result"  # of a worker: what the function has returned
    FAILED = "failed"  # of a worker: a `Failure`
    REFUSED = "refused"  # of the launcher: why it does not start the job
    ENDED = "ended"  # of the launcher: why the job has failed


@dataclass(frozen=True)
class Sender:
    """The place of a worker, as it reports. `worker`: its number in an elastic job; `generation`: -1 before a world."""

    rank: int = 0
    size: int = 1
    generation: int = -1
    worker: int | None = None

    @property
    def is_of_world(self) -> bool:
        """Whether there is a rank: workers of an elastic job have none before their first world."""
        return self.worker is None or self.generation >= 0

    @property
    def place(self) -> int:
        """What orders the results."""
        return self.rank if self.is_of_world else self.worker or 0

    def __str__(self) -> str:
        return f"{'rank' if self.is_of_world else 'worker'} {self.place}"


@dataclass(eq=False)
class Report:
    """A report; `value` reads what has come with it, and may raise whatever unpickling raises."""

    kind: Kind
    sender: Sender
    fd: int

    def value(self) -> Any:
        """What is reported."""
        return next(unpack(self.fd))

    def close(self) -> None:
        """Let go of the file."""
        os.close(self.fd)


class Reporter:
    """The end of the socket that reports go into."""

    def __init__(self, fd: int) -> None:
        self._socket = socket.socket(fileno=fd)
        self._socket.set_inheritable(False)

    def send(self, kind: Kind, sender: Sender, value: Any) -> None:
        """Report."""
        fd = pack(value)
        try:
            head = json.dumps([kind.value, sender.rank, sender.size, sender.generation, sender.worker])
            socket.send_fds(self._socket, [head.encode()], [fd])
        finally:
            os.close(fd)


class Reports:
    """The other end of the socket, where reports arrive. A context manager, which closes both ends."""

    def __init__(self) -> None:
        self._ours, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self.is_open = True  # somebody may report

    def __enter__(self) -> Reports:
        return self

    def __exit__(self, *exception: object) -> None:
        self._ours.close()
        self._theirs.close()

    def fileno(self) -> int:
        """The descriptor that can be read when there are reports, and once there will be none."""
        return self._ours.fileno()

    @property
    def inherited(self) -> int:
        """The descriptor for those that report."""
        return self._theirs.fileno()

    def given(self) -> None:
        """They have it: this process closes its own."""
        self._theirs.close()

    def take(self) -> Iterator[Report]:
        """All that have arrived; does not wait."""
        with contextlib.suppress(BlockingIOError, ConnectionResetError):
            while self.is_open:
                head, fds, _, _ = socket.recv_fds(self._ours, _LONGEST, 1)
                if not head:
                    self.is_open = False
                    return
                kind, *place = json.loads(head)
                sender = Sender(*place)
                if not fds:  # the kernel drops what it has no number for
                    fact = f"a report of {sender} ({kind}) is lost: this program has no descriptor left for it."
                    fix = "close files, or raise ulimit -n: each worker's result takes a descriptor."
                    raise RunError(message(fact, operation="run", fix=fix))
                yield Report(Kind(kind), sender, fds[0])
