"""What writes the output of kvhvdrun."""

from __future__ import annotations

import os
import threading

import pytest

from kvstore_hvd.errors import LaunchError
from kvstore_hvd.launcher.writer import Writer
from support.patience import patient


def test_a_thread_that_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that tells what helps; once there may be threads again, everything is written in order."""

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    reader, fd = os.pipe()
    writer = Writer()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refused)
        with pytest.raises(LaunchError, match=r"(?s)refuses a thread that writes output.*Fix: .*pids\.max"):
            writer.put(fd, b"first\n")
    writer.put(fd, b"second\n")
    assert writer.wait(patient(10))
    writer.close()
    assert os.read(reader, 100) == b"first\nsecond\n"
    os.close(fd)
    os.close(reader)
