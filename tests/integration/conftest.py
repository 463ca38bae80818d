"""Fixtures of the integration tests."""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from collections.abc import Iterator

import pytest

from support.jobs import processes


@pytest.fixture
def marker() -> Iterator[str]:
    """A variable that all processes of a test carry; at its end no process may."""
    name = f"KVHVD_TEST_MARK={uuid.uuid4().hex}"
    yield name
    left = processes(name)
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    assert not left, "processes were left behind"
