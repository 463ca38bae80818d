"""Stopping processes for a while, as a batch system or ``docker pause`` does."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from support.jobs import processes

__all__ = ["all_stopped", "pause", "pause_all", "state_of", "stopped"]


def state_of(pid: int) -> str:
    """The state of a process, a letter of proc(5); 'X' when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Keep these processes stopped."""
    with _stopped(lambda: pids):
        yield


@contextlib.contextmanager
def all_stopped(marker: str) -> Iterator[None]:
    """Keep all processes that carry the marker stopped, also those that they were just starting."""
    with _stopped(lambda: processes(marker)):
        yield


def pause(seconds: float, *pids: int) -> None:
    """Stop these processes for so long."""
    with stopped(*pids):
        time.sleep(seconds)


def pause_all(seconds: float, marker: str) -> None:
    """Stop all processes that carry the marker for so long."""
    with all_stopped(marker):
        time.sleep(seconds)


@contextlib.contextmanager
def _stopped(find: Callable[[], Sequence[int]]) -> Iterator[None]:
    held: set[int] = set()
    try:
        while running := [pid for pid in find() if state_of(pid) not in "TtZX"]:
            for pid in running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
                    held.add(pid)
            time.sleep(0.005)  # a stop takes a moment
        yield
    finally:
        for pid in held:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
