"""All knowledge of MXNet's, NumPy's and Python's versions, and everything that is changed in MXNet.

One file for each class of MXNet's: trainer.py, module.py, optimizer.py, parameter.py, graph.py. A changed method has
one wrapper. Importing this package imports neither MXNet nor NumPy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Optional

from kvstore_hvd.mxnet_compat import engine_errors, graph, hooks, module, numpy_shim, optimizer, parameter, trainer
from kvstore_hvd.mxnet_compat.arrays import (
    Facts,
    address_of,
    bfloat16,
    bytes_in,
    context_of,
    dtype_name,
    facts_of,
    handle_of,
    is_in_graph,
    is_ndarray,
    is_np_ndarray,
    is_parameter,
    is_recording,
    is_tracing,
    read_into,
    stype_of,
    write_from,
)
from kvstore_hvd.mxnet_compat.autograd import differentiable
from kvstore_hvd.mxnet_compat.engine_errors import engine_text
from kvstore_hvd.mxnet_compat.parameter import (
    after_initialization,
    arrays_of,
    awaited_names,
    initialize,
    initialize_awaiting,
    is_block,
    is_deferred,
    is_parameters,
    misfit,
    named_parameters,
    parameters_in,
    set_to_zero,
    zero_added_gradients,
)
from kvstore_hvd.mxnet_compat.trainer import (
    broadcasts_parameters,
    count_on_own_devices,
    devices_of,
    exchange_gradients,
    is_trainer,
    joinable_of,
    key_of,
    labels_of,
    name_parameters,
    note_joinable,
    states_in,
    trainers_of,
)
from kvstore_hvd.mxnet_compat.unsynchronised import collectives
from kvstore_hvd.mxnet_compat.versions import (
    MXNetUnavailableError,
    engine_is_naive,
    is_imported,
    libmxnet_path,
    pip_command,
    require_mxnet,
    version_number,
    waitall,
)

__all__ = [
    "Facts",
    "MXNetUnavailableError",
    "address_of",
    "after_initialization",
    "arrays_of",
    "awaited_names",
    "bfloat16",
    "broadcasts_parameters",
    "bytes_in",
    "collectives",
    "context_of",
    "count_on_own_devices",
    "devices_of",
    "differentiable",
    "dtype_name",
    "engine_is_naive",
    "engine_text",
    "exchange_gradients",
    "facts_of",
    "handle_of",
    "initialize",
    "initialize_awaiting",
    "install_hooks",
    "is_block",
    "is_deferred",
    "is_imported",
    "is_in_graph",
    "is_ndarray",
    "is_np_ndarray",
    "is_parameter",
    "is_parameters",
    "is_recording",
    "is_tracing",
    "is_trainer",
    "joinable_of",
    "key_of",
    "labels_of",
    "libmxnet_path",
    "misfit",
    "name_parameters",
    "named_parameters",
    "note_joinable",
    "numpy_shim",
    "parameters_in",
    "pip_command",
    "read_into",
    "require_mxnet",
    "set_to_zero",
    "states_in",
    "stype_of",
    "trainers_of",
    "version_number",
    "waitall",
    "write_from",
    "zero_added_gradients",
]


def install_hooks(
    store: type, world_size: Callable[[], Optional[int]], arena: Callable[[], Any] = lambda: None
) -> None:
    """Make all changes to the MXNet that is imported. Calling it again replaces what it is given."""
    mxnet = sys.modules["mxnet"]
    hooks.register_store(mxnet, store, world_size, arena)
    engine_errors.register_errors(mxnet)
    for each in (module, optimizer, trainer, parameter, graph):
        each.patch(mxnet)
