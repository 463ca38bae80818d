"""Slots that are left alone after crashes; daemons: when one counts as lost, and how long it waits itself."""

import socket
from unittest.mock import Mock

import pytest

from kvstore_hvd.base.channel import ChannelError, Poller
from kvstore_hvd.launch import processes
from kvstore_hvd.launch.daemon import Daemon
from kvstore_hvd.launch.daemons import Daemons, _Daemon, _fate
from kvstore_hvd.launch.hosts import Slot, Slots

pytestmark = pytest.mark.alike


@pytest.mark.parametrize(
    ("state", "within_s", "fate"),
    [
        ({"has_come": True}, 4.4, "its daemon has said nothing for 4.4 s (KVHVD_LEASE)"),  # 0.4 s more than the lease
        ({}, 60.0, "its daemon did not come within 60 s"),
        ({"fault": "reset"}, 4.0, "the connection to its daemon was lost: reset"),
        ({"fault": "reset", "ending": True}, 1e9, ""),
        ({"fault": "reset", "code": 0}, 0.01, "its daemon (pid 8) exited with code 0"),
        ({"fault": "reset", "code": -40}, 0.01, "its daemon (pid 8) was killed by signal 40"),
        ({"has_come": True, "code": -9}, 4.4, "its daemon has said nothing for 4.4 s (KVHVD_LEASE)"),  # its guard has
    ],
)
def test_how_long_a_daemon_may_be_silent(state, within_s, fate):
    daemon = _Daemon("host", 7, Mock(), 100.0, lease_s=4.0, start_s=60.0)
    vars(daemon).update(state, pid=8)
    assert within_s < 0.1 or _fate(daemon, 100.0 + within_s - 0.01) == ""
    assert _fate(daemon, 100.0 + within_s) == fate


def test_the_loop_is_woken_to_write_only_while_there_is_something_to_write():
    ours, theirs = socket.socketpair()
    channel = Mock(fileno=ours.fileno, write_fd=ours.fileno(), wants_to_write=False)
    channel.flush.side_effect = lambda: setattr(channel, "wants_to_write", False)
    poller = Poller()
    poller.add(channel, pytest.fail)
    with ours, theirs:
        for flushed in (1, 2):
            poller.wait(0)
            assert channel.flush.call_count == flushed - 1
            channel.wants_to_write = True
            poller.wait(0)
            assert channel.flush.call_count == flushed


def test_a_daemon_without_descriptors_says_so_once(scarce):
    launcher = Mock(fileno=lambda: 0)
    daemon = Daemon(launcher, "node1", 1.0, 60.0, {})
    with scarce.socket(socket.AF_UNIX) as daemon._listener:
        for _ in range(3):
            daemon._accept()
    scarce.check(logged=0)
    (said,) = (call[0][0] for call in launcher.send.call_args_list)
    assert "the daemon on node1 has to let a worker wait: Too many open files.\n  Fix: " in said["text"]


@pytest.mark.parametrize(("ends", "code"), [([(7, 128)], 128), ([(7, 137)], -9), ([(9, 1), (7, -9), (8, 3)], 3)])
def test_daemons_are_silent_until_they_or_their_guards_end(ends, code):
    daemons = Daemons(Mock(), Mock(now=lambda: 100.0), Mock(), (), Mock())
    a, b = (_Daemon(host, guard, Mock(), 100.0, 60.0, 60.0) for host, guard in (("a", 7), ("b", 17)))
    daemons._running.update(a=a, b=b)
    a.pid, a.has_come = 8, True
    for b.has_come, a.heard_at, a.fault in ((False, 99.0, ""), (True, 98.9, ""), (True, 98.9, "x")):
        assert (daemons.are_awaited(), daemons.are_silent()) == (not b.has_come, (a.heard_at, a.fault) == (98.9, ""))
    for end in ends:
        daemons.reaped(*end)
        assert a.guard == (0 if end == (7, -9) else 7 if end[0] == 9 else -1)
    assert a.code == code


def test_workers_have_little_time_after_the_loss_of_the_launcher():
    for grace_s, kill_at in ((100.0, 6.0), (0.2, 5.2)):
        daemon = Daemon(Mock(receive=Mock(side_effect=ChannelError("it broke."))), "node1", grace_s, 60.0, {})
        daemon._clock = Mock(now=lambda: 5.0)
        daemon._hear_launcher()
        assert (daemon._code, daemon._kill_at) == (1, kill_at)


@pytest.mark.parametrize(("window", "unsent", "end"), [(1, False, 102), (1, True, 105), (0, False, 112)])
def test_streams_that_stay_open_are_waited_for_once_the_launcher_reads(monkeypatch, window, unsent, end):
    monkeypatch.setattr(processes, "end_children", lambda grace_s: ())
    daemon, times = Daemon(launcher := Mock(fileno=lambda: 0, wants_to_write=unsent), "node1", 1.0, 60.0, {}), [100]
    daemon._clock, daemon._window, daemon._streams = Mock(now=lambda: times[-1]), window, {9: (0, 1)}

    def turn(until):
        times.append(times[-1] + 1)
        daemon._window, launcher.wants_to_write = max(window, times[-1] > 110), unsent and times[-1] < 105

    daemon._turn = turn
    daemon._finish()
    assert times[-1] == end


def slots(**hosts):
    made = Slots((10.0, 300.0))
    made.update(hosts)
    return made


def test_the_oldest_host_comes_first_whatever_is_discovered():
    made = slots(a=1, b=2)
    assert made.update({"c": 1, "b": 1, "a": 1}) == [("host_removed", "b", 1), ("host_added", "c", 1)]
    assert [str(slot) for slot in made] == ["a:0", "b:0", "c:0"]
    made.update({"c": 2, "b": 1})
    made.update({"a": 999_999_999, "b": 1, "c": 2})
    assert [str(slot) for slot in made] == ["b:0", "c:0", "c:1", *(f"a:{index}" for index in range(256))]
    assert (Slot("c", 1) in made, Slot("c", 2) in made, Slot("d", 0) in made) == (True, False, False)


def test_the_first_crash_costs_nothing_and_the_others_more_and_more():
    made, slot = slots(a=2), Slot("a", 0)
    assert (made.crashed(slot, 100.0), made.usable_from(slot) <= 100.0) == (0, True)
    assert [made.crashed(slot, 100.0) for _ in range(6)] == [10, 20, 40, 80, 160, 300]
    assert made.usable_from(slot) == 400.0
    assert made.crashed(Slot("a", 1), 400.0) == 0  # they are counted per slot
    assert made.crashed(slot, 400.0, lived_long=True) == 0


def test_a_cooldown_stays_within_its_range():
    for upper in (1.0, 3600.0):
        made = Slots((1.0, upper))
        assert all(1.0 <= made.crashed("a", 0.0, had_begun=False) <= upper for _ in range(2000))
