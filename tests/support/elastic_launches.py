"""Elastic jobs under kvhvdrun whose workers train nothing, with what their event log tells."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from support import elastic_worker
from support.jobs import LIMIT_S, variables_of
from support.launchers import kvhvdrun

WORKER = Path(elastic_worker.__file__)


class Launch:
    """A running job.

    Parameters
    ----------
    marker : str
        A variable that all of its processes carry.
    folder : Path
        For the event log.
    *options : str
        Of kvhvdrun.
    acts : str
        Of the workers, see `elastic_worker`; with spaces between them.
    command : list of str, optional
        Run instead of these workers.
    prefix : sequence of str, optional
        How to start kvhvdrun.
    variables : dict, optional
        Additional ones.
    """

    def __init__(
        self,
        marker: str,
        folder: Path,
        *options: str,
        acts: str = "steps=25",
        command: list[str] | None = None,
        prefix: Sequence[str] = (),
        variables: dict[str, str] | None = None,
        **more: Any,
    ) -> None:
        self.log = folder / "events.jsonl"
        command = command or [sys.executable, str(WORKER), *acts.split()]
        given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            [*(prefix or kvhvdrun().prefix), "--event-log", str(self.log), *options, *command],
            env={**variables_of(marker), **(variables or {})},
            **given,
        )

    @property
    def events(self) -> list[dict[str, Any]]:
        """The event log so far."""
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(line) for line in self.log.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return []

    def of(self, event: str) -> list[dict[str, Any]]:
        """The events of one kind."""
        return [entry for entry in self.events if entry["event"] == event]

    def until(self, condition: Callable[[], object], what: str = "") -> None:
        """Wait for something; fails at the limit, or when the job ends before."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            ended = self.process.poll() is not None
            if condition():
                return
            if ended or time.monotonic() > deadline:
                self.process.kill()
                out, err = self.process.communicate(timeout=LIMIT_S)
                why = "the job ended" if ended else "time limit"
                text = (err or b"").decode()  # None: the test reads it
                raise AssertionError(f"{why}; waited for {what or condition}\n{self.told()}\n{out!r}\n{text}")
            time.sleep(0.01)  # between two looks at a file; no event tells of its growth

    def until_joined(self, generation: int) -> list[int]:
        """Wait until the members of a generation have met; who they are."""
        self.until(
            lambda: any(e["generation"] == generation for e in self.of("generation_joined")), f"generation {generation}"
        )
        return self.members(generation)

    def until_count(self, count: int, after: int = -1) -> tuple[int, list[int]]:
        """Wait until a generation after the given one has been joined by so many members; its number and members."""

        def found() -> list[tuple[int, list[int]]]:
            joined = [entry["generation"] for entry in self.of("generation_joined") if entry["generation"] > after]
            return [
                (generation, self.members(generation))
                for generation in joined
                if len(self.members(generation)) == count
            ]

        self.until(found, f"a generation with {count} members")
        return found()[-1]

    def until_joined_by(self, *workers: int) -> None:
        """Wait until a generation with these members, in the order of ranks, has been joined."""
        self.until(
            lambda: [*workers] in [self.members(entry["generation"]) for entry in self.of("generation_joined")],
            f"a generation of {workers}",
        )

    def members(self, generation: int) -> list[int]:
        """Who was given a generation, in the order of ranks."""
        (entry,) = [entry for entry in self.of("generation_ready") if entry["generation"] == generation]
        workers: list[int] = entry["workers"]
        return workers

    def pid(self, worker: int) -> int:
        """Process id of a worker."""
        (entry,) = [entry for entry in self.of("worker_started") if entry["worker"] == worker]
        return int(entry["pid"])

    def kill(self, *workers: int, number: int = signal.SIGKILL) -> None:
        """Send workers a signal."""
        for worker in workers:
            os.kill(self.pid(worker), number)

    def daemons(self) -> list[int]:
        """Process ids of the daemons: parents of the workers."""
        found = set()
        for entry in self.of("worker_started"):
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{entry['pid']}/stat").read_text()
                found.add(int(stat.rpartition(")")[2].split()[1]))
        return sorted(found)

    def end(self) -> tuple[int, str, str]:
        """Wait for the end: exit code, stdout, stderr."""
        try:
            out, err = self.process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            out, err = self.process.communicate(timeout=LIMIT_S)
            raise AssertionError(f"the job hangs\n{self.told()}\n{out!r}\n{err.decode()}") from None
        return self.process.returncode, (out or b"").decode(), (err or b"").decode()

    def told(self) -> str:
        """The event log, for people."""
        return "\n".join(json.dumps(entry) for entry in self.events)
