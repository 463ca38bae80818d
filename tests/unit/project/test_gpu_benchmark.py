"""The benchmark on one GPU runs from beginning to end, on the stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.patience import patient

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
def test_all_is_measured(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    command = [sys.executable, "benchmarks/gpu/device.py", "--quick", "--ranks", "2", "--nccl-ranks", "--json", file]
    path = os.pathsep.join(str(ROOT / each) for each in ("", "tests", "benchmarks"))
    environment = {**os.environ, "PYTHONPATH": path, "KVHVD_TEST_FAKE_GPU": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=patient(100))
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Error" not in ended.stdout, ended.stdout + ended.stderr
    found = json.loads(file.read_text())["results"]
    assert [each["way"] for each in found["large"]] == ["twoshot", "ring"]
    assert [each["way"] for each in found["executors"]] == ["kernels"] * 5
    assert found["resources"]
    assert found["packing"]
