"""Elastic training in jobs whose workers nobody replaces: what it recovers from, and what it says where it cannot."""

import pytest

from support.launchers import kvhvdrun, mpirun

LAUNCHERS = {launcher.name: launcher for launcher in (kvhvdrun(), mpirun()) if launcher is not None}

PROGRAM = """
import numpy as np
import kvstore_hvd.mxnet as hvd
from kvstore_hvd import elastic
from kvstore_hvd.elastic.run import run
from kvstore_hvd import numpy_ops
from kvstore_hvd.world import process
hvd.init()
before = hvd.rank()
faults = [FAULT]
@run
def train(state):
    while state.number < 20:
        if state.number == 10 and before == 1 and faults:
            faults.pop()()
        state.total += float(numpy_ops.allreduce(np.full(2, float(state.number)), 'values', op='average')[0])
        state.number += 1
        if state.number % 5 == 0:
            state.commit()
state = elastic.ObjectState(number=0, total=0.0)
train(state)
topology = process.current().topology
report(before=before, rank=topology.rank, size=topology.size, generation=topology.generation, total=state.total)
"""


@pytest.mark.timing
@pytest.mark.parametrize("name", LAUNCHERS)
def test_workers_that_all_live_meet_again(run, name):
    """One sleeps for longer than an operation may wait; the others wait for it in the next world."""
    limits = {"KVHVD_TIMEOUT": "1", "KVHVD_START_TIMEOUT": "60", "KVHVD_LOG_LEVEL": "info"}
    program = PROGRAM.replace("FAULT", "lambda: time.sleep(4)")
    job = run("-np 3", program, launcher=LAUNCHERS[name], **limits)
    assert "the world is lost, back to the last commit" in job.err
    told = [tuple(report.values()) for report in job.reports()]
    assert told == [(rank, rank, 3, 1, 190.0) for rank in range(3)], job.describe()


@pytest.mark.parametrize("name", LAUNCHERS)
def test_a_worker_that_dies_is_not_replaced_and_the_job_says_so(run, name):
    """First in the log, once; under kvhvdrun, which lets the others speak, in the error too."""
    program = PROGRAM.replace("FAULT", "lambda: os.kill(os.getpid(), 9)")
    job = run("-np 3", program, code=137 if name == "kvhvdrun" else None, launcher=LAUNCHERS[name])
    assert job.process.returncode != 0
    assert job.err.count("this job cannot replace workers that die: start with `kvhvdrun --min-np 1") == 1
    if name == "kvhvdrun":
        said = "PeerLostError: training cannot recover: a worker has died, and this job cannot go on without it."
        assert job.err.count(said) >= 2
        assert "died (SIGKILL)" in job.err
        assert "Fix: start with `kvhvdrun --min-np 1 --max-np N python train.py`, which replaces workers." in job.err
