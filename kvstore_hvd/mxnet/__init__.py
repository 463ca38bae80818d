"""The API of ``horovod.mxnet``, without Horovod.

Instead of ``import horovod.mxnet as hvd``::

    import kvstore_hvd.mxnet as hvd

    hvd.init()
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    trainer = hvd.DistributedTrainer(net.collect_params(), 'sgd', {'learning_rate': 0.1 * hvd.size()})
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kvstore_hvd.errors import HorovodInternalError
from kvstore_hvd.mxnet import mpi_ops as _mpi_ops
from kvstore_hvd.mxnet.basics import *
from kvstore_hvd.mxnet.calls import Compression
from kvstore_hvd.mxnet.functions import (
    allgather_object,
    broadcast_object,
    broadcast_parameters,
    broadcast_trainer_states,
)
from kvstore_hvd.mxnet.mpi_ops import *
from kvstore_hvd.mxnet_compat import require_mxnet as _require_mxnet

__all__ = [
    "CommitHandler",
    "Compression",
    "DistributedBatchSampler",
    "DistributedEstimator",
    "DistributedMetric",
    "DistributedOptimizer",
    "DistributedSampler",
    "DistributedTrainer",
    "HorovodInternalError",
    "ShardedTrainer",
    "SyncBatchNorm",
    "allgather_object",
    "average_running_statistics",
    "broadcast_object",
    "broadcast_parameters",
    "broadcast_trainer_states",
    "clip_global_norm",
    "shard",
]
__all__ += _mpi_ops.__all__
__all__.sort()

if TYPE_CHECKING:
    from kvstore_hvd.gluon import (
        CommitHandler,
        DistributedBatchSampler,
        DistributedEstimator,
        DistributedMetric,
        DistributedSampler,
        average_running_statistics,
        clip_global_norm,
        shard,
    )
    from kvstore_hvd.mxnet import elastic as elastic
    from kvstore_hvd.mxnet.optimizer import DistributedOptimizer, DistributedTrainer
    from kvstore_hvd.mxnet.sharded import ShardedTrainer
    from kvstore_hvd.mxnet.sync_batch_norm import SyncBatchNorm
else:

    def __getattr__(name: str) -> Any:
        if name == "elastic":  # stands above this package
            return importlib.import_module("kvstore_hvd.mxnet.elastic")
        # Classes that derive from MXNet's, which may be absent.
        homes = {"DistributedOptimizer": "mxnet.optimizer", "DistributedTrainer": "mxnet.optimizer"}
        homes |= {"ShardedTrainer": "mxnet.sharded", "SyncBatchNorm": "mxnet.sync_batch_norm"}
        home = homes.get(name, "gluon" if name in __all__ else None)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        _require_mxnet()
        value = globals()[name] = getattr(importlib.import_module(f"kvstore_hvd.{home}"), name)
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, "elastic"])
