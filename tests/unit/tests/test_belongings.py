"""What the tests of jobs take for left behind: files and sockets whose job is gone, and nothing of other jobs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from support import belongings
from support.belongings import SHARED, Belongings
from support.patience import patient

LIMIT_S = patient(30)


@pytest.fixture
def marker() -> str:
    return f"KVHVD_TEST_MARK={uuid.uuid4().hex}"


@pytest.fixture
def path() -> Iterator[Path]:
    """A file in /dev/shm that is not there yet."""
    file = SHARED / f"kvstore_hvd-test-{uuid.uuid4().hex}"
    yield file
    file.unlink(missing_ok=True)


@pytest.fixture(autouse=True)
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(belongings, "LIMIT_S", 0.5)


def started(marker: str, program: str) -> subprocess.Popen[bytes]:
    """A process that carries the marker and waits for its input to end after the program."""
    name, _, value = marker.partition("=")
    process = subprocess.Popen(
        [sys.executable, "-c", f"{program}\nprint(flush=True)\ninput()"],
        env={**os.environ, name: value},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


def test_a_file_that_is_left(marker: str, path: Path) -> None:
    job = Belongings(marker)
    path.touch()
    with pytest.raises(AssertionError, match=path.name):
        job.assert_gone()


def test_a_file_that_was_there_before(marker: str, path: Path) -> None:
    path.touch()
    Belongings(marker).assert_gone()


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_a_file_that_another_job_uses(marker: str, path: Path, how: str) -> None:
    """Until its processes are gone: then it is left."""
    program = f"import mmap; file = open({str(path)!r}, 'w+b'); file.truncate(4096)"
    if how == "mapped":
        program += "; memory = mmap.mmap(file.fileno(), 4096); file.close()"
    job = Belongings(marker)
    with started("KVHVD_TEST_MARK=another", program) as process:
        job.assert_gone()
        process.communicate(b"\n", timeout=LIMIT_S)
    with pytest.raises(AssertionError, match=path.name):
        job.assert_gone()


def test_a_process_that_is_left(marker: str) -> None:
    job = Belongings(marker)
    with started(marker, "") as process:
        with pytest.raises(AssertionError, match=f"processes are left: .*{process.pid} "):
            job.assert_gone()
        process.communicate(b"\n", timeout=LIMIT_S)
    job.assert_gone()


@pytest.mark.parametrize("family", [socket.AF_UNIX, socket.AF_INET])
def test_a_socket_in_foreign_hands(marker: str, family: socket.AddressFamily) -> None:
    address = ("127.0.0.1", 0) if family == socket.AF_INET else f"\0{uuid.uuid4().hex}"
    job = Belongings(marker)
    name, _, value = marker.partition("=")
    with socket.socket(family) as passed_on:
        passed_on.bind(address)
        passed_on.listen()
        with subprocess.Popen(
            [sys.executable, "-c", "print(flush=True); input()"],
            env={**os.environ, name: value},
            pass_fds=[passed_on.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            process.stdout.readline()
            job.note()
            process.communicate(b"\n", timeout=LIMIT_S)
        with pytest.raises(AssertionError, match="sockets are left"):
            job.assert_gone()
    job.assert_gone()
