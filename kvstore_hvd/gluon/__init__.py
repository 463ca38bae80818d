"""What a training script needs above the store, for Gluon and Module; all names are in ``kvstore_hvd.mxnet``, too."""

from __future__ import annotations

from kvstore_hvd.gluon.estimator import CommitHandler, DistributedEstimator
from kvstore_hvd.gluon.metrics import DistributedMetric
from kvstore_hvd.gluon.samplers import DistributedBatchSampler, DistributedSampler, shard
from kvstore_hvd.gluon.steps import average_running_statistics, clip_global_norm

__all__ = [
    "CommitHandler",
    "DistributedBatchSampler",
    "DistributedEstimator",
    "DistributedMetric",
    "DistributedSampler",
    "average_running_statistics",
    "clip_global_norm",
    "shard",
]
