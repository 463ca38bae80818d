"""Jobs that are stopped for a while, as a whole or in part, and disks and readers that stand still: all go on.

Real processes, SIGSTOP and SIGCONT. What a pause must not cost is told by the event log: no world is lost, and nobody
is killed.
"""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support import jobs
from support.elastic import ElasticJob
from support.elastic_launches import Launch
from support.elastic_schedule import assert_all_right
from support.jobs import LIMIT_S, line_with
from support.patience import of_the_product
from support.pauses import pause, pause_all, state_of

# Slow: nothing here has to do with the version of MXNet and the MPI.
pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

SAMPLES = 240


@pytest.fixture
def train(marker: str, tmp_path: Path) -> Iterator[Any]:
    """Start a training, and end it if the test does not."""
    started: list[ElasticJob] = []

    def start(**settings: Any) -> ElasticJob:
        started.append(ElasticJob(tmp_path, marker, **settings))
        return started[-1]

    yield start
    for each in started:
        each.close()


def assert_nothing_was_lost(job: Any) -> None:
    told = [entry for entry in job.events if entry["event"] in ("generation_void", "worker_killed", "slot_blacklisted")]
    assert not told, job.told()
    assert len(job.of("generation_ready")) == 1


# -- The whole job ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("longer_s", [-2, 1, pytest.param(26, marks=pytest.mark.soak)])
def test_an_elastic_job_is_stopped(train: Any, marker: str, longer_s: int) -> None:
    """For so much longer than the lease and than an operation may wait for others: that time stands still meanwhile."""
    deadline_s = of_the_product(4)
    variables = {"KVHVD_TIMEOUT": str(deadline_s), "KVHVD_LEASE": "4"}
    job = train(workers=3, variables=variables, arguments=["--pause", "0.05"])
    world = job.until_step(size=3)
    pause_all(deadline_s + longer_s, marker)
    steps = len(job.done(0, world))
    job.until(lambda: len(job.done(0, world)) >= steps + 10, "steps after the pause")
    job.finish()
    assert job.end() == 0, job.describe()
    assert not job.events("generation_void"), job.describe()
    assert_all_right(job, SAMPLES)


def test_an_elastic_job_is_stopped_again_and_again(marker: str, tmp_path: Path) -> None:
    """While it starts, while workers meet, while one is replaced: what takes long then is not held against anybody."""
    deadline_s = of_the_product(6)
    variables = {"KVHVD_LEASE": "2", "KVHVD_START_TIMEOUT": str(deadline_s), "KVHVD_TIMEOUT": str(deadline_s)}
    launch = Launch(marker, tmp_path, "--min-np", "3", acts="steps=60", variables=variables)
    for _ in range(3):
        time.sleep(0.4)
        pause_all(deadline_s / 2, marker)
    code, _, err = launch.end()
    assert (code, err) == (0, ""), launch.told()
    assert_nothing_was_lost(launch)


# One rank always waits for the other.
TURNS = """
import time
import numpy as np
import kvstore_hvd
kvstore_hvd.init()
for step in range(8):
    say(f'step {step}\\n')
    if rank == 1:
        for _ in range(10):
            time.sleep(0.1)
    kvstore_hvd.allreduce(np.ones(4, np.float32), 'turn')
say('done\\n')
"""


@pytest.mark.parametrize(
    "variables",
    [
        {"KVHVD_TIMEOUT": "8"},
        {"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "8"},
    ],
)
def test_a_static_job_is_stopped(marker: str, variables: dict[str, str]) -> None:
    """A deadline counts the time in which whoever watches it has run."""
    process = jobs.start(marker, 2, TURNS, variables=variables)
    line_with(process, b"step 2")
    pause_all(10, marker)
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out.count(b"done")) == (0, 2), err.decode()


# One rank leaves while its operation waits for the other.
LEAVES = """
import time
import mxnet as mx
import kvstore_hvd
store = mx.kv.create('horovod')
array = mx.nd.ones(4)
say(f'step {rank}\\n')
if rank == 1:
    for _ in range(20):
        time.sleep(0.1)
store.pushpull('late', array, out=array)
kvstore_hvd.shutdown()
assert array.asnumpy().tolist() == [2, 2, 2, 2]
say('done\\n')
"""


def test_who_leaves_is_stopped_for_longer_than_its_deadline(marker: str) -> None:
    deadline_s = of_the_product(4)
    process = jobs.start(marker, 2, LEAVES, variables={"KVHVD_TIMEOUT": str(deadline_s)})
    for _ in range(2):
        line_with(process, b"step")
    time.sleep(0.5)
    pause_all(deadline_s + 8, marker)
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out.count(b"done"), err) == (0, 2, b"")


def test_a_worker_is_stopped_for_less_than_its_deadline(marker: str) -> None:
    process = jobs.start(marker, 2, TURNS.replace("step {step}", "step {step} {os.getpid()}"))
    pause(4, int(line_with(process, b"[1] step 2").split()[-1]))
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out.count(b"done"), err) == (0, 2, b"")


def test_workers_that_find_each_other_are_stopped(marker: str) -> None:
    program = """
import time
import kvstore_hvd
say('here\\n')
for _ in range(20 if rank == 1 else 0):
    time.sleep(0.1)
kvstore_hvd.init()
say('met\\n')
"""
    process = jobs.start(marker, 2, program, variables={"KVHVD_START_TIMEOUT": "20"})
    for _ in range(2):
        line_with(process, b"here")
    pause_all(25, marker)
    out, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out.count(b"met")) == (0, 2), err.decode()


def test_survivors_have_their_time_though_the_job_is_stopped(marker: str) -> None:
    program = """
import time
if rank == 1:
    say('failed\\n')
    sys.exit(3)
for _ in range(15):
    time.sleep(0.1)
say('reported\\n')
"""
    limit_s = of_the_product(5)
    process = jobs.start(marker, 2, program, variables={"KVHVD_SURVIVOR_TIME": str(limit_s)})
    line_with(process, b"failed")
    pause_all(limit_s + 2, marker)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, b"reported" in out) == (3, True)


# -- The launcher, and the daemon -----------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["launcher", "daemon"])
def test_launcher_or_daemon_is_stopped(marker: str, tmp_path: Path, who: str) -> None:
    """A worker that dies meanwhile is replaced afterwards; the others are not taken for late, whom nobody heard."""
    acts = "steps=400 2:die 2:at=50"
    launch = Launch(marker, tmp_path, "--min-np", "2", "--max-np", "3", acts=acts, variables={"KVHVD_TIMEOUT": "3"})
    launch.until_joined(0)
    (daemon,) = launch.daemons()
    pause(5, launch.process.pid if who == "launcher" else daemon)
    launch.until(lambda: launch.of("worker_exited"))
    code, _, _ = launch.end()
    assert code == 0, launch.told()
    assert not launch.of("worker_killed"), launch.told()
    assert launch.of("generation_ready")[1]["workers"][:2] == [0, 1]
    codes = {entry["worker"]: entry["code"] for entry in launch.of("worker_exited")}
    assert [codes[number] for number in range(3)] == [0, 0, -signal.SIGKILL]


# -- Output ---------------------------------------------------------------------------------------------------------

# A worker that writes more to standard error than pipes hold, and than the launcher keeps. What it writes to standard
# output fits into the pipes: it is no worker that has to wait.
LOUD = """
import sys
sys.path.insert(0, {folder!r})
from support import elastic_worker
import os
if os.environ["KVHVD_WORKER"] == "0":
    import threading
    def write():
        for number in range(40000):
            print(number, "x" * 60, file=sys.stderr)
    threading.Thread(target=write, daemon=True).start()
elastic_worker.main()
"""


def loud(steps: int) -> list[str]:
    folder = str(Path(jobs.__file__).parents[1])
    return [sys.executable, "-c", LOUD.format(folder=folder), f"steps={steps}"]


@pytest.mark.parametrize("kind", ["pipe", "terminal"])
def test_the_reader_of_the_output_stands_still(marker: str, tmp_path: Path, kind: str) -> None:
    """Workers that write wait; leases and the replacement of a dead worker do not."""
    ours, theirs = os.pipe() if kind == "pipe" else pty.openpty()
    launch = Launch(
        marker,
        tmp_path,
        *("--min-np", "2", "--max-np", "3"),
        command=loud(400),
        stdout=theirs,
        stderr=theirs,
        variables={"KVHVD_LEASE": "2"},
    )
    os.close(theirs)
    launch.until_joined(0)
    time.sleep(5)
    launch.kill(2)
    assert launch.until_joined(1)[:2] == [0, 1]
    launch.until(lambda: len(launch.of("worker_exited")) == 4, "the end of all workers")
    time.sleep(3)  # longer than streams that somebody holds open are waited for
    text = b""
    with contextlib.suppress(OSError):  # how a terminal says that its other end is closed
        while data := os.read(ours, 65536):
            text += data
    os.close(ours)
    assert launch.end()[0] == 0, launch.told()
    assert not launch.of("worker_killed")
    assert_nothing_is_missing(text)


def assert_nothing_is_missing(text: bytes) -> None:
    """All that worker 0 has written until its end, which came first."""
    numbers = [int(line.split()[1]) for line in text.splitlines() if line.endswith(b"xxx")]
    assert len(numbers) > 5000
    assert numbers == list(range(len(numbers)))


def test_the_reader_of_the_event_log_stands_still(marker: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "events")
    reader = os.open(tmp_path / "events", os.O_RDONLY | os.O_NONBLOCK)
    fill = os.open(tmp_path / "events", os.O_WRONLY | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(fill, b"\n" * 4096)
    launch = Launch(
        marker,
        tmp_path,
        *("--min-np", "2", "--event-log", str(tmp_path / "events")),
        acts="steps=150",
        variables={"KVHVD_LEASE": "2"},
    )
    until(lambda: len(jobs.processes(marker)) >= 4)  # launcher, daemon, workers: it has the pipe open
    time.sleep(5)
    os.set_blocking(reader, True)
    os.close(fill)
    text = b""
    while data := os.read(reader, 65536):
        text += data
    code, out, err = launch.end()
    assert (code, err, out.count("done after 150 steps")) == (0, "", 2)
    assert b'"event": "job_start"' in text
    assert b'"event": "job_end"' in text
    os.close(reader)


def test_an_output_file_stands_still(marker: str, tmp_path: Path) -> None:
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
    signal.signal(signal.SIGUSR1, lambda *_: open(sys.argv[1], 'w').close())
    open(sys.argv[1] + '.ready', 'w').close()
    signal.pause()
"""
    touched = tmp_path / "touched"
    command = ["-np", "2", "--output-filename", str(tmp_path / "kept"), sys.executable, "-c", jobs.PRELUDE + program]
    process = subprocess.Popen(
        [*jobs.kvhvdrun().prefix, *command, str(touched)],
        env=jobs.variables_of(marker),
        stdout=subprocess.DEVNULL,
    )
    until(lambda: Path(f"{touched}.ready").exists())
    time.sleep(1)  # the launcher comes to where it could write no more
    process.send_signal(signal.SIGUSR1)
    until(touched.exists)
    os.set_blocking(reader, True)
    text = b""
    while data := os.read(reader, 65536):
        text += data
    os.close(reader)
    assert process.wait(LIMIT_S) == 0
    assert [int(line.split()[0]) for line in text.splitlines()] == list(range(20000))


def until(condition: Any) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own; skips where none can be mounted and frozen."""
    image, folder = tmp_path / "image", tmp_path / "disk"
    folder.mkdir()
    image.write_bytes(b"\0" * (32 << 20))
    steps = (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(folder)])
    try:
        for step in (*steps, ["fsfreeze", "-f", str(folder)], ["fsfreeze", "-u", str(folder)]):
            subprocess.run(step, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        subprocess.run(["umount", str(folder)], check=False, capture_output=True)
        pytest.skip(f"no file system can be mounted and frozen here: {error}")
    yield folder
    subprocess.run(["fsfreeze", "-u", str(folder)], check=False, capture_output=True)
    subprocess.run(["umount", str(folder)], check=False, capture_output=True)


@pytest.mark.soak
def test_the_disk_of_the_output_is_frozen(disk: Path, marker: str, tmp_path: Path) -> None:
    """And that of the event log. A worker that dies meanwhile is replaced."""
    steps = 1500
    with (disk / "output").open("wb") as output:
        launch = Launch(
            marker,
            disk,
            *("--min-np", "2", "--max-np", "3"),
            command=loud(steps),
            stdout=output,
            stderr=output,
            variables={"KVHVD_LEASE": "2"},
        )
    launch.until_joined(0)
    workers = [launch.pid(number) for number in range(3)]
    subprocess.run(["fsfreeze", "-f", str(disk)], check=True)
    try:
        time.sleep(2)
        os.kill(workers[2], signal.SIGKILL)
        time.sleep(5)
        assert launch.process.poll() is None
        assert all(state_of(pid) not in "ZX" for pid in workers[:2])
        assert len(set(jobs.processes(marker))) >= 5  # launcher, daemon, its guard, the two workers
    finally:
        subprocess.run(["fsfreeze", "-u", str(disk)], check=True)
    assert launch.end()[0] == 0, launch.told()
    assert not launch.of("worker_killed")
    assert launch.members(1)[:2] == [0, 1]
    assert_nothing_is_missing((disk / "output").read_bytes())


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_four_jobs_at_once(tmp_path: Path, marker: str) -> None:
    """More processes than cores, and no fault: nobody is taken for lost. For ``KVHVD_TEST_SOAK_S`` seconds (600)."""
    name, _, value = marker.partition("=")
    started = []
    for number in range(4):
        (tmp_path / str(number)).mkdir()
        started.append(ElasticJob(tmp_path / str(number), f"{name}={value}{number}", workers=4))
    try:
        end = time.monotonic() + float(os.environ.get("KVHVD_TEST_SOAK_S", "600"))
        for job in started:
            job.until_step(size=4)
        while time.monotonic() < end:
            assert [job.process.poll() for job in started] == [None] * 4, [job.describe() for job in started]
            time.sleep(1)
        for job in started:
            job.finish()
        for job in started:
            assert job.process.wait(timeout=300) == 0, job.describe()
            assert not job.events("generation_void"), job.describe()
            assert not job.events("worker_killed"), job.describe()
    finally:
        for job in started:
            job.close()
