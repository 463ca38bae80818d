"""Workers that may open few files: they say so when they join, and take no worker for dead that cannot be watched."""

from __future__ import annotations

import re

import pytest

from support.jobs import run

pytestmark = [pytest.mark.timeout(150), pytest.mark.slow]

LIMITED = """
import resource, time
import numpy as np
import kvstore_hvd
from kvstore_hvd import mxnet as hvd
def allow(more):
    used = len(os.listdir('/proc/self/fd')) - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + more, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
"""


def test_too_few_are_said_when_a_world_is_joined(marker: str) -> None:
    program = LIMITED + "allow(10)\nkvstore_hvd.init()"
    code, _, err = run(marker, 2, program)
    assert code == 1
    assert b"joining the world of 2 workers takes 14 open files, and this process has 10 left." in err
    assert b"Fix: `ulimit -n " in err
    assert err.count(b"did not arrive") == 0


def test_too_few_are_said_by_all_when_a_process_set_is_added(marker: str) -> None:
    program = (
        LIMITED
        + """
hvd.init(process_sets='dynamic')
first = hvd.add_process_set([0, 1])
if rank > 0: allow(6)
try:
    hvd.add_process_set([1, 2])
except kvstore_hvd.errors.LaunchError as error:
    say(f'{error}\\n')
say(f'{hvd.size()}\\n')
hvd.barrier()
"""
    )
    code, out, err = run(marker, 3, program, variables={"KVHVD_START_TIMEOUT": "3"})
    assert code == 0, err
    # Less than 6 when the watcher of a world has opened files since.
    text = rb"joining process set 2 of 2 workers takes 14 open files, and this process has [0-6] left\."
    assert len(re.findall(text, out)) >= 2 * 3, out  # of two workers, told to all
    assert sum(line.endswith(b"] 3") for line in out.splitlines()) == 3


def test_a_full_table_of_descriptors_kills_nobody(marker: str) -> None:
    program = (
        LIMITED
        + """
if rank == 1: time.sleep(1)  # the others are looking for it
kvstore_hvd.init()
allow(0)
for step in range(20):
    time.sleep(0.05)
    kvstore_hvd.barrier()
say('through\\n')
"""
    )
    code, out, err = run(marker, 3, program)
    assert (code, out.count(b"through")) == (0, 3), err
