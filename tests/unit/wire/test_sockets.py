"""Connections between processes of a job: what arrives, and what is not believed. Real sockets, no sleeping."""

import contextlib
import os
import select
import socket
import struct
import threading

import pytest

from kvstore_hvd.wire import MAX_MESSAGE, Connection, Listener, WireError, connect

SECRET = b"s" * 32
SERVER, CLIENT = {"role": "launcher"}, {"role": "daemon", "host": "localhost"}
GREETING = 11 + 32


def readable(*connections, seconds=30.0):
    return bool(select.select(connections, [], [], seconds)[0])


class Pair:
    """Both sides of a connection, and the bytes of the client, which `pass_on` gives to the server."""

    def __init__(self, *secrets):
        ours, self.to_server = socket.socketpair()
        self.from_client, theirs = socket.socketpair()
        of_server, of_client = secrets or (SECRET, SECRET)
        self.server = Connection(ours, of_server, "server", SERVER)
        self.client = Connection(theirs, of_client, "client", CLIENT)
        self.seen = b""
        for inner in (self.to_server, self.from_client):
            inner.setblocking(False)

    def settle(self, step=1 << 16):
        """Pass everything on, in steps, until all is quiet; returns what the server receives."""
        received = []
        while self._pass_on(step) or readable(self.server, self.client, seconds=0):
            received += self.server.receive()
            assert self.client.receive() == []
        return received

    def _pass_on(self, step):
        moved = False
        for source, target in ((self.from_client, self.to_server), (self.to_server, self.from_client)):
            with contextlib.suppress(BlockingIOError):
                data = source.recv(step)
                self.seen += data if source is self.from_client else b""
                target.sendall(data)
                moved = moved or bool(data)
        return moved


@pytest.fixture
def pair():
    made = Pair()
    made.settle()
    yield made
    made.server.close()
    made.client.close()


@pytest.fixture
def listener():
    made = Listener(f"kvstore_hvd-test-{os.getpid()}", SECRET, SERVER)
    yield made
    made.close()


def raw(listener):
    """A stranger's connection."""
    stranger = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stranger.connect(b"\0" + str(listener.address).encode())
    stranger.settimeout(30)
    return stranger


def ended(stranger):
    """Whether the other side closes the connection, after whatever it has sent."""
    with contextlib.suppress(ConnectionResetError):
        while stranger.recv(4096):
            pass
    return True


def test_messages_pass_in_order_byte_by_byte(pair):
    assert (pair.server.identity, pair.client.identity) == (CLIENT, SERVER)
    sent = [{"t": "x", "n": n, "text": "ä\udcff", "nested": {"list": [1, None, -0.5, True]}} for n in range(3)]
    for message in sent:
        pair.client.send(message)
    assert pair.settle(step=1) == sent


def test_the_longest_message_passes_and_a_longer_one_is_refused(pair):
    longest = {"t": "x" * (MAX_MESSAGE - len('{"t":""}'))}
    with pytest.raises(WireError, match="cannot be sent"):
        pair.client.send({"t": longest["t"] + "x"})
    pair.client.send(longest)
    received = []
    while not received:
        pair.client.flush()
        received = pair.settle()
    assert received == [longest]


@pytest.mark.parametrize("secrets", [(SECRET, b"t" * 32), (b"t" * 32, SECRET)])
def test_without_the_secret_nobody_gets_in(secrets):
    pair = Pair(*secrets)
    with pytest.raises(WireError, match="does not verify"):
        pair.settle()
    for side in (pair.server, pair.client):
        assert not side.is_authenticated
        side.close()


def test_a_recorded_connection_opens_no_new_one(pair, listener):
    stranger = raw(listener)
    stranger.sendall(pair.seen)
    assert readable(listener)
    assert [*listener.accept(), *listener.accept(), *listener.accept()] == []
    assert ended(stranger)


@pytest.mark.parametrize("kind", ["replay", "altered", "no length", "cut"])
def test_what_is_broken_ends_the_connection(pair, kind):
    start = len(pair.seen)
    pair.client.send({"t": "n", "n": 1})
    assert pair.settle() == [{"t": "n", "n": 1}]
    frame = bytearray(pair.seen[start:])
    if kind == "altered":
        frame[-1] ^= 1
    elif kind == "no length":
        frame[:4] = struct.pack("!I", MAX_MESSAGE + 1)
    pair.to_server.sendall(frame[:-3] if kind == "cut" else frame)
    pair.to_server.close()
    texts = {"no length": f"{MAX_MESSAGE + 1} bytes was announced", "cut": "closed the connection within a message"}
    with pytest.raises(WireError, match=texts.get(kind, "does not verify")):
        while readable(pair.server):
            assert pair.server.receive() == []


@pytest.mark.parametrize("body", [b"[]", b'{"t":"a","t":"b"}', b"[" * 500_000, b'{"t":"\xff"}'])
def test_what_is_no_json_object_ends_the_connection(pair, body):
    pair.client._send_body(body)
    with pytest.raises(WireError, match="JSON"):
        while True:
            pair.client.flush()
            pair.settle()


def test_a_peer_that_does_not_read_is_given_up(pair):
    with pytest.raises(WireError, match=r"left \d+ bytes unread"):
        for _ in range(100):
            pair.server.send({"t": "x" * 1_000_000})
            if readable(pair.server, seconds=0):
                pair.server.receive()


def test_a_silent_stranger_has_its_time_and_no_more(listener):
    silent, slow = raw(listener), raw(listener)
    for now in (100.0, 102.0, 104.9):  # a byte now and then earns no time
        slow.send(b"\0")
        assert [*listener.accept(now), *listener.accept(now)] == []
    assert len(silent.recv(4096)) == GREETING
    assert not readable(silent, seconds=0)
    listener.accept(105.1)
    assert ended(silent)
    assert ended(slow)


def test_strangers_do_not_keep_an_honest_peer_out(listener):
    before = len(os.listdir("/proc/self/fd"))
    strangers = [raw(listener) for _ in range(200) if listener.accept() == []]
    assert len(os.listdir("/proc/self/fd")) <= before + 200 + 64  # one each for us, at most 64 for the listener
    accepted = []

    def serve():
        while not accepted and readable(listener):
            accepted.extend(listener.accept())

    thread = threading.Thread(target=serve)
    thread.start()
    client = connect(listener.address, SECRET, CLIENT, 30)
    thread.join(30)
    assert (accepted[0].identity, accepted[0].peer_pid) == (CLIENT, os.getpid())
    for connection in (client, *accepted, *strangers):
        connection.close()


def test_connect_says_why_it_did_not_succeed(listener):
    with pytest.raises(WireError, match=r"nobody listens at kvstore_hvd-test-nobody\."):
        connect("kvstore_hvd-test-nobody", SECRET, CLIENT, 60)
    with pytest.raises(WireError, match=r"within 0.2 s: the other side does not answer"):
        connect(listener.address, SECRET, CLIENT, 0.2)  # nobody attends to it
