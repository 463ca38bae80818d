"""Elastic jobs that a test watches and disturbs while they run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Optional

import psutil

from support.belongings import Belongings
from support.jobs import PACKAGES, processes
from support.launchers import environment, kvhvdrun, with_tests
from support.patience import patient

__all__ = ["LIMIT_S", "ElasticJob", "Line"]

WORKER = Path(__file__).resolve().with_name("elastic_trainee.py")
# Of the run as a whole, start-up of the workers included: far above what any of them takes.
LIMIT_S = patient(150)
# Between two looks at a file: no event tells of its growth.
GLANCE_S = 0.002
DAEMON = "kvstore_hvd.driver.daemon"

Line = dict[str, Any]


class _Tail:
    """The JSON lines of a file that grows: in their order, and by what they are about and the world they belong to."""

    def __init__(self, path: Path, kind: str) -> None:
        self._path = path
        self._kind = kind  # the field that says what a line is about
        self._position = 0
        self.lines: list[Line] = []
        self.of: dict[tuple[str, Any], list[Line]] = defaultdict(list)

    def read(self) -> list[Line]:
        """Return all lines that are complete by now."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
            complete = data[: data.rfind(b"\n") + 1]
            self._position += len(complete)
            for text in complete.splitlines():
                line = json.loads(text)
                self.lines.append(line)
                self.of[line[self._kind], line.get("generation")].append(line)
        return self.lines


class ElasticJob:
    """A training under ``kvhvdrun --min-np --max-np``, with what its workers and its launcher have written so far.

    Parameters
    ----------
    folder : Path
        Empty; all files of the job are in there.
    marker : str
        ``NAME=value``, a variable that all processes of the job carry.
    workers, min_np : int
        How many there are at most, and at least.
    slots : sequence of (host, slots), optional
        What the discovery script says at first; without it there is no such script.
    options, arguments : sequence of str
        Further ones of kvhvdrun, and of the worker's program.
    points : sequence of dict
        What happens at which point to which worker: see elastic_trainee.py.
    program : Path
        Another one than elastic_trainee.py.
    launcher : sequence of str
        Another command that starts the workers than kvhvdrun; then there are no events.
    """

    def __init__(
        self,
        folder: Path,
        marker: str,
        *,
        workers: int = 4,
        min_np: int = 2,
        slots: Optional[Sequence[tuple[str, int]]] = None,
        options: Sequence[str] = (),
        arguments: Sequence[str] = (),
        points: Sequence[Line] = (),
        variables: Optional[dict[str, str]] = None,
        program: Path = WORKER,
        launcher: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.marker = marker
        self.output = folder / "output"
        self._points = list(points)
        self._write("points.json", json.dumps(self._points))
        self._events = _Tail(folder / "events.jsonl", "event")
        self._workers: dict[int, _Tail] = {}
        self.belongings = Belongings(marker)
        command = [*kvhvdrun().prefix, "--min-np", str(min_np), "--max-np", str(workers)]
        command += ["--event-log", str(folder / "events.jsonl"), *options]
        if slots is not None:
            self.set_slots(slots)
            script = folder / "discover"
            script.write_text(f"#!/bin/sh\ncat {folder}/hosts\n")
            script.chmod(0o755)
            command += ["--host-discovery-script", str(script)]
        command = list(launcher) or command
        name, _, value = marker.partition("=")
        chosen = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", name: value, **(variables or {})}
        chosen["PYTHONPATH"] = str(PACKAGES)
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [*command, sys.executable, str(program), str(folder), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=with_tests({**environment(), **chosen}),
                start_new_session=True,
            )

    # -- What it has written ------------------------------------------------------------------------------------------

    def text(self) -> str:
        """What was printed so far."""
        return self.output.read_text(errors="replace")

    def events(self, name: str = "", **fields: Any) -> list[Line]:
        """Return the lines of the event log so far: all, or those of an event with these fields."""
        return [
            line
            for line in self._events.read()
            if (not name or line["event"] == name) and all(line.get(key) == value for key, value in fields.items())
        ]

    def lines(self, what: str = "", worker: Optional[int] = None) -> list[Line]:
        """Return what workers have written so far, each line with its worker, in the order of time."""
        for path in self.folder.glob("worker-*.jsonl"):
            self._tail(int(path.stem.partition("-")[2]))
        found = [
            {**line, "worker": number}
            for number, tail in self._workers.items()
            if worker in (None, number)
            for line in tail.read()
            if not what or line["what"] == what
        ]
        return sorted(found, key=lambda line: line["t"])

    def done(self, worker: int, generation: int) -> list[Line]:
        """Return the steps that a worker has made in a world."""
        tail = self._tail(worker)
        tail.read()
        return tail.of["done", generation]

    def _tail(self, worker: int) -> _Tail:
        return self._workers.setdefault(worker, _Tail(self.folder / f"worker-{worker}.jsonl", "what"))

    def members(self) -> list[int]:
        """Return the workers of the newest world, in the order of ranks."""
        generations = self.events("generation_ready")
        return list(generations[-1]["workers"]) if generations else []

    # -- Waiting ------------------------------------------------------------------------------------------------------

    def until(self, condition: Callable[[], Any], what: str, limit_s: float = LIMIT_S) -> Any:
        """Wait until `condition` returns something true, and return that; fails at the limit, or when the job ends."""
        end = time.monotonic() + limit_s
        while True:
            ended = self.process.poll() is not None
            if found := condition():
                return found
            assert not ended, f"the job ended with {self.process.returncode} before: {what}\n{self.describe()}"
            assert time.monotonic() < end, f"{limit_s:g} s without: {what}\n{self.describe()}"
            time.sleep(GLANCE_S)

    def until_event(self, name: str, **fields: Any) -> Line:
        """Wait for an event."""
        found: Line = self.until(lambda: self.events(name, **fields), f"event {name} {fields}")[0]
        return found

    def until_step(self, steps: int = 3, *, size: Optional[int] = None, after: int = -1) -> int:
        """Wait until steps are made in a world after the given one, of that size; returns the number of the world."""

        def made() -> Optional[int]:
            ready = [each for each in self.events("generation_ready") if each["generation"] > after]
            for each in ready[::-1]:
                if (
                    size in (None, len(each["workers"]))
                    and len(self.done(each["workers"][0], each["generation"])) >= steps
                ):
                    return int(each["generation"]) + 1
            return None

        number: int = self.until(made, f"{steps} steps in a world of {size or 'any'} workers after world {after}")
        self.belongings.note()
        return number - 1

    # -- Disturbing ---------------------------------------------------------------------------------------------------

    def pid(self, worker: int) -> int:
        """Return the process of a worker."""
        return int(self.events("worker_started", worker=worker)[-1]["pid"])

    def send(self, worker: int, number: int = signal.SIGKILL) -> float:
        """Send a worker a signal; returns the time right before."""
        pid = self.pid(worker)
        now = time.monotonic()
        os.kill(pid, number)
        return now

    def daemons(self) -> list[int]:
        """Return the processes of the daemons."""
        found = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if DAEMON in " ".join(child.cmdline()):
                    found.append(child.pid)
        return found

    def set_slots(self, slots: Sequence[tuple[str, int]]) -> float:
        """Change what the discovery script says; returns the time right before."""
        now = time.monotonic()
        self._write("hosts", "".join(f"{host}:{number}\n" for host, number in slots))
        return now

    def arm(self, worker: int, point: str, number: int = signal.SIGKILL, delay_s: float = 0.0) -> None:
        """Have a worker send itself a signal when it comes to a point for the next time."""
        self._points.append({"worker": worker, "point": point, "count": None, "delay_s": delay_s, "signal": number})
        self._write("points.json", json.dumps(self._points))

    def _write(self, name: str, text: str) -> None:
        """Replace a file as a whole: others may read it at any moment."""
        new = self.folder / f"{name}.new"
        new.write_text(text)
        new.rename(self.folder / name)

    def finish(self) -> None:
        """Let the workers end after the generation that they are in."""
        (self.folder / "finish").touch()

    # -- The end ------------------------------------------------------------------------------------------------------

    def end(self, limit_s: float = LIMIT_S) -> int:
        """Wait for the end; returns the exit code. Fails if anything of the job is left then."""
        self.belongings.note()
        try:
            code = self.process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job hangs\n{self.describe()}") from None
        self.assert_nothing_left()
        return code

    def assert_nothing_left(self, limit_s: float = 0.0) -> None:
        """Fail if a process, a socket or a file in /dev/shm is left; a limit is for a job whose launcher was killed."""
        self.belongings.assert_gone(limit_s, self.describe())

    def close(self) -> None:
        """End what is left of it, after a test that failed."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=15)
        for pid in processes(self.marker):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(timeout=15)

    def describe(self) -> str:
        """Return what is known about the job: for messages of tests that fail."""
        events = "\n".join(json.dumps(line) for line in self.events())
        steps = {worker: tail.read()[-3:] for worker, tail in sorted(self._workers.items())}
        last = "\n".join(f"worker {worker}: {json.dumps(lines)[:600]}" for worker, lines in steps.items())
        return f"-- output of the job\n{self.text()[-6000:]}\n-- events\n{events[-6000:]}\n-- last lines\n{last}"
