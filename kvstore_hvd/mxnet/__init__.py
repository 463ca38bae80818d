"""The API of ``horovod.mxnet``, without Horovod::

import kvstore_hvd.mxnet as hvd

hvd.init()
hvd.broadcast_parameters(net.collect_params(), root_rank=0)
trainer = hvd.DistributedTrainer(net.collect_params(), 'sgd', {'learning_rate': 0.1 * hvd.size()})
"""

from __future__ import annotations

import importlib
from typing import Any

from kvstore_hvd.errors import HorovodInternalError
from kvstore_hvd.mxnet import functions as _functions
from kvstore_hvd.mxnet import mpi_ops as _mpi_ops
from kvstore_hvd.mxnet import optimizer as _optimizer
from kvstore_hvd.mxnet import sync_batch_norm as _sync_batch_norm
from kvstore_hvd.mxnet.compression import Compression
from kvstore_hvd.mxnet.functions import *  # noqa: F403
from kvstore_hvd.mxnet.mpi_ops import *  # noqa: F403

__all__ = ["Compression", "HorovodInternalError"]
__all__ += _functions.__all__
__all__ += _mpi_ops.__all__
__all__ += _optimizer.__all__
__all__ += _sync_batch_norm.__all__


def __getattr__(name: str) -> Any:
    if name == "elastic":  # stands above this package
        return importlib.import_module("kvstore_hvd.mxnet.elastic")
    for module in (_optimizer, _sync_batch_norm):
        if name in module.__all__:
            return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
