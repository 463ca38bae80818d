"""New arrays of MXNet, and copies and sums that MXNet computes itself.

Copies run asynchronously in MXNet's engine. Unlike a raw pointer they understand every layout: weights may lie in an
opaque one after an inference pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from kvstore_hvd import mxnet_compat


def buffer_like(array: Any, dtype: Any = "", *, context: Any = None, shape: tuple[int, ...] | None = None) -> Any:
    """A fresh uninitialised array of `array`'s class, and of its dtype and shape unless others are given."""
    # It lies on the CPU unless a context is given. A row_sparse one has no rows.
    shape, dtype = array.shape if shape is None else shape, array.dtype if dtype == "" else dtype
    if array.stype == "row_sparse":
        import mxnet as mx

        return mx.nd.sparse.zeros("row_sparse", shape, context or mx.cpu(), dtype)
    return new_array(shape, dtype, context, is_np=mxnet_compat.is_np_ndarray(array))


def new_array(shape: tuple[int, ...], dtype: Any, context: Any, *, is_np: bool) -> Any:
    """A fresh uninitialised array of ``mx.np`` or ``mx.nd``; on the CPU if the context is None."""
    import mxnet as mx

    with _for_shape(shape):
        array = mx.nd.empty(shape, context or mx.cpu(), mxnet_compat.bfloat16() if dtype == "bfloat16" else dtype)
        return array.as_np_ndarray() if is_np else array


def copy(source: Any, destination: Any) -> None:
    """Copy all elements, casting to the destination's dtype; asynchronous. Both have the same shape."""
    import mxnet as mx

    with _for_shape(source.shape), mx.autograd.pause():
        if source.stype == "row_sparse":
            if source.dtype != destination.dtype:
                source = source.astype(destination.dtype)
            source.copyto(destination)
            return
        # The operator of the older interface serves both classes of arrays, on both versions of MXNet.
        mx.nd._internal._copyto(source.as_nd_ndarray(), out=destination.as_nd_ndarray())


def local_sum(values: Sequence[Any]) -> Any:
    """The sum of a process's own arrays, in order, as a new array on the first one's device; asynchronous."""
    # Halves are summed in float32 and rounded once, by the native kernels on the CPU and by the same rule elsewhere.
    first = values[0]
    if _is_on_cpu(first):
        return _reduced(values, 1.0, 1.0)
    context, dtype = mxnet_compat.context_of(first), mxnet_compat.dtype_name(first)
    import mxnet as mx

    with _for_shape(first.shape), mx.autograd.pause():

        def widened(array: Any) -> Any:
            wide = mx.nd.empty(array.shape, context, "float32" if dtype in ("float16", "bfloat16") else array.dtype)
            copy(array, wide)
            return wide

        total = widened(first)
        if 0 not in first.shape:  # the operator refuses these
            for value in values[1:]:
                mx.nd.elemwise_add(total, widened(value), out=total)
        if total.dtype != first.dtype:
            rounded = mx.nd.empty(first.shape, context, first.dtype)
            copy(total, rounded)
            total = rounded
        return total.as_np_ndarray() if mxnet_compat.is_np_ndarray(first) else total


def scaled(array: Any, prescale: float, postscale: float) -> Any:
    """A new array on the array's device with the values times both factors; asynchronous."""
    # The native kernels compute it, as with several workers: integers scale in float64 and are truncated after each
    # factor, halves scale in float32 and are rounded after each factor.
    result, context = _reduced([array], prescale, postscale), mxnet_compat.context_of(array)
    return result if mxnet_compat.context_of(result) == context else _on(context, result)


def _on(context: Any, array: Any) -> Any:
    copied = buffer_like(array, context=context)
    copy(array, copied)
    return copied


def _is_on_cpu(array: Any) -> bool:
    return bool(mxnet_compat.context_of(array).device_type.startswith("cpu"))


def _reduced(values: Sequence[Any], prescale: float, postscale: float) -> Any:
    """The sum of arrays of equal dtype and shape, scaled by the native kernels, as a new array on the CPU."""
    result = buffer_like(values[0])
    if 0 in result.shape:
        return result
    sources = [value if _is_on_cpu(value) else _on(None, value) for value in values]
    handles = [mxnet_compat.handle_of(each) for each in (*sources, result)]
    mxnet_compat.local_operations().reduce(handles[:-1], handles[-1], prescale, postscale)
    return result


def _for_shape(shape: tuple[int, ...]) -> contextlib.AbstractContextManager[Any]:
    """Makes the older interface take shapes that it would read as unknown: () and those with a zero."""
    if shape and 0 not in shape:
        return contextlib.nullcontext()
    import mxnet as mx

    scope: contextlib.AbstractContextManager[Any] = mx.util.np_shape(True)
    return scope
