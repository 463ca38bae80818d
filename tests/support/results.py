"""Reads what the ranks of one step have recorded, and counts each test once, whatever the number of ranks."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

_NO_TESTS = 5  # pytest's exit code
_WORST_FIRST = ("failed", "passed", "skipped")


@dataclass
class Results:
    """The tests of one step: a test has failed when any rank failed it or never came to its end."""

    outcomes: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # of whole ranks: killed, nothing recorded
    failed_ranks: list[int] = field(default_factory=list)
    texts: dict[str, tuple[str, list[int]]] = field(default_factory=dict)  # of failed tests: why, and on which ranks

    def count(self, outcome: str) -> int:
        """Return how many tests ended as ``outcome``; a step that fails without a failed test counts as one."""
        number = sum(1 for value in self.outcomes.values() if value == outcome)
        return max(number, 1) if outcome == "failed" and self.problems else number

    @property
    def failed_tests(self) -> list[str]:
        """The names of the failed tests, in the order in which they ran."""
        return [test for test, outcome in self.outcomes.items() if outcome == "failed"]


def read(folder: Path, ranks: int, may_be_empty: bool = False) -> Results:
    """Read the records of ``ranks`` ranks from ``folder``; to have selected no test is a failure unless it may be."""
    results = Results()
    seen: list[dict[str, str]] = []
    for rank in range(ranks):
        tests, ended, texts = _read_rank(folder / f"rank{rank}.jsonl")
        for test, text in texts.items():
            results.texts.setdefault(test, (text, []))[1].append(rank)
        if ended is None:
            running = " and ".join(test for test, outcome in tests.items() if outcome == "started")
            where = f"in {running}" if running else "outside of a test"
            results.problems.append(f"rank {rank} did not come to its end ({where})")
        elif ended not in (0, 1, *([_NO_TESTS] if may_be_empty else [])):
            results.problems.append(f"rank {rank}: pytest ended with code {ended}")
        if ended not in (0, _NO_TESTS):
            results.failed_ranks.append(rank)
        seen.append({test: "failed" if outcome == "started" else outcome for test, outcome in tests.items()})
    for test in dict.fromkeys(test for tests in seen for test in tests):
        # A test that only some ranks ran is a failure: either a rank was lost, or the ranks disagree on the tests.
        outcomes = {tests.get(test, "failed") for tests in seen}
        results.outcomes[test] = next(outcome for outcome in _WORST_FIRST if outcome in outcomes)
    return results


def _read_rank(path: Path) -> tuple[dict[str, str], int | None, dict[str, str]]:
    tests: dict[str, str] = {}
    texts: dict[str, str] = {}
    ended = None
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
        except ValueError:  # the rank was killed in the middle of the line
            continue
        if entry["test"]:
            tests[entry["test"]] = entry["outcome"]
            if entry["text"]:
                texts[entry["test"]] = entry["text"]
        else:
            ended = int(entry["outcome"].split()[1])
    return tests, ended, texts
