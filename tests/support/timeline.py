"""Timelines as their viewers read them: the trace event format, checked event by event."""

import json
from pathlib import Path
from typing import Any

# Times have three decimals, and sums of them round.
_NS = 0.0005


class Trace:
    """A timeline that has been read and found to be in order."""

    def __init__(self, path: Path) -> None:
        content = json.loads(path.read_text())
        self.about: dict[str, Any] = content["otherData"]
        self.events: list[dict[str, Any]] = content["traceEvents"]
        assert content["displayTimeUnit"] in ("ms", "ns")
        for event in self.events:
            assert {"name", "ph", "pid", "tid"} <= set(event), event
            assert event["ph"] in "MXi", event
            if event["ph"] != "M":
                assert event["ts"] >= 0, event
        for (rank, row), spans in self.rows().items():
            self._check_row(rank, row, spans)

    def rows(self) -> dict[tuple[int, int], list[dict[str, Any]]]:
        rows: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for event in self.events:
            if event["ph"] == "X":
                rows.setdefault((event["pid"], event["tid"]), []).append(event)
        return rows

    def names(self, rank: int) -> list[str]:
        return [event["args"]["name"] for event in self.events if event["pid"] == rank and self._is(event, "thread")]

    def ranks(self) -> list[int]:
        """Whose operations it shows, as the viewer sorts them."""
        names = [event["pid"] for event in self.events if self._is(event, "process")]
        assert names == [event["pid"] for event in self.events if event["name"] == "process_sort_index"]
        return names

    def row(self, rank: int, name: str) -> list[dict[str, Any]]:
        rows = [
            event["tid"]
            for event in self.events
            if event["pid"] == rank and self._is(event, "thread") and event["args"]["name"] == name
        ]
        assert len(rows) == 1, f"rank {rank} has {len(rows)} rows {name!r}"
        return self.rows().get((rank, rows[0]), [])

    def cycles(self, rank: int) -> list[float]:
        return [e["ts"] for e in self.events if e["ph"] == "i" and e["name"] == "CYCLE_START" and e["pid"] == rank]

    def _is(self, event: dict[str, Any], what: str) -> bool:
        return bool(event["ph"] == "M" and event["name"] == f"{what}_name")

    def _check_row(self, rank: int, row: int, spans: list[dict[str, Any]]) -> None:
        assert {rank} == {e["pid"] for e in self.events if e["tid"] == row}, "rows have numbers of their own"
        until = 0.0
        assert len(spans) % 2 == 0
        for waiting, working in zip(spans[::2], spans[1::2]):
            assert waiting["name"] == f"NEGOTIATE_{working['name']}"
            for span in (waiting, working):
                assert span["dur"] >= 0
                assert span["ts"] >= until - _NS, f"overlap: {span} begins before {until}"
                until = span["ts"] + span["dur"]
            assert {"bytes", "algorithm", "dtype"} <= set(working["args"])


def parts_of(path: Path) -> list[str]:
    """The names of what the workers have left beside a timeline, temporary files included."""
    return sorted(entry.name for entry in path.parent.iterdir() if entry.name.startswith(path.name + "."))
