"""Horovod's variables in the environment of workers: those of kvhvdrun have them, those of mpirun have none of ours."""

import os

import pytest

import kvstore_hvd.mxnet as hvd
from kvstore_hvd.config import config
from support.launched import launched

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


@pytest.mark.sizes
def test_mpirun_sets_none(rank, size):
    """Horovod's launcher does not either, where MPI starts the workers."""
    if not launched().launcher.startswith("mpirun"):
        pytest.skip("for workers of mpirun")
    assert variables() == {}
