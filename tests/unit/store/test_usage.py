"""What a store counts, how much of it it keeps, and what its report looks like."""

import pytest

from kvstore_hvd.native import Statistics, Times
from kvstore_hvd.store import usage
from kvstore_hvd.store.usage import OTHER_KEYS, Batch, Report, Usage

NOTHING = {
    "algorithm": "",
    "staged": "",
    "submitted": 0.0,
    "ms": {name: {"mean": 0.0, "last": 0.0} for name in ("queued", "reducing", "exposed")},
}


def test_keys_that_are_used_once_are_counted_together(monkeypatch):
    monkeypatch.setattr(usage, "MAX_KEYS", 3)
    counted = Usage()
    for step in range(100):
        counted.add("pushpull", 0, 4)
        counted.add("pushpull", f"once/{step}", 8)
    report = counted.report("s0", {}, {}, {})
    assert (report["operations"], report["bytes"]) == ({"pushpull": 200}, 1200)
    assert list(report["keys"]) == ["0", "once/0", "once/1", OTHER_KEYS]
    assert report["keys"]["0"] == {"operations": {"pushpull": 100}, "bytes": 400, **NOTHING}
    assert report["keys"][OTHER_KEYS] == {"operations": {"pushpull": 98}, "bytes": 98 * 8, **NOTHING}


@pytest.mark.parametrize("most", [2, 16])
def test_batches_count_like_their_operations(most, monkeypatch):
    monkeypatch.setattr(usage, "_MOST_BATCHES", most)
    batched, single = Usage(), Usage()
    batches = [Batch("pushpull", [(key, 4 * key), ("loss", 1)]) for key in (1, 2, 3)]
    for time in range(3):
        for batch in batches * 2:
            if not batch.times:
                batched.add_batch(batch)
            batch.times += 1
            for key, array_bytes in batch.sizes:
                single.add(batch.operation, key, array_bytes)
        if time == 1:
            assert batched.report("s0", {}, {}, {}) == single.report("s0", {}, {}, {})
    assert batched.report("s0", {}, {}, {}) == single.report("s0", {}, {}, {})


def test_times_are_means_and_totals_in_milliseconds_and_print_as_a_table():
    counted = Usage()
    for key in (0, "0") * 2:
        counted.add("pushpull", key, 1 << 20)
    counted.add("broadcast", "loss", 4)
    statistics = Statistics(4, 4 << 20, "two-shot", Times(1.0, 2.0, 0.5), Times(0.25, 1.0, 0.0), 77.0)
    entries = counted.report("s0", {"0": "weight"}, {"s0/0": statistics}, {"0": "3 devices"})
    assert entries["ms"] == {"queued": 1000.0, "reducing": 2000.0, "exposed": 500.0}
    times = {"queued": (250.0, 250.0), "reducing": (500.0, 1000.0), "exposed": (125.0, 0.0)}
    ms = {name: {"mean": mean, "last": last} for name, (mean, last) in times.items()}
    told = {"algorithm": "two-shot", "staged": "3 devices", "submitted": 77.0, "ms": ms}
    assert entries["keys"]["weight"] == {"operations": {"pushpull": 4}, "bytes": 4 << 20, **told}
    rounds, arena = {"count": 3, "exposed_ms": 1.5, "reducing_ms": 0.5}, {"used": 1 << 20, "capacity": 8 << 20}
    figures = {"operations": 5, "bytes": 4 << 20, "waited_ms": 7.0, "compared": 4, "last": 3, "behind_ms": 4.5}
    ranks = {1: figures, 2: dict.fromkeys(figures, 0)}
    assert str(Report({"workers": 2, "rounds": rounds, "arena": arena, "ranks": ranks, **entries})).splitlines() == [
        "2 workers; 4 pushpull, 1 broadcast; 4.0 MiB; training waited at most 0.5 ms for sums, 1.0 ms for "
        "workers (3 steps); arena: 1.0 of 8.0 MiB",
        "rank 1: waited 7.0 ms; came last in 75 % of 4 operations, 1.5 ms behind the median",
        "rank 2: waited 0.0 ms; came last in 0 % of 0 operations, 0 ms behind the median",
        "key     calls    bytes  algorithm  queued ms  reducing ms  exposed ms  staged because",
        "weight      4  4194304  two-shot     250.000      500.000     125.000  3 devices",
        "loss        1        4",
    ]


@pytest.mark.parametrize("zero_copy", [0, 1])
def test_why_keys_are_staged(setting, zero_copy):
    setting(KVHVD_ZERO_COPY=str(zero_copy))
    counted, whys = Usage(), {"two-shot": "staged by another worker", "one-shot": "not a Trainer's gradient"}
    for each in (*whys, "link-sum", "direct"):
        counted.add("pushpull", each, 4)
    statistics = {f"s0/{each}": Statistics(1, 4, each, *[Times(0.0, 0.0, 0.0)] * 2, 0.0) for each in counted._counts}
    report = counted.report("s0", {}, statistics, dict.fromkeys(("two-shot", "link-sum", "direct"), ""))["keys"]
    found = {each: entry["staged"] for each, entry in report.items() if entry["staged"]}
    assert found == (whys if zero_copy else dict.fromkeys(whys, "KVHVD_ZERO_COPY=0"))
