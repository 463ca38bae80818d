"""Settings that a program makes itself, after its imports and before it joins the world."""

import json
import sys

import pytest

from support.launchers import mpirun

PROGRAM = """
import importlib, logging
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
hvd = importlib.import_module(NAME)
worlds = [world(HOROVOD_LOG_LEVEL='debug', HOROVOD_DYNAMIC_PROCESS_SETS='1', HOROVOD_TIMELINE='timeline.json'),
          world(HOROVOD_LOG_LEVEL='error')]
refused = ''
try:
    world(HOROVOD_STALL_CHECK_TIME_SECONDS='soon')
except ConfigError as error:
    refused = str(error)
report(worlds=[*worlds, world()], refused=refused)
"""


@pytest.mark.parametrize(
    "how", ["kvhvdrun --as-horovod", *(pytest.param(how, marks=pytest.mark.slow) for how in ("kvhvdrun", "mpirun -m"))]
)
def test_settings_before_init(run, how):
    """They hold in the world that is joined next; what cannot be used is refused there, and can be corrected."""
    launcher = mpirun() if how.startswith("mpirun") else ()
    if launcher is None:
        pytest.skip("no mpirun and mpi4py beside this interpreter")
    options = "-np 2 " + how.partition(" ")[2]
    if "-m" in how:
        options = f"-np 2 {sys.executable} -m kvstore_hvd"
    name = "kvstore_hvd.mxnet" if how == "kvhvdrun" else "horovod.mxnet"
    job = run(options, f"NAME = {name!r}\n" + PROGRAM, launcher=launcher)
    assert len(job.reports()) == 2
    for told in job.reports():
        assert told["worlds"] == [["dynamic", True], ["fixed", False], ["fixed", False]]
        assert "HOROVOD_STALL_CHECK_TIME_SECONDS: 'soon' is not" in told["refused"]
    assert json.loads((job.folder / "timeline.json").read_text()), "the timeline of the first world"
