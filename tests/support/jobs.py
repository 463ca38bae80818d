"""Jobs that a test starts, watches and disturbs while they run, and what may not be left of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import kvstore_hvd
from support.launchers import Launcher, environment, kvhvdrun
from support.patience import patient

TESTS = Path(__file__).resolve().parents[1]
#: Where the package that is tested is imported from: the installed one has its extension, a source tree may not.
PACKAGES = Path(kvstore_hvd.__file__).resolve().parents[1]
LIMIT_S = patient(60)
# Between two looks at files and at /proc, which have no events.
GLANCE_S = 0.01
SHARED = Path("/dev/shm")
# MPI names its files so; whether they stay is MPI's affair.
OF_MPI = re.compile(r"sm_segment\.|mpich_shm_|vader_segment\.|open_mpi\.")

PRELUDE = """
import os, signal, subprocess, sys, threading, time
names = ('KVHVD_RANK', 'KVHVD_WORKER', 'OMPI_COMM_WORLD_RANK', 'PMI_RANK')
rank = int(next((os.environ[name] for name in names if name in os.environ), 0))
def say(text, stream=sys.stdout):
    stream.write(text); stream.flush()
def forever():
    threading.Event().wait(100)
def report(**fields):  # in one piece: mpirun may mix the ranks' output otherwise
    import json
    os.write(1, ('@' + json.dumps(fields) + '\\n').encode())
def wait_for(name):
    while not os.path.exists(name): time.sleep(0.01)
"""

# A worker of an elastic job that learns nothing, in short steps which it commits, until there is a file `finish`.
ELASTIC = """
import numpy as np
import kvstore_hvd
from kvstore_hvd import elastic
kvstore_hvd.init()
@elastic.run
def train(state):
    world = kvstore_hvd.topology()
    say(f'generation {world.generation} rank {world.rank} of {world.size}\\n')
    while not state.finished:
        time.sleep(0.02)
        asked = np.array([os.path.exists('finish')], np.int32)
        state.finished = bool(kvstore_hvd.allreduce(asked, 'finish', op='max')[0])
        state.commit()
train(elastic.ObjectState(finished=False))
"""


def processes(marker: str) -> list[int]:
    """Running processes that carry the marker in their environment, or its value among their arguments."""
    value = marker.partition("=")[2].encode()
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            proc = Path("/proc", entry)
            arguments = (proc / "cmdline").read_bytes().split(b"\0")
            if value in arguments or marker.encode() in (proc / "environ").read_bytes().split(b"\0"):
                found.append(int(entry))
    return found


def status_of(pid: int) -> list[str]:
    """The state of a process ('X': there is none), its parent, and so on, as proc(5) has them."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]


@contextlib.contextmanager
def stopped(*pids: int, marker: str = "") -> Iterator[None]:
    """Keep these processes stopped, or all that carry the marker, also those that they were just starting."""
    held: set[int] = set()
    try:
        while running := [p for p in (processes(marker) if marker else pids) if status_of(p)[0] not in "TtZX"]:
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


def variables_of(marker: str = "") -> dict[str, str]:
    name, _, value = marker.partition("=")
    return {**environment(), "PYTHONPATH": f"{PACKAGES}:{TESTS}", **({name: value} if marker else {})}


def shared_files() -> set[str]:
    """The files in /dev/shm that this user has made, but for those of MPI."""
    found = set()
    for entry in os.scandir(SHARED):
        with contextlib.suppress(FileNotFoundError):
            if not OF_MPI.match(entry.name) and entry.stat().st_uid == os.getuid():
                found.add(entry.name)
    return found


def left_files(before: set[str]) -> set[str]:
    """The files in /dev/shm that are new and that no process holds, as those of jobs that still run are."""
    new = shared_files() - before
    for pid in filter(str.isdigit, os.listdir("/proc") if new else []):
        held = []
        with contextlib.suppress(OSError):
            held += [line.split(maxsplit=5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
            for entry in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    held.append(os.readlink(entry.path))
        new.difference_update(path[len(f"{SHARED}/") :] for path in held if path.startswith(f"{SHARED}/"))
    return new & shared_files()


class Lines:
    """The JSON lines of a file that somebody else writes, as far as they are complete."""

    def __init__(self, path: Path) -> None:
        self._path, self._position = path, 0
        self._found: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
            complete = data[: data.rfind(b"\n") + 1]
            self._position += len(complete)
            self._found += map(json.loads, complete.splitlines())
        return self._found


class Job:
    """A command whose processes all carry a marker, in a folder that has its output: `out0`, `err0`, and so on. The
    names of `more` that are in capitals are environment variables, the others are arguments of Popen."""

    def __init__(self, folder: Path, marker: str, command: Sequence[str], **more: Any) -> None:
        self.folder, self.marker = folder, marker
        number = len(list(folder.glob("out[0-9]*")))
        self._out, self._err, log = folder / f"out{number}", folder / f"err{number}", folder / f"events{number}.jsonl"
        self._events, self._shared_before = Lines(log), shared_files()
        variables = {name: value for name, value in more.items() if name[0].isupper()}
        environ = {**variables_of(marker), "OMP_NUM_THREADS": "1", **variables}
        with self._out.open("wb") as out, self._err.open("wb") as err:
            given: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err, "cwd": folder}
            given.update((name, value) for name, value in more.items() if not name[0].isupper())
            command = [str(log) if word == "{log}" else word for word in command]
            self.process: subprocess.Popen[bytes] = subprocess.Popen(command, env=environ, **given)

    @property
    def out(self) -> str:
        return self._out.read_text(errors="replace")

    @property
    def err(self) -> str:
        return self._err.read_text(errors="replace")

    def of(self, rank: int) -> str:
        """What a rank has printed so far, first to standard output."""
        lines = re.findall(r"^\[([\d,-]+)\] (.*\n?)", self.out + "\n" + self.err, re.MULTILINE)
        runs = [(re.findall(r"(\d+)-?(\d*)", ranks), line) for ranks, line in lines]
        return "".join(line for ranks, line in runs if any(int(a) <= rank <= int(b or a) for a, b in ranks))

    def reports(self) -> list[dict[str, Any]]:
        """What ranks have told with `report`, in the order of what came first in it."""
        found = [json.loads(line[line.index("@{") + 1 :]) for line in self.out.splitlines() if "@{" in line]
        return sorted(found, key=lambda fields: next(iter(fields.values())))

    def events(self, event: str = "", **fields: Any) -> list[dict[str, Any]]:
        """The event log of an elastic job so far: all, or the events of a kind with these fields."""
        found = self._events.read()
        return [line for line in found if event in ("", line["event"]) and fields.items() <= line.items()]

    def members(self, generation: int = -1) -> list[int]:
        ready = [each for each in self.events("generation_ready") if generation in (-1, each["generation"])]
        return list(ready[-1]["workers"]) if ready else []

    def describe(self) -> str:
        events = "\n".join(map(json.dumps, self.events()))
        return f"code {self.process.poll()}\n{self.out[-5000:]}\n-- errors\n{self.err[-5000:]}\n-- events\n{events}"

    def until(self, condition: Callable[[], Any], what: str = "") -> Any:
        """Wait until `condition` returns something true, and return that; fails at the limit, or when the job ends."""
        limit = time.monotonic() + LIMIT_S
        while True:
            ended = self.process.poll() is not None
            if found := condition():
                return found
            assert not ended, f"the job ended before {what or condition}\n{self.describe()}"
            assert time.monotonic() < limit, f"{LIMIT_S:g} s without {what or condition}\n{self.describe()}"
            time.sleep(GLANCE_S)

    def until_printed(self, text: str, times: int = 1) -> Job:
        """Wait until it has printed this so many times, on either stream."""
        self.until(lambda: self.out.count(text) + self.err.count(text) >= times, f"{times} times {text!r}")
        return self

    def until_event(self, event: str, **fields: Any) -> dict[str, Any]:
        found: dict[str, Any] = self.until(lambda: self.events(event, **fields), f"event {event} {fields}")[0]
        return found

    def until_joined(self, *workers: int, count: int = 0, after: int = -1) -> list[int]:
        """Wait until a world of these workers, or of so many, or any, has been joined after the given one."""

        def joined() -> list[list[int]]:
            numbers = (each["generation"] for each in self.events("generation_joined"))
            worlds = [self.members(number) for number in numbers if number > after]
            return [world for world in worlds if list(workers) in ([], world) and count in (0, len(world))]

        found: list[int] = self.until(joined, f"a world of {workers or count}")[-1]
        return found

    def end(self, code: int | None = 0, number: int = 0, leaves: bool = False) -> Job:
        """Wait for the end, after a signal to the launcher; fails if anything is left, or if the code is another.
        `leaves`: hosts that the launcher did not reach may need a moment, as after a launcher that was killed."""
        if number:
            self.process.send_signal(number)
        try:
            self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the job hangs\n{self.describe()}") from None
        self._assert_nothing_is_left(patient(15) if leaves or self.process.returncode < 0 else 0.0)
        assert code in (None, self.process.returncode), self.describe()
        return self

    def _assert_nothing_is_left(self, limit_s: float) -> None:
        """No process, within the limit, and no file in shared memory; other jobs may run at the same time."""
        end = time.monotonic() + limit_s
        while (left := processes(self.marker)) and time.monotonic() < end:
            time.sleep(GLANCE_S)
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes()[:200] for pid in left if status_of(pid)[0] != "X"]
        assert not left, f"processes are left: {left} {commands}\n{self.describe()}"
        end = time.monotonic() + patient(15)  # a file of another job may be on its way from one process to the next
        while files := left_files(self._shared_before):
            assert time.monotonic() < end, f"left in {SHARED}: {files}\n{self.describe()}"
            time.sleep(GLANCE_S)

    def go(self, name: str = "go") -> Job:
        (self.folder / name).touch()
        return self

    def pid(self, worker: int) -> int:
        return int(self.events("worker_started", worker=worker)[-1]["pid"])

    def kill(self, *workers: int, number: int = signal.SIGKILL) -> None:
        for worker in workers:
            if pid := self.pid(worker):  # 0 would be all processes of our group
                os.kill(pid, number)

    def daemons(self) -> list[int]:
        """The daemons of an elastic job: parents of its workers."""
        parents = {int(status_of(self.pid(entry["worker"]))[1]) for entry in self.events("worker_started")}
        return sorted(parents - {0})

    def close(self) -> None:
        if self.process.poll() is None:
            for pid in processes(self.marker):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            self.process.kill()
            self.process.wait(LIMIT_S)


def start(
    folder: Path,
    marker: str,
    options: str,
    program: str | Sequence[str] = ELASTIC,
    launcher: Launcher | Sequence[str] = (),
    **more: Any,
) -> Job:
    """Start kvhvdrun, or another launcher, with a Python program (lines after PRELUDE) or a command."""
    if isinstance(launcher, Launcher):
        more = {**launcher.environment, **more}
        launcher = launcher.prefix
    words = [*(launcher or kvhvdrun().prefix), *(["--event-log", "{log}"] if "--min-np" in options else [])]
    if isinstance(program, str):
        file = folder / f"program{len(list(folder.glob('program*')))}.py"
        file.write_text(PRELUDE + program)
        program = [str(file)] if sys.executable in options else [sys.executable, str(file)]
    return Job(folder, marker, [*words, *shlex.split(options), *program], **more)
