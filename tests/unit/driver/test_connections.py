"""The connections of a loop: when it is woken, and when it may sleep."""

from __future__ import annotations

import select
import socket
from typing import Any

from kvstore_hvd.driver.connections import Connections


class Line:
    """As much of a connection as the loop sees."""

    def __init__(self, connected: socket.socket) -> None:
        self.fileno = connected.fileno
        self.close = connected.close
        self.wants_to_write = False
        self.flushed = 0

    def flush(self) -> None:
        """All is written."""
        self.flushed += 1
        self.wants_to_write = False


def is_woken(connections: Connections) -> bool:
    connections.arm()
    return bool(select.select([connections], [], [], 0)[0])


def test_the_loop_is_woken_to_write_only_while_there_is_something_to_write() -> None:
    ours, theirs = socket.socketpair()
    line: Any = Line(ours)
    connections = Connections()
    connections.add(line)
    for flushed in (1, 2):
        assert not is_woken(connections)
        line.wants_to_write = True
        assert is_woken(connections)
        assert connections.ready() == []
        assert line.flushed == flushed
    assert not is_woken(connections)
    theirs.send(b"x")
    assert is_woken(connections)
    assert connections.ready() == [line]
    connections.close_all()
    theirs.close()
