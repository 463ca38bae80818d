"""Counts, bytes and times of a store's operations, and the report of them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore_hvd.config import config
from kvstore_hvd.native import Statistics, Times
from kvstore_hvd.store.keys import MAX_KEYS, Key, wire_name
from kvstore_hvd.world.flight import describe_late

#: How a report calls all keys beyond the first `MAX_KEYS`.
OTHER_KEYS = "(other keys)"

_TIMES = ("queued", "reducing", "exposed")
# Bounds the memory of programs that make ever new ones.
_MOST_BATCHES = 16


_NO_TIME = Times(0.0, 0.0, 0.0)
_UNKNOWN = Statistics(0, 0, "", _NO_TIME, _NO_TIME, 0.0)


def _why_staged(algorithm: str, reason: str | None) -> str:
    """Why arrays that an algorithm reduces go through staging memory; `reason` is that of a Trainer's gradient."""
    # Over hosts arrays in arenas are read where they lie.
    if algorithm not in ("inline", "one-shot", "two-shot") and (algorithm != "link-sum" or reason == ""):
        return ""
    if not config().zero_copy:
        return "KVHVD_ZERO_COPY=0"
    return "not a Trainer's gradient" if reason is None else reason or "staged by another worker"


class Report(dict[str, Any]):
    """What `Horovod.report` returns: a dict that prints as a table."""

    def __str__(self) -> str:
        calls = ", ".join(f"{number} {operation}" for operation, number in self["operations"].items()) or "nothing"
        arena = "no arena"
        if self["arena"]["capacity"]:
            arena = f"arena: {_mib(self['arena']['used'])} of {_mib(self['arena']['capacity'])} MiB"
        rounds = self["rounds"]
        steps, sums = rounds["count"], rounds["reducing_ms"]
        others = rounds["exposed_ms"] - sums
        waited = f"training waited at most {sums:.1f} ms for sums, {others:.1f} ms for workers ({steps} steps)"
        lines = [f"{self['workers']} workers; {calls}; {_mib(self['bytes'])} MiB; {waited}; {arena}"]
        for rank, of in self["ranks"].items():
            late = describe_late(of["compared"], of["last"], of["behind_ms"])
            lines.append(f"rank {rank}: waited {of['waited_ms']:.1f} ms; {late}")
        if self["keys"]:
            rows = [["key", "calls", "bytes", "algorithm", *(f"{name} ms" for name in _TIMES), "staged because"]]
            for key, entry in self["keys"].items():
                means = [f"{entry['ms'][name]['mean']:.3f}" if entry["algorithm"] else "" for name in _TIMES]
                count = sum(entry["operations"].values())
                rows.append([key, str(count), str(entry["bytes"]), entry["algorithm"], *means, entry["staged"]])
            widths = [max(map(len, column)) for column in zip(*rows)]
            sides = ["<", ">", ">", "<", *[">"] * len(_TIMES), "<"]  # texts to the left, figures to the right
            lines += ["  ".join(map(format, row, map("{}{}".format, sides, widths))).rstrip() for row in rows]
        return "\n".join(lines)


def _mib(number: int) -> str:
    return f"{number / (1 << 20):.1f}"


@dataclass
class _Counts:
    operations: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))
    bytes: int = 0


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
        self._batches: list[Batch] = []  # those with times

    def add(self, operation: str, key: Key, array_bytes: int, times: int = 1) -> None:
        """Count one operation, or several alike. The keys 3 and '3' are the same."""
        counts = self._counts.get(str(key))
        if counts is None:
            name = str(key) if len(self._counts) < MAX_KEYS else OTHER_KEYS
            counts = self._counts.setdefault(name, _Counts())
        counts.operations[operation] += times
        counts.bytes += array_bytes * times

    def add_batch(self, batch: Batch) -> None:
        """Have a batch counted, whose `times` is 0 and grows from now on."""
        if len(self._batches) >= _MOST_BATCHES:
            self._settle()
        self._batches.append(batch)

    def _settle(self) -> None:
        for batch in self._batches:
            for key, array_bytes in batch.sizes:
                self.add(batch.operation, key, array_bytes, batch.times)
            batch.times = 0
        self._batches = []

    def report(
        self, namespace: str, names: Mapping[str, str], statistics: Mapping[str, Statistics], staged: Mapping[str, str]
    ) -> dict[str, Any]:
        """Totals, and counts by key; the entries are described in `Horovod.report`."""
        # By key: `names` of parameters, and why gradients are `staged` ('': they are not); `statistics` of the engine
        # are by wire name.
        self._settle()
        operations, totals, keys = Counter[str](), dict.fromkeys(_TIMES, 0.0), {}
        for key, counts in self._counts.items():
            operations.update(counts.operations)
            of = statistics.get(wire_name(namespace, key), _UNKNOWN)
            ms = {}
            for name in _TIMES:
                total = getattr(of.total, name) * 1e3
                totals[name] += total
                ms[name] = {"mean": total / max(1, of.operations), "last": getattr(of.last, name) * 1e3}
            keys[names.get(key, key)] = {
                "operations": dict(counts.operations),
                "bytes": counts.bytes,
                "algorithm": of.algorithm,
                "staged": _why_staged(of.algorithm, staged.get(key)),
                "submitted": of.submitted,
                "ms": ms,
            }
        total_bytes = sum(counts.bytes for counts in self._counts.values())
        return {"operations": dict(operations), "bytes": total_bytes, "ms": totals, "keys": keys}
