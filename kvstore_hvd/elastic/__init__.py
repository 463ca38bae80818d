"""Training that continues when workers are lost, come, or go; with Horovod's names::

state = elastic.GluonState(net, trainer, epoch=0, sampler=sampler)

@elastic.run
def train(state):
    while state.epoch < 10:
        for batch in loader:  # of state.sampler
            ...
            state.commit()
        state.epoch += 1
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# First: two threads deadlock if one imports a module of kvstore_hvd.mxnet and the other one that package.
from kvstore_hvd import mxnet as _mxnet  # noqa: F401  # isort: skip
from kvstore_hvd.elastic.gluon_state import GluonState, get_handler_registry, set_handler_registry
from kvstore_hvd.elastic.handlers import StagedHandler, StateHandler
from kvstore_hvd.elastic.run import notification_manager, run, run_fn
from kvstore_hvd.elastic.state import HostUpdateResult, ObjectState, State
from kvstore_hvd.errors import HorovodInternalError, HostsUpdatedInterrupt
from kvstore_hvd.mxnet_compat import require_mxnet as _require_mxnet

__all__ = [
    "ElasticSampler",
    "GluonState",
    "HorovodInternalError",
    "HostUpdateResult",
    "HostsUpdatedInterrupt",
    "ObjectState",
    "StagedHandler",
    "State",
    "StateHandler",
    "get_handler_registry",
    "notification_manager",
    "run",
    "run_fn",
    "set_handler_registry",
]


if TYPE_CHECKING:
    from kvstore_hvd.elastic.sampler import ElasticSampler
else:

    def __getattr__(name: str) -> Any:
        if name != "ElasticSampler":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        _require_mxnet()  # its class derives from one of MXNet's
        return importlib.import_module("kvstore_hvd.elastic.sampler").ElasticSampler


def __dir__() -> list[str]:
    return __all__
