"""Jobs that are stopped for a while, as a whole or in part, and readers that stand still: all go on.

Real processes, SIGSTOP and SIGCONT. What a pause must not cost is told by the event log: no world is lost, and nobody
is killed.
"""

import os
import signal
import sys
import time

import pytest

from support.jobs import stopped

pytestmark = [pytest.mark.timeout(200), pytest.mark.timing, pytest.mark.slow]


def pause(seconds, *pids, marker=""):
    """Stop these processes, or all that carry the marker, for so long."""
    with stopped(*pids, marker=marker):
        time.sleep(seconds)


def assert_nothing_was_lost(job):
    kinds = {entry["event"] for entry in job.events()}
    assert not kinds & {"generation_void", "worker_killed", "slot_blacklisted"}, job.describe()


# -- The whole job ------------------------------------------------------------------------------------------------


def test_an_elastic_job_is_stopped_again_and_again(start, marker):
    """While it starts, while workers meet: what takes long then is not held against anybody."""
    limits = {"KVHVD_LEASE": "2", "KVHVD_START_TIMEOUT": "6", "KVHVD_TIMEOUT": "6"}
    job = start("--min-np 3", acts="steps=60", **limits)
    for _ in range(3):
        time.sleep(0.4)
        pause(3, marker=marker)
    assert job.end().err == ""
    assert_nothing_was_lost(job)


# One rank always waits for the other; at the end, one leaves while its operation waits.
TURNS = """
import numpy as np
import kvstore_hvd
say('here\\n')
for _ in range(20 if rank == 1 else 0):
    time.sleep(0.1)
kvstore_hvd.init()
for step in range(6):
    say(f'step {step} {os.getpid()}\\n')
    for _ in range(10 * rank):
        time.sleep(0.1)
    kvstore_hvd.allreduce(np.ones(4, np.float32), 'turn')
say('done\\n')
"""


@pytest.mark.parametrize("limit", ["KVHVD_TIMEOUT", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "KVHVD_START_TIMEOUT"])
def test_a_static_job_is_stopped(start, marker, limit):
    """A deadline counts the time in which whoever watches it has run."""
    job = start("-np 2", TURNS, **{limit: "6"})
    job.until_printed("here" if "START" in limit else "step 2", 2)
    pause(8, marker=marker)
    assert job.end().out.count("done") == 2


def test_who_leaves_is_stopped_for_longer_than_its_deadline(start, marker):
    program = """
import mxnet as mx
import kvstore_hvd
store = mx.kv.create('horovod')
array = mx.nd.ones(4)
say('step\\n')
for _ in range(20 * rank):
    time.sleep(0.1)
store.pushpull('late', array, out=array)
kvstore_hvd.shutdown()
assert array.asnumpy().tolist() == [2, 2, 2, 2]
"""
    job = start("-np 2", program, KVHVD_TIMEOUT="4").until_printed("step", 2)
    time.sleep(0.5)
    pause(8, marker=marker)
    assert job.end().err == ""


@pytest.mark.parametrize("who", ["launcher", "daemon"])
def test_launcher_or_daemon_is_stopped(start, who):
    """A worker that dies meanwhile is replaced afterwards; the others are not taken for late, whom nobody heard."""
    job = start("--min-np 2 --max-np 3", acts="steps=400 2:die 2:at=50", KVHVD_TIMEOUT="3")
    job.until_joined(0, 1, 2)
    pause(5, job.process.pid if who == "launcher" else job.daemons()[0])
    job.end()
    assert not job.events("worker_killed"), job.describe()
    assert job.events("generation_ready")[1]["workers"][:2] == [0, 1]
    codes = {entry["worker"]: entry["code"] for entry in job.events("worker_exited")}
    assert [codes[number] for number in range(3)] == [0, 0, -signal.SIGKILL]


# -- Output ---------------------------------------------------------------------------------------------------------

# A worker that writes more to standard error than pipes hold, and than the launcher keeps. What it writes to standard
# output fits into the pipes: it is no worker that has to wait.
LOUD = """
import os, sys, threading
from support import elastic_worker
def write():
    for number in range(40000):
        print(number, "x" * 60, file=sys.stderr)
if os.environ["KVHVD_WORKER"] == "0":
    threading.Thread(target=write, daemon=True).start()
elastic_worker.main()
"""


def test_the_reader_of_the_output_stands_still(start):
    """Workers that write wait; leases and the replacement of a dead worker do not, and nothing is missing."""
    ours, theirs = os.pipe()
    command = [sys.executable, "-c", LOUD, "steps=400"]
    job = start("--min-np 2 --max-np 3", command, stdout=theirs, stderr=theirs, KVHVD_LEASE="2")
    os.close(theirs)
    job.until_joined(0, 1, 2)
    time.sleep(5)
    job.kill(2)
    job.until_joined(0, 1, 3)
    job.until(lambda: len(job.events("worker_exited")) == 4, "the end of all workers")
    time.sleep(3)  # longer than streams that somebody holds open are waited for
    with open(ours, "rb") as reader:
        text = reader.read()
    job.end()
    assert not job.events("worker_killed")
    numbers = [int(line.split()[1]) for line in text.splitlines() if line.endswith(b"xxx")]
    assert len(numbers) > 5000
    assert numbers == list(range(len(numbers)))


def test_an_output_file_stands_still(start, tmp_path):
    """Signals are passed on meanwhile, and nothing is lost."""
    folder = tmp_path / "kept" / "rank.0"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "stdout")
    reader = os.open(folder / "stdout", os.O_RDONLY | os.O_NONBLOCK)
    program = """
if rank == 0:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    for number in range(20000):
        say(f'{number} {"x" * 60}\\n')
else:
    signal.signal(signal.SIGUSR1, lambda *_: open('touched', 'w').close())
    open('ready', 'w').close()
    signal.pause()
"""
    job = start("-np 2 --output-filename kept", program)
    job.until((tmp_path / "ready").exists)
    time.sleep(1)  # the launcher comes to where it could write no more
    job.process.send_signal(signal.SIGUSR1)
    job.until((tmp_path / "touched").exists)
    os.set_blocking(reader, True)
    with open(reader) as lines:
        text = lines.read()
    job.end()
    assert [int(line.split()[0]) for line in text.splitlines()] == list(range(20000))


def test_a_worker_is_stopped_for_less_than_its_deadline(start):
    job = start("-np 2", TURNS)
    line = job.until(lambda: [line for line in job.out.splitlines() if line.startswith("[1] step 2")])[0]
    pause(2, int(line.split()[-1]))
    assert (job.end().out.count("done"), job.err) == (2, "")
