"""The connections of a loop, as one descriptor that can be waited for together with everything else."""

from __future__ import annotations

import select
from typing import Protocol

from kvstore_hvd.base.channel import Channel

__all__ = ["Connections"]


class _HasDescriptor(Protocol):
    def fileno(self) -> int: ...


class Connections:
    """Knows which connections can be read, and writes what they could not write at once."""

    def __init__(self, *others: _HasDescriptor) -> None:
        self._epoll = select.epoll()
        self._known: dict[int, tuple[Channel, int]] = {}  # by descriptor: and for what we wait there
        for other in others:
            self._epoll.register(other.fileno(), select.EPOLLIN)

    def fileno(self) -> int:
        """The descriptor that can be read when there is something to do."""
        return self._epoll.fileno()

    def add(self, connection: Channel) -> None:
        """Attend to this connection from now on."""
        self._epoll.register(connection.fileno(), select.EPOLLIN)
        self._known[connection.fileno()] = (connection, select.EPOLLIN)

    def close(self, connection: Channel) -> None:
        """Close a connection; without effect on one that is closed."""
        # Its number may be given to the next one at once.
        if self._known.pop(connection.fileno(), None) is not None:
            self._epoll.unregister(connection.fileno())
        connection.close()

    def arm(self) -> None:
        """Before each wait: also wait until what is unsent can be written."""
        for fd, (connection, before) in self._known.items():
            events = select.EPOLLIN | (select.EPOLLOUT if connection.wants_to_write else 0)
            if events != before:
                self._epoll.modify(fd, events)
                self._known[fd] = (connection, events)

    def ready(self) -> list[Channel]:
        """The connections that can be read now, or have ended; those that can be written are flushed."""
        readable = []
        for fd, events in self._epoll.poll(0):
            if fd not in self._known:
                continue
            connection, _ = self._known[fd]
            if events & select.EPOLLOUT:
                connection.flush()
            if events & ~select.EPOLLOUT:
                readable.append(connection)
        return readable

    def close_all(self) -> None:
        """Close the connections, and the descriptor."""
        for connection, _ in self._known.values():
            connection.close()
        self._known.clear()
        self._epoll.close()
