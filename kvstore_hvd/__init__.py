"""Train Apache MXNet with the API of Horovod: a KVStore that reduces gradients without parameter servers.

Importing this package registers the store, now if MXNet is imported already, else as soon as it is::

    import kvstore_hvd
    import mxnet as mx

    kv = mx.kv.create('horovod')
    trainer = mx.gluon.Trainer(net.collect_params(), 'sgd', {'learning_rate': 0.1}, kvstore=kv)
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from kvstore_hvd.base.import_hook import ImportHook as _ImportHook
from kvstore_hvd.config import config as _config
from kvstore_hvd.config import prepare_mxnet as _prepare_mxnet

if TYPE_CHECKING:
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
    from kvstore_hvd.join import Join, Joinable, JoinHook
    from kvstore_hvd.launch.call import run
    from kvstore_hvd.numpy_ops import allreduce, allreduce_init, barrier, broadcast
    from kvstore_hvd.store.divergence import verify
    from kvstore_hvd.store.kvstore import Horovod
    from kvstore_hvd.timeline import start_timeline, stop_timeline
    from kvstore_hvd.world.process import init, is_initialized, reset, shutdown, topology
    from kvstore_hvd.world.topology import Topology

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

# The modules that the names come from, each when a name of it is asked for: the launcher needs none of them, and starts
# without NumPy.
_HOMES = (
    "errors",
    "launch.call",
    "join",
    "numpy_ops",
    "world.process",
    "store.divergence",
    "timeline",
    "world.topology",
)

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "Horovod":  # derives from a class of MXNet's, which may be absent
            importlib.import_module("kvstore_hvd.mxnet_compat").require_mxnet()
            value = importlib.import_module("kvstore_hvd.store.kvstore").Horovod
        else:
            homes = (importlib.import_module(f"kvstore_hvd.{home}") for home in _HOMES)
            value = next(getattr(home, name) for home in homes if name in home.__all__)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# -- MXNet --------------------------------------------------------------------------------------------------------


def _before_mxnet() -> None:
    if _config().numpy_shim:
        from kvstore_hvd.mxnet_compat import numpy_shim

        numpy_shim.prepare()


def _after_mxnet() -> None:
    """Register the store and make all other changes."""
    from kvstore_hvd import mxnet_compat

    if _config().numpy_shim:
        mxnet_compat.numpy_shim.finish()
    if "kvstore_hvd.store.kvstore" not in sys.modules:  # else it is importing MXNet itself, and goes on afterwards
        importlib.import_module("kvstore_hvd.store.kvstore")


_prepare_mxnet()
if _config().as_horovod:
    importlib.import_module("kvstore_hvd.horovod.alias").install()
if sys.modules.get("mxnet") is not None:
    importlib.import_module("mxnet")  # waits for a thread that is still importing it
    _after_mxnet()
else:
    _ImportHook("mxnet", _before_mxnet, _after_mxnet).install()
