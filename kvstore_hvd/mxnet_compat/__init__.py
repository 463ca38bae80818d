"""All knowledge of MXNet's, NumPy's and Python's versions, and everything that is changed in MXNet.

One file for each class of MXNet's: trainer.py, module.py, parameter.py, graph.py; optimizers are in exchangers.py and
updates.py. A changed method has one wrapper. Importing this package imports neither MXNet nor NumPy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Optional

from kvstore_hvd.mxnet_compat import exchangers, graph, hooks, module, numpy_shim, parameter, trainer, updates
from kvstore_hvd.mxnet_compat.arrays import *
from kvstore_hvd.mxnet_compat.exchangers import collectives, states_of
from kvstore_hvd.mxnet_compat.hooks import *
from kvstore_hvd.mxnet_compat.parameter import *
from kvstore_hvd.mxnet_compat.trainer import *

__all__ = ["collectives", "install_hooks", "numpy_shim", "states_of"]


def install_hooks(
    store: type, world_size: Callable[[], Optional[int]], arena: Callable[[], Any] = lambda: None
) -> None:
    """Make all changes to the MXNet that is imported. Calling it again replaces what it is given."""
    mxnet = sys.modules["mxnet"]
    hooks.register_store(mxnet, store, world_size, arena)
    hooks.register_errors(mxnet)
    for each in (module, exchangers, trainer, parameter, graph, updates):
        each.patch(mxnet)
