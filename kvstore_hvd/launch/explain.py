"""``kvhvdrun explain``, ``status`` and ``stacks``: what the workers of a job did before a failure, or do now.

Both are told by the parts of hosts, see `world.flight`: from files, or from the segments of running workers, which are
found and mapped by way of /proc. A worker that hangs or is stopped need not take part.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import operator
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvstore_hvd import native
from kvstore_hvd.base import files
from kvstore_hvd.errors import LaunchError, message, printable, rank_list, rounded
from kvstore_hvd.launch.processes import ask
from kvstore_hvd.native import Counts
from kvstore_hvd.world.flight import MOST, describe_late, part_of, slow_worker

# Time between the two looks that rates are taken from.
_RATES_S = 1.0
# Time for a worker to write its stacks, and time without a new byte after which they are complete.
_STACKS_S, _QUIET_S = 5.0, 0.2
# Workers and pending operations that are told of one by one.
_SHOWN = 8


class Operation(NamedTuple):
    """One worker's part in an operation: seconds since it was submitted, and completed (infinity: not yet)."""

    name: str
    number: int
    text: str
    age_s: float
    over_s: float


class Worker(NamedTuple):
    """What is known of a worker; `operations` of all sets, None: nothing, it is on a host without a part."""

    name: str
    doing: str
    is_stopped: bool
    operations: list[Operation] | None


class Pending(NamedTuple):
    """An operation that some are in: for how long, who has completed it, and who is known not to have submitted it."""

    text: str
    number: int
    age_s: float
    since: dict[int, float]  # seconds by rank
    over: list[int]
    missing: list[int]
    late: list[int]  # those that the others wait for


class Story(NamedTuple):
    """What the parts of all hosts tell of one world."""

    about: str
    failure: tuple[str, str] | None  # class of the error, and the fact
    now: float
    age_s: float
    workers: dict[int, Worker]
    counts: dict[int, Counts]  # of the process set that the story is about
    pending: list[Pending]  # those first that some have not submitted
    patient: dict[int, float]  # workers without input, and for how many seconds they have waited for the others


def tell(parts: Sequence[Mapping[str, Any]]) -> Story:
    """The story that parts tell of their latest world; it is about the process set in which the failure began."""
    latest = max(part["generation"] for part in parts)
    parts = [part for part in parts if part["generation"] == latest]
    # The loss of the world of all workers follows from that of a process set.
    first = min(parts, key=lambda part: ((part["failure"] or [""])[0] == "PeerLostError", part["set_number"]))
    own = [part for part in parts if part["set_number"] == first["set_number"]]
    told: dict[int, list[Mapping[str, Any]]] = {}
    sets: dict[int, dict[int, list[Operation]]] = {}
    counts: dict[int, Counts] = {}
    for part in sorted(parts, key=lambda part: bool(part["set_number"] != first["set_number"])):
        number, is_own = part["set_number"], part["set_number"] == first["set_number"]
        where = "" if is_own else f" of process set {number}" if number else " of all workers"
        for one in part["workers"]:
            rank, is_here = one["rank"], bool(one["state"])
            told.setdefault(rank, []).append(one)
            if is_here:
                sets.setdefault(number, {})[rank] = [_operation(part, row, where) for row in one["operations"]]
            if is_own and (is_here or rank not in counts):
                counts[rank] = Counts(**one["counts"])
    workers = {rank: _worker(told[rank], [has[rank] for has in sets.values() if rank in has]) for rank in sorted(told)}
    hosts = sorted({one["host"] for part in own for one in part["workers"] if one["host"]})
    within = f", process set {first['set_number']}" if first["set_number"] else ""
    about = f"job {first['job'] or '?'}, generation {latest}{within}: {len(counts)} workers on {', '.join(hosts)}"
    if len(own) < first["hosts"]:
        about += f" (told by {len(own)} of {first['hosts']} hosts)"
    failure = next((tuple(part["failure"]) for part in own if part["failure"]), None)
    pending = sorted((one for has in sets.values() for one in _pending(has)), key=lambda one: not one.missing)
    waits = ((rank, one) for has in sets.values() for rank in has for one in has[rank] if one.over_s == math.inf)
    patient = {rank: one.age_s for rank, one in waits if one.name.startswith(native.PATIENT)}
    age_s = max(part["age_s"] for part in own)
    return Story(about, failure, first["time"], age_s, workers, counts, pending, patient)


def _worker(told: Sequence[Mapping[str, Any]], known: Sequence[list[Operation]]) -> Worker:
    told = sorted(told, key=lambda one: not one["state"])  # its own host knows best
    where = f" ({told[0]['host']}, pid {told[0]['pid']})" if told[0]["pid"] else " (never joined)"
    doing = next((one["doing"] for one in told if one["doing"]), "")
    operations = [one for has in known for one in has] if known else None
    return Worker(f"rank {told[0]['rank']}{where}", doing, told[0]["is_stopped"], operations)


def _operation(part: Mapping[str, Any], row: Sequence[Any], where: str) -> Operation:
    kind, number, _, announced, _, completed = row
    name, label, collective = part["kinds"][kind][:3]
    # The clocks of hosts differ by more than the times at which they hear of a failure.
    ages = (announced or 0) / 1e6, math.inf if completed is None else completed / 1e6
    return Operation(name, number, f"{collective} {label or repr(name)}{where}", *ages)


def _pending(has: Mapping[int, Sequence[Operation]]) -> list[Pending]:
    """The operations of one set that are not over, the earliest one first; `has`: operations by rank."""
    latest = {(rank, one.name): one.number for rank in has for one in sorted(has[rank], key=lambda one: one.number)}
    by: dict[tuple[str, int], dict[int, Operation]] = {}
    for rank in sorted(has):
        for one in has[rank]:
            by.setdefault((one.name, one.number), {})[rank] = one
    found = []
    for (name, number), of in by.items():
        since = {rank: one.age_s for rank, one in of.items() if one.over_s == math.inf}
        if name and since and not name.startswith(native.PATIENT):
            over = [rank for rank in of if rank not in since]
            missing = [rank for rank in sorted(has) if not over and latest.get((rank, name), -1) < number]
            text, age_s = next(iter(of.values())).text, max(one.age_s for one in of.values())
            found.append(Pending(text, number, age_s, since, over, missing, missing or list(since)))
    return sorted(found, key=lambda one: -one.age_s)


# -- explain ---------------------------------------------------------------------------------------------------------


def explain(story: Story) -> str:
    """What diverged first, who was where, and what to do."""
    kind, words = story.failure or ("", "")
    fact, fix = words.partition("\n  ")[0], words.partition("\n  Fix: ")[2]  # a newline alone is of a name
    lines = [f"{story.about}; {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(story.now))}"]
    if kind:
        lines.append(f"{kind}: {fact.rstrip('.')}.")
    pending, workers = story.pending, story.workers
    lines += [] if pending else ["No operation was under way."]
    for one in pending[:1]:
        who = f"number {one.number + 1} of its name, submitted by {rank_list([*one.since, *one.over])}"
        who += f", not by {rank_list(one.missing)}" if one.missing else ""
        who += f", not over on {rank_list(one.since)}" if one.over else ""
        more = f"; {len(pending) - 1} more under way" if len(pending) > 1 else ""
        lines.append(f"First that is not over: {one.text}, {who}, {rounded(one.age_s)} s before{more}.")
    shown = sorted(workers, key=lambda rank: (not pending or rank not in pending[0].late, rank))[:_SHOWN]
    lines += [f"  {workers[rank].name} {_where(story, rank)}" for rank in shown]
    if len(workers) > _SHOWN:
        lines.append(f"  ... and {len(workers) - _SHOWN} more workers")
    lines += _slow(story, story.counts, story.age_s)
    lines.append(f"What to do: {fix.rstrip('.') or _advice(story)}.")
    return _text(lines)


def _text(lines: Iterable[str]) -> str:
    """These lines; names in them may have control characters, and newlines."""
    return "\n".join(printable(line).replace("\n", r"\n") for line in lines)


def _where(story: Story, rank: int) -> str:
    """What a worker did, as the end of a sentence."""
    worker = story.workers[rank]
    line = f"; it was {worker.doing}" if worker.doing else ""
    if worker.is_stopped:
        return f"was stopped{line}."
    if worker.operations is None:
        return f"is on a host that has told nothing{line}."
    if rank in story.patient:
        return f"has no input left and waits for the others, for {rounded(story.patient[rank])} s{line}."
    own = next((one for one in story.pending if rank in one.since), None)
    if own is not None:
        whom = f" for {rank_list(own.missing)}" if own.missing else ""
        return f"waited in {own.text}{whom}, for {rounded(own.since[rank])} s{line}."
    last = min(worker.operations, key=lambda one: one.over_s, default=None)
    if last is None:
        return f"has submitted nothing{line}."
    return f"waited for nothing: {last.text} was over {rounded(last.over_s)} s before{line}."


def _slow(story: Story, counts: Mapping[int, Counts], elapsed_s: float) -> list[str]:
    """A line of the worker that all others waited for most of the time, by the counts of that time."""
    found = slow_worker(counts, elapsed_s)
    if found is None or story.patient:  # who has no input left is late in all that follows
        return []
    name, own = story.workers[found[0]].name, counts[found[0]]
    late = describe_late(own.compared, own.last, own.behind_ns / 1e6)
    return [f"{name} was slow: it {late}; the others waited in {found[1] * 100:.0f} % of the time."]


def _advice(story: Story) -> str:
    if story.failure is not None and story.failure[0] == "PeerLostError":
        return "see the last output of that worker or host; without a word it was often out of memory (dmesg)"
    if not story.pending:
        return "see the error, and the output of the workers"
    first = story.pending[0]
    waits = [one for one in story.pending if one.missing]
    late, more = set[int](), set(first.late)
    while more:  # those, too, that the late ones wait for themselves
        late |= more
        more = {rank for one in waits if not more.isdisjoint(one.since) for rank in one.missing} - late
    stopped = [rank for rank in late if story.workers[rank].is_stopped]
    if stopped:
        return f"find who stopped the process of {rank_list(stopped)}; `kill -CONT PID` continues it"
    missing = late.difference(*(one.since for one in story.pending))
    if first.missing and missing:
        return f"see why {rank_list(missing)} did not come: its line above, or `kvhvdrun stacks` while the job runs"
    silent = [rank for rank, worker in story.workers.items() if worker.operations is None]
    if silent:
        return f"see the workers of silent hosts ({rank_list(silent)}); under mpirun explain their files with this one"
    if first.missing and not late.difference(*(one.since for one in waits)):
        return "have all workers submit the same operations, and those that they wait for in the same order"
    return "see `kvhvdrun stacks` while the job runs: all workers have submitted it, and one stays inside"


# -- Running jobs ----------------------------------------------------------------------------------------------------


def _memory_files(name: str) -> Iterator[tuple[int, str]]:
    """The processes of this user that hold a memory file of a name, and a path of it."""
    for entry in os.scandir("/proc"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            is_own = entry.name.isdecimal() and entry.stat().st_uid == os.getuid()
            for fd in os.listdir(f"{entry.path}/fd") if is_own else ():
                with contextlib.suppress(FileNotFoundError):  # it has just been closed
                    if os.readlink(f"{entry.path}/fd/{fd}").startswith(f"/memfd:{name} "):
                        yield int(entry.name), f"{entry.path}/fd/{fd}"


def _running(job: str) -> list[list[Any]]:
    """The segments of the present worlds of running jobs and process sets on this host; `job`: a name or a process."""
    found: dict[tuple[int, int], tuple[Any, Any]] = {}
    pids: dict[tuple[int, int], set[int]] = {}
    for pid, path in _memory_files("kvstore_hvd"):
        with contextlib.suppress(OSError, ValueError):  # ValueError: it is of another version
            status = os.stat(path)
            key = status.st_dev, status.st_ino
            pids.setdefault(key, set()).add(pid)
            if key not in found:
                with open(path, "r+b", buffering=0) as file:
                    segment = native.Segment.attach(file.fileno())
                found[key] = segment, segment.snapshot()
    worlds: dict[str, dict[int, Any]] = {}  # by job, and ``JOB.setN``
    for key, (segment, shot) in sorted(found.items(), key=lambda each: each[1][1].created):
        # Digits are a process: they begin the names of other jobs, too.
        is_meant = int(job) in pids[key] or shot.job == job if job.isdecimal() else shot.job.startswith(job)
        if is_meant and any(worker.state == "joined" for worker in shot.workers):
            world = worlds.setdefault(shot.job, {})
            if world and any(other.snapshot().generation < shot.generation for other in world.values()):
                world.clear()
            world[shot.host] = segment
    return [list(worlds[key].values()) for key in sorted(worlds)]


def _parts(segments: Sequence[Any], most: int = MOST) -> list[dict[str, Any]]:
    return [json.loads(json.dumps(part_of(segment, most))) for segment in segments]


def status(segments: Sequence[Any]) -> str:
    """A table of the workers of a running job, with their rates."""
    before = tell(_parts(segments, 0))
    time.sleep(_RATES_S)
    story = tell(_parts(segments))
    elapsed, olds = story.now - before.now, before.counts
    since = {rank: Counts(*map(operator.sub, news, olds[rank])) for rank, news in story.counts.items()}
    pending = [] if story.failure else story.pending  # the waits of a lost world are over
    rows = [("rank", "operations/s", "MiB/s", "waited", "came last", "")]
    for rank, worker in story.workers.items():
        counts = since[rank]
        late = f"{counts.last / counts.compared:.0%}" if counts.compared else "-"
        rates = f"{counts.operations / elapsed:.0f}", f"{counts.bytes / elapsed / (1 << 20):.1f}"
        # What some have completed is over on the others in a moment.
        own = next((one for one in pending if rank in one.since and not one.over), None)
        doing = ["is stopped"] if worker.is_stopped else []
        if rank in story.patient:
            doing.append("has no input left")
        elif own is not None:
            whom = rank_list(own.missing) if own.missing else "the others"
            doing.append(f"waits in {own.text} for {whom}, {own.since[rank]:.1f} s")
        doing += [worker.doing] if worker.doing and not story.failure else []
        # Of a wait under way nothing is counted.
        waited = f"{min(1.0, counts.waited_ns / 1e9 / elapsed):.0%}" if counts.operations else "-"
        rows.append((worker.name.removeprefix("rank "), *rates, waited, late, "; ".join(doing)))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    cells = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:5], widths[1:]), row[5]] for row in rows)
    fact = story.failure[1].partition("\n  ")[0] if story.failure else ""
    lost = f"; the world is lost: {fact}" if fact else ""
    return _text([story.about + lost, *("  ".join(row).rstrip() for row in cells), *_slow(story, since, elapsed)])


def stacks(segments: Sequence[Any]) -> str:
    """The Python stacks of the workers of a running job on this host."""
    pids = {worker.pid: worker for segment in segments for worker in segment.snapshot().workers if worker.state}
    told = []
    for pid, path in _memory_files(files.STACKS):
        worker = pids.pop(pid, None)
        if worker is not None:
            told.append((worker.rank, f"rank {worker.rank} ({worker.host}, pid {pid}):\n{_stacks_of(worker, path)}"))
    told += [(one.rank, f"rank {one.rank} ({one.host}, pid {pid}) tells no stacks") for pid, one in pids.items()]
    return "\n".join(text for _, text in sorted(told))


def _stacks_of(worker: native.Worker, path: str) -> str:
    if worker.is_stopped:
        return "  it is stopped"
    try:
        with open(path, "rb") as memory:
            begin = size = memory.seek(0, os.SEEK_END)
            if not ask(worker.pid, files.STACKS_SIGNAL):
                return "  it tells no stacks any more"
            end = time.monotonic() + _STACKS_S
            while time.monotonic() < end:
                time.sleep(_QUIET_S)
                grown = memory.seek(0, os.SEEK_END)
                if grown == size > begin:
                    break
                size = grown
            memory.seek(begin)
            threads = memory.read().decode(errors="replace").rstrip().split("\n\n")
            # But for this package's own threads.
            text = "\n".join(one for one in threads if not ("/kvstore_hvd/world/" in one and " in _bootstrap" in one))
        return text or "  it does not answer"
    except (OSError, ValueError) as error:
        return f"  {error}"


# -- The commands ----------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Run a command, `argv[0]`, with its arguments."""
    parser = argparse.ArgumentParser(prog=f"kvhvdrun {argv[0]}", allow_abbrev=False)
    if argv[0] == "explain":
        parser.description = "Say what the workers of a job did before a failure, or do now."
        parser.add_argument("files", metavar="FILE", nargs="*", help="kvhvd-failure-JOB.json; none: the running job")
    else:
        what = "what the workers do" if argv[0] == "status" else "the Python stacks of the workers"
        parser.description = f"Show {what} of the running jobs of this user on this host."
        parser.add_argument("job", metavar="JOB", nargs="?", default="", help="its name, or the pid of a worker [all]")
    options = parser.parse_args(argv[1:])
    if argv[0] == "explain" and options.files:
        texts = [_explain_files(options.files)]
    else:
        job = "" if argv[0] == "explain" else options.job
        running = _running(job)
        if not running:
            fact = f"no job {job} runs on this host." if job else "no job of this user runs on this host."
            raise LaunchError(message(fact, fix="ask on a host with workers; `kvhvdrun explain FILE` reads a file."))
        if argv[0] == "explain":
            parts = [part for segments in running for part in _parts(segments)]
            jobs = dict.fromkeys(part["job"] for part in parts)
            texts = [explain(tell([part for part in parts if part["job"] == job])) for job in jobs]
        else:
            of_all = [segments for segments in running if not segments[0].snapshot().set_number]
            texts = list(map(status, running)) if argv[0] == "status" else list(map(stacks, of_all))
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.buffer.write(printable("\n\n".join(texts) + "\n").encode(errors="backslashreplace"))
        sys.stdout.flush()
    return 0


def _explain_files(paths: Sequence[str]) -> str:
    parts: list[Mapping[str, Any]] = []
    try:
        for path in paths:
            with open(path, encoding="utf-8") as file:
                content = json.load(file)
            parts += content["parts"] if content["format"] == 1 else content["parts of format 1"]
        if len({part["job"] for part in parts}) > 1:
            raise LaunchError(message("the files are of several jobs.", fix="explain the jobs one by one."))
        return explain(tell(parts))
    except (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError) as error:
        fact = f"'{path}' is no file of a failure of this version: {type(error).__name__}: {error}."
        fix = "name a kvhvd-failure-*.json, and use the kvhvdrun of the version that wrote it."
        raise LaunchError(message(fact, fix=fix)) from None
