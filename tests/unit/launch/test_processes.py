"""How what is left of a job ends, who adopts it, and which numbers get a signal."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.alike

# For a process of its own: a reaper collects every child of its process.
REAPER = """
import os, select, signal, subprocess, sys, time
from kvstore_hvd.launch.processes import Reaper
reaper = Reaper(0.3)
def leader(program):
    process = subprocess.Popen([sys.executable, '-c', program], start_new_session=True)
    process.returncode = 0  # not to be reaped by it
    return process.pid
def collected(count):
    ended, end = [], time.monotonic() + 60
    while len(ended) < count or reaper.wait_s() < 1e9:
        assert time.monotonic() < end
        ended += reaper.reap()
        select.select([], [], [], 0.01)  # the launcher has signals that tell it
    return sorted(ended)
"""


def in_child(program):
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


def test_a_leader_keeps_its_number_until_its_group_has_had_time_and_is_gone():
    program = f"""
killpg = os.killpg
def checked(pid, number):
    with open(f'/proc/{{pid}}/stat') as file:
        print(int(number), file.read().rpartition(')')[2].split()[0], flush=True)
    killpg(pid, number)
os.killpg = checked
pid = leader({LEAVES_A_DEAF_ONE!r})
reaper.add(pid)
assert collected(1) == [(pid, 7)]
"""
    # A zombie each time: the kernel has not given the number to anybody else.
    assert in_child(program).split() == ["15", "Z", "9", "Z"]


# A child, and an orphan out of its session, are deaf to SIGTERM; another child is to be spared.
LEAVES_ORPHANS = """
from kvstore_hvd.launch import processes
processes.adopt_orphans()
spared = subprocess.Popen(['sleep', '60'])
before = processes.children()
deaf = 'import signal; signal.signal(15, signal.SIG_IGN); signal.alarm(60); print(1, flush=True); signal.pause()'
for wrapper in ([], ['setsid', 'sh', '-c', '"$@" & exit', 'sh']):
    child = subprocess.Popen([*wrapper, sys.executable, '-c', deaf], env={}, stdout=subprocess.PIPE)
    child.stdout.readline()
child.wait()
assert len(processes.children() - before) == 2
"""


def test_children_and_orphans_that_are_deaf_are_killed_after_a_grace_as_long_after_a_standstill():
    program = """
stood_still_s, monotonic = 0.0, time.monotonic
time.monotonic = lambda: monotonic() + stood_still_s
ending = processes.end_children(0.3, before)
next(ending)
stood_still_s = 100.0
next(ending)
assert len(processes.children() - before) == 2
for pause_s in ending:
    time.sleep(pause_s)
assert processes.children() == before
spared.kill()
"""
    in_child(LEAVES_ORPHANS + program)


@pytest.mark.parametrize("end", ["os.kill(guard, processes.KILL_DAEMON)", "os.close(launcher)"])
def test_a_guard_ends_what_a_killed_or_deaf_daemon_has_left_and_tells_how_that_ended(end):
    program = f"""
from kvstore_hvd.launch import processes
processes._GUARD_LOOK_S = 0.01
read, write = os.pipe()
line, launcher = os.pipe()
def run():
    subprocess.Popen(['setsid', 'env', '-i', 'sh', '-c', 'sleep 1000 & sleep 1000'])
    os.write(write, b'x')
    time.sleep(100)
guard = processes.run_guarded('of a test', [write], line, run, 1.0)
os.close(write)
os.close(line)
assert os.read(read, 1) == b'x'
end = time.monotonic() + 60
while not open(f'/proc/{{guard}}/comm').read().startswith('job-guard of'):
    assert time.monotonic() < end
    time.sleep(0.01)  # it tells nobody that it is ready
{end}
assert os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1]) == 128 + 9
assert os.read(read, 1) == b''  # whoever has held it is gone
"""
    in_child(program)
