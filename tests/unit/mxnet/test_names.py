"""What programs import from the modules of ``horovod.mxnet``; needs no MXNet."""

from __future__ import annotations

import importlib

import pytest

import kvstore_hvd.mxnet as hvd
from kvstore_hvd.mxnet import basics, mpi_ops, process_sets


def test_each_public_name_is_there_once() -> None:
    assert len(set(hvd.__all__)) == len(hvd.__all__)
    needs_mxnet = {"DistributedOptimizer", "DistributedTrainer", "SyncBatchNorm"}
    missing = [name for name in hvd.__all__ if name not in needs_mxnet and not hasattr(hvd, name)]
    assert not missing


@pytest.mark.parametrize("module", [basics, mpi_ops])
def test_modules_have_the_same_objects(module: object) -> None:
    for name in module.__all__:  # type: ignore[attr-defined]
        assert getattr(hvd, name) is getattr(module, name)


def test_operations_have_the_basics() -> None:
    names = "init shutdown is_initialized size local_size cross_size rank local_rank cross_rank mpi_threads_supported"
    assert set(names.split()) <= set(mpi_ops.__all__)


def test_functions_are_not_hidden_by_modules() -> None:
    for name in ("all_to_all", "gathers", "gradients"):
        importlib.import_module(f"kvstore_hvd.mxnet.{name}")
    assert callable(hvd.alltoall)
    assert callable(hvd.allgather)


def test_process_sets_outside_of_a_world() -> None:
    assert process_sets.process_sets() == []
    assert process_sets.get_process_set_ids_and_ranks() == {}
    with pytest.raises(ValueError, match=r"there is no process set 1\.\n  Fix: use one of: none\."):
        process_sets.process_set_by_id(1)
