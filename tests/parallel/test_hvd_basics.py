"""Horovod's basics: joining and leaving, ranks and sizes, what this build can do."""

from __future__ import annotations

import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd

mx = pytest.importorskip("mxnet")

QUESTIONS = (hvd.size, hvd.rank, hvd.local_size, hvd.local_rank, hvd.cross_size, hvd.cross_rank, hvd.is_homogeneous)


def test_ranks_and_sizes(world):
    """All of them are the topology's."""
    assert hvd.is_initialized()
    assert (hvd.rank(), hvd.size()) == (world.rank, world.size)
    assert (hvd.local_rank(), hvd.local_size()) == (world.local_rank, world.local_size)
    assert (hvd.cross_rank(), hvd.cross_size()) == (world.cross_rank, world.cross_size)
    assert hvd.is_homogeneous() is True


def test_what_this_build_can_do(world):
    """Truthful constants."""
    assert hvd.mpi_enabled() is (world.source == "mpi")
    assert isinstance(hvd.mpi_built(), bool)
    assert hvd.mpi_threads_supported() is (world.source == "mpi")
    assert hvd.nccl_built() == 0
    for question in (hvd.gloo_enabled, hvd.gloo_built, hvd.ddl_built, hvd.ccl_built, hvd.cuda_built, hvd.rocm_built):
        assert question() is False


def test_init_again_does_nothing(world):
    """`init` in a world."""
    hvd.init()
    assert kvstore_hvd.topology().epoch == world.epoch


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


def test_init_refuses_what_is_no_process_set(world):
    """`init(process_sets=...)`."""
    for wrong in ("static", [[0]], 3):
        with pytest.raises((ValueError, TypeError)):
            hvd.init(process_sets=wrong)
