"""Settings that a program makes itself, after its imports and before it joins the world."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.jobs import LIMIT_S
from support.launchers import Launcher, environment, kvhvdrun, mpirun, with_tests

pytestmark = pytest.mark.timeout(120)

WORKER = str(Path(__file__).resolve().parent.parent / "support" / "settings_worker.py")
STARTS = {
    "import": ([], [WORKER, "kvstore_hvd.mxnet"]),
    "-m": ([], ["-m", "kvstore_hvd", WORKER, "horovod.mxnet"]),
    "as-horovod": (["--as-horovod"], [WORKER, "horovod.mxnet"]),
}


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("launcher", [kvhvdrun(), mpirun()], ids=["kvhvdrun", "mpirun"])
def test_settings_before_init(tmp_path: Path, launcher: Launcher | None, start: str, workers: int) -> None:
    """They hold in the world that is joined next; what cannot be used is refused there, and can be corrected."""
    options, program = STARTS[start]
    if launcher is None:
        pytest.skip("no mpirun and mpi4py beside this interpreter")
    if options and launcher.name == "mpirun":
        pytest.skip("an option of kvhvdrun")
    command = launcher.command(workers, [*options, sys.executable, *program, str(tmp_path)])
    done = subprocess.run(
        command,
        env=with_tests(environment(launcher)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for line in done.stdout.splitlines():
        told = json.loads(line[line.index("{") :])
        first, second, third = told["worlds"]
        assert first["size"] == workers
        assert (first["sets"], first["debug"]) == ("dynamic", True)
        assert (second["sets"], second["debug"]) == ("fixed", False)
        assert (third["sets"], third["debug"]) == ("fixed", False)
        assert "HOROVOD_STALL_CHECK_TIME_SECONDS: 'soon' is not" in told["refused"]
    assert len(done.stdout.splitlines()) == workers
    assert json.loads((tmp_path / "timeline.json").read_text()), "the timeline of the first world"
