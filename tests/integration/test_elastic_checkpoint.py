"""A job that is lost as a whole: the next one goes on from the job's checkpoint."""

import pytest

PROGRAM = """
import numpy as np
import kvstore_hvd.mxnet as hvd
from kvstore_hvd import elastic
from kvstore_hvd import numpy_ops
hvd.init()
begun = []
@elastic.run
def train(state):
    begun.append(state.step)
    while state.step < 20:
        state.total += float(numpy_ops.allreduce(np.full(2, state.step + 1.0), 'values', op='average')[0])
        state.step += 1
        if state.step == LAST:
            say('last\\n')
            forever()
        if state.step % 5 == 0:
            state.commit()
state = elastic.ObjectState(step=0, total=0.0)
train(state)
report(rank=hvd.rank(), begun=begun, total=state.total)
"""


@pytest.mark.parametrize("options", ["-np 2", "--min-np 2 --max-np 2"])
def test_the_next_job_goes_on_from_the_last_commit(start, run, tmp_path, options):
    """The launcher is killed at step 13, so steps 11 to 13 are repeated; a third job finds nothing more to do."""
    options += " --checkpoint kept --checkpoint-every 1e-6"
    lost = start(options, PROGRAM.replace("LAST", "13")).until_printed("last", 2)
    assert lost.err.count("there is no checkpoint") == 1
    lost.process.kill()
    lost.end(-9)
    for first in (10, 20):
        job = run(options, PROGRAM.replace("LAST", "None"))
        assert job.err.count("training goes on from the checkpoint") == 1
        assert [tuple(report.values()) for report in job.reports()] == [(rank, [first], 210.0) for rank in (0, 1)]
    (tmp_path / "kept").write_text("another file")
    assert "is no checkpoint" in run(options, PROGRAM.replace("LAST", "None"), code=1).err
