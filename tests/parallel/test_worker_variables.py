"""Horovod's variables in the environment of workers: those of kvhvdrun have them, those of mpirun have none of ours."""

import json
import os
import subprocess
import sys

import pytest

import kvstore_hvd.mxnet as hvd
from kvstore_hvd.config import config
from support.launched import launched
from support.patience import patient

pytest.importorskip("mxnet")

ASKED = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")


def variables():
    """Return Horovod's variables of this process, of those that its launcher sets for workers."""
    names = [*(f"HOROVOD_{each.upper()}" for each in ASKED), "HOROVOD_HOSTNAME"]
    names += ["HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS"]
    return {name: os.environ[name] for name in names if name in os.environ}


@pytest.fixture
def of_kvhvdrun(world):
    if launched().launcher != "kvhvdrun":
        pytest.skip("for workers of kvhvdrun")
    if config().test_hosts:
        pytest.skip("kvhvdrun does not know of virtual hosts")


def test_they_say_what_the_functions_say(of_kvhvdrun):
    """Ranks and sizes as hvd's functions; the rest as Horovod's launcher says it where it needs no MPI."""
    assert variables() == {
        **{f"HOROVOD_{name.upper()}": str(getattr(hvd, name)()) for name in ASKED},
        "HOROVOD_HOSTNAME": "localhost",
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
    }
    assert os.environ["KVHVD_SLOT"] == f"localhost:{hvd.local_rank()}"
    assert not set(variables()) & set(config().unused)


def test_mpirun_sets_none(rank, size):
    """Horovod's launcher does not either, where MPI starts the workers."""
    if not launched().launcher.startswith("mpirun"):
        pytest.skip("for workers of mpirun")
    assert variables() == {}


PROGRAM = """
import json, os
import kvstore_hvd.mxnet as hvd
hvd.init()
print('@', json.dumps([hvd.rank(), hvd.size(), os.environ.get('HOROVOD_SIZE')]), flush=True)
"""


def run(environ, *command):
    """Return what programs print that this worker starts."""
    program = [*command, sys.executable, "-c", PROGRAM]
    done = subprocess.run(program, env=environ, capture_output=True, text=True, timeout=patient(60))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "have no effect" not in done.stderr
    return [json.loads(line.partition("@")[2]) for line in done.stdout.splitlines() if "@" in line]


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_programs_that_a_worker_starts(of_kvhvdrun, rank):
    """Another kvhvdrun has workers of its own; a program without kvhvdrun's variables is alone."""
    if rank:
        return  # one is enough; nobody waits for it
    for options in (["-np", "2", "--no-prefix"], ["--min-np", "2", "--max-np", "2", "--no-prefix"]):
        told = run(dict(os.environ), sys.executable, "-m", "kvstore_hvd.launch", *options)
        assert sorted(told) == [[0, 2, "2"], [1, 2, "2"]]
    cleaned = {name: value for name, value in os.environ.items() if not name.startswith("KVHVD_")}
    assert run(cleaned) == [[0, 1, os.environ["HOROVOD_SIZE"]]]
    some = {name: value for name, value in os.environ.items() if name not in ("KVHVD_RANK", "KVHVD_SIZE")}
    assert run(some) == [[0, 1, os.environ["HOROVOD_SIZE"]]]
