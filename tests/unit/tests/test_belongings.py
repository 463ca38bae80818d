"""What the tests of jobs take for left behind: files and processes of the job, and nothing of other jobs."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from support import jobs
from support.jobs import SHARED, Belongings


def test_what_is_left_and_what_another_job_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "patient", lambda _: 0.3)
    name, value = "KVHVD_TEST_MARK", uuid.uuid4().hex
    path = SHARED / f"kvstore_hvd-test-{value}"
    job = Belongings(f"{name}={value}")
    program = f"file = open({str(path)!r}, 'w'); print(flush=True); input()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    try:
        for mark in ("another", value):
            command = [sys.executable, "-c", program]
            with subprocess.Popen(command, env={**os.environ, name: mark}, **pipes) as process:  # type: ignore[call-overload]
                process.stdout.readline()
                if mark == "another":
                    job.assert_gone()
                else:
                    with pytest.raises(AssertionError, match=f"processes are left: .*{process.pid}"):
                        job.assert_gone()
                process.communicate(b"\n", timeout=60)
        with pytest.raises(AssertionError, match=path.name):
            job.assert_gone()
    finally:
        Path(path).unlink(missing_ok=True)
    job.assert_gone()
