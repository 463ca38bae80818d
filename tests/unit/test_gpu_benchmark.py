"""The measurements of benchmarks/gpu run through, on the stand-in: a GPU is there for a few minutes only."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_all_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/gpu/device.py", "--quick", "--ranks", "2"]
    environment = {
        **os.environ,
        "KVHVD_TEST_FAKE_GPU": "1",
        "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in ("", "tests", "benchmarks")),
        "XDG_CACHE_HOME": str(tmp_path),
    }
    subprocess.run([*command, "--json", str(tmp_path / "out.json")], check=True, cwd=ROOT, env=environment)
    found = json.loads((tmp_path / "out.json").read_text())["results"]
    assert found["resources"]
    assert found["packing"]
    assert [each["way"] for each in found["executors"]].count("kernels") == 5
