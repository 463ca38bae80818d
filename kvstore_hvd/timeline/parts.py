"""The part of a timeline that one worker writes: lines of JSON, readable however the worker ends.

The first line is a `Header`, as an object. An array is an operation (`records.TimelineEvent`). Later objects:
``{"world": 1}``: the next operations belong to the world of this generation. ``{"set": 3}``: they belong to this
process set of the world (0: to all workers). ``{"lost": 12}``: this many operations found no room. ``{"end":
"<session>"}``: the part is complete.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from kvstore_hvd.base.files import open_alone
from kvstore_hvd.native import TimelineEvent

_FORMAT = 1
_JSON = json.JSONEncoder(separators=(",", ":"))


@dataclass(frozen=True)
class Header:
    """The writer of a part, with two clocks of one moment."""

    session: str  # equal for all parts of one timeline
    rank: int
    size: int
    host: str
    pid: int
    mark_cycles: bool
    monotonic_ns: int = field(default_factory=time.monotonic_ns)
    unix_ns: int = field(default_factory=time.time_ns)
    ahead_ns: int = 0  # this host's monotonic clock minus that of rank 0's host
    error_ns: int = 0  # of ahead_ns
    format: int = _FORMAT


def part_path(target: str, rank: int) -> str:
    """The part of this rank of the timeline `target`."""
    return f"{target}.rank-{rank}.part"


class PartWriter:
    """A new part, which replaces an old one. One thread at a time."""

    def __init__(self, target: str, header: Header) -> None:
        self.path = part_path(target, header.rank)
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
        lines = [_JSON.encode(event) for event in events]
        if lost:
            lines.append(f'{{"lost":{lost}}}')
        if not lines:
            return
        if process_set != self._set:
            lines.insert(0, f'{{"set":{process_set}}}')
            self._set = process_set
        self._write("\n".join(lines) + "\n")

    def end(self) -> None:
        """Write the last line, and close the part."""
        self._write(f'{{"end":"{self._session}"}}\n')
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
    line = f'{{"end":"{session}"}}\n'.encode()
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
    first = next(read_lines(path), None)
    if not isinstance(first, dict) or first.get("format") != _FORMAT:
        return None
    try:
        return Header(**first)
    except TypeError:
        return None
