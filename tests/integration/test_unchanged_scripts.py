"""Scripts written for Horovod, started as they are: by kvhvdrun --as-horovod and by python -m kvstore_hvd."""

import os
import sys

import pytest

from support.launchers import mpirun
from support.timeline import Trace


@pytest.mark.alike
def test_a_script_finds_horovod_in_every_worker(run, tmp_path):
    """So do other processes of the script, however they are started; without the option there is none."""
    (tmp_path / "other.py").write_text("import kvstore_hvd, horovod; print(horovod.__version__)")
    (tmp_path / "train.py").write_text("""
import multiprocessing, os, subprocess, sys
import horovod.common.exceptions
def version(item):
    import horovod.common.exceptions
    return horovod.__version__
if __name__ == '__main__':
    print(horovod.__version__, __name__, sys.argv[1:], sys.path[0], flush=True)
    with multiprocessing.get_context('spawn').Pool(1) as pool:
        print(pool.map(version, range(2)), flush=True)
    subprocess.run([sys.executable, 'other.py'], check=True)
""")
    job = run("-np 2 --as-horovod", ["env", "A=1", sys.executable, "train.py", "--lr", "1"])
    own = f"0.28.1 __main__ ['--lr', '1'] {tmp_path}\n['0.28.1', '0.28.1']\n0.28.1\n"
    assert (job.of(0), job.of(1)) == (own, own)
    assert "No module named 'horovod'\n  Fix: kvhvdrun --as-horovod " in run("-np 1", "import horovod", code=1).err
    without = "; import sys; sys.path = [each for each in sys.path if 'packages' not in each]; import mxnet"
    for name in ("os", "kvstore_hvd"):
        assert "  Fix: pip install mxnet" in run("-np 2", f"import {name}{without}", code=1).err


# Settings that a program makes itself, after its imports and before it joins the world.
PROGRAM = """
import logging
import horovod.mxnet as hvd
import numpy as np
import kvstore_hvd
from kvstore_hvd.errors import ConfigError
OURS = ('HOROVOD_LOG_LEVEL', 'HOROVOD_DYNAMIC_PROCESS_SETS', 'HOROVOD_TIMELINE', 'HOROVOD_STALL_CHECK_TIME_SECONDS')
texts = []
class Said(logging.Handler):
    def emit(self, record): texts.append(record.getMessage())
logging.getLogger('kvstore_hvd').addHandler(Said())
def world(**variables):
    for name in OURS:
        os.environ.pop(name, None)
    os.environ.update(variables)
    texts.clear()
    hvd.init()
    try:
        hvd.add_process_set([0])
        sets = 'dynamic'
    except ValueError:
        sets = 'fixed'
    kvstore_hvd.allreduce(np.ones(2), 'x')
    hvd.shutdown()
    return [sets, any('left the world' in text for text in texts)]
worlds = [world(HOROVOD_LOG_LEVEL='debug', HOROVOD_DYNAMIC_PROCESS_SETS='1', HOROVOD_TIMELINE='timeline.json'),
          world(HOROVOD_LOG_LEVEL='error')]
refused = ''
try:
    world(HOROVOD_STALL_CHECK_TIME_SECONDS='soon')
except ConfigError as error:
    refused = str(error)
report(worlds=[*worlds, world()], refused=refused)
"""


@pytest.mark.parametrize("how", ["kvhvdrun", pytest.param("mpirun", marks=pytest.mark.slow)])
def test_settings_before_init(run, how):
    """They hold in the world that is joined next; what cannot be used is refused there, and can be corrected."""
    launcher, options = (), "-np 2 --as-horovod"
    if how == "mpirun":
        launcher, options = mpirun(), f"-np 2 {sys.executable} -m kvstore_hvd"
    if launcher is None:
        pytest.skip("no mpirun and mpi4py beside this interpreter")
    job = run(options, PROGRAM, launcher=launcher)
    assert len(job.reports()) == 2
    for told in job.reports():
        assert told["worlds"] == [["dynamic", True], ["fixed", False], ["fixed", False]]
        assert "HOROVOD_STALL_CHECK_TIME_SECONDS: 'soon' is not" in told["refused"]
    trace = Trace(job.folder / "timeline.json")  # of the first world, and of no other
    assert [len(trace.row(rank, "x")) for rank in range(2)] == [2, 2]


@pytest.mark.alike
def test_variables_of_horovod(run):
    """Those without effect are said by one rank; communication threads run where one of them says."""
    program = """
before, allowed = set(os.listdir('/proc/self/task')), os.sched_getaffinity(0)
import kvstore_hvd; kvstore_hvd.init(); kvstore_hvd.barrier()
started = set(os.listdir('/proc/self/task')) - before
pinned = [t for t in started if os.sched_getaffinity(int(t)) == {min(allowed)}]
say(f'{len(pinned) >= 1} {os.sched_getaffinity(0) == allowed}\\n')
"""
    core = min(os.sched_getaffinity(0))
    variables = {"HOROVOD_THREAD_AFFINITY": f"{core},{core}", "HOROVOD_CYCLE_TIME": "1"}
    job = run("-np 2 --as-horovod", program, HOROVOD_LOG_LEVEL="warning", **variables)
    assert sorted(job.out.splitlines()) == ["[0] True True", "[1] True True"]
    assert job.err.count("these variables of Horovod have no effect here") == 1
    assert "[0] [rank 0/2] kvstore_hvd warning: these variables" in job.err
    assert "HOROVOD_CYCLE_TIME: operations are carried out as soon as" in job.err
    assert "HOROVOD_LOG_LEVEL" not in job.err
    err = run("-np 2", ["true"], code=2, KVHVD_TIMEUOT="3").err  # a misspelt one of ours, by the launcher
    assert "  KVHVD_TIMEUOT does not exist; did you mean KVHVD_TIMEOUT?\n  Fix: " in err
