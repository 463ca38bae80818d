"""All knowledge of MXNet's, NumPy's and Python's versions, and everything that is changed in MXNet. Names only.

Importing this package imports neither MXNet nor NumPy.
"""

from __future__ import annotations

from kvstore_hvd.mxnet_compat import numpy_shim
from kvstore_hvd.mxnet_compat.arrays import (
    address_of,
    bfloat16,
    bytes_in,
    context_of,
    dtype_name,
    handle_of,
    is_ndarray,
    is_np_ndarray,
    is_parameter,
    read_into,
    stype_of,
    write_from,
)
from kvstore_hvd.mxnet_compat.autograd import differentiable, is_in_graph, is_recording, is_tracing
from kvstore_hvd.mxnet_compat.engine_errors import engine_text, set_told, was_told
from kvstore_hvd.mxnet_compat.exchanging import broadcasts_parameters
from kvstore_hvd.mxnet_compat.gradients import set_to_zero
from kvstore_hvd.mxnet_compat.hooks import install_hooks
from kvstore_hvd.mxnet_compat.parameters import (
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
    zero_added_gradients,
)
from kvstore_hvd.mxnet_compat.trainers import (
    count_on_own_devices,
    devices_of,
    is_trainer,
    joinable_of,
    key_of,
    labels_of,
    note_joinable,
    states_in,
    trainers_of,
)
from kvstore_hvd.mxnet_compat.unsynchronised import note_collective
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
    "MXNetUnavailableError",
    "address_of",
    "after_initialization",
    "arrays_of",
    "awaited_names",
    "bfloat16",
    "broadcasts_parameters",
    "bytes_in",
    "context_of",
    "count_on_own_devices",
    "devices_of",
    "differentiable",
    "dtype_name",
    "engine_is_naive",
    "engine_text",
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
    "named_parameters",
    "note_collective",
    "note_joinable",
    "numpy_shim",
    "parameters_in",
    "pip_command",
    "read_into",
    "require_mxnet",
    "set_to_zero",
    "set_told",
    "states_in",
    "stype_of",
    "trainers_of",
    "version_number",
    "waitall",
    "was_told",
    "write_from",
    "zero_added_gradients",
]
