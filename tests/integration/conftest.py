"""Fixtures of the integration tests."""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support import jobs
from support.jobs import Job


@pytest.fixture
def marker() -> Iterator[str]:
    """A variable that all processes of a test carry; at its end no process may."""
    name = f"KVHVD_TEST_MARK={uuid.uuid4().hex}"
    yield name
    left = jobs.processes(name)
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    assert not left, "processes were left behind"


@pytest.fixture
def start(tmp_path: Path, marker: str) -> Iterator[Callable[..., Job]]:
    """Start jobs in the test's folder, see `support.jobs.start`; those that are left after a failure are ended."""
    started: list[Job] = []

    def start_one(*arguments: Any, **more: Any) -> Job:
        started.append(jobs.start(tmp_path, marker, *arguments, **more))
        return started[-1]

    yield start_one
    for job in started:
        job.close()


@pytest.fixture
def run(start: Callable[..., Job]) -> Callable[..., Job]:
    """Start a job and wait for its end, with exit code 0 or `code`."""
    return lambda *arguments, code=0, **more: start(*arguments, **more).end(code)
