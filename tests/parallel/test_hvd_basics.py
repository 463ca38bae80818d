from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from kvstore_hvd import gpu
from kvstore_hvd.gpu import runtime
from kvstore_hvd.mxnet import basics
from support.arrays import by_host
from support.patience import in_child

mx = pytest.importorskip("mxnet")

pytestmark = pytest.mark.sizes

QUESTIONS = (hvd.size, hvd.rank, hvd.local_size, hvd.local_rank, hvd.cross_size, hvd.cross_rank, hvd.is_homogeneous)


def test_ranks_and_sizes(world):
    """All of them are the topology's; `init` in a world does nothing."""
    assert hvd.is_initialized()
    assert (hvd.rank(), hvd.size()) == (world.rank, world.size)
    assert (hvd.local_rank(), hvd.local_size()) == (world.local_rank, world.local_size)
    assert (hvd.cross_rank(), hvd.cross_size()) == (world.cross_rank, world.cross_size)
    assert hvd.is_homogeneous() is (len({len(ranks) for ranks in by_host(list(range(world.size)))}) == 1)
    hvd.init()
    assert kvstore_hvd.topology().generation == world.generation


def test_what_this_build_can_do(world):
    assert hvd.mpi_enabled() is (world.source == "mpi")
    assert hvd.mpi_built() >= hvd.mpi_enabled()
    assert hvd.mpi_threads_supported() is (world.source == "mpi")
    if runtime.driver_version() is None:
        assert hvd.cuda_built() is False
        assert hvd.nccl_built() == 0
    for question in (hvd.gloo_enabled, hvd.gloo_built, hvd.ddl_built, hvd.ccl_built, hvd.rocm_built):
        assert question() is False


def test_what_can_be_done_with_gpus(monkeypatch):
    monkeypatch.setattr(gpu, "is_installed", lambda: True)
    monkeypatch.setattr(runtime, "driver_version", lambda: 13000)
    found = SimpleNamespace(version=22304), kvstore_hvd.KVHvdError("there is none")
    monkeypatch.setattr(basics, "library", Mock(side_effect=found))
    assert hvd.cuda_built() is True
    assert [hvd.nccl_built() for _ in found] == [22304, 0]
    monkeypatch.setattr(runtime, "driver_version", lambda: None)
    assert hvd.cuda_built() is False
    assert hvd.nccl_built() == 0


def test_outside_of_a_world(rank, size):
    """After `shutdown` every call raises a ValueError until `init`, which joins a fresh world."""
    hvd.allreduce(mx.nd.ones((2,))).wait_to_read()
    hvd.shutdown()
    hvd.shutdown()
    assert not hvd.is_initialized()
    assert not hvd.mpi_enabled()
    assert hvd.global_process_set.ranks is None
    assert hvd.global_process_set.size() is None
    calls = [
        *QUESTIONS,
        lambda: hvd.allreduce(mx.nd.ones((2,))),
        lambda: hvd.broadcast_(mx.nd.ones((2,)), 0),
        lambda: hvd.allgather(mx.nd.ones((2,))),
        lambda: hvd.broadcast_object(1),
        lambda: hvd.broadcast_parameters({}),
        lambda: hvd.DistributedTrainer([], "sgd"),
        hvd.barrier,
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"has not been initialized\.\n  Fix: call hvd\.init\(\) first\."):
            call()
    hvd.init()
    assert (hvd.rank(), hvd.size()) == (rank, size)
    assert hvd.allreduce(mx.nd.ones((2,)), op=hvd.Sum).asnumpy().tolist() == [size] * 2


def test_init_after_different_worlds(rank, size):
    """Workers meet whatever worlds each of them was in before: alone, in overlapping groups, or twice in one."""
    hvd.shutdown()
    try:
        for _ in range(rank):
            hvd.init(comm=[rank])
            hvd.shutdown()
        for group in [[0, 1], [1, 2], [0, 1], [2, 0], [1, 0]]:
            if max(group) < size and rank in group:
                hvd.init(comm=group)
                assert hvd.allgather(mx.nd.array([rank])).asnumpy().tolist() == group
                hvd.shutdown()
                hvd.init()
                assert (hvd.rank(), hvd.size()) == (group.index(rank), 2)
                hvd.shutdown()
    finally:
        hvd.init(comm=list(range(size)))
    assert hvd.allreduce(mx.nd.ones((2,)), op=hvd.Sum).asnumpy().tolist() == [size] * 2


def test_in_a_forked_child(rank, size):
    """It knows its worker's place, and cannot take part."""
    answers = [question() for question in QUESTIONS]

    def ask():
        assert hvd.is_initialized()
        assert [question() for question in QUESTIONS] == answers
        if size > 1:  # alone there is nobody to disturb
            with pytest.raises(kvstore_hvd.NotInitializedError, match="forked child of a worker"):
                hvd.allreduce(mx.nd.ones((2,)))
            for call in (kvstore_hvd.init, kvstore_hvd.reset, lambda: kvstore_hvd.allreduce(np.ones(1), "child")):
                with pytest.raises(kvstore_hvd.ShutdownError):
                    call()

    in_child(ask)
