"""Record when every operation of every worker waited and ran, for Perfetto or chrome://tracing (docs/timeline.md).

Each worker writes a part; `write_trace` makes one trace of them. ``python -m kvstore_hvd.timeline merge FILE`` makes
the timeline of a job that was killed.
"""

from __future__ import annotations

import argparse
import fcntl
import glob
import itertools
import json
import operator
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Union, get_type_hints

from kvstore_hvd.base.files import open_alone, replacing
from kvstore_hvd.errors import rank_list
from kvstore_hvd.native import TimelineEvent

__all__ = ["start_timeline", "stop_timeline"]

_FORMAT = 2
# Processes in a trace have the numbers of their ranks; those of workers that came later are above this.
_MOST_RANKS = 1_000_000
_JSON = json.JSONEncoder(separators=(",", ":"))
# Numbers of calls in names: all calls share a row.
_COUNTED = re.compile(r"(?<=\.noname)\.\d+|(?<=^join)/\d+(?=/)|(?<=^'join)/\d+(?=/)")


def start_timeline(file_path: Union[str, os.PathLike[str]], mark_cycles: bool = False) -> None:
    """Begin to record the operations of all workers; every worker must call it.

    Joins the world first if this process never did. `shutdown` and the end of the program write the recording as
    `stop_timeline` does; a `reset` does not end it.

    Parameters
    ----------
    file_path : str or os.PathLike
        The file to write, replaced if it exists; the path of rank 0 counts. Until the recording ends, each worker
        writes to ``<file_path>.rank-<rank>.part``.
    mark_cycles : bool
        Mark where rounds begin: series of submissions in which no name occurs twice, in training the steps. The choice
        of rank 0 counts.

    Raises
    ------
    InvalidRequestError
        A timeline is being recorded already, or the path cannot be written to; raised on every worker.
    HorovodInternalError
        The world is lost.
    ShutdownError
        This worker left its world, or is a forked child.
    """
    from kvstore_hvd.world import process

    process.current().start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the recording; every worker must call it. The file is there when it returns.

    Does nothing without a recording. Operations under way are not in the file: read their results
    (``mx.nd.waitall()``) before.

    Raises
    ------
    KVHvdError
        The file could not be written; raised on every worker. The workers' parts stay beside it.
    HorovodInternalError
        The world is lost. The file is made by the last worker that ends its recording, unless one has died.
    """
    from kvstore_hvd.world import process

    process.current().stop_timeline()


# -- Parts -------------------------------------------------------------------------------------------------------------
#
# A part is lines of JSON, readable however its worker ends. The first line is a `Header`, as an object. An array is an
# operation (`native.TimelineEvent`). Later objects: ``{"world": 1}``: the next operations belong to the world of this
# generation. ``{"set": 3}``: they belong to this process set (0: to all workers). ``{"lost": 12}``: so many operations
# found no room. ``{"end": "<session>"}``: the part is complete.


@dataclass(frozen=True)
class Header:
    """The writer of a part, with two clocks of one moment."""

    session: str  # equal for all parts of one timeline; begins with the name of the job
    rank: int
    size: int
    host: str
    pid: int
    mark_cycles: bool
    monotonic_ns: int = field(default_factory=time.monotonic_ns)
    unix_ns: int = field(default_factory=time.time_ns)
    ahead_ns: int = 0  # this host's monotonic clock minus that of rank 0's host
    error_ns: int = 0  # of ahead_ns
    generation: int = 0  # of the world in which this worker began to record
    format: int = _FORMAT


def part_path(target: str, rank: int, generation: int = 0) -> str:
    """The part of the timeline `target` of a worker that began to record in this generation, with this rank."""
    return f"{target}.rank-{rank}{f'-{generation}' if generation else ''}.part"


class PartWriter:
    """A new part, which replaces an old one. One thread at a time."""

    def __init__(self, target: str, header: Header) -> None:
        self.path = part_path(target, header.rank, header.generation)
        self._session = header.session
        self._set = 0
        self._file = open_alone(self.path)
        try:
            self._write(_JSON.encode(asdict(header)) + "\n")
        except BaseException:
            self.discard()
            raise

    def world(self, generation: int) -> None:
        """Begin the operations of the world of this generation."""
        self._set = 0
        self._write(f'{{"world":{generation}}}\n')

    def add(self, events: Iterable[TimelineEvent], lost: int = 0, process_set: int = 0) -> None:
        """Write operations of a process set (0: of all workers), and the number of those without room."""
        lines = [*map(_JSON.encode, events), *([f'{{"lost":{lost}}}'] if lost else [])]
        if lines and process_set != self._set:
            lines.insert(0, f'{{"set":{process_set}}}')
            self._set = process_set
        self._write("".join(f"{line}\n" for line in lines))

    def end(self) -> None:
        """Write the last line, and close the part."""
        self._write(_JSON.encode({"end": self._session}) + "\n")
        self._close()

    def discard(self) -> None:
        """Close and delete the part."""
        self._close()
        os.unlink(self.path)

    def _close(self) -> None:
        # A forked child may have the file open, too, and would keep the lock.
        fcntl.flock(self._file, fcntl.LOCK_UN)
        self._file.close()

    def _write(self, text: str) -> None:
        rest = memoryview(text.encode())
        while rest:
            rest = rest[self._file.write(rest) :]


def has_ended(path: str, session: str) -> bool:
    """Whether this file is a complete part of the session."""
    line = f"{_JSON.encode({'end': session})}\n".encode()
    try:
        with open(path, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - len(line)))
            return file.read() == line
    except FileNotFoundError:
        return False


def read_lines(path: str) -> Iterator[Any]:
    """The value of each line, without a line that a killed worker has cut."""
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                yield json.loads(line)
            except ValueError:
                continue


def read_header(path: str) -> Header | None:
    """The header; None if this is no part of a timeline."""
    try:
        told: dict[str, Any] = next(read_lines(path)) if os.path.isfile(path) else {}
        header = Header(**told)
    except (OSError, RecursionError, StopIteration, TypeError):
        return None
    if {name: type(value) for name, value in told.items()} != get_type_hints(Header) or header.format != _FORMAT:
        return None
    return header if 0 <= header.rank < header.size <= _MOST_RANKS else None


# -- The trace ---------------------------------------------------------------------------------------------------------
#
# The *trace event format* of Perfetto (https://ui.perfetto.dev) and chrome://tracing: a process for each rank, in it a
# row for each tensor, times in microseconds since the start of the recording. Parts are read line by line: a timeline
# need not fit into memory.


@dataclass
class Summary:
    """The contents of a trace."""

    ranks: list[int] = field(default_factory=list)
    operations: int = 0
    lost: int = 0  # operations without room in the recording
    unfinished: list[int] = field(default_factory=list)  # ranks whose part has no end, because they died


class StrangePartError(ValueError):
    """Raised with the path of a file that is no part of a timeline."""

    def __str__(self) -> str:
        return f"not a part of a timeline: {self.args[0]}"


def write_trace(target: str, parts: Sequence[str]) -> Summary:
    """Make `target` of the parts of one timeline, which stay; it appears complete or not at all."""
    headers = [(path, header) for path in parts if (header := read_header(path)) is not None]
    if not headers or len(headers) < len(parts):
        raise StrangePartError(next((path for path in parts if path not in dict(headers)), "nothing was given"))
    trace = _Trace(min((header for _, header in headers), key=lambda header: header.monotonic_ns - header.ahead_ns))
    with replacing(target, f"{target}.{os.getpid()}.tmp") as file:
        file.writelines(line.encode() for line in trace.lines(headers))
    return trace.summary


class _Trace:
    """The events of parts, one part after the other."""

    def __init__(self, first: Header) -> None:
        self._first = first  # the time 0 of the trace is that of this header
        self._numbers = itertools.count(1)  # of rows: viewers merge rows of equal numbers, also of different ranks
        self.summary = Summary()

    def lines(self, parts: Sequence[tuple[str, Header]]) -> Iterator[str]:
        # One line for each event: large traces can be looked at with grep, too.
        yield '{"displayTimeUnit":"ms","traceEvents":['
        separator = "\n"
        for path, header in parts:
            try:
                for event in self._part(path, header):
                    yield f"{separator}{json.dumps(event)}"
                    separator = ",\n"
            except (ArithmeticError, RecursionError, TypeError):
                raise StrangePartError(path) from None
        about = {
            "recorder": "kvstore_hvd",
            "ranks": len(parts),
            "clock": "CLOCK_MONOTONIC",
            "clock_error_ns": max(header.error_ns for _, header in parts),
            "ts_0_monotonic_ns": self._first.monotonic_ns,
            "ts_0_unix_ns": self._first.unix_ns,
            "lost_operations": self.summary.lost,
            "unfinished_ranks": self.summary.unfinished,
        }
        yield f'\n],"otherData":{json.dumps(about)}}}\n'

    def _part(self, path: str, header: Header) -> Iterator[dict[str, Any]]:
        self._header = header
        self._pid = header.generation * _MOST_RANKS + header.rank
        # By process set (0: all workers) and name: the end of the last operation of each row, by the row's number.
        # Operations of a row do not overlap.
        self._rows: defaultdict[tuple[int, str], dict[int, int]] = defaultdict(dict)
        self._cycle_rows: dict[int, int] = {}  # by process set
        self.summary.ranks.append(header.rank)
        since = f", since generation {header.generation}" if header.generation else ""
        title = f"rank {header.rank} ({header.host}, pid {header.pid}{since})"
        yield self._event("M", "process_name", 0, args={"name": title})
        yield self._event("M", "process_sort_index", 0, args={"sort_index": self._pid})
        process_set, ended, types = 0, False, list(get_type_hints(TimelineEvent).values())
        for line in read_lines(path):
            if isinstance(line, dict):
                if "world" in line:
                    process_set = 0
                process_set = operator.index(line.get("set", process_set))
                self.summary.lost += operator.index(line.get("lost", 0))
                ended = "end" in line
            elif list(map(type, line)) != types:
                raise TypeError
            else:
                event = TimelineEvent._make(line)
                self.summary.operations += 1
                yield from self._operation(process_set, event)
                if header.mark_cycles and event.begins_round:
                    yield from self._cycle(process_set, event.submitted)
        if not ended:
            self.summary.unfinished.append(header.rank)

    def _operation(self, process_set: int, event: TimelineEvent) -> Iterator[dict[str, Any]]:
        # A name's operations follow one another; calls without a name may overlap.
        rows = self._rows[process_set, _COUNTED.sub("", event.name)]
        row = next((row for row, until in rows.items() if until <= event.since), 0)
        if not row:
            row = next(self._numbers)
            title = _COUNTED.sub("", event.label).replace("'", "") or event.name
            yield from self._head(row, process_set, title, row)
        rows[row] = event.completed
        what = event.collective.upper()
        args = {"bytes": event.bytes, "dtype": event.dtype, "algorithm": event.algorithm, "name": event.name}
        if event.collective in ("allreduce", "reducescatter"):
            args["op"] = event.op
        if event.on_link:
            args["on_link_us"] = event.on_link / 1000
        if process_set:
            args["process_set"] = process_set
        if event.failed:
            args["failed"] = True
        yield self._span(f"NEGOTIATE_{what}", "negotiate", row, event.since, event.scheduled)
        yield {**self._span(what, event.collective, row, event.scheduled, event.completed), "args": args}

    def _cycle(self, process_set: int, begin: int) -> Iterator[dict[str, Any]]:
        if process_set not in self._cycle_rows:
            self._cycle_rows[process_set] = next(self._numbers)
            yield from self._head(self._cycle_rows[process_set], process_set, "cycles", 0)
        yield self._event("i", "CYCLE_START", self._cycle_rows[process_set], s="p", ts=self._us(begin))

    def _head(self, row: int, process_set: int, title: str, sort_index: int) -> Iterator[dict[str, Any]]:
        if process_set:
            title = f"process set {process_set}: {title}"
        yield self._event("M", "thread_name", row, args={"name": title})
        yield self._event("M", "thread_sort_index", row, args={"sort_index": sort_index})

    def _span(self, name: str, category: str, row: int, begin: int, end: int) -> dict[str, Any]:
        ts = self._us(begin)
        return self._event("X", name, row, cat=category, ts=ts, dur=round(self._us(end) - ts, 3))

    def _event(self, phase: str, name: str, row: int, **more: Any) -> dict[str, Any]:
        return {"name": name, "ph": phase, "pid": self._pid, "tid": row, **more}

    def _us(self, monotonic_ns: int) -> float:
        # An earlier time is shown as the start of the recording.
        own_ns, first = monotonic_ns - self._header.ahead_ns, self._first
        return max(0, own_ns - first.monotonic_ns + first.ahead_ns) / 1000


# -- python -m kvstore_hvd.timeline ------------------------------------------------------------------------------------


def merge(target: str, job: str = "", strange: Collection[str] = ()) -> tuple[str, list[str]]:
    """Make `target` of the parts beside it but for `strange`, of the latest session; returns what it has and the parts.

    Empty where there is none; `job`: none of this job. Raises OSError and ValueError.
    """
    found = {path: read_header(path) for path in glob.glob(glob.escape(target) + ".rank-*.part")}
    headers = {path: header for path, header in found.items() if header is not None and path not in strange}
    headers = {path: header for path, header in headers.items() if header.session.startswith(job)}
    if not headers:
        return "", []
    latest = max(headers, key=lambda path: headers[path].unix_ns)
    own = {path: header for path, header in headers.items() if header.session == headers[latest].session}
    try:
        summary = write_trace(target, sorted(own, key=lambda path: (own[path].generation, own[path].rank)))
    except StrangePartError as error:
        return merge(target, job, {*strange, error.args[0]})
    lines = [f"{target}: {summary.operations} operations of {rank_list(summary.ranks)}"]
    size = max(own.values(), key=lambda header: header.generation).size
    missing = set(range(size)) - set(summary.ranks)
    if missing:
        lines.append(f"missing: {rank_list(missing)} of {size}")
    if summary.unfinished:
        who = rank_list(sorted(set(summary.unfinished)))
        lines.append(f"the last moments are missing, because they did not end in good order: {who}")
    if summary.lost:
        lines.append(f"{summary.lost} operations were not recorded: there were too many at a time")
    others = sorted(found.keys() - own.keys())
    if others:
        lines.append(f"left out, no part of this timeline: {', '.join(others)}")
    return "\n".join(lines), list(own)


def main(argv: Sequence[str] | None = None) -> int:
    """Run with the arguments `argv` (default: ``sys.argv[1:]``)."""
    about = "Make the timeline of a job that was killed."
    parser = argparse.ArgumentParser(prog="python -m kvstore_hvd.timeline", description=about)
    parser.add_argument("merge", choices=["merge"], help="make FILE of the parts that its workers left beside it")
    parser.add_argument("file", metavar="FILE", help="as given to start_timeline() or HOROVOD_TIMELINE")
    target = parser.parse_args(argv).file
    try:
        text, _ = merge(target)  # the parts stay, in case the job still runs
    except (OSError, ValueError) as error:
        print(f"the timeline cannot be made: {error}", file=sys.stderr)
        return 1
    if not text:
        print(f"there is no part of a timeline: {part_path(target, 0)} and so on.", file=sys.stderr)
        return 1
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
