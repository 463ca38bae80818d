"""What belongs to a job and how it ends, the guard of it, and whose descendant a process is."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
from pathlib import Path

import pytest

from kvstore_hvd.errors import LaunchError
from kvstore_hvd.launcher.belonging import Remains, mark_of, mark_this_process
from kvstore_hvd.launcher.guard import Guard
from kvstore_hvd.launcher.writer import Writer
from support.patience import patient

SLEEP = [sys.executable, "-c", "import threading; threading.Event().wait(100)"]


@pytest.fixture
def sleeper():
    with subprocess.Popen(SLEEP, start_new_session=True) as process:
        yield process
        process.kill()


@pytest.fixture
def variable():
    """Of a job without processes."""
    return f"KVHVD_TEST_NOBODY={uuid.uuid4().hex}".encode()


def marked(variable, command=SLEEP, **more):
    """Start a process of the job that has cleared its environment and left its session."""
    mark = lambda: mark_this_process(mark_of(variable))  # noqa: E731
    return subprocess.Popen(command, env={}, start_new_session=True, preexec_fn=mark, **more)  # noqa: PLW1509


def abandoned(guard):
    """End a guard as the launcher's death would."""
    os.close(guard._write)
    os.waitpid(guard.pid, 0)


def test_the_guard_ends_what_has_the_mark_or_the_variable(sleeper, variable):
    name, _, value = variable.decode().partition("=")
    guard = Guard(variable)
    with marked(variable) as bare, subprocess.Popen(SLEEP, env={name: value}, start_new_session=True) as named:
        abandoned(guard)
        assert (bare.wait(patient(60)), named.wait(patient(60))) == (-15, -15)
    assert sleeper.poll() is None


def test_a_guard_has_neither_the_name_nor_the_descriptors_of_its_launcher(variable):
    left, right = os.pipe()
    guard = Guard(variable)
    proc = Path("/proc", str(guard.pid))
    while not (proc / "cmdline").read_bytes().startswith(b"job-guard"):
        select.select([], [], [], 0.01)  # it tells nobody that it is ready
    assert (proc / "comm").read_bytes().startswith(b"job-guard of")
    os.close(right)
    while os.read(left, 1):
        pass
    os.close(left)
    guard.close()


@pytest.mark.parametrize("had_begun", [False, True])
def test_what_is_deaf_is_killed_also_after_a_standstill(variable, monkeypatch, had_begun):
    deaf = "import signal; signal.signal(15, signal.SIG_IGN); print(1, flush=True); signal.pause()"
    with marked(variable, [sys.executable, "-c", deaf], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        remains = Remains(variable, 0.1)
        monotonic, sleep, stood_still_s = time.monotonic, time.sleep, 0.0

        def stopped(seconds):
            nonlocal stood_still_s
            stood_still_s = 100.0
            sleep(seconds)

        if had_begun:  # by a clock that is behind, as that of a launcher that was stopped before
            remains.step(monotonic() - 100)
        monkeypatch.setattr(time, "monotonic", lambda: monotonic() + stood_still_s)
        monkeypatch.setattr(time, "sleep", stopped)
        remains.finish()
        monkeypatch.undo()
        assert process.wait(patient(60)) == -9


@pytest.mark.parametrize("pidfds", [True, False])
def test_a_number_that_has_become_a_strangers_gets_no_signal(variable, monkeypatch, pidfds):
    if not pidfds:
        monkeypatch.delattr(signal, "pidfd_send_signal")
    with marked(variable) as process, subprocess.Popen(SLEEP, start_new_session=True) as stranger:
        remains = Remains(variable, 0.1)
        with monkeypatch.context() as patch:
            # What was found a moment ago is another process by now, or none.
            patch.setattr(remains, "find", lambda: [stranger.pid, 1 << 22])
            patch.setattr("kvstore_hvd.launcher.belonging._KILLED_S", 0.1)
            remains.finish()
        assert stranger.poll() is None
        remains._signal(process.pid, signal.SIGKILL)
        assert process.wait(patient(60)) == -9
        stranger.kill()


# For a process of its own: a reaper collects every child of its process.
REAPER = """
import os, select, signal, subprocess, sys, time
from kvstore_hvd.launcher.reaper import Reaper
reaper = Reaper(0.3)
def leader(program):
    process = subprocess.Popen([sys.executable, '-uc', program], start_new_session=True, stdout=subprocess.PIPE)
    process.returncode = 0  # not to be reaped by it
    return process.pid, process.stdout
def collected(count):
    ended, end = [], time.monotonic() + 60
    while len(ended) < count or reaper.wait_s() is not None:
        assert time.monotonic() < end
        ended += reaper.reap()
        select.select([], [], [], 0.01)  # the launcher has signals that tell it
    return sorted(ended)
"""


def in_child(program):
    """Run it with a reaper; returns what it prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", REAPER + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


# A leader whose child is deaf to SIGTERM, and stays.
LEAVES_A_DEAF_ONE = """
import os, subprocess, sys
deaf = 'import signal; signal.signal(15, signal.SIG_IGN); print(1, flush=True); signal.pause()'
subprocess.Popen([sys.executable, '-c', deaf], stdout=subprocess.PIPE).stdout.readline()
os._exit(7)
"""
# A leader whose child cleans up when it gets SIGTERM.
HAS_A_CLEANER = """
import subprocess, sys
cleaner = '''
import signal, sys
signal.signal(15, lambda *_: (print('cleaned up', flush=True), sys.exit()))
print('ready', flush=True)
signal.pause()
'''
subprocess.Popen([sys.executable, '-c', cleaner]).wait()
"""


def test_a_leader_keeps_its_number_until_its_group_is_gone():
    program = f"""
killpg = os.killpg
def checked(pid, number):
    with open(f'/proc/{{pid}}/stat') as file:
        print(number, file.read().rpartition(')')[2].split()[0], flush=True)
    killpg(pid, number)
os.killpg = checked
pid, output = leader({LEAVES_A_DEAF_ONE!r})
reaper.add(pid)
assert collected(1) == [(pid, 7)]
"""
    # A zombie each time: the kernel has not given the number to anybody else.
    assert in_child(program).splitlines() == ["15 Z", "9 Z"]


def test_a_leader_that_is_killed_leaves_its_group_time():
    program = f"""
pid, output = leader({HAS_A_CLEANER!r})
reaper.add(pid)
assert output.readline() == b'ready\\n'
reaper.signal(pid, signal.SIGKILL)
assert collected(1) == [(pid, -9)]
print(output.read().decode())
"""
    assert in_child(program).strip() == "cleaned up"


def test_a_thread_that_the_system_refuses(monkeypatch):
    """An error that tells what helps; once there may be threads again, everything is written in order."""

    def refused(thread):
        raise RuntimeError("can't start new thread")

    reader, fd = os.pipe()
    writer = Writer()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(LaunchError, match=r"(?s)refuses a thread that writes output.*Fix: .*pids\.max"):
            writer.put(fd, b"first\n")
    writer.put(fd, b"second\n")
    assert writer.wait(patient(10))
    writer.close()
    assert os.read(reader, 100) == b"first\nsecond\n"
    os.close(fd)
    os.close(reader)
