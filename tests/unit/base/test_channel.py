"""Messages over a socket: what arrives, and what ends the connection. Real sockets, no sleeping."""

import socket
import struct

import pytest

from kvstore_hvd.base.channel import Channel, ChannelError


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours, longest=1 << 20), theirs


def frame(body):
    return struct.pack("!II", len(body), 0) + body


def test_messages_pass_in_order_byte_by_byte(pair):
    channel, theirs = pair
    other, relay = socket.socketpair()
    with other, relay:
        sender = Channel(other)
        sent = [{"t": "x", "n": n, "text": "ä\udcff", "nested": {"list": [1, None, -0.5, True]}} for n in range(3)]
        for message in sent:
            sender.send(message, b"\0\xff" * message["n"])
        received = []
        for byte in relay.recv(1 << 16):
            theirs.send(bytes([byte]))
            received += channel.receive()
    assert received == [sent[0], {**sent[1], "raw": b"\0\xff"}, {**sent[2], "raw": b"\0\xff" * 2}]
    assert channel.receive() == []


def test_what_comes_before_the_greeting_is_no_message():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel, received = Channel(ours, greeting=b"hello\n"), []
        for byte in b"hell no\nhello\n" + frame(b'{"t":"x"}'):
            theirs.send(bytes([byte]))
            received += channel.receive()
        assert (received, channel.skipped) == ([{"t": "x"}], b"hell no\n")


def test_what_is_not_taken_at_once_waits_for_flush(pair):
    channel, theirs = pair
    message = {"t": "x" * 1_000_000}
    channel.send(message)
    assert channel.wants_to_write
    receiver, received = Channel(theirs), []
    while not received:
        channel.flush()
        received = receiver.receive()
    assert received == [message]
    assert not channel.wants_to_write


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (struct.pack("!II", 1 << 20, 1), "1048577 bytes was announced; at most 1048576"),
        (frame(b"[]"), "is no message"),
        (frame(b"{}"), "is no message"),
        (frame(b'{"t":1}'), "is no message"),
        (frame(b"[" * 500_000), "is no message"),
        (frame(b'{"t":"\xff"}'), "is no message"),
        (frame(b'{"t":"x"}')[:-1], "closed the connection within a message"),
        (b"", "closed the connection[.]"),
    ],
)
def test_what_ends_a_connection(pair, data, error):
    channel, theirs = pair
    theirs.settimeout(30)
    sent = 0
    with pytest.raises(ChannelError, match=error):
        while True:
            if sent < len(data):
                sent += theirs.send(data[sent : sent + (1 << 16)])
            else:
                theirs.shutdown(socket.SHUT_WR)
            assert channel.receive() == []


def test_nothing_is_raised_before_all_is_received_that_had_arrived(pair):
    channel, theirs = pair
    theirs.sendall(frame(b'{"t":"last"}'))
    channel.send({"t": "unread"})
    theirs.close()
    channel.send({"t": "x"})
    assert not channel.wants_to_write
    assert channel.receive() == [{"t": "last"}]
    with pytest.raises(ChannelError, match="closed"):
        channel.receive()
