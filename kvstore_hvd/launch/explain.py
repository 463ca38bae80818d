"""``kvhvdrun explain``, ``status`` and ``stacks``: what the workers of a job did before a failure, or do now.

Both are told by the parts of hosts, see `world.flight`: from files, or from the segments of running workers, which are
found and mapped by way of /proc. A worker that hangs or is stopped need not take part.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kvstore_hvd.base import files
from kvstore_hvd.errors import LaunchError, message, printable, rank_list

# Time between the two looks that rates are taken from.
_RATES_S = 1.0
# Time for a worker to write its stacks, and time without a new byte after which they are complete.
_STACKS_S, _QUIET_S = 5.0, 0.2
# Workers and pending operations that are told of one by one.
_SHOWN = 8
# Operations of each worker that are told, at most.
_KNOWN = 1000


class Operation(NamedTuple):
    """One worker's part in an operation; times in seconds since 1970, None: not yet."""

    text: str
    announced: float
    completed: float | None


class Worker(NamedTuple):
    """What is known of a worker; `operations` by name and number, None: nothing, it is on a host without a part."""

    name: str
    doing: str
    is_stopped: bool
    counts: Mapping[str, int]
    operations: dict[tuple[str, int], Operation] | None

    @property
    def last(self) -> Operation | None:
        """The operation that it completed last."""
        over = [one for one in (self.operations or {}).values() if one.completed is not None]
        return max(over, key=lambda one: one.completed or 0.0, default=None)


class Pending(NamedTuple):
    """An operation that no worker has completed: those that have submitted it, and those that are known not to."""

    text: str
    number: int
    since: dict[int, float]  # by rank
    missing: list[int]

    @property
    def begin(self) -> float:
        """When the first of them submitted it."""
        return min(self.since.values())


class Story(NamedTuple):
    """What the parts of all hosts tell of one world."""

    about: str
    failure: tuple[str, str] | None  # class of the error, and the fact
    now: float
    age_s: float
    workers: dict[int, Worker]

    @property
    def pending(self) -> list[Pending]:
        """The operations that are not over, the earliest one first."""
        has: dict[tuple[str, int], dict[int, Operation]] = {}
        latest: dict[int, dict[str, int]] = {}  # by rank: the last number of each name
        for rank, worker in self.workers.items():
            latest[rank] = {}
            for key, one in (worker.operations or {}).items():
                has.setdefault(key, {})[rank] = one
                latest[rank][key[0]] = max(key[1], latest[rank].get(key[0], -1))
        found = []
        for (name, number), by in has.items():
            if not name or any(one.completed is not None for one in by.values()):
                continue
            known = [rank for rank, worker in self.workers.items() if worker.operations is not None]
            missing = [rank for rank in known if latest[rank].get(name, -1) < number]
            since = {rank: one.announced for rank, one in sorted(by.items())}
            found.append(Pending(next(iter(by.values())).text, number, since, missing))
        return sorted(found, key=lambda one: (not one.missing, one.begin))


def tell(parts: Sequence[Mapping[str, Any]]) -> Story:
    """The story that parts of one world tell."""
    first = parts[0]
    failures = [tuple(part["failure"]) for part in parts if part["failure"]]
    # The clocks of hosts differ by more than the times at which they hear of a failure.
    now, age_s = first["time"], max(part["age_s"] for part in parts)
    workers: dict[int, Worker] = {}
    for part in parts:
        for one in part["workers"]:
            is_here = bool(one["state"])
            if is_here or one["rank"] not in workers:
                workers[one["rank"]] = _worker(part, one, is_here, now)
    hosts = sorted({one["host"] for part in parts for one in part["workers"] if one["host"]})
    within = f", process set {first['set_number']}" if first["set_number"] else ""
    count = f"{len(workers)} workers on {', '.join(hosts)}"
    about = f"job {first['job'] or '?'}, generation {first['generation']}{within}: {count}"
    cut = [part["host"] for part in parts]
    if len(cut) < first["hosts"]:
        about += f" (told by {len(cut)} of {first['hosts']} hosts)"
    failure = failures[0] if failures else None
    return Story(about, failure, now, age_s, dict(sorted(workers.items())))


def _worker(part: Mapping[str, Any], told: Mapping[str, Any], is_here: bool, now: float) -> Worker:
    def at(ago_us: float | None) -> float | None:
        return None if ago_us is None else now - ago_us / 1e6

    operations = {}
    for kind, number, _, announced, _, completed in told["operations"]:
        name, label, collective = part["kinds"][kind][:3]
        text = f"{collective} {label or repr(name)}".replace("\n", r"\n")
        operations[name, number] = Operation(text, at(announced) or 0.0, at(completed))
    where = f" ({told['host']}, pid {told['pid']})" if told["pid"] else " (never joined)"
    doing, name = told["doing"], f"rank {told['rank']}{where}"
    return Worker(name, doing, bool(told["is_stopped"]), told["counts"], operations if is_here else None)


# -- explain ---------------------------------------------------------------------------------------------------------


def explain(story: Story) -> str:
    """What diverged first, who was where, and what to do."""
    fact, _, fix = (story.failure or ("", ""))[1].partition("\n  Fix: ")
    lines = [f"{story.about}; {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(story.now))}"]
    if story.failure is not None:
        lines.append(f"{story.failure[0]}: {fact.partition(chr(10))[0].rstrip('.')}.")
    pending, workers = story.pending, story.workers
    if not pending:
        lines.append("No operation was under way.")
    for one in pending[:1]:
        who = f"submitted by {rank_list(one.since)}, not by {rank_list(one.missing)}" if one.missing else ""
        who = who or f"submitted by {rank_list(one.since)}"
        more = f"; {len(pending) - 1} more under way" if len(pending) > 1 else ""
        count = f"number {one.number + 1} of its name"
        first = "First that is not over" if len(pending) < _KNOWN else f"First of the last {_KNOWN:,} that is not over"
        lines.append(f"{first}: {one.text}, {count}, {who}, {story.now - one.begin:.3g} s before{more}.")
    shown = sorted(workers, key=lambda rank: (not pending or rank not in pending[0].missing, rank))[:_SHOWN]
    lines += [f"  {workers[rank].name} {_where(story, rank, pending)}" for rank in shown]
    if len(workers) > _SHOWN:
        lines.append(f"  ... and {len(workers) - _SHOWN} more workers")
    lines += [f"{workers[rank].name} {late}" for rank, late in _slow(story)]
    lines.append(f"What to do: {fix.rstrip('.') or _advice(story, pending)}.")
    return "\n".join(lines)


def _where(story: Story, rank: int, pending: Sequence[Pending]) -> str:
    """What a worker did, as the end of a sentence."""
    worker = story.workers[rank]
    line = f"; it was {worker.doing}" if worker.doing else ""
    if worker.is_stopped:
        return f"was stopped{line}."
    if worker.operations is None:
        return f"is on a host that has told nothing{line}."
    own = next((one for one in pending if rank in one.since), None)
    if own is not None:
        whom = f" for {rank_list(own.missing)}" if own.missing else ""
        return f"waited in {own.text}{whom}, for {story.now - own.since[rank]:.3g} s{line}."
    last = worker.last
    if last is None or last.completed is None:
        return f"has submitted nothing{line}."
    return f"waited for nothing: {last.text} was over {story.now - last.completed:.3g} s before{line}."


def _slow(story: Story) -> list[tuple[int, str]]:
    """The worker that all others waited for most of the time, and how late it came."""
    from kvstore_hvd.native import Counts
    from kvstore_hvd.world.flight import describe_late, slow_worker

    counts = {rank: Counts(**worker.counts) for rank, worker in story.workers.items()}
    found = slow_worker(counts, story.age_s)
    if found is None:
        return []
    rank, part = found
    return [(rank, f"was slow: it {describe_late(counts[rank])}; the others waited in {part * 100:.0f} % of the time.")]


def _advice(story: Story, pending: Sequence[Pending]) -> str:
    first = pending[0] if pending else None
    kind = story.failure[0] if story.failure is not None else ""
    missing = first.missing if first is not None else []
    if kind == "PeerLostError":
        return "see the last output of that worker or host; without a word it was often out of memory (dmesg)"
    if first is None:
        return "see the error, and the output of the workers"
    if any(story.workers[rank].is_stopped for rank in missing):
        return f"find who stopped the process of {rank_list(missing)}; `kill -CONT PID` continues it"
    if any(rank in one.since for one in pending for rank in missing):
        return "have all workers submit the same operations, and those that they wait for in the same order"
    if missing:
        return f"see why {rank_list(missing)} did not come: its line above, or `kvhvdrun stacks` while the job runs"
    if any(worker.operations is None for worker in story.workers.values()):
        return "explain it together with the files of the other hosts"
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
    from kvstore_hvd import native

    found: dict[tuple[int, int], tuple[Any, Any]] = {}
    pids: dict[tuple[int, int], set[int]] = {}
    for pid, path in _memory_files("kvstore_hvd"):
        with contextlib.suppress(OSError, ValueError):  # ValueError: it is of another version
            status = os.stat(path)
            key = status.st_dev, status.st_ino
            pids.setdefault(key, set()).add(pid)
            if key not in found:
                fd = os.open(path, os.O_RDWR)
                try:
                    segment = native.Segment.attach(fd)
                    found[key] = segment, segment.snapshot()
                finally:
                    os.close(fd)
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


def _parts(segments: Sequence[Any], most: int = _KNOWN) -> list[dict[str, Any]]:
    from kvstore_hvd.world.flight import part_of

    return [json.loads(json.dumps(part_of(segment, most))) for segment in segments]


def status(segments: Sequence[Any]) -> str:
    """A table of the workers of a running job, with their rates."""
    before = tell(_parts(segments, 0))
    time.sleep(_RATES_S)
    story = tell(_parts(segments))
    elapsed, pending = story.now - before.now, story.pending
    rows = [("rank", "operations/s", "MiB/s", "waited", "came last", "")]
    for rank, worker in story.workers.items():
        since = {name: value - before.workers[rank].counts[name] for name, value in worker.counts.items()}
        late = f"{since['last'] / since['compared']:.0%}" if since["compared"] else "-"
        rates = f"{since['operations'] / elapsed:.0f}", f"{since['bytes'] / elapsed / (1 << 20):.1f}"
        own = next((one for one in pending if rank in one.since), None)
        doing = worker.doing
        if own is not None:
            whom, age_s = rank_list(own.missing) if own.missing else "the others", story.now - own.since[rank]
            doing = f"waits in {own.text} for {whom}, {max(0.0, age_s):.1f} s; {doing}".rstrip("; ")
        if worker.is_stopped:
            doing = f"is stopped; {doing}".rstrip("; ")
        name = worker.name.removeprefix("rank ")
        # Of a wait under way nothing is counted.
        waited = f"{min(1.0, since['waited_ns'] / 1e9 / elapsed):.0%}" if since["operations"] else "-"
        rows.append((name, *rates, waited, late, doing))
    widths = [max(len(row[column]) for row in rows) for column in range(5)]
    cells = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:5], widths[1:]), row[5]] for row in rows)
    slow = (f"{story.workers[rank].name} {late}" for rank, late in _slow(story))
    return "\n".join([story.about, *("  ".join(row).rstrip() for row in cells), *slow])


def stacks(segments: Sequence[Any]) -> str:
    """The Python stacks of the workers of a running job on this host."""
    shots = [segment.snapshot() for segment in segments]
    pids = {worker.pid: worker for shot in shots for worker in shot.workers if worker.state}
    told = []
    for pid, path in _memory_files(files.STACKS):
        worker = pids.pop(pid, None)
        if worker is not None:
            told.append((worker.rank, f"rank {worker.rank} ({worker.host}, pid {pid}):\n{_stacks_of(pid, path)}"))
    told += [(one.rank, f"rank {one.rank} ({one.host}, pid {pid}) tells no stacks") for pid, one in pids.items()]
    return "\n".join(text for _, text in sorted(told))


def _stacks_of(pid: int, path: str) -> str:
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            fields = {line.partition(":")[0]: line.split()[1:2] for line in file}
        if fields["State"][0] in ("T", "t"):
            return "  it is stopped"
        caught = int(fields["SigCgt"][0], 16)
        if not caught >> (files.STACKS_SIGNAL - 1) & 1:
            return "  it tells no stacks any more"
        with open(path, "rb") as memory:
            begin = size = memory.seek(0, os.SEEK_END)
            os.kill(pid, files.STACKS_SIGNAL)
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
    except (OSError, ValueError, LookupError) as error:
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
            texts = [explain(tell(_parts(segments))) for segments in running]
        else:
            of_all = [segments for segments in running if not segments[0].snapshot().set_number]
            texts = list(map(status, running)) if argv[0] == "status" else list(map(stacks, of_all))
    with contextlib.suppress(BrokenPipeError):
        print(printable("\n\n".join(texts)), flush=True)
    return 0


def _explain_files(paths: Sequence[str]) -> str:
    try:
        return explain(tell(_read(paths)))
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        fact = f"this is no file of a failure of this version: {type(error).__name__}: {error}."
        raise LaunchError(message(fact, fix="use the kvhvdrun of the version that wrote it.")) from None


def _read(paths: Sequence[str]) -> list[Mapping[str, Any]]:
    """The parts in files, of the latest world; of a process set, if the loss of the world of all follows from its."""
    parts: list[Mapping[str, Any]] = []
    for path in paths:
        try:
            with open(path, encoding="utf-8") as file:
                content = json.load(file)
            parts += content["parts"] if content["format"] == 1 else content["parts of format 1"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            fact = f"'{path}' cannot be explained: {error}."
            raise LaunchError(message(fact, fix="name a kvhvd-failure-*.json.")) from None
    if len({part["job"] for part in parts}) > 1:
        raise LaunchError(message("the files are of several jobs.", fix="explain the jobs one by one."))
    latest = max((part["generation"] for part in parts), default=0)
    parts = [part for part in parts if part["generation"] == latest]
    first = min(parts, key=lambda part: (part["failure"][0] == "PeerLostError", part["set_number"]), default=None)
    return [part for part in parts if first is not None and part["set_number"] == first["set_number"]]
