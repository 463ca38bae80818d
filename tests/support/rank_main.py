"""Run pytest as one rank: ``python rank_main.py FOLDER PYTEST-ARGUMENT...``

Everything the rank prints goes to ``FOLDER/rank<r>.log``, and each finished test at once to ``FOLDER/rank<r>.jsonl``:
a rank that is killed, or ended by a timeout, still leaves behind what it had done and which test it was in.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Protocol

# The folder of this file is no place to import from; the folder above it is, for "support".
sys.path[0] = str(Path(__file__).resolve().parents[1])

import pytest  # noqa: E402

from support.launched import launched  # noqa: E402


class _Report(Protocol):
    nodeid: str
    failed: bool
    skipped: bool
    longreprtext: str


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

    def pytest_runtest_logreport(self, report: _Report) -> None:
        if report.failed:
            self._outcomes[report.nodeid] = "failed"
            self._texts[report.nodeid] = report.longreprtext
        elif report.skipped and self._outcomes[report.nodeid] == "passed":
            self._outcomes[report.nodeid] = "skipped"

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._write(nodeid, self._outcomes.pop(nodeid))

    def pytest_collectreport(self, report: _Report) -> None:
        if report.failed:
            self._texts[report.nodeid] = report.longreprtext
            self._write(report.nodeid, "failed")

    def pytest_sessionfinish(self, session: Any, exitstatus: int) -> None:
        self._write("", f"ended {int(exitstatus)}")


def main(folder: Path, arguments: list[str]) -> int:
    """Run pytest with ``arguments``; returns 0 once it came to its end, whatever the tests said.

    What they said stands in the record. As an exit code it would have the launcher end the other ranks, which are
    still busy with the test that failed here, or with the next ones.
    """
    rank = launched().rank
    with (folder / f"rank{rank}.log").open("wb") as log:
        for descriptor in (1, 2):
            os.dup2(log.fileno(), descriptor)
    pytest.main(arguments, plugins=[Recorder(folder / f"rank{rank}.jsonl")])
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
