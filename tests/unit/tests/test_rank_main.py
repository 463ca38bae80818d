"""What a rank records of its tests, and what is counted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from support.rank_main import Recorder
from support.results import Results, read


def report(test: str, outcome: str) -> SimpleNamespace:
    return SimpleNamespace(nodeid=test, failed=outcome == "failed", skipped=outcome == "skipped", longreprtext="why")


def recorded(folder: Path, *ended: str, code: int | None = 1) -> Results:
    """Three tests at the same time, of which one fails and one is skipped; of those that came to their end."""
    recorder = Recorder(folder / "rank0.jsonl")
    for test in "abc":
        recorder.pytest_runtest_logstart(test)
    for test, outcome in ("a", "passed"), ("b", "failed"), ("c", "skipped"), ("b", "passed"), ("a", "passed"):
        recorder.pytest_runtest_logreport(report(test, outcome))
    for test in ended:
        recorder.pytest_runtest_logfinish(test)
    if code is not None:
        recorder.pytest_sessionfinish(None, code)
    return read(folder, 1)


def test_tests_that_run_at_the_same_time(tmp_path: Path) -> None:
    results = recorded(tmp_path, "c", "a", "b")
    assert results.outcomes == {"a": "passed", "b": "failed", "c": "skipped"}
    assert results.problems == []
    assert results.texts == {"b": ("why", [0])}


def test_all_that_were_running_are_named(tmp_path: Path) -> None:
    results = recorded(tmp_path, "b", code=None)
    assert results.outcomes == {"a": "failed", "b": "failed", "c": "failed"}
    assert results.problems == ["rank 0 did not come to its end (in a and c)"]
