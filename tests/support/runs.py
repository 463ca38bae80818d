"""Jobs of several ranks that a test watches while they run."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.belongings import Belongings
from support.launchers import environment, kvhvdrun, with_tests
from support.patience import patient

# Of the run as a whole: start-up of the workers included, far above what any of them takes.
LIMIT_S = patient(90)


class Run:
    """A job under kvhvdrun whose processes all carry the marker, with what it printed so far."""

    def __init__(
        self, worker: Path, arguments: list[str], ranks: int, folder: Path, marker: str, **variables: str
    ) -> None:
        self.output = folder / "output"
        self.belongings = Belongings(marker)
        command = kvhvdrun().command(ranks, [sys.executable, str(worker), *arguments])
        name, _, value = marker.partition("=")
        variables = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", name: value, **variables}
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=with_tests({**environment(), **variables}),
            )

    def text(self) -> str:
        """What was printed so far."""
        return self.output.read_text(errors="replace")

    def until(self, condition: Callable[[str], object]) -> str:
        """Wait until the output satisfies `condition`; fails at the limit."""
        end = time.monotonic() + LIMIT_S
        while not condition(self.text()):
            assert time.monotonic() < end, f"time limit; output:\n{self.text()}"
            assert self.process.poll() is None or condition(self.text()), f"the job ended; output:\n{self.text()}"
            time.sleep(0.02)  # between two looks at a file; no event tells of its growth
        return self.text()

    def end(self) -> tuple[int, str]:
        """Wait for the end; returns the exit code and the whole output. Fails if anything of the job is left then."""
        try:
            self.belongings.note_until_end_of(self.process, LIMIT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the job hangs; output:\n{self.text()}")
        self.belongings.assert_gone(about=self.text())
        return self.process.returncode, self.text()
