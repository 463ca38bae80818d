"""From the parts that workers wrote to one trace for Perfetto (https://ui.perfetto.dev) and chrome://tracing.

The format is the *trace event format*: a process for each rank, in it a row for each tensor, times in microseconds
since the recording began. Parts are read line by line: a timeline need not fit into memory.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from kvstore_hvd.recording.parts import Header, read_header, read_lines
from kvstore_hvd.records import TimelineEvent

__all__ = ["Summary", "write_trace"]

_CYCLES = "cycles"


@dataclass
class Summary:
    """What became of the parts."""

    ranks: list[int] = field(default_factory=list)
    operations: int = 0
    lost: int = 0  # operations that the workers could not record
    unfinished: list[int] = field(default_factory=list)  # ranks whose part has no end: they died


def write_trace(target: str, parts: Sequence[str]) -> Summary:
    """Make `target` of the parts of one timeline; it appears complete or not at all. The parts are left alone.

    Parameters
    ----------
    target : str
        An existing file is replaced.
    parts : sequence of str
        Paths, in the order of ranks.

    Returns
    -------
    Summary

    Raises
    ------
    ValueError
        There is no part, or one of them is none.
    OSError
        A file cannot be read or written.
    """
    headers = [(path, header) for path in parts if (header := read_header(path)) is not None]
    if not headers or len(headers) < len(parts):
        strange = [path for path in parts if path not in dict(headers)]
        raise ValueError(f"not a part of a timeline: {', '.join(strange) or 'nothing was given'}")
    trace = _Trace(min((header for _, header in headers), key=lambda header: header.monotonic_ns))
    temporary = f"{target}.{os.getpid()}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            trace.write(file, headers)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return trace.summary


class _Trace:
    def __init__(self, first: Header) -> None:
        self._first = first  # its clock is 0
        self._rows = 0
        self.summary = Summary()

    def write(self, file: IO[str], parts: Sequence[tuple[str, Header]]) -> None:
        # One line for each event: large traces can be looked at with grep, too.
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        separator = "\n"
        for path, header in parts:
            for event in self._part(path, header):
                file.write(f"{separator}{json.dumps(event)}")
                separator = ",\n"
        about = {
            "recorder": "kvstore_hvd",
            "ranks": len(parts),
            "clock": "CLOCK_MONOTONIC",
            "ts_0_monotonic_ns": self._first.monotonic_ns,
            "ts_0_unix_ns": self._first.unix_ns,
            "lost_operations": self.summary.lost,
            "unfinished_ranks": self.summary.unfinished,
        }
        file.write(f'\n],"otherData":{json.dumps(about)}}}\n')

    def _part(self, path: str, header: Header) -> Iterator[dict[str, Any]]:
        rank = header.rank
        self.summary.ranks.append(rank)
        yield self._about(rank, 0, "process_name", name=f"rank {rank} ({header.host}, pid {header.pid})")
        yield self._about(rank, 0, "process_sort_index", sort_index=rank)
        rows: dict[str, int] = {}
        rounds: dict[tuple[int, int], int] = {}  # (world, round): its first submission
        world, ended = 0, False
        for line in read_lines(path):
            if isinstance(line, dict):
                world = line.get("world", world)
                self.summary.lost += line.get("lost", 0)
                ended = "end" in line
                continue
            if not isinstance(line, list) or len(line) != len(TimelineEvent._fields):
                continue
            event = TimelineEvent._make(line)
            self.summary.operations += 1
            if event.name not in rows:
                rows[event.name] = self._new_row()
                title = event.label.replace("'", "") or event.name
                yield self._about(rank, rows[event.name], "thread_name", name=title)
                yield self._about(rank, rows[event.name], "thread_sort_index", sort_index=len(rows))
            yield from self._operation(rank, rows[event.name], event)
            key = (world, event.round)
            rounds[key] = min(rounds.get(key, event.submitted), event.submitted)
        if not ended:
            self.summary.unfinished.append(rank)
        if header.mark_cycles and rounds:
            row = self._new_row()
            yield self._about(rank, row, "thread_name", name=_CYCLES)
            yield self._about(rank, row, "thread_sort_index", sort_index=0)
            for begin in sorted(rounds.values()):
                yield {"name": "CYCLE_START", "ph": "i", "s": "p", "pid": rank, "tid": row, "ts": self._us(begin)}

    def _operation(self, rank: int, row: int, event: TimelineEvent) -> Iterator[dict[str, Any]]:
        what = event.collective.upper()
        args = {"bytes": event.bytes, "dtype": event.dtype, "algorithm": event.algorithm, "name": event.name}
        if event.collective in ("allreduce", "reducescatter"):
            args["op"] = event.op
        if event.failed:
            args["failed"] = True
        yield self._span(f"NEGOTIATE_{what}", "negotiate", rank, row, event.since, event.scheduled)
        yield {**self._span(what, event.collective, rank, row, event.scheduled, event.completed), "args": args}

    def _span(self, name: str, category: str, rank: int, row: int, begin: int, end: int) -> dict[str, Any]:
        ts = self._us(begin)
        duration = round(self._us(end) - ts, 3)
        return {"name": name, "cat": category, "ph": "X", "ts": ts, "dur": duration, "pid": rank, "tid": row}

    def _us(self, monotonic_ns: int) -> float:
        # What was under way when the recording began, begins with it.
        return max(0, monotonic_ns - self._first.monotonic_ns) / 1000

    def _new_row(self) -> int:
        # Of one trace, not of one rank: viewers take rows of an equal number for one.
        self._rows += 1
        return self._rows

    @staticmethod
    def _about(rank: int, row: int, what: str, **args: Any) -> dict[str, Any]:
        return {"name": what, "ph": "M", "pid": rank, "tid": row, "args": args}
