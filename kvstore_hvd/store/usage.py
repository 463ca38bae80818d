"""Counts, bytes and times of a store's operations, and the report of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore_hvd.native import Statistics, Times
from kvstore_hvd.store.keys import MAX_KEYS, Key

#: How a report calls all keys beyond the first `MAX_KEYS`.
OTHER_KEYS = "(other keys)"

_TIMES = ("queued", "reducing", "exposed")
# Bounds the memory of programs that make ever new ones.
_MOST_BATCHES = 16


@dataclass(frozen=True)
class Measured:
    """The engine's statistics of a key, and why its arrays go through staging memory ('': they do not)."""

    statistics: Statistics
    staged: str

    def report(self) -> dict[str, Any]:
        """As a part of a key's entry."""
        of, count = self.statistics, max(1, self.statistics.operations)
        ms = {
            name: {"mean": getattr(of.total, name) / count * 1e3, "last": getattr(of.last, name) * 1e3}
            for name in _TIMES
        }
        return {"algorithm": of.algorithm, "staged": self.staged, "submitted": of.submitted, "ms": ms}


_NO_TIME = Times(0.0, 0.0, 0.0)
_UNKNOWN = Measured(Statistics(0, 0, "", _NO_TIME, _NO_TIME, 0.0), "")


class Report(dict[str, Any]):
    """What `Horovod.report` returns: a dict that prints as a table."""

    def __str__(self) -> str:
        calls = ", ".join(f"{number} {operation}" for operation, number in self["operations"].items()) or "nothing"
        arena = "no arena"
        if self["arena"]["capacity"]:
            arena = f"arena: {_mib(self['arena']['used'])} of {_mib(self['arena']['capacity'])} MiB"
        rounds = self["rounds"]
        waited = f"training waited {rounds['exposed_ms']:.1f} ms for communication ({rounds['count']} steps)"
        lines = [f"{self['workers']} workers; {calls}; {_mib(self['bytes'])} MiB; {waited}; {arena}"]
        if self["keys"]:
            rows = [["key", "calls", "bytes", "algorithm", *(f"{name} ms" for name in _TIMES), "staged because"]]
            for key, entry in self["keys"].items():
                means = [f"{entry['ms'][name]['mean']:.3f}" if entry["algorithm"] else "" for name in _TIMES]
                count = sum(entry["operations"].values())
                rows.append([key, str(count), str(entry["bytes"]), entry["algorithm"], *means, entry["staged"]])
            lines += _aligned(rows)
        return "\n".join(lines)


def _mib(number: int) -> str:
    return f"{number / (1 << 20):.1f}"


def _aligned(rows: list[list[str]]) -> list[str]:
    """Texts to the left, figures to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    to_the_left = (0, 3, len(widths) - 1)
    return [
        "  ".join(
            cell.ljust(width) if column in to_the_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]


@dataclass
class _Counts:
    operations: dict[str, int] = field(default_factory=dict)
    bytes: int = 0

    def report(self) -> dict[str, Any]:
        return {"operations": dict(self.operations), "bytes": self.bytes}


@dataclass
class Batch:
    """Operations that are counted together, time after time: of one kind, and the bytes of each key's array."""

    operation: str
    sizes: Sequence[tuple[Key, int]]
    times: int = 0  # not yet added to the counts of the keys


class Usage:
    """Counts operations and their arrays' bytes, for each of the first `MAX_KEYS` keys, and for all the others."""

    def __init__(self) -> None:
        self._counts: dict[str, _Counts] = {}
        self._others = _Counts()
        self._batches: list[Batch] = []  # those with times

    def add(self, operation: str, key: Key, array_bytes: int, times: int = 1) -> None:
        """Count one operation, or several alike. The keys 3 and '3' are the same."""
        counts = self._counts.get(str(key))
        if counts is None:
            counts = _Counts() if len(self._counts) < MAX_KEYS else self._others
            if counts is not self._others:
                self._counts[str(key)] = counts
        counts.operations[operation] = counts.operations.get(operation, 0) + times
        counts.bytes += array_bytes * times

    def add_batch(self, batch: Batch) -> None:
        """Have a batch counted, whose `times` is 0 and grows from now on."""
        if len(self._batches) >= _MOST_BATCHES:
            self._settle()
        self._batches.append(batch)

    def _settle(self) -> None:
        batches, self._batches = self._batches, []
        for batch in batches:
            times, batch.times = batch.times, 0
            for key, array_bytes in batch.sizes:
                self.add(batch.operation, key, array_bytes, times)

    def report(self, names: Mapping[str, str], measured: Callable[[str], Measured | None]) -> dict[str, Any]:
        """Totals, and counts by key; the entries are described in `Horovod.report`."""
        self._settle()
        everything = [*self._counts.values(), self._others]
        operations: dict[str, int] = {}
        for counts in everything:
            for operation, number in counts.operations.items():
                operations[operation] = operations.get(operation, 0) + number
        keys = {}
        totals = dict.fromkeys(_TIMES, 0.0)
        for key, counts in self._counts.items():
            known = measured(key)
            keys[names.get(key, key)] = {**counts.report(), **(_UNKNOWN if known is None else known).report()}
            if known is not None:
                for name in _TIMES:
                    totals[name] += getattr(known.statistics.total, name) * 1e3
        if self._others.operations:
            keys[OTHER_KEYS] = {**self._others.report(), **_UNKNOWN.report()}
        total_bytes = sum(counts.bytes for counts in everything)
        return {"operations": operations, "bytes": total_bytes, "ms": totals, "keys": keys}
