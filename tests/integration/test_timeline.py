import os
import re
import subprocess
import sys

import pytest

from support.jobs import LIMIT_S, variables_of
from support.timeline import Trace, parts_of

TRAIN = """
import numpy as np
import kvstore_hvd
kvstore_hvd.broadcast(np.ones(3), 0, 'weight')
for _ in range(5):
    kvstore_hvd.allreduce(np.ones(3), 'weight')
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
"""

SUM = """
import numpy as np
import kvstore_hvd
kvstore_hvd.init()
while True:
    kvstore_hvd.allreduce(np.ones(2), 'x')
    if rank == 1 and open('timeline.json.rank-1.part').read().count('\\n') > 20:
        {fault}
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_leaves_one_file(run, tmp_path, ranks):
    """Nothing in the program: variables alone. A child that runs the exit handlers of the program changes nothing."""
    (tmp_path / "own").mkdir()
    target = tmp_path / "own" / "timeline.json"
    run(f"-np {ranks}", TRAIN, HOROVOD_TIMELINE=str(target), HOROVOD_TIMELINE_MARK_CYCLES="1")
    trace = Trace(target)
    assert (trace.ranks(), trace.about["lost_operations"]) == (list(range(ranks)), 0)
    for rank in range(ranks if ranks > 1 else 0):
        (name,) = (name for name in trace.names(rank) if "weight" in name)
        spans = [span["name"] for span in trace.row(rank, name)]
        assert spans == ["NEGOTIATE_BROADCAST", "BROADCAST", *["NEGOTIATE_ALLREDUCE", "ALLREDUCE"] * 5]
        assert len(trace.cycles(rank)) >= 5
    assert os.listdir(tmp_path / "own") == [target.name]


@pytest.mark.alike
@pytest.mark.parametrize(("ranks", "variable"), [(1, "HOROVOD_TIMELINE"), (2, "KVHVD_TIMELINE")])
def test_a_path_that_cannot_be_written_ends_the_job(run, ranks, variable):
    """Every rank says why, before it trains; nothing is left behind."""
    variables = {variable: "missing/timeline.json", "KVHVD_SURVIVOR_TIME": "30"}
    job = run(f"-np {ranks}", "import kvstore_hvd; kvstore_hvd.init(); say('trained')", code=1, **variables)
    assert "trained" not in job.out
    for rank in range(ranks):
        assert re.search(rf"InvalidRequestError: \[rank (0-)?{rank}(-1)?/{ranks}\] start_timeline: ", job.err)
    assert not list(job.folder.glob("*json*"))


@pytest.mark.alike
@pytest.mark.parametrize(("fault", "code"), [("os.kill(os.getpid(), 9)", 137), ("raise ValueError('test')", 1)])
def test_a_job_that_ends_badly_leaves_what_it_has_recorded(run, tmp_path, fault, code):
    """One file if all ranks have ended by themselves, else parts that can be merged, and stay."""
    target = tmp_path / "timeline.json"
    variables = {"KVHVD_TIMELINE": target.name, "KVHVD_SURVIVOR_TIME": "30"}
    run("-np 2", SUM.format(fault=fault), code=code, **variables)
    parts = [f"{target.name}.rank-{rank}.part" for rank in range(2)] if code == 137 else []
    assert parts_of(target) == parts
    if parts:
        assert not target.exists()
        command = [sys.executable, "-m", "kvstore_hvd.timeline", "merge", str(target)]
        done = subprocess.run(command, env=variables_of(), capture_output=True, text=True, timeout=LIMIT_S)
        assert "did not end in good order: rank 1" in done.stdout, done
        assert parts_of(target) == parts
    trace = Trace(target)
    assert (trace.ranks(), trace.about["unfinished_ranks"]) == ([0, 1], [1] if parts else [])
    for rank in range(2):
        (name,) = (name for name in trace.names(rank) if "x" in name)
        assert [span["name"] for span in trace.row(rank, name)][:2] == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE"]
