import os
import re

import pytest

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
    """One file; the launcher makes it where a rank was killed."""
    target = tmp_path / "timeline.json"
    variables = {"KVHVD_TIMELINE": target.name, "KVHVD_SURVIVOR_TIME": "30"}
    job = run("-np 2", SUM.format(fault=fault), code=code, **variables)
    assert parts_of(target) == []
    unfinished = [1] if code == 137 else []
    assert ("did not end in good order: rank 1" in job.err) == bool(unfinished), job.describe()
    trace = Trace(target)
    assert (trace.ranks(), trace.about["unfinished_ranks"]) == ([0, 1], unfinished)
    for rank in range(2):
        (name,) = (name for name in trace.names(rank) if "x" in name)
        assert [span["name"] for span in trace.row(rank, name)][:2] == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE"]


def test_an_elastic_job_leaves_one_file_of_all_generations(start, tmp_path):
    """A worker that was killed, and the one that replaced it, have a row each."""
    target = tmp_path / "timeline.json"

    def records_of(who):
        return sum(part.read_text().count("finish") for part in tmp_path.glob(f"timeline.json.{who}.part"))

    job = start("-np 2 --min-np 2 -H localhost:2", KVHVD_TIMELINE=target.name)
    job.until_joined()
    job.until(lambda: records_of("rank-1") > 5, "records")
    job.kill(1)
    job.until_joined(after=0)
    job.until(lambda: records_of("rank-1-1") > 5, "records of the newcomer")
    job.go("finish").end()
    assert parts_of(target) == []
    trace = Trace(target)
    (newcomer,) = set(trace.ranks()) - {0, 1}
    assert trace.about["unfinished_ranks"] == [1]
    begins = {who: min(span["ts"] for span in spans) for (who, _), spans in trace.rows().items()}
    assert begins[1] < begins[newcomer]
