"""The workers of one daemon: their processes, their streams, and their lines to the daemon."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from kvstore_hvd.base.channel import Channel
from kvstore_hvd.launcher import processes
from kvstore_hvd.launcher.guard import Guard
from kvstore_hvd.launcher.output import Tail
from kvstore_hvd.launcher.reaper import Reaper
from kvstore_hvd.launcher.relay import Relay

__all__ = ["LocalWorker", "LocalWorkers", "NotStarted"]


class NotStarted(Exception):
    """A worker cannot be started; the text says why."""


@dataclass
class LocalWorker:
    """One running worker; its process id is also that of its group and session."""

    id: int
    pid: int = 0
    code: int | None = None  # exit code, or -signal; None while it runs
    tail: Tail = field(default_factory=Tail)  # of its stderr
    line: Channel | None = None
    kill_at: float | None = None  # when it is killed, because it has been told to end


class LocalWorkers:
    """All workers that run here, by their ids."""

    def __init__(
        self, relay: Relay, guard: Guard, variable: bytes, grace_s: float, prefix: bool, keep: Sequence[int] = ()
    ) -> None:
        self._relay = relay
        self._guard = guard
        self._variable = variable
        self._reaper = Reaper(grace_s)
        self._prefix = prefix
        self._keep = tuple(keep)
        self._running: dict[int, LocalWorker] = {}

    def __iter__(self) -> Iterator[LocalWorker]:
        return iter(list(self._running.values()))

    def __len__(self) -> int:
        return len(self._running)

    def get(self, worker: int) -> LocalWorker | None:
        """The worker with this id, if it runs."""
        return self._running.get(worker)

    def start(
        self, worker: int, command: Sequence[str], environment: dict[str, str], cores: Sequence[int]
    ) -> LocalWorker:
        """Start a worker."""
        started = LocalWorker(worker)
        prefix = f"[{worker}] ".encode() if self._prefix else b""
        try:
            with ExitStack() as ends:
                stdin = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                ends.callback(os.close, stdin)
                stdout = self._relay.connect(1, prefix)
                ends.callback(os.close, stdout)
                stderr = self._relay.connect(2, prefix, started.tail.add)
                ends.callback(os.close, stderr)
                started.pid = processes.spawn(
                    command, environment, stdin, stdout, stderr, self._variable, cores, keep=self._keep
                )
        except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
            raise NotStarted(str(error) or type(error).__name__) from None
        self._reaper.add(started.pid)
        self._running[worker] = started
        return started

    def signal(self, worker: LocalWorker, number: int) -> None:
        """Send a signal to the group of a worker that runs, as a terminal would."""
        self._reaper.signal(worker.pid, number)

    def reap(self) -> list[LocalWorker]:
        """Collect every child that has ended, adopted orphans too; returns the workers among them."""
        # What a worker has left behind, which may hold locks, ports, or the pipes that we read, is ended.
        ended = []
        by_pid = {worker.pid: worker for worker in self._running.values()}
        for pid, code in self._reaper.reap():
            self._guard.replace(pid)
            worker = by_pid.get(pid)
            if worker is None:
                continue
            worker.code = code
            del self._running[worker.id]
            ended.append(worker)
        return ended

    def wait_s(self) -> float:
        """Seconds until `reap` has something to do even if nobody ends."""
        wait_s = self._reaper.wait_s()
        return float("inf") if wait_s is None else wait_s
