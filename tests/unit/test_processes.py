"""The guard of a launcher's workers, and whose descendant a process is."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import uuid
from collections.abc import Iterator

import pytest

from kvstore_hvd.launcher.processes import Guard, descends_from

SLEEP = [sys.executable, "-c", "import threading; threading.Event().wait(100)"]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(SLEEP, start_new_session=True) as process:
        yield process
        process.kill()


def abandoned(guard: Guard) -> None:
    """End a guard as the launcher's death would."""
    os.close(guard._write)
    os.waitpid(guard.pid, 0)


def test_the_guard_kills_what_it_was_told_of(sleeper: subprocess.Popen[bytes]) -> None:
    guard = Guard(f"KVHVD_TEST_NOBODY={uuid.uuid4().hex}".encode())
    guard.add(sleeper.pid)
    abandoned(guard)
    assert sleeper.wait(60) == -9


def test_the_guard_spares_what_took_the_number_of_a_worker_that_is_gone(sleeper: subprocess.Popen[bytes]) -> None:
    guard = Guard(f"KVHVD_TEST_NOBODY={uuid.uuid4().hex}".encode())
    guard.add(sleeper.pid)
    guard.remove(sleeper.pid)
    abandoned(guard)
    assert sleeper.poll() is None


def test_whose_descendant_a_process_is(sleeper: subprocess.Popen[bytes]) -> None:
    program = f"import subprocess; p = subprocess.Popen({SLEEP!r}, start_new_session=True); print(p.pid); p.wait()"
    with subprocess.Popen([sys.executable, "-uc", program], stdout=subprocess.PIPE, start_new_session=True) as worker:
        assert worker.stdout is not None
        assert select.select([worker.stdout], [], [], 60)[0]
        child = int(worker.stdout.readline())
        assert descends_from(worker.pid, worker.pid)
        assert descends_from(child, worker.pid)
        assert descends_from(child, os.getpid())
        assert not descends_from(worker.pid, child)
        assert not descends_from(sleeper.pid, worker.pid)
        assert not descends_from(os.getpid(), worker.pid)
        assert not descends_from(1 << 22, worker.pid)  # beyond all process ids
        os.kill(child, 9)
