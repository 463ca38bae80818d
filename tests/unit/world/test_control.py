"""A worker's line to its launcher: places in worlds, updates, and what becomes of a worker without it."""

import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading

import pytest

from kvstore_hvd.base.channel import Channel
from kvstore_hvd.errors import LaunchError
from kvstore_hvd.world import control
from kvstore_hvd.world.control import ControlConnection
from kvstore_hvd.world.topology import Host
from support.patience import patient, until

SECRET = b"s" * 32
WORLD = {"size": 3, "hosts": [["node", "this one"]] * 3, "local_ranks": [0, 2, 1], "pids": [1, 2, 3]}
WORLD["addresses"] = [[f"10.0.0.{number}:1"] for number in range(3)]
LONG_S = patient(30.0)


class Daemon:
    def __init__(self):
        self.name = f"kvstore_hvd-test-{secrets.token_hex(8)}"
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(f"\0{self.name}")
        self.listener.listen()
        self.listener.settimeout(LONG_S)
        self.worker = None
        self.received = []
        self._lock = threading.Lock()  # of who sends: tests do it from timers, too

    def accept(self):
        self.worker = Channel(self.listener.accept()[0])

    def take(self):
        while not self.received:
            assert select.select([self.worker], [], [], LONG_S)[0]
            self.received += self.worker.receive()
        return self.received.pop(0)

    def send(self, kind, **fields):
        with self._lock:
            self.worker.send({"t": kind, **fields})

    def world(self, generation, rank=1):
        self.send("world", generation=generation, rank=rank, job="job", **WORLD)


@pytest.fixture
def daemon():
    one = Daemon()
    yield one
    one.listener.close()


@pytest.fixture
def line(daemon, monkeypatch):
    """The line; its loss is noted instead of ending the tests."""
    ended = threading.Event()
    monkeypatch.setattr(ControlConnection, "_end", lambda self, error: ended.set())
    made = ControlConnection(daemon.name, SECRET, 7)
    daemon.accept()
    yield made
    daemon.worker.close()
    assert ended.wait(LONG_S)


def test_the_first_world_of_a_new_job(daemon, line):
    daemon.world(0)
    world, is_real = line.enter([2, 1])
    assert is_real
    assert (world.topology.rank, world.topology.size, world.topology.generation) == (1, 3, 0)
    assert (world.topology.local_rank, world.topology.source) == (2, "launcher")
    assert (world.topology.local_ranks, world.topology.pids) == ([0, 2, 1], (1, 2, 3))
    assert (world.job, world.secret, world.lost()) == ("job", SECRET, "")
    assert world.addresses == tuple(map(tuple, WORLD["addresses"]))
    here = Host.here()
    about = {"host": [here.name, here.identity], "pid": os.getpid(), "ranks": [2, 1], "addresses": []}
    assert daemon.take() == {"t": "enter", **about}
    line.joined(world)
    assert daemon.take() == {"t": "joined", "generation": 0}
    line.synced()
    assert daemon.take() == {"t": "synced", "generation": 0}


def test_a_running_job_gives_a_guess(daemon, line):
    daemon.send("rank", rank=2, **WORLD)
    world, is_real = line.enter()
    assert not is_real
    assert (world.topology.rank, world.topology.generation) == (2, -1)
    assert daemon.take()["t"] == "enter"
    threading.Timer(0.05, daemon.world, [4]).start()
    world = line.next_world("start", "why", [0])
    assert (world.topology.generation, world.meeting) == (4, 4)
    assert daemon.take() == {"t": "ready", "generation": -1, "cause": "start", "text": "why", "unreached": [0]}


def test_a_world_that_is_lost_before_it_is_taken_is_given_up(daemon, line):
    """The launcher waits for a word from every worker that it gave the world to."""
    daemon.world(0)
    first, _ = line.enter()
    daemon.world(1)
    daemon.send("lost", generation=1, text="worker 3 was killed")
    until(first.lost)
    assert line.why_lost(0) == line.why_lost(1) == first.lost() == "worker 3 was killed"  # and so are those before it
    assert line.why_lost(2) == ""
    threading.Timer(0.05, daemon.world, [2]).start()
    assert line.next_world("lost", "").topology.generation == 2
    ready = {"t": "ready", "generation": 1, "cause": "meeting", "text": "worker 3 was killed", "unreached": []}
    assert [daemon.take() for _ in range(3)][2] == ready


def test_updates(daemon, line):
    """One that came before a world was given out is part of it."""
    told = []
    line.on_update = lambda number, result: told.append((number, result))
    daemon.world(0)
    line.enter()
    assert line.update is None
    daemon.send("updated", number=1, result=2)
    until(lambda: told == [(1, 2)])
    assert line.update == (1, 2)
    daemon.world(1)
    line.next_world("updated", "")
    assert line.update is None
    daemon.send("updated", number=2, result=1)
    until(lambda: line.update == (2, 1))


@pytest.mark.parametrize("kind", ["fail", "leave"])
def test_the_end_of_the_job_and_of_a_worker_that_is_not_needed(daemon, line, kind):
    daemon.world(0)
    line.enter()
    daemon.send(kind, text="too many resets.", fix="see it.")
    with pytest.raises(LaunchError if kind == "fail" else SystemExit) as end:
        line.next_world("updated", "")
    assert str(end.value) == ("worker '7': the job ends: too many resets.\n  Fix: see it." if kind == "fail" else "0")


def test_a_daemon_that_is_not_there_or_is_another_users(daemon, monkeypatch):
    with pytest.raises(LaunchError, match=r"does not answer: .*\n  Fix: start with kvhvdrun"):
        ControlConnection(f"{daemon.name}x", SECRET, 7)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(control, "peer_process", lambda made: (1, 1001))
    with pytest.raises(LaunchError, match="user 1001 answers in place of the daemon"):
        ControlConnection(daemon.name, SECRET, 7)
    for own, other in ((1000, 0), (0, 1001)):  # by sudo
        monkeypatch.setattr(os, "geteuid", lambda own=own: own)
        monkeypatch.setattr(control, "peer_process", lambda made, other=other: (1, other))
        control._connected(daemon.name).close()


def test_a_forked_child_says_nothing_and_waits_for_nobody(daemon, line):
    """Not for who was sending as it was forked, either."""
    with line._lock:
        child = os.fork()
        if child == 0:
            line.finished()
            os._exit(0)
    try:
        until(lambda: os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT))
    finally:
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    assert status == 0
    line.finished()
    assert daemon.take() == {"t": "finished"}


PROGRAM = """
import os, sys, time
from kvstore_hvd.world.control import ControlConnection
line = ControlConnection(sys.argv[1], b"s" * 32, 0)
child = os.fork()
if child == 0:
    time.sleep(60)
sys.stdout = open(1, "w")  # buffered, whatever the environment says
print("not flushed")
os.write(1, b"here\\n")
time.sleep(60)
"""


@pytest.mark.parametrize("how", ["closed", "refused", "nobody reads"])
def test_a_worker_ends_without_its_line(daemon, full_pipe, how):
    """Nobody watches over it; what it forked does not keep the line open, and is not ended by it."""
    command = [sys.executable, "-c", PROGRAM, daemon.name]
    stderr = full_pipe if how == "nobody reads" else subprocess.PIPE
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True)
    try:
        daemon.accept()
        assert worker.stdout.readline() == b"here\n"
        if how == "refused":
            daemon.send("refused", text="another process has called init().")
        daemon.worker.close()
        assert worker.wait(LONG_S) == 1
    finally:
        os.killpg(worker.pid, signal.SIGKILL)
        printed, said = worker.communicate()
    told = {
        "refused": b"lost: another process has called init(). This process ends.",
        "closed": b"the control connection to the daemon of this job is lost: the other side closed the connection.",
    }
    assert how not in told or (told[how] in said and printed == b"not flushed\n")
