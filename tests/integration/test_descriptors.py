"""Jobs that may open few files: kvhvdrun says how many suffice, and workers say so when they join."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from support import elastic_worker
from support.jobs import LIMIT_S, run, variables_of
from support.launchers import kvhvdrun

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


@pytest.mark.parametrize(
    "options",
    [
        "-np {0}",
        "--min-np {0}",
        "--min-np 1 --event-log log -H localhost:{0}",
        "--min-np {1} --host-discovery-script 'echo localhost:{0}; echo 127.0.0.1:{0}'",
    ],
)
@pytest.mark.parametrize("count", [1, 2, 9])
def test_as_many_files_as_kvhvdrun_asks_for_suffice(marker: str, tmp_path: Path, options: str, count: int) -> None:
    given = shlex.split(options.format(count, 2 * count))

    def attempt(files: int) -> tuple[int, str]:
        worker = ["true"] if given[0] == "-np" else [sys.executable, elastic_worker.__file__, "steps=5"]
        command = ["bash", "-c", f'ulimit -n {files} && exec "$@"', "bash", *kvhvdrun().prefix, *given, *worker]
        done = subprocess.run(
            command,
            env={**variables_of(marker), "KVHVD_ELASTIC_TIMEOUT": "60"},
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        return done.returncode, done.stderr

    code, err = attempt(15)
    needed = re.search(r"needs (\d+) open files, and only 15 are allowed", err)
    assert code == 2, err
    assert needed is not None, err
    assert attempt(int(needed[1])) == (0, "")
