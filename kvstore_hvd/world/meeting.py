"""Hand one memory segment to all workers of a host.

1. Local rank 0 listens on an abstract Unix socket: a name that is no file, and ends with its process.
2. It sends each connection a fresh nonce. A worker answers with a hello: its local rank, its process, its version.
3. Once all workers of the host have come, local rank 0 creates the segment and sends each the file descriptor. No
   worker returns earlier: this is also the barrier at the start of a world.

The kernel reports the user of a peer, which must be the same. HMAC-SHA256 over the nonces of both sides proves to each
side that the other one knows the job's secret. The socket keeps message boundaries: a foreign process sends one message
that does not verify, and its connection is closed.
"""

from __future__ import annotations

import array
import errno
import hashlib
import hmac
import logging
import os
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from kvstore_hvd import log
from kvstore_hvd.base.channel import peer_process
from kvstore_hvd.base.cores import LOOK_S, Deadline
from kvstore_hvd.config import config
from kvstore_hvd.errors import LaunchError, message
from kvstore_hvd.world.topology import Place, World, watching_namespaces

MAC_BYTES = NONCE_BYTES = 32
#: Seconds between two looks at workers that are missing, and whether the world is lost.
POLL_S = 0.02

_MAGIC = b"KVHVD\x01"
_MAX_MESSAGE = 16 * 1024
# Connections that have not proved themselves; past this number the oldest is closed.
_MAX_STRANGERS = 256
# The server's deadline is earlier, so that its text, which names the missing ranks, reaches the other workers.
_CLIENT_EXTRA_S = 5.0
# Errors of a process without free descriptors or memory, and the pause after one.
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_SCARCE_S = 0.1
# Time between the first two attempts to connect; it doubles, up to POLL_S.
_FIRST_PAUSE_S = 0.001

_HELLO = struct.Struct("!II")  # local rank, process id; then the fields
# Between the fields of a hello: version, payload, PID namespace, time namespace.
_SEPARATOR = "\0"
_OK, _FAILED = b"\x01", b"\x00"
_FIX_OF_SOCKETS = "a sandbox (seccomp, SELinux, AppArmor) forbids Unix sockets here: allow them, or run outside of it."
_UNSEEN = "the workers are in different {} namespaces, and cannot see whether the others are alive."
_ONE_CONTAINER = "start all of them in one container, or in containers with one {} namespace"
# Fields of a hello that must be equal: index, error, fix. Workers in other namespaces would take each other for dead.
_EQUAL = (
    (0, "the workers run different versions of kvstore_hvd.", "install the same version for every worker."),
    (2, _UNSEEN.format("PID"), f"{_ONE_CONTAINER.format('PID')} (docker run --pid=container:NAME)."),
    (3, _UNSEEN.format("time"), f"{_ONE_CONTAINER.format('time')}."),
)


def mac(secret: bytes, *parts: bytes) -> bytes:
    """HMAC-SHA256 over parts, each with its length, so that no two lists of parts have the same text."""
    text = b"".join(struct.pack("!I", len(part)) + part for part in parts)
    return hmac.digest(secret, text, hashlib.sha256)


def share_segment(
    world: World,
    create: Callable[[Sequence[str]], int],
    *,
    version: str = "",
    payload: str = "",
    timeout_s: float | None = None,
) -> int:
    """Share one segment among the workers of this host, made of their payloads. Collective over them; a barrier."""
    if world.topology.local_size == 1:
        return create([payload])
    timeout, fields = config().start_timeout_s if timeout_s is None else timeout_s, [version, payload]
    fields += watching_namespaces()
    if world.topology.local_rank == 0:
        return _Server(world, fields, timeout).run(create)
    return _fetch(world, fields, timeout)


def socket_name(world: World) -> bytes:
    """The abstract address of a world's meeting; without the secret it cannot be guessed or taken beforehand."""
    text = f"{world.job}/{world.meeting}/{world.topology.host}".encode()
    return b"\0kvstore_hvd-" + mac(world.secret, b"name", text).hex()[:32].encode()


def _socket() -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def check_wanted(world: World) -> None:
    """Raise LaunchError when the world is lost."""
    why = world.lost()
    if why:
        fix = "kvstore_hvd.elastic.run meets the next world by itself; outside of it, start the job again."
        raise _error(world.topology, f"the workers need not meet any more: {why}", fix)


def accept(listener: socket.socket) -> socket.socket | None:
    """The next connection, or None. Without free descriptors: None after a pause, logged once."""
    try:
        return listener.accept()[0]
    except OSError as error:
        if error.errno in _SCARCE:
            text = "a connection of another worker waits: %s. Fix: see ulimit -n and which files this process has open."
            log.once("accept", logging.WARNING, text, error.strerror)
            time.sleep(_SCARCE_S)  # the listener stays readable
        return None


def _error(topology: Place, fact: str, fix: str, details: Iterable[str] = ()) -> LaunchError:
    return LaunchError(message(fact, **topology.prefix, details=details, fix=fix))


# -- Local rank 0 -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Connection:
    socket: socket.socket
    pid: int
    nonce: bytes = field(default_factory=lambda: secrets.token_bytes(NONCE_BYTES))
    peer_nonce: bytes = b""
    rank: int = 0  # local rank, once proved
    fields: Sequence[str] = ()


class _Server:
    def __init__(self, world: World, fields: Sequence[str], timeout_s: float) -> None:
        self._world, self._fields, self._timeout_s = world, fields, timeout_s
        self._topology, self._ranks = world.topology, world.topology.local_ranks
        self._peers: dict[int, _Connection] = {}  # by local rank
        self._selector = selectors.DefaultSelector()

    def run(self, create: Callable[[Sequence[str]], int]) -> int:
        deadline, listener = Deadline(self._timeout_s), self._listen()
        status, text, fds = _OK, "", list[int]()
        try:
            self._gather(listener, deadline)
            self._compare()
            fds = [create([self._fields[1], *(peer.fields[1] for peer in self._peers.values())])]
            return fds[0]
        except BaseException as error:
            status, text = _FAILED, str(error) or type(error).__name__
            raise
        finally:
            for peer in self._peers.values():
                self._send(peer, status, text, *fds)
            for connection in self._connections():
                connection.socket.close()
            listener.close()
            self._selector.close()

    def _connections(self) -> list[_Connection]:
        """All connections, the oldest first."""
        return [key.data for key in self._selector.get_map().values() if key.data is not None]

    def _listen(self) -> socket.socket:
        listener = _socket()
        try:
            listener.bind(socket_name(self._world))
            listener.listen(max(128, 2 * self._topology.local_size))
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                fix = "create the store in one process per worker only; a process started by a worker must not "
                fix += "inherit its KVHVD_ variables."
                raise _error(self._topology, "another process is this rank of the job already.", fix) from None
            fact = f"cannot open a Unix socket to meet the other workers: {error}."
            raise _error(self._topology, fact, _FIX_OF_SOCKETS) from error
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        return listener

    def _gather(self, listener: socket.socket, deadline: Deadline) -> None:
        """Answer connections until all peers have proved themselves."""
        while len(self._peers) < self._topology.local_size - 1:
            if deadline.left() <= 0:
                raise self._missing()
            check_wanted(self._world)
            for key, _ in self._selector.select(deadline.wait_s(POLL_S)):
                if key.fileobj is listener:
                    self._accept(listener)
                else:
                    self._receive(key.data)

    def _accept(self, listener: socket.socket) -> None:
        if (accepted := accept(listener)) is None:
            return
        pid, uid = peer_process(accepted)
        if uid != os.geteuid():
            log.logger.info("rendezvous: refused process %d of user %d", pid, uid)
            accepted.close()
            return
        strangers = [each for each in self._connections() if not each.rank]
        if len(strangers) >= _MAX_STRANGERS:
            self._drop(strangers[0])
        accepted.setblocking(False)
        connection = _Connection(accepted, pid)
        self._selector.register(accepted, selectors.EVENT_READ, connection)
        try:
            accepted.send(_MAGIC + connection.nonce)
        except OSError:
            self._drop(connection)

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(_MAX_MESSAGE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if connection.rank:  # a proved peer sends nothing more: this is its end
            check_wanted(self._world)
            who = f"{self._topology.rank_list([self._ranks[connection.rank]])} (pid {connection.pid})"
            fact = f"{who} ended while the workers were finding each other."
            raise _error(self._topology, fact, "look at what that worker printed.")
        local_rank = self._verify(connection, data)
        if local_rank is None:
            if data:
                log.logger.info("rendezvous: process %d did not prove that it belongs to the job", connection.pid)
            self._drop(connection)
        elif local_rank in self._peers or not 0 < local_rank < self._topology.local_size:
            is_known = local_rank < self._topology.local_size
            rank = self._topology.all_ranks[self._ranks[local_rank]] if is_known else local_rank
            self._send(connection, _FAILED, f"rank {rank} has already joined from another process.")
            self._drop(connection)
        else:
            connection.rank = local_rank
            self._peers[local_rank] = connection

    def _verify(self, connection: _Connection, data: bytes) -> int | None:
        """The local rank of a hello that verifies, or None. Stores the other fields of the hello."""
        head = len(_MAGIC) + NONCE_BYTES + _HELLO.size
        if len(data) < head + MAC_BYTES or not data.startswith(_MAGIC):
            return None
        body, proof = data[:-MAC_BYTES], data[-MAC_BYTES:]
        if not hmac.compare_digest(proof, mac(self._world.secret, b"client", connection.nonce, body)):
            return None
        connection.peer_nonce = body[len(_MAGIC) : len(_MAGIC) + NONCE_BYTES]
        rank, connection.pid = _HELLO.unpack_from(body, len(_MAGIC) + NONCE_BYTES)
        fields = body[head:].decode("utf-8", "replace").split(_SEPARATOR)
        connection.fields = [*fields, *[""] * (len(self._fields) - len(fields))]
        return int(rank)

    def _drop(self, connection: _Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()

    def _compare(self) -> None:
        """Raise LaunchError unless these fields of all workers are equal."""
        for at, fact, fix in _EQUAL:
            ranks = {self._fields[at]: [self._topology.rank]}
            for local_rank, peer in sorted(self._peers.items()):
                ranks.setdefault(peer.fields[at], []).append(self._ranks[local_rank])
            if len(ranks) > 1:
                details = [f"{text or 'unknown'}: {self._topology.rank_list(each)}" for text, each in ranks.items()]
                raise _error(self._topology, fact, fix, details)

    def _missing(self) -> LaunchError:
        absent = [r for i, r in enumerate(self._ranks) if i > 0 and i not in self._peers]
        arrived = self._topology.rank_list(set(self._ranks).difference(absent))
        return self._topology.late(absent, self._timeout_s, [f"arrived: {arrived}"])

    def _send(self, connection: _Connection, status: bytes, text: str, *fds: int) -> None:
        body = status + text.encode(errors="backslashreplace")[: _MAX_MESSAGE // 2]
        data = body + mac(self._world.secret, b"server", connection.nonce, connection.peer_nonce, body)
        try:
            socket.send_fds(connection.socket, [data], fds)
        except OSError as error:
            # The engine watches the processes from here on, and reports a peer that has died.
            log.logger.info("rendezvous: could not answer process %d: %s", connection.pid, error)


# -- The others ---------------------------------------------------------------------------------------------------


class _NotTheServer(Exception):
    """The process that answered does not know the secret."""


def _fetch(world: World, fields: Sequence[str], timeout_s: float) -> int:
    """Connect to local rank 0, prove that this worker knows the secret, and wait for the segment."""
    topology, name = world.topology, socket_name(world)
    longer = Deadline(timeout_s + _CLIENT_EXTRA_S)
    deadline = longer.within(timeout_s)
    why, pause_s = "it never opened its socket", _FIRST_PAUSE_S
    while True:
        check_wanted(world)
        if deadline.left() <= 0:
            raise topology.late([topology.local_ranks[0]], timeout_s, why=f" ({why})")
        with _socket() as connection:
            connection.settimeout(max(0.001, deadline.wait_s()))
            try:
                connection.connect(name)
                if peer_process(connection)[1] != os.geteuid():
                    raise _NotTheServer
                return _ask(connection, world, fields, longer)
            except _NotTheServer:
                why = "another process answers in its place"
            except OSError as error:
                if error.errno in (errno.EPERM, errno.EACCES):
                    fact = f"cannot connect to the other workers: {error}."
                    raise _error(topology, fact, _FIX_OF_SOCKETS) from error
        # The server has not started, or has ended. An abstract name gives no event to wait for.
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, POLL_S)


def _ask(connection: socket.socket, world: World, fields: Sequence[str], deadline: Deadline) -> int:
    # The server sends its nonce at once; a process that does not is not the server.
    connection.settimeout(max(0.001, deadline.wait_s(LOOK_S)))
    challenge = connection.recv(_MAX_MESSAGE)
    if len(challenge) != len(_MAGIC) + NONCE_BYTES or not challenge.startswith(_MAGIC):
        raise _NotTheServer
    server_nonce, nonce = challenge[len(_MAGIC) :], secrets.token_bytes(NONCE_BYTES)
    about = _HELLO.pack(world.topology.local_rank, os.getpid()) + _SEPARATOR.join(fields).encode()
    body = _MAGIC + nonce + about
    connection.send(body + mac(world.secret, b"client", server_nonce, body))
    while True:
        connection.settimeout(max(0.001, deadline.wait_s(POLL_S)))
        try:
            answer, fds = _receive_fds(connection)
            break
        except socket.timeout:
            check_wanted(world)
            if deadline.left() <= 0:
                raise
    try:
        body, proof = answer[:-MAC_BYTES], answer[-MAC_BYTES:]
        if not answer:
            raise ConnectionResetError(errno.ECONNRESET, "the server ended")
        if not body or not hmac.compare_digest(proof, mac(world.secret, b"server", server_nonce, nonce, body)):
            raise _NotTheServer
        if body[:1] == _OK and len(fds) == 1:
            return fds.pop()
        *details, last = body[1:].decode("utf-8", "replace").splitlines() or [""]
        fact, _, fix = last.partition("Fix: ")
        details = [line for line in (*details, fact if fix else last) if line.strip()]
        text = "the start failed on the worker that leads this host."
        raise _error(world.topology, text, fix or "see what that worker says.", details)
    finally:
        for fd in fds:
            os.close(fd)


def _receive_fds(connection: socket.socket) -> tuple[bytes, list[int]]:
    """One message and its descriptors, close-on-exec (`socket.recv_fds` drops its flags)."""
    fds = array.array("i")
    room = socket.CMSG_SPACE(4 * fds.itemsize)
    data, ancillary, _, _ = connection.recvmsg(_MAX_MESSAGE, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
    return data, fds.tolist()
