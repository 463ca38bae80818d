"""What the daemon of a job passes on, and to whom it listens: output, messages of workers, strangers. The launcher is a
fake that decides nothing. How workers start and end is in test_elastic_launcher and test_launcher_*."""

import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from kvstore_hvd.base.channel import Channel, ChannelError
from kvstore_hvd.launch.daemon import WINDOW
from support.jobs import processes, variables_of
from support.patience import patient, until

pytestmark = pytest.mark.alike

LINE = """
import os, select, socket, sys, threading, time
from kvstore_hvd.base.channel import Channel, ChannelError
def open_line():
    connected = socket.socket(socket.AF_UNIX)
    connected.connect('\\0' + os.environ['KVHVD_DAEMON'])
    return Channel(connected)
def hear(line):
    while not (messages := line.receive()):
        select.select([line], [], [])
    return messages
def closed(line):
    try:
        while True:
            hear(line)
    except ChannelError:
        return True
"""
FINISHED = "line = open_line()\nline.send({'t': 'finished'})\n"
DAEMON = """
import socket, sys
from kvstore_hvd.base.channel import Channel
from kvstore_hvd.launch.daemon import Daemon
sys.exit(Daemon(Channel(socket.socket(fileno=int(sys.argv[1]))), 'localhost', 0.2, 1000.0, {}).run())
"""


class Launcher:
    """Starts one daemon, and collects what it says."""

    def __init__(self, marker):
        self.environment = variables_of(marker)
        self.messages, self.written, self.acknowledges = [], defaultdict(bytes), True
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-c", DAEMON, str(theirs.fileno())]
        self.daemon = subprocess.Popen(
            command, env=self.environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL
        )
        theirs.close()
        self.line = Channel(ours)

    def send(self, kind, **fields):
        self.line.send({"t": kind, **fields})

    def start(self, worker, program):
        how = {"share": [], "control": True, "stdin": False, "capture": True}
        how["environment"] = {**self.environment, "PYTHONUNBUFFERED": "1"}
        self.send("start", worker=worker, command=[sys.executable, "-c", LINE + program], **how)

    def until(self, condition):
        return until(lambda: condition() or self.hear() or condition())

    def hear(self):
        """Take what there is, and wait a moment if there is nothing."""
        select.select([self.line], [], [], 0.1)
        self.line.flush()
        for message in self.line.receive():
            if message["t"] == "out":
                data = message.get("raw", b"")
                self.written[message["worker"], message["fd"]] += data
                if self.acknowledges:
                    self.send("ack", bytes=len(data))
            else:
                self.messages.append(message)

    def next(self, kind, worker=None):
        """The next message of this kind; those before it are passed over."""

        def found():
            while self.messages:
                message = self.messages.pop(0)
                if message["t"] == kind and worker in (None, message.get("worker")):
                    return message
            return None

        return self.until(found)


@pytest.fixture
def launcher(marker):
    """A launcher whose daemon ends when it is gone."""
    made = Launcher(marker)
    yield made
    made.line.close()
    assert made.daemon.wait(patient(15)) == 1


def test_output_waits_until_it_is_acknowledged_but_for_last_words(launcher):
    """The news of an end comes behind all that the worker has written, and messages pass meanwhile."""
    launcher.acknowledges = False
    launcher.start(0, f"os.write(1, b'x' * {WINDOW + (1 << 20)})")
    launcher.until(lambda: len(launcher.written[0, 1]) >= WINDOW)
    launcher.start(1, FINISHED + "os.write(2, b'last')")
    assert launcher.next("from", 1)["message"] == {"t": "finished"}
    launcher.next("exited", 1)
    assert launcher.written[1, 2] == b"last"
    for _ in range(2):
        launcher.next("beat")
    assert len(launcher.written[0, 1]) < WINDOW + (1 << 17)
    launcher.acknowledges = True
    launcher.send("ack", bytes=WINDOW)
    launcher.next("exited", 0)
    assert len(launcher.written[0, 1]) == WINDOW + (1 << 20)


def test_only_the_worker_itself_and_what_it_starts_get_a_line(launcher):
    program = """
first = open_line()
second = open_line()
print('a second:', hear(second)[0]['text'], closed(second))
first.send({'t': 'joined', 'generation': 1})
first.close()
if os.geteuid() == 0:
    os.seteuid(65534)  # as sudo may: it is still this process
again = open_line()
again.send({'t': 'joined', 'generation': 2})
again.close()
if os.fork() == 0:  # as under a shell
    parent = os.getpid()
    if os.fork() == 0:
        while os.getppid() == parent: time.sleep(0.01)  # until it is an orphan
        line = open_line()
        line.send({'t': 'joined', 'generation': 3})
        hear(line)
    os._exit(0)
os.wait()
threading.Event().wait(100)
"""
    launcher.start(1, FINISHED + "threading.Event().wait(100)")
    launcher.next("from", 1)
    launcher.start(0, program)
    pid = launcher.next("started", 0)["pid"]
    assert [launcher.next("from", 0)["message"]["generation"] for _ in range(3)] == [1, 2, 3]
    (name,) = re.findall(rb"KVHVD_DAEMON=(\S+?)\0", Path(f"/proc/{pid}/environ").read_bytes())
    connected = socket.socket(socket.AF_UNIX)
    connected.connect(b"\0" + name)
    stranger = Channel(connected)

    def is_refused():
        try:
            stranger.receive()
        except ChannelError:
            return True
        return False

    launcher.until(is_refused)
    stranger.close()
    assert launcher.written[0, 1] == b"a second: another process of worker 0 has called init() already. True\n"


def test_what_is_no_message_costs_a_worker_its_line_and_nothing_else(launcher):
    program = """
def refused(data):
    line = open_line()
    os.write(line.fileno(), data)
    return closed(line)
assert refused(b'\\0\\0\\0\\2\\0\\0\\0\\0[]')
assert refused(b'\\0\\0\\0\\x0d\\0\\0\\0\\0{"t":"enter"}')
assert refused(b'\\0\\x20\\0\\0\\0\\0\\0\\0')  # as many bytes are to follow
"""
    files = f"/proc/{launcher.daemon.pid}/fd"
    launcher.next("beat")
    before = len(os.listdir(files))
    launcher.start(1, FINISHED + "print(hear(line))")
    launcher.next("from", 1)
    launcher.start(0, program + FINISHED)
    assert launcher.next("from", 0)["message"] == {"t": "finished"}
    assert launcher.next("exited", 0)["code"] == 0
    launcher.send("to", worker=1, message={"t": "lost", "generation": 0, "text": "still here"})
    assert launcher.next("exited", 1)["code"] == 0
    assert b"still here" in launcher.written[1, 1]
    assert len(os.listdir(files)) == before


DEAF = "import signal\nfor number in (10, 15): signal.signal(number, signal.SIG_IGN)\n" + FINISHED
DEAF += "threading.Event().wait(100)"


def test_one_that_is_deaf_to_its_end_is_killed_after_the_grace(launcher):
    launcher.start(0, DEAF)
    launcher.next("from", 0)
    launcher.send("signal", worker=0, signal=signal.SIGUSR1)
    for number in (signal.SIGSTOP, signal.SIGCONT):  # Ctrl-Z and fg
        launcher.send("signal", worker=None, signal=number)
    for _ in range(2):
        launcher.next("beat")  # it lives: its end would be passed over here, and missed below
    launcher.send("signal", worker=0, signal=signal.SIGTERM)
    assert launcher.next("exited", 0)["code"] == -signal.SIGKILL


def test_the_loss_of_the_launcher_ends_everything(launcher, marker):
    launcher.start(0, DEAF)
    launcher.next("from", 0)
    launcher.line.close()
    assert launcher.daemon.wait(patient(15)) == 1
    assert processes(marker) == []
