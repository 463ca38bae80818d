"""The stall report: which ranks wait for which ranks, and where a late rank is.

The ranks exchange nothing for it: each reads the pending operations of all ranks in the segment, about twice a second,
on a thread of its own.
- Of the ranks that wait for an operation, the lowest one logs the operation and the late ranks.
- A late rank logs the operations that it has not submitted, with its Python stack.
- A rank whose engine is blocked by a stopped process logs that process.
- Past the stall shutdown time, the waiting rank fails the world with its report.
The same thread tells the engine the program's line, for errors and `kvhvdrun status`, also where reports are off.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from kvstore_hvd import log, native
from kvstore_hvd.base.cores import LOOK_S, RunningClock
from kvstore_hvd.native import Missed, Waiting
from kvstore_hvd.world.topology import Place

# What the names of this package's threads begin with; stacks leave those out.
_OWN_THREADS = "kvstore_hvd-"
# Calls of the main thread and of other threads, the innermost ones, and the number of other threads in a report.
_MAIN_CALLS, _OTHER_CALLS, _OTHER_THREADS = 15, 5, 3

# Top packages whose code is not the program's. Python 3.9 does not list its own.
LIBRARIES = {"kvstore_hvd", "horovod", "mxnet", "concurrent", "contextlib", "functools", "threading"}
LIBRARIES |= getattr(sys, "stdlib_module_names", set())
# Letters of a path in the program's line.
_MAX_PATH = 80
# Calls of the main thread among which the program's line is looked for.
_MOST_CALLS = 100
# Functions of MXNet's that wait for results.
_BLOCKING = {"asnumpy", "wait_to_read", "wait_to_write", "waitall"}
# Time after which a pending operation makes the engine know the threads in calls of MXNet.
_SOON_S = 1.0

# Time for a look that is under way when the world is left.
_STOP_S = 1.0
# Looks before the first report, at least.
_LOOKS = 4
# Operations and ranks in a report.
_SHOWN, _SHOWN_RANKS = 6, 8
# Missed operations that are looked at.
_MISSED = 256

# proc(5): the states of a process that explain why it does not go on.
_STATES = {
    "T": "its process is stopped; `kill -CONT {pid}` continues it",
    "t": "its process is stopped by a debugger",
    "D": "its process waits for a disk or a network file system",
    "Z": "its process has ended",
}


class StallInspector:
    """Reports the stalls of one world, again and again, and when they are over; with a `check_s` of 0, none."""

    def __init__(
        self,
        engine: native.Engine,
        topology: Place,
        check_s: float,
        shutdown_s: float,
        describe: Callable[[str], str],
        observe: Callable[[float], None] = lambda now: None,
        on_loss: Callable[[], None] = lambda: None,
    ) -> None:
        # Called at each look, with its time, and when the world is seen to be lost.
        self._observe, self._on_loss = observe, on_loss
        self._engine, self._topology, self._describe = engine, topology, describe
        self._name, self._workers = f"rank {topology.rank_in_all}", f"workers{topology.group}"
        self._check_s, self._shutdown_s = min(check_s, shutdown_s or check_s), shutdown_s
        #: Whether this worker has failed the world because others did not come.
        self.has_given_up = False
        self._waiting, self._missing = _Schedule(self._check_s), _Schedule(self._check_s)
        self._missed_since: dict[Missed, float] = {}
        self._patient: set[tuple[str, float]] = set()  # of these this worker has logged that it may wait for any time
        self._blocked_since: float | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{_OWN_THREADS}stall", daemon=True)

    def start(self) -> None:
        """Look from now on, until `stop` or the world is lost."""
        self._thread.start()

    def stop(self) -> None:
        """Look no more. Waits for a look that is under way, for a second at most."""
        self._ended.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_STOP_S)

    def look(self, now: float) -> bool:
        """Look once, and log new reports; returns whether the world still lives."""
        if self._engine.health() is not None:
            self._on_loss()
            return False
        self._observe(now)
        missed = self._engine.missed(_MISSED)
        if self._check_s:
            self._look_at_waiting(now)
            self._look_at_missed(now, missed)
        callers = native.callers_of("mxnet") if missed or self._engine.waiting(_SOON_S) else []
        self._engine.tell_line(program_line(), callers, _is_blocked())
        return True

    def _run(self) -> None:
        tick_s = min(LOOK_S, self._check_s / _LOOKS) if self._check_s else LOOK_S
        clock = RunningClock()
        try:
            while not self._ended.wait(tick_s) and self.look(clock.now()):
                pass
        except Exception as error:  # noqa: BLE001 - a report must not be what ends a training
            log.logger.warning("there will be no more stall reports: %s: %s", type(error).__name__, error)

    # -- What this worker waits for -----------------------------------------------------------------------------------

    def _look_at_waiting(self, now: float) -> None:
        waiting = self._engine.waiting(self._check_s)
        if waiting is None:
            self._look_at_blocked(now)
            return
        self._blocked_since = None
        patient = {(one.name, one.since): one for one in waiting if one.name.startswith(native.PATIENT)}
        for key, one in patient.items():
            if key not in self._patient and one.late:
                whom = self._topology.rank_list(one.late)
                head = f"{self._name} has no input left, and has waited {one.age_s:.0f} s for {whom}: this is no stall."
                log.logger.info("%s", "\n  ".join([head, *self._ranks(one.late)]))
        self._patient = set(patient)
        # The lowest rank that waits for an operation and is not stopped reports it.
        waiting = [
            one
            for one in sorted(waiting, key=lambda one: -one.age_s)
            if (one.name, one.since) not in patient
            and all(is_stopped(self._engine, rank) for rank in range(self._topology.rank) if rank not in one.late)
        ]
        culprits = {rank for one in waiting for rank in one.late}
        report, over = self._waiting.update({(one.name, one.since): one.age_s for one in waiting}, culprits)
        if over is not None:
            log.logger.warning("the stall%s is over: %s waited %.0f s.", self._topology.group, self._name, over)
        if not waiting:
            return
        oldest = waiting[0].age_s
        if report:
            head = f"{self._name} has waited {oldest:.0f} s for other {self._workers}."
            log.logger.warning("%s", self._waiting_text(head, waiting, "see its own report"))
        if self._shutdown_s and oldest >= self._shutdown_s:
            whom = self._topology.rank_list(culprits) if culprits else "the other ranks"
            head = f"{self._name} waited {oldest:.0f} s, longer than the stall shutdown time, for {whom}"
            self.has_given_up = True
            self._engine.abort(self._waiting_text(head, waiting))

    def _waiting_text(self, head: str, waiting: Sequence[Waiting], hint: str = "") -> str:
        lines = [head, *(f"{one.operation}: {one.age_s:.0f} s, {self._who(one)}" for one in waiting[:_SHOWN])]
        if len(waiting) > _SHOWN:
            lines.append(f"... and {len(waiting) - _SHOWN} more")
        lines += self._ranks({rank for one in waiting for rank in one.late}, hint)
        return "\n  ".join(lines)

    def _who(self, one: Waiting) -> str:
        if one.announced_by_all:
            behind = f"{self._topology.rank_list(one.late)} stopped inside it" if one.late else "none of them moves"
            return f"submitted by all; {behind}"
        present = [rank for rank in range(self._topology.size) if rank not in one.late]
        return f"submitted by {self._topology.rank_list(present)}, not by {self._topology.rank_list(one.late)}"

    def _ranks(self, ranks: Collection[int], hint: str = "") -> list[str]:
        """A line for each rank, with the state of its process if that explains the delay, else the hint."""
        lines, segment = [], self._engine.segment
        told = [] if segment is None else segment.snapshot(0).workers
        for rank in sorted(ranks)[:_SHOWN_RANKS]:
            pid, text = self._engine.process(rank)  # no process of another host, or of a rank that never joined
            why = _STATES.get(_state(self._engine, rank), "" if rank == self._topology.rank else hint)
            is_known = pid or self._topology.hosts[rank] != self._topology.host
            if not pid and is_known and told and told[rank].is_stopped:  # as its host says
                pid, why = told[rank].pid, _STATES["T"]
            lines.append(f"{text}: {why.format(pid=pid)}" if why and is_known else text)
        if len(ranks) > _SHOWN_RANKS:
            lines.append(f"... and {len(ranks) - _SHOWN_RANKS} more")
        return lines

    def _look_at_blocked(self, now: float) -> None:
        """Report that a thread of this worker is blocked in the engine, where a stopped rank holds a lock."""
        if self._blocked_since is None:
            self._blocked_since = now
        age_s = now - self._blocked_since
        if age_s < self._check_s:
            return
        stopped = [rank for rank in range(self._topology.size) if is_stopped(self._engine, rank)]
        report, _ = self._waiting.update({"blocked": age_s} if stopped else {}, stopped)
        if report:
            head = f"{self._name} has been blocked in the engine for {age_s:.0f} s: a stopped rank holds a lock."
            log.logger.warning("%s", "\n  ".join([head, *self._ranks(stopped)]))

    # -- What others wait for -----------------------------------------------------------------------------------------

    def _look_at_missed(self, now: float, missed: Sequence[Missed] | None) -> None:
        if missed is None:
            return
        self._missed_since = {one: self._missed_since.get(one, now) for one in missed}
        ages = {one: now - since for one, since in self._missed_since.items() if now - since >= self._check_s}
        report, _ = self._missing.update(ages, ())  # the waiting ranks report the end
        if report:
            names = [self._describe(one.name) for one in list(ages)[:_SHOWN]]
            names += [f"... and {len(ages) - _SHOWN} more"] * (len(ages) > _SHOWN)
            head = f"the other {self._workers} have waited {max(ages.values()):.0f} s for {self._name}."
            lines = head, f"It has not submitted {', '.join(names)}", *python_stacks().splitlines()
            log.logger.warning("%s", "\n  ".join(lines))


class _Schedule:
    """When to report a stall: a row of looks, each of which shares an operation with the look before."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._known: set[Hashable] = set()
        self._culprits: set[int] = set()
        self._next_s = limit_s
        self._longest_s = 0.0

    def update(self, ages: Mapping[Any, float], culprits: Collection[int]) -> tuple[bool, float | None]:
        """Whether to report now, and how long the stall before lasted if it is over (else None)."""
        over = None
        if self._known and self._known.isdisjoint(ages):
            over = self._longest_s
            self._culprits, self._next_s, self._longest_s = set(), self._limit_s, 0.0
        self._known = set(ages)
        if not ages:
            return False, over
        longest_s = max(ages.values())
        self._longest_s = max(self._longest_s, longest_s)
        report = longest_s >= self._next_s or not self._culprits.issuperset(culprits)
        self._culprits.update(culprits)
        while self._next_s <= longest_s:
            self._next_s += self._limit_s
        return report, over


def is_stopped(engine: native.Engine, rank: int) -> bool:
    """Whether the process of a rank is seen to be stopped, by a signal or a debugger."""
    return _state(engine, rank) in ("T", "t")


def _state(engine: native.Engine, rank: int) -> str:
    """The state of a rank's process, a letter of proc(5); '' when it cannot be seen."""
    pid, _ = engine.process(rank)
    try:  # the name in parentheses may hold anything
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode() if pid else ""
    except (OSError, IndexError):
        return ""


def program_line() -> str:
    """Where the main thread is in the program, outside of libraries: ``'train.py:12 in main'``."""
    # Where it is in libraries only: the innermost call.
    calls = native.calls_of(threading.main_thread().ident or 0, _MOST_CALLS)
    of_program = (call for call in calls if str(call[3]).partition(".")[0] not in LIBRARIES)
    path, line, function, _ = next(of_program, calls[0] if calls else ("", 0, "", ""))
    return f"{path if len(path) <= _MAX_PATH else f'...{path[-_MAX_PATH:]}'}:{line} in {function}" if path else ""


def _is_blocked() -> bool:
    """Whether the main thread waits for results."""
    for *_, function, module in native.calls_of(threading.main_thread().ident or 0, 1):
        package = str(module).partition(".")[0]
        return package == "kvstore_hvd" or (package == "mxnet" and function in _BLOCKING)
    return False


def python_stacks() -> str:
    """The stacks of this process, as tracebacks show them: the main thread's first, this package's threads left out."""
    frames, main = sys._current_frames(), threading.main_thread().ident or 0
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    others = [(names.get(ident, f"thread {ident}"), frame) for ident, frame in frames.items() if ident != main]
    others = [(name, frame) for name, frame in others if not name.startswith(_OWN_THREADS)]
    parts = [_stack("main thread", frames[main], _MAIN_CALLS)] if main in frames else []
    parts += [_stack(name, frame, _OTHER_CALLS) for name, frame in others[:_OTHER_THREADS]]
    if len(others) > _OTHER_THREADS:
        parts.append(f"... and {len(others) - _OTHER_THREADS} more threads")
    return "\n".join(parts)


def _stack(name: str, frame: FrameType, most: int) -> str:
    calls = traceback.extract_stack(frame, limit=most)
    left_out = sum(1 for _ in traceback.walk_stack(frame)) - len(calls)
    title = f"{name}, innermost call last{f' ({left_out} outer calls left out)' if left_out > 0 else ''}:"
    return "\n".join([title, *(line.rstrip("\n") for line in traceback.format_list(calls))])
