"""A rank that is stopped while it holds a lock of the world: the interpreters of the others run on, and say so."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from support.runs import Run

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
COMPILER = shutil.which(os.environ.get("CXX", "g++"))

pytestmark = [pytest.mark.slow, pytest.mark.skipif(COMPILER is None, reason="there is no C++ compiler")]


@pytest.fixture(scope="module")
def offsets(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return where the locks lie in a segment."""
    program = tmp_path_factory.mktemp("offsets") / "offsets"
    flags = ["-std=c++17", f"-I{ROOT / 'native'}"]
    subprocess.run([str(COMPILER), *flags, "-o", str(program), str(SUPPORT / "lock_offsets.cpp")], check=True)
    return subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.split()


@pytest.mark.parametrize("case", ["table", "schedule", "two threads"])
def test_threads_of_the_others_run_on(tmp_path: Path, marker: str, offsets: list[str], case: str) -> None:
    """Also while a small array is submitted, which takes no time as a rule and keeps the interpreter lock."""
    variables = {"KVHVD_STALL_CHECK_TIME_S": "1"}
    run = Run(SUPPORT / "locked_worker.py", [case, *offsets], 2, tmp_path, marker, **variables)
    try:
        output = run.until(
            lambda text: "the interpreter runs on" in text and "rank 0 has been blocked in the engine" in text
        )
        assert "summed" not in output
        (pid,) = re.findall(r"stopping (\d+)", output)
        assert f"its process is stopped; `kill -CONT {pid}` continues it" in output
        os.kill(int(pid), signal.SIGCONT)
        code, output = run.end()
        assert code == 0, output
        assert output.count("summed") == 2, output
    finally:
        if run.process.poll() is None:
            for pid in re.findall(r"stopping (\d+)", run.text()):
                os.kill(int(pid), signal.SIGCONT)
            run.process.send_signal(signal.SIGTERM)
            run.process.wait(timeout=30)
