"""MXNet's autograd, for results that were computed outside of it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from kvstore_hvd.mxnet_compat.arrays import context_of


def differentiable(array: Any, result: Any, gradient: Callable[[Any], Any]) -> Any:
    """Record that `result` was computed from `array`; to be called while recording."""
    import mxnet as mx

    shape, count = result.shape, result.size
    is_plain, is_plain_result = _is_plain(array), _is_plain(result)

    def backward(output_gradient: Any) -> Any:
        with mx.util.np_shape(True):  # each thread has its own
            given = output_gradient.as_np_ndarray()
            if not is_plain_result:
                given = given[:count].reshape(shape)
            found = gradient(given)
            if not is_plain:
                found = _flat(found)
            return found.as_np_ndarray() if isinstance(output_gradient, mx.np.ndarray) else found.as_nd_ndarray()

    with mx.util.np_shape(True):
        # MXNet drops the gradient of a function's input whose gradients are to be added up, and its functions fail for
        # arrays without dimensions or elements. An operator of its own before and after the function hides both.
        source = mx.nd._internal._copy(array.as_nd_ndarray()) if is_plain else _flat(array)
        with mx.autograd.pause():
            target = result if is_plain_result else _flat(result)
        recorded = _function()(target.as_nd_ndarray(), backward)(source.as_nd_ndarray())
        if is_plain_result:
            # Gradients from a convolution come in a layout of oneDNN's, which functions misread. This operator's own
            # gradient never does.
            recorded = mx.nd.slice_axis(recorded, axis=0, begin=0, end=None)
        else:
            recorded = recorded.as_np_ndarray()[:count].reshape(shape)
        return recorded.as_np_ndarray() if isinstance(array, mx.np.ndarray) else recorded.as_nd_ndarray()


def _is_plain(array: Any) -> bool:
    return bool(array.shape) and 0 not in array.shape


def _flat(array: Any) -> Any:
    """The elements in one dimension, and one more if there are none."""
    import mxnet as mx

    flat = array.as_np_ndarray().reshape(-1)
    if array.size:
        return flat
    return mx.np.concatenate([flat, mx.nd.zeros((1,), context_of(array), array.dtype).as_np_ndarray()])


@functools.cache
def _function() -> type:
    import mxnet as mx

    class Function(mx.autograd.Function):  # type: ignore[misc]
        def __init__(self, result: Any, gradient: Callable[[Any], Any]) -> None:
            super().__init__()
            self._result = result
            self._gradient = gradient

        def forward(self, *inputs: Any) -> Any:
            result, self._result = self._result, None
            return result

        def backward(self, *output_grads: Any) -> Any:
            return self._gradient(output_grads[0])

    return Function
