"""What the workers of a world do and have done, as text: the file of a failure, metrics, and the slow worker.

All of it is read from the segment, where each worker's engine keeps figures and its last operations, see
native/report/flight.hpp. Workers on other hosts are known by their figures, which the links exchange.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from kvstore_hvd import __version__, log, native
from kvstore_hvd.base import files
from kvstore_hvd.config import config
from kvstore_hvd.errors import rounded
from kvstore_hvd.native import Counts, Snapshot
from kvstore_hvd.world.topology import Place

#: Operations of each worker in a file, and bytes of a host's part: a message of a worker has at most a mebibyte. An
#: operation takes about the last number.
MOST, _MOST_BYTES, _ROW_BYTES = 1000, 800_000, 34
_METRICS_S = 5.0  # between two writings

# A slow worker is reported if more than this part of the time by which the last ones came late in at least so many
# operations is its own, and the others wait for more than this part of the time; it waits for less than half of theirs.
_MOSTLY, _LEAST_COMPARED, _COSTLY = 0.5, 3, 0.1

# Why an algorithm carries an operation out; architecture.md has the thresholds.
_WHY = {
    "failed": "the workers disagree about it",
    "inline": "it is at most as large as the threshold inlined, and the last worker reduces it at once",
    "one-shot": "its chunk is at most as large as the threshold one_shot, and not all arrays lie in arenas",
    "two-shot": "it is larger than the threshold one_shot, and not all arrays lie in arenas",
    "direct": "all arrays lie in arenas",
    "device": "the arrays are on GPUs",
    **dict.fromkeys(("broadcast", "exchange", "reducescatter"), "the workers are on one host"),
    **dict.fromkeys(("link-sum", "link-broadcast", "link-exchange"), "the workers are on several hosts"),
}

_losses = 0  # of worlds, in this process


# -- The file of a failure -------------------------------------------------------------------------------------------


def part_of(segment: native.Segment, most: int = MOST) -> dict[str, Any]:
    """The part of this host in the file of a failure, ready for JSON.

    An operation is a row: what it is (an index of ``"kinds"``), its number under its name, its algorithm (an index of
    ``"algorithms"``), and when it was announced, scheduled and completed, in microseconds before ``"time"`` (null: not
    yet). That is in seconds since 1970.
    """
    shot = segment.snapshot(most)
    kinds: dict[tuple[Any, ...], int] = {}
    algorithms: dict[str, int] = {}

    def ago(then: int) -> int | None:
        return (shot.now - then) // 1000 if then else None

    def row(one: native.Operation) -> list[Any]:
        kind = one.name, one.label, one.collective, one.dtype, one.op, one.bytes
        algorithm = algorithms.setdefault(one.algorithm, len(algorithms))
        times = map(ago, (one.announced, one.scheduled, one.completed))
        return [kinds.setdefault(kind, len(kinds)), one.number, algorithm, *times]

    workers = [
        {**worker._asdict(), "counts": worker.counts._asdict(), "operations": list(map(row, worker.operations))}
        for worker in shot.workers
    ]
    age_s = (shot.now - shot.created) / 1e9
    about = {"job": shot.job.partition(".set")[0], "version": __version__, "on": socket.gethostname()}
    times = {"time": time.time(), "age_s": age_s}
    lists = {"kinds": list(kinds), "algorithms": list(algorithms), "workers": workers}
    return {**shot._asdict(), **about, **times, **lists}


def note_loss(segment: native.Segment | None, send: Callable[[str], None] | None) -> None:
    """Write down what the workers of a lost world did, once on each host; `send`: to the launcher."""
    global _losses
    if segment is None:
        return
    _losses += 1
    path = config().failure_file
    if not path or not segment.claim_failure():
        return
    try:
        most, text = 2 * min(MOST, _MOST_BYTES // _ROW_BYTES // segment.size), ""
        while not text or (most and len(text) > _MOST_BYTES):
            most //= 2
            part = part_of(segment, most)
            text = json.dumps(part, separators=(",", ":"))
        if send is not None:
            send(text)
            return
        path = files.failure_path(path, part["job"], "")
        if part["hosts"] > 1:
            root, suffix = os.path.splitext(path)
            path = f"{root}.host{part['host']}{suffix}"
        files.replace(path, files.failure_file([*_told_before(path, part), text]))
    except Exception as error:  # noqa: BLE001 - the failure itself is what the program has to hear of
        log.logger.warning("the file of the failure cannot be written: %s: %s", type(error).__name__, error)
    else:
        log.logger.warning("what the workers did before is in %s: see `kvhvdrun explain`", path)


def _told_before(path: str, part: Mapping[str, Any]) -> list[str]:
    """The parts in a file that are of the same world: of a process set, which was lost first."""
    if not os.path.isfile(path):  # such as a pipe, from which nothing comes
        return []
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        with open(path, encoding="utf-8") as file:
            parts = json.load(file)["parts"]
        return [json.dumps(each) for each in parts if all(each[of] == part[of] for of in ("job", "generation"))]
    return []


# -- Figures ---------------------------------------------------------------------------------------------------------


def figures(segment: native.Segment | None) -> dict[int, dict[str, float]]:
    """What `Horovod.report` has under ``'ranks'``."""
    workers = [] if segment is None else segment.snapshot().workers
    names = [name.replace("_ns", "_ms") for name in Counts._fields]

    def of(counts: Counts) -> dict[str, float]:
        return {name: value / 1e6 if name.endswith("_ms") else value for name, value in zip(names, counts)}

    return {worker.rank: of(worker.counts) for worker in workers}


def answer_signals() -> None:
    """Have this process print its Python stacks on SIGQUIT, and write them to a memory file for `kvhvdrun stacks`."""
    # Not in place of a handler of the program.
    if signal.getsignal(signal.SIGQUIT) is signal.SIG_DFL:
        faulthandler.register(signal.SIGQUIT, file=2)
    if signal.getsignal(files.STACKS_SIGNAL) is signal.SIG_DFL:
        faulthandler.register(files.STACKS_SIGNAL, file=os.memfd_create(files.STACKS))


# By field of `Counts`.
_METRICS = {
    "operations": "Collective operations that are over.",
    "bytes": "Bytes of the arrays of these.",
    "waited_ns": "Time in which the worker only waited for other workers.",
    "compared": "Operations in which the arrivals of workers were compared.",
    "last": "Those of them in which the worker came last.",
    "behind_ns": "Time behind the median worker in these.",
}


def metrics(shot: Snapshot) -> str:
    """The workers of this host in Prometheus's text format, for node exporter's textfile collector."""
    # https://prometheus.io/docs/instrumenting/exposition_formats/
    here = [worker for worker in shot.workers if worker.state]
    job = shot.job.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    lines = []
    for field, text in _METRICS.items():
        name = f"kvstore_hvd_{field.replace('_ns', '_seconds')}_total"
        lines += [f"# HELP {name} {text}", f"# TYPE {name} counter"]
        for worker in here:
            value = getattr(worker.counts, field) / (1e9 if field.endswith("_ns") else 1)
            lines.append(f'{name}{{job="{job}",rank="{worker.rank}"}} {value!r}')
    of_job = {
        "workers": ("Workers of the world.", len(shot.workers)),
        "generation": ("Number of the world; it grows as workers come, go or are lost.", shot.generation),
        "lost_worlds": ("Worlds that were lost, as the first worker of this host has seen.", _losses),
    }
    for name, (text, number) in of_job.items():
        lines += [f"# HELP kvstore_hvd_{name} {text}", f"# TYPE kvstore_hvd_{name} gauge"]
        lines.append(f'kvstore_hvd_{name}{{job="{job}"}} {number}')
    return "\n".join([*lines, ""])


class Observer:
    """Writes the metrics of a host and reports a slow worker, as long as a world lives; one thread calls it."""

    def __init__(self, engine: native.Engine, topology: Place, check_s: float) -> None:
        self._engine, self._topology, self._check_s = engine, topology, check_s
        self._before: dict[int, Counts] = {}
        self._reported_at = self._written_at = -1.0  # < 0: not yet
        self._writes = bool(config().metrics_file) and topology.local_rank == 0 and not topology.set_number
        self._logs_choices = log.logger.isEnabledFor(logging.DEBUG)
        self._choices: set[tuple[str, str, int]] = set()

    def look(self, now: float) -> None:
        """Do what is due at this time; a look every half second."""
        if self._writes and (self._written_at < 0 or now - self._written_at >= _METRICS_S):
            self._written_at = now
            self.write_metrics()
        is_due = self._reported_at < 0 or now - self._reported_at >= self._check_s
        segment = self._engine.segment
        if segment is not None and self._check_s and self._topology.rank == 0 and is_due:
            self._report(segment, now)
        if segment is not None and self._logs_choices:
            self._log_choices(segment)

    def write_metrics(self) -> None:
        """Write the file of metrics, if there is one."""
        segment, path = self._engine.segment, config().metrics_file
        if segment is None or not self._writes:
            return
        try:
            files.replace(path, metrics(segment.snapshot()).encode())
        except OSError as error:
            log.once("metrics", logging.WARNING, "%s cannot be written: %s", path, error.strerror)

    def _report(self, segment: native.Segment, now: float) -> None:
        workers = segment.snapshot(MOST).workers
        elapsed, self._reported_at = now - self._reported_at, now
        before, self._before = self._before, {worker.rank: worker.counts for worker in workers}
        if not before:
            return
        since = {w.rank: Counts(*(new - old for new, old in zip(w.counts, before[w.rank]))) for w in workers}
        found = slow_worker(since, elapsed)
        if found is None:
            return
        # A worker that has no input left is late in all that follows.
        joins = (one for worker in workers for one in worker.operations if one.name.startswith(native.PATIENT))
        if not all(one.completed for one in joins):
            return
        (rank, part), own = found, since[found[0]]
        (worker,) = (each for each in workers if each.rank == rank)
        late = describe_late(own.compared, own.last, own.behind_ns / 1e6)
        what = f"rank {rank} ({worker.host}, pid {worker.pid}) {late}"
        where = f"; it was {worker.doing}" if worker.doing else ""
        log.logger.warning("%s: the others waited for it in %.0f %% of the time%s", what, part * 100, where)

    def _log_choices(self, segment: native.Segment) -> None:
        """Tell once for each size of an array which algorithm has carried it out."""
        for one in segment.snapshot(MOST).workers[self._topology.rank].operations:
            choice = one.collective, one.algorithm, one.bytes
            if one.algorithm and choice not in self._choices and len(self._choices) < MOST:
                self._choices.add(choice)
                text = "%s %s of %d bytes: %s, %s"
                log.logger.debug(text, one.collective, one.label, one.bytes, one.algorithm, _WHY[one.algorithm])


def slow_worker(since: Mapping[int, Counts], elapsed_s: float) -> tuple[int, float] | None:
    """The worker for which the others wait, and in which part of the time; by the counts of that time."""
    rank = max(since, key=lambda each: (since[each].behind_ns, -each))
    own, behind_ns = since[rank], sum(counts.behind_ns for counts in since.values())
    waits = sorted(counts.waited_ns for each, counts in since.items() if each != rank)
    waited = waits[(len(waits) - 1) // 2] if waits else 0
    is_late = own.compared >= _LEAST_COMPARED and own.behind_ns > _MOSTLY * behind_ns
    part = waited / 1e9 / elapsed_s if elapsed_s > 0 else 0.0
    return (rank, min(part, 1.0)) if is_late and own.waited_ns < waited / 2 and part > _COSTLY else None


def describe_late(compared: float, last: float, behind_ms: float) -> str:
    """How late a worker came, as the end of a sentence."""
    often, mean_ms = min(100 * last / max(1, compared), 100), behind_ms / max(1, last)
    return f"came last in {often:.0f} % of {compared:,} operations, {rounded(mean_ms)} ms behind the median"
