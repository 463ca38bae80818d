"""The examples that documents refer to run as they stand there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from support.jobs import LIMIT_S, variables_of
from support.launchers import kvhvdrun

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.timeout(120)
def test_uneven(marker):
    """All samples of all workers count, and all workers end with the same parameters."""
    pytest.importorskip("sklearn")
    command = [*kvhvdrun().prefix, "-np", "3", sys.executable, str(EXAMPLES / "uneven.py"), "--epochs", "3"]
    done = subprocess.run(
        command, env=variables_of(marker), capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "worker 2: 719 images, 45 batches in an epoch" in done.stdout
    assert "135 on every worker" in done.stdout
    assert "equal on all workers" in done.stdout
