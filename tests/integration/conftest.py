import contextlib
import os
import signal
import uuid

import pytest

from support import jobs


@pytest.fixture
def marker():
    """A variable that all processes of a test carry; at its end no process may."""
    name = f"KVHVD_TEST_MARK={uuid.uuid4().hex}"
    yield name
    left = jobs.processes(name)
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    assert not left, "processes were left behind"


@pytest.fixture
def start(tmp_path, marker):
    """Start jobs in the test's folder, see `support.jobs.start`; those that are left after a failure are ended."""
    started = []

    def start_one(*arguments, **more):
        started.append(jobs.start(tmp_path, marker, *arguments, **more))
        return started[-1]

    yield start_one
    for job in started:
        job.close()


@pytest.fixture
def run(start):
    """Start a job and wait for its end, with exit code 0 or `code`."""
    return lambda *arguments, code=0, **more: start(*arguments, **more).end(code)
