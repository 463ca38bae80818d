"""What a store counts, and how much of it it keeps."""

from __future__ import annotations

import pytest

from kvstore_hvd import usage
from kvstore_hvd.usage import OTHER_KEYS, Usage


def test_nothing_was_done() -> None:
    assert Usage().report({}) == {"operations": {}, "bytes": 0, "keys": {}}


def test_counts_by_key_and_in_total() -> None:
    counted = Usage()
    counted.add("broadcast", 3, 8)
    counted.add("pushpull", "3", 8)
    counted.add("pushpull", "loss", 4)
    assert counted.report({"3": "weight"}) == {
        "operations": {"broadcast": 1, "pushpull": 2},
        "bytes": 20,
        "keys": {
            "weight": {"operations": {"broadcast": 1, "pushpull": 1}, "bytes": 16},
            "loss": {"operations": {"pushpull": 1}, "bytes": 4},
        },
    }


def test_keys_that_are_used_once_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "MAX_KEYS", 3)
    counted = Usage()
    for step in range(100):
        counted.add("pushpull", 0, 4)
        counted.add("pushpull", f"once/{step}", 8)
    report = counted.report({})
    assert (report["operations"], report["bytes"]) == ({"pushpull": 200}, 1200)
    assert list(report["keys"]) == ["0", "once/0", "once/1", OTHER_KEYS]
    assert report["keys"]["0"] == {"operations": {"pushpull": 100}, "bytes": 400}
    assert report["keys"][OTHER_KEYS] == {"operations": {"pushpull": 98}, "bytes": 98 * 8}
