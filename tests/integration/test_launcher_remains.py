"""What workers have started ends with the job: whoever is killed, and not before it has cleaned up."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.elastic_launches import Launch
from support.jobs import LIMIT_S, processes, run, start, variables_of, wait_for
from support.launchers import kvhvdrun

pytestmark = [pytest.mark.timeout(150), pytest.mark.slow]

# In its session and out of it, with its environment and without.
CHILDREN = """
mark = os.environ['KVHVD_TEST_MARK']
bare = ['env', '-i', '/bin/sh', '-c', 'sleep 1000; :', mark]
subprocess.Popen(['sleep', '1000'])
subprocess.Popen(['sleep', '1000'], start_new_session=True)
subprocess.Popen(bare)
subprocess.Popen(bare, start_new_session=True)
subprocess.Popen(['setsid', 'sh', '-c', 'setsid env -i /bin/sh -c "sleep 1000; :" $0 & exit', mark]).wait()
say('ready\\n')
"""


def until_gone(marker: str, limit_s: float = LIMIT_S) -> None:
    end = time.monotonic() + limit_s
    while left := processes(marker):
        assert time.monotonic() < end, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
        time.sleep(0.02)  # between two looks at /proc, which has no events


def with_name(marker: str, name: bytes) -> list[int]:
    """The processes that `pkill NAME` or `pkill -f NAME` would hit, of this job only."""
    found = []
    for pid in processes(marker):
        with contextlib.suppress(OSError):
            proc = Path("/proc", str(pid))
            if name in (proc / "comm").read_bytes() or name in (proc / "cmdline").read_bytes():
                found.append(pid)
    return found


def guards(marker: str) -> list[int]:
    return with_name(marker, b"job-guard")


def kill(*pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


# -- Whoever is killed --------------------------------------------------------------------------------------------


def test_whoever_kills_launchers_by_name_ends_all_of_the_job(marker: str) -> None:
    process = start(marker, 2, CHILDREN + "forever()")
    wait_for(process, 2)
    assert len(processes(marker)) >= 2 + 2 * 5
    by_name = with_name(marker, b"kvhvdrun")
    assert process.pid in by_name
    kill(*by_name)
    process.communicate(timeout=LIMIT_S)
    until_gone(marker)


def test_a_guard_that_is_killed_is_replaced(marker: str) -> None:
    process = start(marker, 2, CHILDREN + "forever()")
    wait_for(process, 2)
    (first,) = guards(marker)
    kill(first)
    end = time.monotonic() + LIMIT_S
    while not (now := guards(marker)) or now == [first]:
        assert time.monotonic() < end
        time.sleep(0.02)  # the launcher says nothing of it
    process.kill()
    process.communicate(timeout=LIMIT_S)
    until_gone(marker)


def test_a_guard_that_is_killed_costs_the_job_nothing(marker: str) -> None:
    process = start(marker, 2, "say('ready\\n'); sys.stdin.read() if rank == 0 else None", stdin=-1)
    wait_for(process, 2)
    kill(*guards(marker))
    out, err = process.communicate(b"", timeout=LIMIT_S)
    assert (process.returncode, err) == (0, b""), out


def test_elastic_whoever_kills_launchers_by_name_ends_all_of_the_job(marker: str, tmp_path: Path) -> None:
    program = "import os, subprocess, sys\ndef say(text): print(text, end='', flush=True)\n" + CHILDREN
    hosts = "setsid env -i sh -c 'sleep 1000; :' $KVHVD_TEST_MARK > /dev/null 2>&1 & echo localhost:2"
    command = [sys.executable, "-c", program + "import threading; threading.Event().wait()"]
    launch = Launch(marker, tmp_path, "--min-np", "2", "--host-discovery-script", hosts, command=command)
    wait_for(launch.process, 2)
    (daemon,) = launch.daemons()
    kill(*with_name(marker, b"kvhvdrun"), daemon)
    launch.process.communicate(timeout=LIMIT_S)
    until_gone(marker)


# -- What cleans up behind itself ---------------------------------------------------------------------------------

# Shared memory that Python's resource tracker removes once the processes of its program are gone.
SHARED = """
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
helper = subprocess.Popen([sys.executable, '-c', 'import threading; threading.Event().wait(1000)'],
                          pass_fds=[__import__('multiprocessing.resource_tracker').resource_tracker._resource_tracker._fd])
say(f'{memory.name}\\n')
"""


@pytest.fixture
def shared() -> Iterator[Any]:
    """Reads the name of a worker's shared memory; at the end of the test there is none."""
    paths: list[Path] = []

    def read(line: bytes) -> None:
        paths.append(Path("/dev/shm", line.decode().split()[-1]))

    yield read
    left = [path for path in paths if path.exists()]
    for path in left:
        path.unlink()
    assert paths
    assert not left


def test_shared_memory_of_a_worker_that_is_killed_is_removed(marker: str, shared: Any) -> None:
    program = SHARED + "if rank == 1: sys.stdin.read(); os.kill(os.getpid(), 9)\nforever()"
    code, out, _ = run(marker, 2, program)
    assert code == 137
    for line in out.splitlines():
        shared(line)


def test_shared_memory_of_a_worker_that_is_deaf_to_the_signal_is_removed(marker: str, shared: Any) -> None:
    program = "signal.signal(signal.SIGTERM, lambda *_: None)\n" + SHARED + "forever()"
    process = start(marker, 2, program, variables={"KVHVD_KILL_GRACE": "1"})
    for line in wait_for(process, 2):
        shared(line)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGTERM


def test_shared_memory_is_removed_when_the_launcher_is_killed(marker: str, shared: Any) -> None:
    process = start(marker, 2, SHARED + "forever()")
    for line in wait_for(process, 2):
        shared(line)
    process.kill()
    process.communicate(timeout=LIMIT_S)
    until_gone(marker)


def test_elastic_shared_memory_of_a_worker_that_is_killed_is_removed(marker: str, tmp_path: Path, shared: Any) -> None:
    program = (
        "import os, pathlib, signal, subprocess, sys, time\ndef say(text): print(text, end='', flush=True)\n" + SHARED
    )
    # The others end after it: a job that has come to its end before has failed with its last worker.
    program += """
killed = pathlib.Path('killed')
if os.environ['KVHVD_WORKER'] == '0':
    killed.with_suffix('.part').write_text(str(os.getpid()))
    killed.with_suffix('.part').rename(killed)
    os.kill(os.getpid(), signal.SIGKILL)
while not killed.exists() or pathlib.Path('/proc', killed.read_text()).exists():
    time.sleep(0.01)
"""
    command = [sys.executable, "-c", program]
    launch = Launch(marker, tmp_path, "--min-np", "1", "-H", "localhost:2", command=command, cwd=tmp_path)
    code, out, err = launch.end()
    assert code == 0, err
    for line in out.splitlines():
        shared(line.encode())


def test_what_is_deaf_to_sigterm_is_killed_after_a_short_grace(marker: str) -> None:
    program = """
deaf = 'import signal, threading; signal.signal(15, signal.SIG_IGN); print(1, flush=True); threading.Event().wait()'
child = subprocess.Popen([sys.executable, '-c', deaf], stdout=subprocess.PIPE)
child.stdout.readline()
subprocess.Popen([sys.executable, '-c', deaf], stdout=subprocess.PIPE, start_new_session=True).stdout.readline()
"""
    code, _, err = run(marker, 2, program)
    assert (code, err) == (0, b"")


@pytest.mark.parametrize("options", [(), ("--min-np", "1")])
def test_what_was_started_before_kvhvdrun_goes_on(marker: str, options: tuple[str, ...]) -> None:
    """As in the start script of a container: a shell starts a service, and becomes kvhvdrun."""
    script = 'sleep 1000 > /dev/null & echo $!; exec "$@"'
    command = ["sh", "-c", script, "sh", *kvhvdrun().prefix, "-np", "2", *options, "true"]
    done = subprocess.run(command, env=variables_of(), stdout=subprocess.PIPE, timeout=LIMIT_S, check=True)
    service = int(done.stdout)
    os.kill(service, signal.SIGTERM)  # raises when it is gone
