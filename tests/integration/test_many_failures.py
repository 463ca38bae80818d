"""Hundreds of operations that fail within a millisecond, on several threads: see `native/mxnet/error_list.hpp`."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.runs import Run

WORKER = Path(__file__).resolve().parents[1] / "support" / "many_failures_worker.py"


@pytest.mark.timeout(200)
def test_mxnets_list_of_errors_stays_whole(tmp_path: Path, marker: str) -> None:
    """MXNet's threads extend that list without a lock, which damaged the heap in one of a few rounds."""
    run = Run(WORKER, ["12", str(tmp_path)], 2, tmp_path, marker, MXNET_CPU_PRIORITY_NTHREADS="8")
    code, output = run.end()
    assert code == 0, output
    assert output.count("all rounds") == 2, output
