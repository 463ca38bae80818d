"""Daemons and their connections: when one counts as lost, and when the loop is woken."""

import select
import socket
from unittest.mock import Mock

import pytest

from kvstore_hvd.driver.connections import Connections
from kvstore_hvd.driver.daemons import _Daemon, _fate


@pytest.mark.parametrize(
    ("state", "within_s", "fate"),
    [
        ({"line": Mock()}, 5.0, "its daemon has said nothing for 5 s (KVHVD_LEASE)"),  # a second more than the lease
        ({}, 60.0, "its daemon did not come within 60 s"),
        ({"fault": "reset"}, 0.5, "the line to its daemon was lost: reset"),
        ({"fault": "reset", "ending": True}, 1e9, ""),
        ({"line": Mock(), "code": 3}, 0.5, "its daemon (pid 7) exited with code 3"),  # it may have said something yet
    ],
)
def test_how_long_a_daemon_may_be_silent(state, within_s, fate):
    daemon = _Daemon("host", 7, heard_at=100.0, **state)
    assert _fate(daemon, 100.0 + within_s - 0.01, lease_s=4.0) == ""
    assert _fate(daemon, 100.0 + within_s, lease_s=4.0) == fate


def test_the_loop_is_woken_to_write_only_while_there_is_something_to_write():
    ours, theirs = socket.socketpair()
    line = Mock(fileno=ours.fileno, close=ours.close, wants_to_write=False)
    line.flush.side_effect = lambda: setattr(line, "wants_to_write", False)
    connections = Connections()
    connections.add(line)

    def is_woken():
        connections.arm()
        return bool(select.select([connections], [], [], 0)[0])

    for flushed in (1, 2):
        assert not is_woken()
        line.wants_to_write = True
        assert is_woken()
        assert connections.ready() == []
        assert line.flush.call_count == flushed
    assert not is_woken()
    theirs.send(b"x")
    assert is_woken()
    assert connections.ready() == [line]
    connections.close_all()
    theirs.close()
