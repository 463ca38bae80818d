"""The arrays of one operation on this rank, and what they have to hold when it is over."""

import ctypes
import random
from dataclasses import dataclass, field
from typing import Any, Optional

import mxnet as mx
import numpy as np

from kvstore_hvd.mxnet_compat import bfloat16, context_of, dtype_name
from support.arrays import make

Array = Any  # numpy.ndarray of any dtype


@dataclass
class Arrays:
    """What an operation is given, and what must come of it."""

    model: Any  # of the program
    inputs: list[list[Any]] = field(default_factory=list)  # of each tensor, of each device
    outs: list[list[Any]] = field(default_factory=list)  # of each tensor; none: in place, or a new array is returned
    # Array, what it must hold (None: anything), and what it is; `calls` adds to it.
    expected: list[tuple[Any, Any, str]] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    is_replicated: bool = False  # whether the results are the same on all members
    differences: list[str] = field(default_factory=list)  # of objects, which are compared where they are received
    errors: list[Exception] = field(default_factory=list)  # what calls before the last one raised

    @property
    def first(self) -> Any:
        """The array that a chained operation takes."""
        return self.results[0] if self.results else self.inputs[0][0] if self.inputs else None


def make_array(
    arrays: Arrays, values: Array, dtype: str, draw: random.Random, ctx: Any = None, adapter: Any = None
) -> Any:
    """An array of MXNet with these values: of either class, perhaps part of a larger one, perhaps not computed yet.
    Perhaps in the arena of an adapter, if one is given: what one rank has there, another may have elsewhere."""
    ctx = ctx or mx.cpu()
    values = np.asarray(values)
    if dtype == "bfloat16":
        array = mx.nd.empty(values.shape, ctx, dtype=bfloat16())
        mx.nd._internal._copyto(mx.nd.array(values, ctx=ctx), out=array)
        return array
    if values.size == 0 or values.ndim == 0:
        return make(mx.np, values, ctx)
    if draw.random() < 0.1:
        edge = values[:1]
        whole = make(mx.nd, np.concatenate([edge, values, edge]), ctx)
        for place in (slice(0, 1), slice(len(values) + 1, len(values) + 2)):
            arrays.expected.append((whole[place], edge.copy(), "beside the array"))
        return whole[1 : len(values) + 1]
    if adapter is not None and ctx == mx.cpu() and dtype in ("float16", "float32", "float64") and draw.random() < 0.9:
        array = _in_arena(adapter, values, dtype, draw.choice((mx.nd, mx.np)))
        if array is not None:
            return array
    array = make(draw.choice((mx.nd, mx.np)), values, ctx)
    return array.copy() if draw.random() < 0.3 else array


def _in_arena(adapter: Any, values: Array, dtype: str, kind: Any) -> Optional[Any]:
    """Such an array, or None if the arena is full."""
    handle = adapter.new_array(values.shape, dtype)
    if not handle:
        return None
    array = (kind.NDArray if hasattr(kind, "NDArray") else kind.ndarray)(handle=ctypes.c_void_p(handle))
    array[:] = make(kind, values)
    return array


def read(array: Any) -> Array:
    """The values of an array of MXNet, bfloat16 as float32; raises its error, if it has one."""
    if isinstance(array, np.ndarray):
        return array
    array.wait_to_read()  # without elements, reading would not wait
    if dtype_name(array) != "bfloat16":
        return array.asnumpy()
    if 0 in array.shape:
        return np.zeros(array.shape, np.float32)
    wide = mx.nd.empty(array.shape, context_of(array), dtype="float32")
    return mx.nd._internal._copyto(array.as_nd_ndarray(), out=wide).asnumpy()
