"""Run pytest as one rank: ``python results.py FOLDER PYTEST-ARGUMENT...``, and read what the ranks have recorded.

Everything a rank prints goes to ``FOLDER/rank<r>.log``, and each test at its start and its end to
``FOLDER/rank<r>.jsonl``: a rank that is killed, or ended by a timeout, still leaves behind what it had done and which
test it was in.
"""

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

if __name__ == "__main__":  # the folder of this file is no place to import from; the folder above it is, for "support"
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from support.launchers import launched

_NO_TESTS = 5  # pytest's exit code
_WORST_FIRST = ("failed", "passed", "skipped")


class Recorder:
    """A pytest plugin that writes one JSON line when a test starts and one when it ends; several may run at once."""

    def __init__(self, path: Path) -> None:
        # Unbuffered, so that a line is out even if the process is gone with the next instruction.
        self._file = path.open("wb", buffering=0)
        self._outcomes: dict[str, str] = {}  # of the tests that run
        self._texts: dict[str, str] = {}  # why they have failed

    def _write(self, test: str, outcome: str) -> None:
        entry = {"test": test, "outcome": outcome, "text": self._texts.pop(test, "")}
        self._file.write(json.dumps(entry).encode() + b"\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._outcomes[nodeid] = "passed"
        self._write(nodeid, "started")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._outcomes[report.nodeid] = "failed"
            self._texts[report.nodeid] = report.longreprtext
        elif report.skipped and self._outcomes[report.nodeid] == "passed":
            self._outcomes[report.nodeid] = "skipped"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(nodeid, self._outcomes.pop(nodeid))

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._texts[report.nodeid] = report.longreprtext
        if not report.passed:  # a skipped module, too
            self._write(report.nodeid, report.outcome)

    def pytest_sessionfinish(self, session: Any, exitstatus: int) -> None:
        self._write("", f"ended {int(exitstatus)}")


@dataclass
class Results:
    """The tests of one step: a test has failed when any rank failed it or never came to its end."""

    outcomes: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)  # of whole ranks: killed, nothing recorded
    failed_ranks: list[int] = field(default_factory=list)
    texts: dict[str, tuple[str, list[int]]] = field(default_factory=dict)  # of failed tests: why, and on which ranks

    def count(self, outcome: str) -> int:
        """Return how many tests ended as ``outcome``; a step that fails without a failed test counts as one."""
        number = list(self.outcomes.values()).count(outcome)
        return max(number, 1) if outcome == "failed" and self.problems else number


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
        if results.outcomes[test] == "failed":  # there is no text of a rank, or a process of xdist, that did not end it
            failed = [rank for rank, tests in enumerate(seen) if tests.get(test, "failed") == "failed"]
            results.texts.setdefault(test, ("it was not run here, or its process ended", failed))
    return results


def _read_rank(path: Path) -> tuple[dict[str, str], Optional[int], dict[str, str]]:
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


def main(folder: Path, arguments: list[str]) -> int:
    """Run pytest with ``arguments``; returns 0 once it came to its end, whatever the tests said.

    What they said stands in the record. As an exit code it would have the launcher end the other ranks, which are
    still busy with the test that failed here, or with the next ones.
    """
    import pytest

    rank = launched().rank
    with (folder / f"rank{rank}.log").open("wb") as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
    pytest.main(arguments, plugins=[Recorder(folder / f"rank{rank}.jsonl")])
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
