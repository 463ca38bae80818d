"""Jobs that may open few files: kvhvdrun says how many suffice, and workers say so when they join."""

import re

import pytest

from support.launchers import kvhvdrun

pytestmark = [pytest.mark.timeout(150), pytest.mark.slow]

LIMITED = """
import resource
import kvstore_hvd
from kvstore_hvd import mxnet as hvd
def allow(more):
    used = len(os.listdir('/proc/self/fd')) - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + more, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
"""


def test_too_few_are_said_when_a_world_is_joined(run):
    err = run("-np 2", LIMITED + "allow(10)\nkvstore_hvd.init()", code=1).err
    assert "joining the world of 2 workers takes 14 open files, and this process has 10 left." in err
    assert "Fix: `ulimit -n " in err
    assert err.count("did not arrive") == 0


def test_too_few_are_said_by_all_when_a_process_set_is_added(run):
    program = """
hvd.init(process_sets='dynamic')
first = hvd.add_process_set([0, 1])
if rank > 0: allow(6)
try:
    hvd.add_process_set([1, 2])
except kvstore_hvd.errors.LaunchError as error:
    say(f'{error}\\n')
hvd.barrier()
"""
    out = run("-np 3", LIMITED + program, KVHVD_START_TIMEOUT="3").out
    # Less than 6 when the watcher of a world has opened files since.
    text = r"joining process set 2 of 2 workers takes 14 open files, and this process has [0-6] left\."
    assert len(re.findall(text, out)) >= 2 * 3, out  # of two workers, told to all


def test_a_full_table_of_descriptors_kills_nobody(run):
    program = """
kvstore_hvd.init()
kvstore_hvd.barrier()  # imports its module
allow(0)
for step in range(20): kvstore_hvd.barrier()
say('through\\n')
"""
    assert run("-np 3", LIMITED + program).out.count("through") == 3


def test_more_descriptors_than_select_takes(run):
    program = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
import numpy as np
import kvstore_hvd
kvstore_hvd.init()
report(rank=rank, total=float(kvstore_hvd.allreduce(np.ones(1), 'x')[0]), highest=held[-1])
"""
    reports = run("-np 4", program, KVHVD_TEST_HOSTS="2").reports()
    assert [(one["total"], one["highest"] > 1023) for one in reports] == [(4.0, True)] * 4


@pytest.mark.parametrize(
    "options",
    ["-np 9", "--min-np 9 -H localhost:9", "--min-np 18 --host-discovery-script 'echo localhost:9 127.0.0.1:9'"],
)
def test_as_many_files_as_kvhvdrun_asks_for_suffice(run, options):
    def attempt(files, code):
        limit = ["bash", "-c", f'ulimit -n {files} && exec "$@"', "bash", *kvhvdrun().prefix]
        more = {"acts": "steps=5"} if "--min-np" in options else {"program": ["true"]}
        words = options.replace(" 127", "; echo 127")
        return str(run(words, launcher=limit, code=code, KVHVD_ELASTIC_TIMEOUT="60", **more).err)

    needed = re.search(r"needs (\d+) open files, and only 15 are allowed", attempt(15, 2))
    assert needed is not None
    assert attempt(int(needed[1]), 0) == ""
