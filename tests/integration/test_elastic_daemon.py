"""The daemon of elastic jobs: what it starts, reports and passes on, and how it ends. The launcher is a fake."""

import json
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from kvstore_hvd.base.channel import Channel, ChannelError
from kvstore_hvd.base.cores import usable_cores
from kvstore_hvd.launch.daemon import WINDOW
from support.fake_launcher import FakeLauncher
from support.jobs import LIMIT_S, processes

pytestmark = pytest.mark.alike


def daemon_name(pid):
    """The name of the daemon's socket, as a worker with this process id has been told."""
    for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        if entry.startswith(b"KVHVD_DAEMON="):
            return entry.partition(b"=")[2].decode()
    raise AssertionError(f"process {pid} has no daemon")


# -- Workers --------------------------------------------------------------------------------------------------------


def test_workers_start_and_their_ends_are_reported(marker):
    with FakeLauncher(marker) as launcher:
        launcher.start(0, "print('out'); print('first', file=sys.stderr); sys.stderr.write('last'); sys.exit(3)")
        launcher.start(7, "os.kill(os.getpid(), signal.SIGKILL)")
        launcher.start(3, "")
        pids = {n: launcher.next("started", n)["pid"] for n in (0, 7, 3)}
        assert len(set(pids.values())) == 3
        launcher.wait(lambda: sum(message["t"] == "exited" for message in launcher.heard) == 3)
        exits = {message["worker"]: message for message in launcher.heard if message["t"] == "exited"}
        assert {n: message["code"] for n, message in exits.items()} == {0: 3, 7: -signal.SIGKILL, 3: 0}
        assert launcher.end() == 0
    assert {key: data for key, data in launcher.written.items() if data} == {(0, 1): b"out\n", (0, 2): b"first\nlast"}


def test_output_waits_until_it_is_acknowledged_but_for_last_words(marker):
    """The news of an end comes behind all that the worker has written, and messages pass meanwhile."""
    with FakeLauncher(marker) as launcher:
        launcher.deaf = True
        launcher.start(0, "os.write(1, b'x' * (WINDOW + (1 << 20)))".replace("WINDOW", str(WINDOW)))
        launcher.wait(lambda: len(launcher.written[0, 1]) >= WINDOW, "a full window")
        launcher.start(1, "open_line().send({'t': 'finished'})\nos.write(2, b'last')")
        assert launcher.told(1) == {"t": "finished"}
        launcher.next("exited", 1)
        assert launcher.written[1, 2] == b"last"
        launcher.settle()
        assert len(launcher.written[0, 1]) < WINDOW + (1 << 17)
        launcher.deaf = False
        launcher.send("ack", bytes=WINDOW)
        launcher.next("exited", 0)
        assert len(launcher.written[0, 1]) == WINDOW + (1 << 20)


def test_a_worker_has_what_the_launcher_says_and_its_daemon(marker):
    program = """
names = sorted(name for name in os.environ if name.startswith('KVHVD_') and not name.startswith('KVHVD_TEST_'))
print(json.dumps({name: os.environ[name] for name in names}), os.environ['MINE'], sorted(os.sched_getaffinity(0)))
print(os.getsid(0) == os.getpid(), repr(sys.stdin.read()))
"""
    cores = usable_cores()
    with FakeLauncher(marker) as launcher:
        command = [sys.executable, "-c", "import json, os, sys\n" + program]
        launcher.start_command(4, command, share=(0, len(cores)), MINE="ä", KVHVD_WORKER="4", KVHVD_DAEMON="no")
        launcher.next("exited", 4)
        launcher.end()
        out = launcher.written[4, 1]
        names = json.loads(out.splitlines()[0].partition(b"}")[0] + b"}")
    names = {name: value for name, value in names.items() if name not in os.environ}  # it has those of its daemon
    assert names.pop("KVHVD_DAEMON").startswith("kvstore_hvd-")
    assert names == {"KVHVD_WORKER": "4"}
    assert out.partition(b"}")[2].decode().split("\n") == [f" ä [{cores[0]}]", "True ''", ""]


def test_what_cannot_be_started_is_reported(marker):
    commands = [["/nowhere/program"], [], ["/bin/sh", "a\0b"], ["/etc/hostname"]]
    with FakeLauncher(marker) as launcher:
        for number, (command, text) in enumerate(zip(commands, ("No such file", "", "null", "/etc/hostname"))):
            launcher.start_command(number, command)
            message = launcher.next("not_started", number)
            assert message["text"]
            assert text in message["text"]
        launcher.start(6, "")
        assert launcher.next("exited", 6)["code"] == 0


def test_one_that_is_being_ended_and_does_not_is_killed_after_the_grace(marker):
    program = "for number in (signal.SIGTERM, signal.SIGUSR1):\n    signal.signal(number, signal.SIG_IGN)\n"
    program += "open_line().send({'t': 'finished'})\nforever()"
    with FakeLauncher(marker, kill_grace_s=0.3) as launcher:
        launcher.start(0, program)
        launcher.told(0)
        launcher.send("signal", worker=0, signal=signal.SIGUSR1)
        launcher.settle()
        assert not any(message["t"] == "exited" for message in launcher.heard)
        launcher.send("signal", worker=0, signal=signal.SIGTERM)
        assert launcher.next("exited", 0)["code"] == -signal.SIGKILL


# -- Ends -----------------------------------------------------------------------------------------------------------

# Ignores SIGTERM, and has a child that has left its session.
STUBBORN = """
subprocess.Popen([sys.executable, '-c', 'import threading; threading.Event().wait(100)'], start_new_session=True)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
line = open_line()
line.send({'t': 'finished'})
forever()
"""


def with_stubborn_workers(launcher):
    for worker in (0, 1):
        launcher.start(worker, STUBBORN)
    launcher.wait(lambda: sum(message["t"] == "from" for message in launcher.heard) == 2)


def test_end_leaves_nothing_and_reports_everything(marker):
    with FakeLauncher(marker, kill_grace_s=0.2) as launcher:
        with_stubborn_workers(launcher)
        assert launcher.end() == 0
        assert [m["code"] for m in launcher.heard if m["t"] == "exited"] == [-9, -9]
        assert processes(marker) == []


def test_a_signal_leaves_the_workers_their_time(marker):
    """The daemon ends when they have left; who has not after the grace is killed."""
    program = "line = open_line()\nline.send({'t': 'finished'})\nhear(line)"
    with FakeLauncher(marker) as launcher:
        launcher.start(0, program)
        launcher.told(0)
        launcher.daemon.terminate()
        assert "on localhost" in launcher.next("ending")["text"]
        launcher.settle()
        assert not any(message["t"] == "exited" for message in launcher.heard)
        launcher.send("to", worker=0, message={"t": "leave"})
        assert launcher.next("exited", 0)["code"] == 0
        launcher.wait(lambda: launcher.ended, "the end of the daemon")
        assert launcher.daemon.wait(LIMIT_S) == 1
    with FakeLauncher(marker, kill_grace_s=0.3) as launcher:
        with_stubborn_workers(launcher)
        launcher.daemon.terminate()
        launcher.wait(lambda: processes(marker) == [], "the end of all processes")


@pytest.mark.parametrize("who", ["daemon", "launcher"])
def test_the_end_of_daemon_or_launcher_ends_everything(marker, who):
    with FakeLauncher(marker) as launcher:
        with_stubborn_workers(launcher)
        if who == "daemon":
            launcher.daemon.kill()
        else:
            launcher.line.close()
            launcher.ended = "by us"
        launcher.wait(lambda: processes(marker) == [], "the end of all processes")
        if who == "launcher":
            assert launcher.daemon.wait(LIMIT_S) == 1
            assert b"kvhvdrun: the connection to the launcher is lost: the other side closed" in launcher.last_words()


@pytest.mark.timing
def test_a_silent_launcher_counts_as_gone(marker):
    with FakeLauncher(marker, lease_s=2.0) as launcher:
        with_stubborn_workers(launcher)
        launcher.silent = True
        launcher.wait(lambda: launcher.ended, "the end of the lease")
        assert b"has said nothing for 2 s" in launcher.last_words()
        launcher.wait(lambda: processes(marker) == [], "the end of all processes")


# -- Strangers, and workers out of their minds ----------------------------------------------------------------------


def test_only_the_worker_itself_and_what_it_starts_get_a_line(marker):
    program = """
first = open_line()
print('a second', closed(open_line()))
first.send({'t': 'joined', 'generation': 1})
first.close()
if os.geteuid() == 0:
    os.seteuid(65534)  # as sudo may: it is still this process
again = open_line()
again.send({'t': 'joined', 'generation': 2})
again.close()
if os.fork() == 0:  # as under a shell
    if os.fork() == 0:
        time.sleep(0.2)  # an orphan by now
        line = open_line()
        line.send({'t': 'joined', 'generation': 3})
        hear(line)
        os._exit(0)
    os._exit(0)
os.wait()
forever()
"""
    with FakeLauncher(marker) as launcher:
        launcher.start(1, "line = open_line()\nline.send({'t': 'finished'})\nforever()")
        launcher.told(1)
        launcher.start(0, program)
        pid = launcher.next("started", 0)["pid"]
        assert [launcher.told(0)["generation"] for _ in range(3)] == [1, 2, 3]
        connected = socket.socket(socket.AF_UNIX)
        connected.connect("\0" + daemon_name(pid))
        stranger = Channel(connected)
        with pytest.raises(ChannelError, match="closed"):
            while True:
                stranger.receive()
                launcher.pump()
        stranger.close()
        launcher.settle()
        launcher.end()
    assert launcher.written[0, 1] == b"a second True\n"


def test_what_is_no_message_costs_a_worker_its_line_and_nothing_else(marker):
    program = """
def refused(data):
    line = open_line()
    os.write(line.fileno(), data)
    return closed(line)
assert refused(b'\\0\\0\\0\\2\\0\\0\\0\\0[]')
assert refused(b'\\0\\0\\0\\x0d\\0\\0\\0\\0{"t":"enter"}')
assert refused(b'\\0\\x20\\0\\0\\0\\0\\0\\0')  # as many bytes are to follow
line = open_line()
line.send({'t': 'finished'})
"""
    with FakeLauncher(marker) as launcher:
        launcher.start(1, "line = open_line()\nline.send({'t': 'finished'})\nprint(hear(line))")
        launcher.told(1)
        launcher.start(0, program)
        assert launcher.told(0) == {"t": "finished"}
        assert launcher.next("exited", 0)["code"] == 0
        launcher.send("to", worker=1, message={"t": "lost", "generation": 0, "text": "still here"})
        assert launcher.next("exited", 1)["code"] == 0
        assert b"still here" in launcher.written[1, 1]
