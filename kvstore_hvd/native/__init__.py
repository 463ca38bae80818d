"""The native extension, loaded at its first use: importing this package never fails for want of it.

The only module that imports ``kvstore_hvd._native``, whose stub says what is in it.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore_hvd import errors

if TYPE_CHECKING:
    from kvstore_hvd._native import (
        Activity,
        Arena,
        Engine,
        Link,
        LocalReductions,
        MXNetAdapter,
        Request,
        Segment,
        Step,
        Transport,
        Work,
        abi,
        callers_of,
        calls_of,
        end_as_failed,
        end_within,
        has_pidfds,
        mpi_transport,
        scale,
        set_simd_target,
        simd_target,
        stop_links,
        tcp_transport,
        thresholds,
    )

__all__ = [
    "DTYPES",
    "ITEM_BYTES",
    "MAX_NAMES",
    "OPS",
    "PATIENT",
    "Activity",
    "Arena",
    "Engine",
    "Link",
    "LocalReductions",
    "MXNetAdapter",
    "Request",
    "Segment",
    "Step",
    "Transport",
    "Work",
    "abi",
    "callers_of",
    "calls_of",
    "end_as_failed",
    "end_within",
    "has_pidfds",
    "mpi_transport",
    "scale",
    "set_simd_target",
    "simd_target",
    "stop_links",
    "tcp_transport",
    "thresholds",
]

# The codes are those of native/base/types.hpp, which the kernels for GPUs know too.
DTYPES = {
    "float16": 0,
    "bfloat16": 1,
    "float32": 2,
    "float64": 3,
    "int8": 4,
    "uint8": 5,
    "int32": 6,
    "int64": 7,
}
#: Bytes of an element.
ITEM_BYTES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
}
OPS = {"sum": 0, "average": 1, "min": 2, "max": 3, "product": 4}
#: What the names of requests begin with that have no timeout and are in no stall report: native/request/request.hpp.
PATIENT = "~"
#: How many tensors a world knows at a time: native/shm/world.hpp.
MAX_NAMES = 8192


class NotBuiltError(errors.KVHvdError, ImportError):
    """The native extension is not there."""


if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(_extension(), name)
        return value


def _extension() -> Any:
    try:
        return importlib.import_module("kvstore_hvd._native")
    except ModuleNotFoundError as error:
        if error.name != "kvstore_hvd._native":
            raise
        raise NotBuiltError(_why_not_built()) from None


def _why_not_built() -> str:
    """The message where the extension is missing."""
    here = Path(__file__).parents[1]
    fact = f"the native extension of kvstore_hvd is missing: {here} belongs to a source tree that was not built."
    # Python looks into the script's folder first: a script that lies in the source tree never finds the installed copy.
    installed = next((path.parent for entry in sys.path for path in Path(entry).glob("kvstore_hvd/_native.*.so")), None)
    if installed is None:
        return errors.message(fact, fix="run `pip install .` (or `pip install -e .`) in the source tree.")
    return errors.message(
        f"{fact} It hides the copy that is installed in {installed}.",
        fix="keep (or start) your script in another folder, or run `pip install -e .` in the source tree.",
    )
