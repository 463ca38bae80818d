"""How connections begin: a listener that strangers cannot harm, and the way to it."""

from __future__ import annotations

import errno
import os
import select
import socket
import time
from typing import Any, Union

from kvstore_hvd.base.clocks import Deadline
from kvstore_hvd.log import logger
from kvstore_hvd.wire.authentication import peer_process
from kvstore_hvd.wire.connection import Connection, WireError

__all__ = ["Address", "Listener", "connect"]

# Host and port, or the name of an abstract Unix socket without its leading NUL.
Address = Union[tuple[str, int], str]

# Connections that have not proved themselves: beyond this number the oldest is closed, after this time each is.
_MAX_STRANGERS = 64
_STRANGER_S = 5.0
_SAY_EVERY_S = 1.0
# Out of descriptors or memory: the next attempt is made after this time.
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_PAUSE_S = 0.1
_RETRY_S = 0.02


class Listener:
    """Accepts connections, and hands over those that have proved that they know the secret."""

    # What a stranger does costs bounded memory and time, and changes nothing. Processes of other users cannot come in
    # through a Unix socket at all.

    def __init__(self, address: Address, secret: bytes, identity: dict[str, Any]) -> None:
        self._secret = secret
        self._identity = identity
        self._strangers: dict[int, tuple[Connection, float]] = {}  # by descriptor: since when; the oldest first
        self._paused_until = 0.0
        self._refused = 0
        self._scarce = ""
        self._said_at = float("-inf")
        self._socket = _listening(address)
        self._socket.setblocking(False)
        self._epoll = select.epoll()
        self._epoll.register(self._socket, select.EPOLLIN)

    @property
    def address(self) -> Address:
        """Where it listens, for `connect`."""
        name: Any = self._socket.getsockname()
        return name[1:].decode() if isinstance(name, bytes) else (name[0], name[1])

    def fileno(self) -> int:
        """A descriptor that can be read when `accept` has something to do."""
        return self._epoll.fileno()

    def accept(self, now: float | None = None) -> list[Connection]:
        """Attend to all who have come, without waiting. Call it at least once a second: strangers have their time."""
        now = time.monotonic() if now is None else now
        for fd, (_, since) in list(self._strangers.items()):
            if now >= since + _STRANGER_S:
                self._refuse(fd)
        if self._paused_until and now >= self._paused_until:
            self._paused_until = 0.0
            self._epoll.modify(self._socket, select.EPOLLIN)
        proved = []
        for fd, _ in self._epoll.poll(0):
            if fd == self._socket.fileno():
                self._admit(now)
            elif fd in self._strangers and self._hear(fd):
                proved.append(self._strangers.pop(fd)[0])
                self._epoll.unregister(fd)
        self._tell(now)
        return proved

    def close(self) -> None:
        """Listen no more, and close what has not been handed over."""
        for connection, _ in self._strangers.values():
            connection.close()
        self._strangers.clear()
        self._socket.close()
        self._epoll.close()

    def _admit(self, now: float) -> None:
        for _ in range(_MAX_STRANGERS):  # more have to wait, so that they cannot keep us
            try:
                accepted, _ = self._socket.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _SCARCE:
                    # Whoever waits stays there, and would wake us for nothing, again and again.
                    self._paused_until = now + _PAUSE_S
                    self._epoll.modify(self._socket, 0)
                    self._scarce = error.strerror or str(error)
                    return
                continue  # this one is gone again
            if accepted.family == socket.AF_UNIX and peer_process(accepted)[1] != os.geteuid():
                accepted.close()
                self._refused += 1
                continue
            if len(self._strangers) >= _MAX_STRANGERS:
                self._refuse(next(iter(self._strangers)))
            connection = Connection(accepted, self._secret, "server", self._identity)
            self._strangers[connection.fileno()] = connection, now
            self._epoll.register(connection, select.EPOLLIN)

    def _hear(self, fd: int) -> bool:
        """Whether a stranger has now proved itself."""
        connection, _ = self._strangers[fd]
        try:
            connection.receive()
        except WireError:
            self._refuse(fd)
            return False
        return connection.is_authenticated

    def _refuse(self, fd: int) -> None:
        connection, _ = self._strangers.pop(fd)
        self._epoll.unregister(fd)
        connection.close()
        self._refused += 1

    def _tell(self, now: float) -> None:
        if not (self._refused or self._scarce) or now < self._said_at + _SAY_EVERY_S:
            return
        if self._refused:
            logger.info("connections that did not prove that they belong to the job: %d", self._refused)
        if self._scarce:
            logger.warning("a connection could not be accepted, and has to wait: %s", self._scarce)
        self._refused, self._scarce, self._said_at = 0, "", now


def connect(address: Address, secret: bytes, identity: dict[str, Any], timeout_s: float) -> Connection:
    """Connect to a `Listener`, and wait until both sides have proved themselves."""
    # Tries again until the time is over: a listener under attack may have closed us for others.
    shown = address if isinstance(address, str) else f"{address[0]}:{address[1]}"
    deadline = Deadline(timeout_s)
    while True:
        try:
            return _connect_once(address, secret, identity, deadline)
        except ConnectionRefusedError as error:
            raise WireError(f"nobody listens at {shown}.") from error
        except (OSError, WireError) as error:
            reason = str(error).rstrip(".")
        if deadline.left() <= _RETRY_S:
            raise WireError(f"no connection to {shown} within {timeout_s:g} s: {reason}.")
        time.sleep(_RETRY_S)


def _connect_once(address: Address, secret: bytes, identity: dict[str, Any], deadline: Deadline) -> Connection:
    # Another listener may hold the port by now; one that says nothing is none of ours.
    answer = deadline.within(_STRANGER_S)
    connected = _connected(address, answer)
    try:
        connection = Connection(connected, secret, "client", identity)
        poll = select.poll()
        poll.register(connection, select.POLLIN)
        while not connection.is_authenticated:
            if answer.left() <= 0:
                raise WireError("the other side does not answer.")
            if poll.poll(answer.wait_s() * 1000):
                connection.receive()
    except BaseException:
        connected.close()
        raise
    return connection


def _connected(address: Address, deadline: Deadline) -> socket.socket:
    if isinstance(address, str):
        return _connected_to(socket.AF_UNIX, b"\0" + address.encode(), deadline)
    failure: OSError | None = None
    for family, _, _, _, place in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        try:
            return _connected_to(family, place, deadline)
        except OSError as error:
            failure = error
    raise failure or OSError("its name has no address")


def _connected_to(family: int, place: Any, deadline: Deadline) -> socket.socket:
    connecting = socket.socket(family, socket.SOCK_STREAM)
    try:
        connecting.setblocking(False)
        code = connecting.connect_ex(place)
        if code == errno.EINPROGRESS:
            poll = select.poll()
            poll.register(connecting, select.POLLOUT)
            while not poll.poll(deadline.wait_s() * 1000):
                if deadline.left() <= 0:
                    raise WireError("the other side does not answer.")
            code = connecting.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))
    except BaseException:
        connecting.close()
        raise
    return connecting


def _listening(address: Address) -> socket.socket:
    if not isinstance(address, str):
        return socket.create_server(address, backlog=128)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listening.bind(b"\0" + address.encode())
        listening.listen(128)
    except BaseException:
        listening.close()
        raise
    return listening
