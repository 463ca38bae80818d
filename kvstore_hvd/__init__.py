"""Train Apache MXNet with the API of Horovod: a KVStore that reduces gradients without parameter servers.

Importing this package registers the store, now if MXNet is imported already, else as soon as it is::

    import kvstore_hvd
    import mxnet as mx

    kv = mx.kv.create('horovod')
    trainer = mx.gluon.Trainer(net.collect_params(), 'sgd', {'learning_rate': 0.1}, kvstore=kv)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvstore_hvd import mxnet_compat
from kvstore_hvd.calling import run
from kvstore_hvd.config import config as _config
from kvstore_hvd.config import prepare_mxnet as _prepare_mxnet
from kvstore_hvd.errors import (
    ConfigError,
    DivergedError,
    HorovodInternalError,
    HostsUpdatedInterrupt,
    InputFailedError,
    InvalidRequestError,
    InvalidTypeError,
    KVHvdError,
    LaunchError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    RunError,
    ShutdownError,
    TimeoutError,  # noqa: A004 - Horovod's and PyTorch's word for it
    TransportError,
    UnsupportedDtypeError,
    UnsupportedMethodError,
    UnsynchronisedTrainerError,
)
from kvstore_hvd.horovod import alias as horovod_alias
from kvstore_hvd.join import Join, Joinable, JoinHook
from kvstore_hvd.ops.numpy_ops import allreduce, allreduce_init, barrier, broadcast
from kvstore_hvd.process.process import current as _process
from kvstore_hvd.store.divergence import verify
from kvstore_hvd.store.kvstore import make_store_class
from kvstore_hvd.timeline import start_timeline, stop_timeline
from kvstore_hvd.worlds.topology import Topology

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "DivergedError",
    "Horovod",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "InputFailedError",
    "InvalidRequestError",
    "InvalidTypeError",
    "Join",
    "JoinHook",
    "Joinable",
    "KVHvdError",
    "LaunchError",
    "MismatchError",
    "NotInitializedError",
    "PeerLostError",
    "RunError",
    "ShutdownError",
    "TimeoutError",
    "Topology",
    "TransportError",
    "UnsupportedDtypeError",
    "UnsupportedMethodError",
    "UnsynchronisedTrainerError",
    "allreduce",
    "allreduce_init",
    "barrier",
    "broadcast",
    "init",
    "is_initialized",
    "reset",
    "run",
    "shutdown",
    "start_timeline",
    "stop_timeline",
    "topology",
    "verify",
]


init = _process().init
shutdown = _process().shutdown
reset = _process().reset


def is_initialized() -> bool:
    """Whether this process is in a world of workers."""
    return _process().is_initialized


def topology() -> Topology:
    """Who this worker is and how many there are; joins the world first when this process never did."""
    return _process().topology


if TYPE_CHECKING:
    from kvstore_hvd.store.kvstore import Horovod
else:

    def __getattr__(name: str) -> Any:
        # The class derives from one of MXNet's, which may be absent: it is made when it is asked for.
        if name == "Horovod":
            return make_store_class()
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_prepare_mxnet()
if _config().numpy_shim:
    mxnet_compat.numpy_shim.install()
mxnet_compat.install_hooks_on_import(make_store_class, _process().expected_size, _process().adapter_for_gradients)
if _config().as_horovod:
    horovod_alias.install()
