"""Connections between processes of a job: what arrives, and what is not believed. Real sockets, no sleeping."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvstore_hvd import log
from kvstore_hvd.wire import MAX_MESSAGE, Connection, Listener, WireError, connect
from kvstore_hvd.wire import sockets as wire_sockets
from support.patience import patient

SECRET = b"s" * 32
SERVER, CLIENT = {"role": "launcher"}, {"role": "daemon", "host": "localhost"}
HEAD = 36  # length and MAC
GREETING = 11 + 32
SEED = 5
names = iter(range(1_000_000))


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):  # by default they take megabytes
            listener.setsockopt(socket.SOL_SOCKET, option, 1 << 16)
        ours = socket.create_connection(listener.getsockname())
        return listener.accept()[0], ours


PAIRS: list[Callable[[], tuple[socket.socket, socket.socket]]] = [socket.socketpair, tcp_pair]


def readable(*connections: Any, seconds: float = 30.0) -> bool:
    return bool(select.select(connections, [], [], seconds)[0])


def receive(connection: Connection, count: int = 1) -> list[dict[str, Any]]:
    """The next messages, at least `count` of them."""
    messages: list[dict[str, Any]] = []
    while len(messages) < count:
        assert readable(connection), f"only {len(messages)} of {count} messages came"
        messages += connection.receive()
    return messages


def broken(connection: Connection) -> str:
    """Receive until the connection is no more; no message may come before."""
    while True:
        assert readable(connection), "nothing more came"
        try:
            assert connection.receive() == []
        except WireError as error:
            return str(error)


def shake(server: Connection, client: Connection) -> None:
    while not (server.is_authenticated and client.is_authenticated):
        assert readable(server, client)
        assert server.receive() == [] == client.receive()


@pytest.fixture
def sockets() -> Iterator[Callable[..., tuple[Connection, Connection]]]:
    """Makes both sides of a connection, which have shaken hands unless told otherwise."""
    made: list[Connection] = []

    def make(
        pair: Callable[[], tuple[socket.socket, socket.socket]] = socket.socketpair,
        secrets: tuple[bytes, bytes] = (SECRET, SECRET),
        shaken: bool = True,
    ) -> tuple[Connection, Connection]:
        ours, theirs = pair()
        both = Connection(ours, secrets[0], "server", SERVER), Connection(theirs, secrets[1], "client", CLIENT)
        made.extend(both)
        if shaken:
            shake(*both)
        return both

    yield make
    for connection in made:
        connection.close()


@pytest.fixture
def listening() -> Iterator[Callable[..., Listener]]:
    made: list[Listener] = []

    def make(kind: str = "unix") -> Listener:
        address = ("127.0.0.1", 0) if kind == "tcp" else f"kvstore_hvd-test-{os.getpid()}-{next(names)}"
        made.append(Listener(address, SECRET, SERVER))
        return made[-1]

    yield make
    for listener in made:
        listener.close()


def raw(listener: Listener) -> socket.socket:
    """A stranger's connection."""
    address = listener.address
    if isinstance(address, str):
        stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stranger.connect(b"\0" + address.encode())
    else:
        stranger = socket.create_connection(address)
    stranger.settimeout(30)
    return stranger


def ended(stranger: socket.socket) -> bool:
    """Whether the other side closes the connection, after whatever it has sent."""
    try:
        while stranger.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def attend(listener: Listener, times: int = 1, now: float | None = None) -> list[Connection]:
    return [connection for _ in range(times) for connection in listener.accept(now)]


class Accepting:
    """Attends to a listener in a thread, until it has `count` connections."""

    def __init__(self, listener: Listener, count: int = 1) -> None:
        self.connections: list[Connection] = []
        self._listener, self._count = listener, count
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while len(self.connections) < self._count and readable(self._listener):
            self.connections += self._listener.accept()

    def result(self) -> list[Connection]:
        self._thread.join(60)
        assert len(self.connections) >= self._count
        return self.connections


# -- Honest peers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", PAIRS)
def test_both_sides_learn_who_the_other_is(sockets: Any, pair: Any) -> None:
    server, client = sockets(pair)
    assert server.identity == CLIENT
    assert client.identity == SERVER


@pytest.mark.parametrize("pair", PAIRS)
def test_messages_pass_both_ways_in_order(sockets: Any, pair: Any) -> None:
    server, client = sockets(pair)
    sent = [{"t": "x", "n": n, "text": "ä\udcff", "nested": {"list": [1, None, -0.5, True]}} for n in range(100)]
    for message in sent:
        server.send(message)
        client.send(message)
    assert receive(client, 100) == sent == receive(server, 100)


@pytest.mark.parametrize("pair", PAIRS)
def test_the_longest_message_passes_though_the_socket_takes_it_in_parts(sockets: Any, pair: Any) -> None:
    server, client = sockets(pair)
    message = {"t": "x" * (MAX_MESSAGE - len('{"t":""}'))}
    for _ in range(4):
        server.send(message)
    assert server.wants_to_write
    received: list[dict[str, Any]] = []
    while len(received) < 4:
        server.flush()
        if readable(client, seconds=0.01):  # TCP may have taken all of it, and not sent it yet
            received += client.receive()
    assert received == [message] * 4
    assert not server.wants_to_write


def test_a_longer_one_is_refused_and_the_connection_stays(sockets: Any) -> None:
    server, client = sockets()
    with pytest.raises(WireError, match="1048577 bytes cannot be sent"):
        server.send({"t": "x" * (MAX_MESSAGE - len('{"t":""}') + 1)})
    with pytest.raises(WireError, match="cannot be sent"):
        server.send({"t": object()})
    with pytest.raises(WireError, match="cannot be sent"):
        server.send({"t": float("nan")})
    server.send({"t": "short"})
    assert receive(client) == [{"t": "short"}]


class Slow:
    """Passes bytes on in steps, in both directions; keeps what went by, and alters one bit of it if asked to."""

    def __init__(self, alter: tuple[str, int] = ("", -1)) -> None:
        self._alter = alter
        self.to_server, to_a = socket.socketpair()
        self.to_client, to_b = socket.socketpair()
        self.outer = (to_a, to_b)
        self.seen: dict[str, bytes] = {"server": b"", "client": b""}
        for inner in (self.to_server, self.to_client):
            inner.setblocking(False)

    def pass_on(self, step: int = 1) -> bool:
        moved = False
        for source, target, name in (
            (self.to_server, self.to_client, "server"),
            (self.to_client, self.to_server, "client"),
        ):
            try:
                data = bytearray(source.recv(step))
            except BlockingIOError:
                continue
            position = self._alter[1] - len(self.seen[name])
            if name == self._alter[0] and 0 <= position < len(data):
                data[position] ^= 1 << position % 8
            self.seen[name] += data
            target.sendall(data)
            moved = moved or bool(data)
        return moved


def settle(slow: Slow, server: Connection, client: Connection, step: int = 1 << 16) -> tuple[list[Any], list[Any]]:
    """Pass on and receive until all is quiet; returns what the server and the client received."""
    at_server: list[Any] = []
    at_client: list[Any] = []
    while slow.pass_on(step) or readable(server, client, seconds=0):
        at_server += server.receive()
        at_client += client.receive()
    return at_server, at_client


def through(slow: Slow) -> tuple[Connection, Connection]:
    return Connection(slow.outer[0], SECRET, "server", SERVER), Connection(slow.outer[1], SECRET, "client", CLIENT)


def test_bytes_may_come_one_by_one() -> None:
    slow = Slow()
    server, client = through(slow)
    assert settle(slow, server, client, step=1) == ([], [])
    assert server.identity == CLIENT
    assert client.identity == SERVER
    sent = [{"t": "first"}, {"t": "second", "text": "y" * 300}]
    for message in sent:
        server.send(message)
        client.send(message)
    assert settle(slow, server, client, step=1) == (sent, sent)
    server.close()
    client.close()


def test_what_was_sent_before_the_end_arrives_before_it(sockets: Any) -> None:
    server, client = sockets()
    server.send({"t": "last"})
    server.close()
    client.send({"t": "lost"})  # the loss is told once, by receive
    assert receive(client) == [{"t": "last"}]
    assert "closed the connection" in broken(client)
    with pytest.raises(WireError, match="not open"):
        server.send({"t": "more"})


def test_an_end_before_everything_was_read_is_an_end_too(sockets: Any) -> None:
    server, client = sockets(tcp_pair)
    client.send({"t": "unread"})
    assert readable(server)
    server.close()  # resets the connection
    assert broken(client) == "the other side closed the connection."


def test_an_end_within_a_message_is_told_as_such(sockets: Any) -> None:
    slow = Slow()
    server, client = through(slow)
    settle(slow, server, client)
    client.send({"t": "cut"})
    for _ in range(HEAD + 3):
        slow.pass_on()
    slow.to_server.close()
    assert "closed the connection within a message" in broken(server)
    client.close()


def test_a_peer_that_does_not_read_is_given_up(sockets: Any) -> None:
    server, client = sockets()
    message = {"t": "x" * 1_000_000}
    sent = 0
    while server.wants_to_write or sent == 0:
        server.send(message)
        sent += 1
        assert sent < 100
    with pytest.raises(WireError, match=r"left \d+ bytes unread"):
        while readable(server):
            server.receive()
    assert not client.wants_to_write


# -- Others ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secrets", [(SECRET, b"t" * 32), (b"t" * 32, SECRET)])
def test_without_the_secret_nobody_gets_in(sockets: Any, secrets: tuple[bytes, bytes]) -> None:
    server, client = sockets(secrets=secrets, shaken=False)
    client.receive()
    assert "does not verify" in broken(server)
    server.close()
    assert "closed" in broken(client)
    assert not server.is_authenticated
    assert not client.is_authenticated
    for side in (server, client):
        with pytest.raises(WireError, match="not open"):
            side.send({"t": "x"})


def test_a_server_without_the_secret_is_not_believed(sockets: Any) -> None:
    """It greets, and answers the client's proof with bytes it has seen elsewhere."""
    slow = Slow()
    server, client = through(slow)
    settle(slow, server, client)
    server.close()
    client.close()
    ours, theirs = socket.socketpair()
    victim = Connection(theirs, SECRET, "client", CLIENT)
    ours.sendall(slow.seen["server"])  # the greeting, and the true server's proof
    victim.receive()
    assert "does not verify" in broken(victim)
    assert not victim.is_authenticated
    victim.close()


def recorded(count: int = 2) -> tuple[Slow, Connection, Connection, int]:
    """Both sides of a connection that has passed `count` messages each way, and the bytes of the client's hello."""
    slow = Slow()
    server, client = through(slow)
    settle(slow, server, client)
    hello = len(slow.seen["client"])
    for n in range(count):
        client.send({"t": "n", "n": n})
        server.send({"t": "n", "n": n})
    settle(slow, server, client)
    return slow, server, client, hello


def test_a_recorded_connection_opens_no_new_one(listening: Any) -> None:
    slow, server, client, _ = recorded()
    server.close()
    client.close()
    listener = listening()
    stranger = raw(listener)
    stranger.sendall(slow.seen["client"])
    assert readable(listener)
    assert attend(listener, 3) == []
    assert ended(stranger)


@pytest.mark.parametrize("which", ["same", "first again", "hello", "reflected"])
def test_replays_on_the_same_connection_end_it(which: str) -> None:
    slow, server, client, hello = recorded()
    frame = (len(slow.seen["client"]) - hello) // 2
    replayed = {
        "same": slow.seen["client"][-frame:],
        "first again": slow.seen["client"][hello : hello + frame],
        "hello": slow.seen["client"][:hello],
        "reflected": slow.seen["server"][-frame:],
    }[which]
    slow.to_server.sendall(replayed)
    assert "does not verify" in broken(server)
    with pytest.raises(WireError, match="does not verify"):
        server.receive()  # and remains so
    server.close()
    client.close()


def test_messages_that_change_places_end_the_connection() -> None:
    slow, server, client, _ = recorded(0)
    client.send({"t": "a"})
    client.send({"t": "b"})
    data = slow.to_client.recv(1 << 16)
    half = len(data) // 2
    slow.to_server.sendall(data[half:] + data[:half])
    assert "does not verify" in broken(server)
    server.close()
    client.close()


def test_a_message_left_out_ends_the_connection() -> None:
    slow, server, client, _ = recorded(0)
    client.send({"t": "a"})
    slow.to_client.recv(1 << 16)
    client.send({"t": "b"})
    slow.pass_on(1 << 16)
    assert "does not verify" in broken(server)
    server.close()
    client.close()


def test_each_altered_byte_of_a_message_ends_the_connection() -> None:
    length = HEAD + len(json.dumps({"t": "x", "n": 1}, separators=(",", ":")))
    for position in range(length):
        slow, server, client, _ = recorded(0)
        client.send({"t": "x", "n": 1})
        data = bytearray(slow.to_client.recv(1 << 16))
        assert len(data) == length
        data[position] ^= 1 << position % 8
        slow.to_server.sendall(bytes(data))
        slow.to_server.close()  # a longer length waits for more, which does not come
        assert broken(server), f"byte {position}"
        server.close()
        client.close()


def test_each_altered_byte_of_the_handshake_keeps_both_out() -> None:
    slow, server, client, hello = recorded(0)
    server.close(), client.close()
    greeting, proof = GREETING, len(slow.seen["server"]) - GREETING
    for name, count in (("server", greeting + proof), ("client", hello)):
        for position in range(count):
            slow = Slow((name, position))
            server, client = through(slow)
            with contextlib.suppress(WireError):
                settle(slow, server, client)
            assert len(slow.seen[name]) > position
            assert not (server.is_authenticated and client.is_authenticated), f"{name}'s byte {position}"
            server.close()
            client.close()


def sealed(body: bytes) -> bytes:
    """What a client that knows the secret, but not the protocol, would send as its first message."""
    ours, theirs = socket.socketpair()
    server, client = Connection(ours, SECRET, "server", SERVER), Connection(theirs, SECRET, "client", CLIENT)
    shake(server, client)
    client._send_body(body)
    try:
        while readable(server):
            server.receive()
            client.flush()
    except WireError as error:
        return str(error).encode()
    finally:
        server.close()
        client.close()
    return b""


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"1",
        b"null",
        b'{"t":NaN}',
        b'{"t":Infinity}',
        b'{"t":1e999}',
        b'{"t":"a","t":"b"}',
        b'{"t":{"a":1,"a":1}}',
        b'{"t":' + b"9" * 100_000 + b"}",
        b"[" * 500_000,
        b'{"a":' * 100_000,
        b'{"t":"\xff"}',
        '{"t":"ä"}'.encode(),
        b'{"t":1} x',
        b"{'t':1}",
    ],
    ids=lambda body: repr(body[:20]),
)
def test_what_is_no_json_object_ends_the_connection(body: bytes) -> None:
    assert b"JSON" in sealed(body)


@pytest.mark.parametrize("length", [MAX_MESSAGE + 1, 0xFFFFFFFF])
def test_an_announced_length_beyond_the_limit_ends_the_connection(length: int) -> None:
    slow, server, client, _ = recorded(0)
    slow.to_server.sendall(struct.pack("!I", length))
    assert f"{length} bytes was announced" in broken(server)
    server.close()
    client.close()


# -- Listeners ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_connect_and_accept(listening: Any, kind: str) -> None:
    listener = listening(kind)
    accepting = Accepting(listener, 2)
    clients = [connect(listener.address, SECRET, {"n": n}, 30) for n in range(2)]
    servers = accepting.result()
    assert sorted(server.identity["n"] for server in servers) == [0, 1]
    for client in clients:
        assert client.identity == SERVER
        client.send({"t": "hello"})
    for server in servers:
        assert receive(server) == [{"t": "hello"}]
        assert server.peer_pid == (os.getpid() if kind == "unix" else 0)
        server.send({"t": "welcome"})
    for client in clients:
        client.send({"t": "more"})
    assert readable(servers[0])
    assert not readable(listener, seconds=0)  # what they say from now on is the caller's business
    for connection in (*clients, *servers):
        if connection in clients:
            assert receive(connection) == [{"t": "welcome"}]
        connection.close()


def test_what_follows_the_handshake_at_once_is_not_lost(listening: Any) -> None:
    listener = listening()
    arrived = threading.Event()

    def serve() -> None:
        accepted: list[Connection] = []
        while not accepted and readable(listener):
            accepted = listener.accept()
        accepted[0].send({"t": "at once"})
        arrived.wait(patient(30))
        accepted[0].close()

    thread = threading.Thread(target=serve)
    thread.start()
    client = connect(listener.address, SECRET, CLIENT, 30)
    assert receive(client) == [{"t": "at once"}]
    arrived.set()
    thread.join(30)
    client.close()


def test_connect_says_why_it_did_not_succeed(listening: Any) -> None:
    with pytest.raises(WireError, match=r"nobody listens at kvstore_hvd-test-nobody\."):
        connect("kvstore_hvd-test-nobody", SECRET, CLIENT, 60)
    listener = listening("tcp")
    with pytest.raises(WireError, match=r"127\.0\.0\.1:\d+ within 0.2 s: the other side does not answer"):
        connect(listener.address, SECRET, CLIENT, 0.2)  # nobody attends to it


def test_connect_waits_no_longer_where_nobody_takes_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel answers nobody while the queue of a listener is full: such a wait counts like any other."""
    attempts = []
    connected_to = wire_sockets._connected_to

    def counted(*args: Any) -> socket.socket:
        attempts.append(args)
        return connected_to(*args)

    monkeypatch.setattr(wire_sockets, "_connected_to", counted)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(3):
            stranger = stack.enter_context(socket.socket())
            stranger.setblocking(False)
            stranger.connect_ex(listener.getsockname())
        with pytest.raises(WireError, match=r"no connection to 127\.0\.0\.1:\d+ within 2 s: the other side does not"):
            connect(listener.getsockname(), SECRET, CLIENT, 2)
    assert len(attempts) < 5  # the first one takes all the time; 7 if its end did not count, 20 if none of it did


def test_strangers_have_their_time_and_no_more(listening: Any) -> None:
    listener = listening("tcp")
    silent, slow = raw(listener), raw(listener)
    attend(listener, 3, now=100.0)
    for _ in range(20):  # a byte now and then earns no time
        slow.send(b"\0")
        attend(listener, now=102.0)
    attend(listener, 2, now=104.9)
    silent.settimeout(0)
    assert len(silent.recv(4096)) == GREETING
    with pytest.raises(BlockingIOError):
        silent.recv(1)
    attend(listener, now=105.1)
    silent.settimeout(30)
    assert ended(silent)
    assert ended(slow)


def test_two_hundred_strangers_do_not_keep_an_honest_peer_out(listening: Any) -> None:
    listener = listening()
    before = len(os.listdir("/proc/self/fd"))
    strangers = []
    for _ in range(200):
        strangers.append(raw(listener))
        attend(listener)
    # One descriptor each for us, at most 64 for the listener.
    assert len(os.listdir("/proc/self/fd")) <= before + 200 + 64
    accepting = Accepting(listener)
    client = connect(listener.address, SECRET, CLIENT, 30)
    assert accepting.result()[0].identity == CLIENT
    assert all(ended(stranger) for stranger in strangers[:136])
    for connection in (client, *accepting.connections, *strangers):
        connection.close()


def test_strangers_are_told_of_at_most_once_a_second(listening: Any, caplog: pytest.LogCaptureFixture) -> None:
    listener = listening()
    with caplog.at_level(logging.INFO, log.logger.name):
        for n in range(30):
            stranger = raw(listener)
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + b"x" * 40)
            attend(listener, 3, now=100 + 0.1 * n)
            stranger.close()
        attend(listener, now=110.0)
    counts = [record.args[0] for record in caplog.records]
    assert len(counts) <= 4
    assert sum(counts) == 30
    assert SECRET.decode() not in caplog.text


def test_when_descriptors_are_short_the_listener_waits_and_goes_on(listening: Any) -> None:
    import resource

    listener = listening()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    stranger = raw(listener)
    used = max(int(fd) for fd in os.listdir("/proc/self/fd"))
    filled = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, hard))
    try:
        try:
            while True:
                filled.append(os.dup(stranger.fileno()))
        except OSError:
            pass
        assert attend(listener, now=100.0) == []
        assert not readable(listener, seconds=0)  # it would wake us for nothing
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in filled:
            os.close(fd)
    attend(listener, 2, now=101.0)
    assert len(stranger.recv(4096)) == GREETING
    stranger.close()


def test_garbage_changes_nothing(listening: Any) -> None:
    """Thousands of connections with random bytes, cut and altered handshakes; an honest one lives among them."""
    slow, server, client, hello = recorded()
    server.close(), client.close()
    template = slow.seen["client"]
    listener = listening()
    accepting = Accepting(listener)
    honest = connect(listener.address, SECRET, CLIENT, 30)
    (accepted,) = accepting.result()
    generator = random.Random(SEED)
    before = len(os.listdir("/proc/self/fd"))
    for round_number in range(3000):
        kind = generator.randrange(4)
        if kind == 0:
            data = generator.randbytes(generator.choice((1, 4, 36, 43, 100, 5000)))
        elif kind == 1:
            data = struct.pack("!I", generator.choice((0, 31, 32, 60, 4096, 4097, 1 << 31))) + generator.randbytes(200)
        elif kind == 2:
            data = template[: generator.randrange(len(template))]
        else:
            changed = bytearray(template)
            changed[generator.randrange(hello)] ^= 1 << generator.randrange(8)
            data = bytes(changed)
        stranger = raw(listener)
        try:
            stranger.sendall(data)
            if generator.random() < 0.5:
                stranger.shutdown(socket.SHUT_WR)
        except OSError:
            pass
        assert attend(listener, 2) == []
        if generator.random() < 0.7:
            stranger.close()
        if round_number % 500 == 0:
            honest.send({"t": "n", "n": round_number})
            assert receive(accepted) == [{"t": "n", "n": round_number}]
    stranger.close()
    attend(listener, 2, now=1e9)
    assert len(os.listdir("/proc/self/fd")) == before
    honest.close()
    accepted.close()


def test_other_users_cannot_come_in(listening: Any, monkeypatch: pytest.MonkeyPatch) -> None:

    listener = listening()
    monkeypatch.setattr(wire_sockets, "peer_process", lambda connection: (1, os.geteuid() + 1))
    stranger = raw(listener)
    attend(listener)
    assert stranger.recv(4096) == b""
    stranger.close()
