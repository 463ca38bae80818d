"""Gradient compression: how gradients are rounded before they are summed."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping, MutableMapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from kvstore_hvd import mxnet_compat
from kvstore_hvd.errors import InvalidRequestError, InvalidTypeError, UnsupportedDtypeError, message
from kvstore_hvd.store.arrays import buffer_like, copy, local_sum, scaled
from kvstore_hvd.store.keys import Call, Group, unique

_MOST_INT8 = 127  # workers whose signs add up within int8


def parse_compression(params: Any) -> tuple[bool, float]:
    """Read the parameters of ``set_gradient_compression``: whether to sum as float16; the threshold of 2bit, or 0."""

    def text(
        fact: str, fix: str = "use {'type': 'fp16'}, {'type': '2bit', 'threshold': 0.5} or {'type': 'none'}."
    ) -> str:
        return message(fact, operation="set_gradient_compression", fix=fix)

    if not isinstance(params, Mapping):
        raise InvalidTypeError(text(f"the parameters are a {type(params).__name__}, not a dict."))
    given = dict(params)
    kind = given.pop("type", None)
    if kind is None:
        raise InvalidRequestError(text("the parameters have no 'type'."))
    if kind not in ("none", "fp16", "2bit"):
        raise InvalidRequestError(text(f"compression {kind!r} is not supported."))
    threshold = 0.0
    if kind == "2bit":
        wanted = given.pop("threshold", 0.5)
        wrong = text(f"the threshold is {wanted!r}.", "pass a positive number that float32 can hold.")
        if isinstance(wanted, bool) or not isinstance(wanted, numbers.Real):
            raise InvalidTypeError(wrong)
        with np.errstate(over="ignore"):
            threshold = float(np.float32(wanted))
        if not 0.0 < threshold < math.inf:
            raise InvalidRequestError(wrong)
    if given:
        takes = "no parameter but 'threshold'" if kind == "2bit" else "no parameters"
        raise InvalidRequestError(text(f"compression {kind!r} takes {takes}, but got {sorted(map(str, given))}."))
    return kind == "fp16", threshold


# -- 2bit: of each value one of -1, 0 and 1 is summed; the rest stays with the worker, and is added to the next --------


def check_compressible(call: Call, group: Group) -> None:
    """Raise UnsupportedDtypeError for what 2bit compression cannot take, as MXNet's own stores do."""
    dtype = "row_sparse" if group.is_row_sparse else mxnet_compat.dtype_name(group.values[0])
    if dtype != "float32":
        fact = f"2bit compression is for dense float32 gradients, not for {dtype}."
        fix = "cast it, use a store of its own, or set_gradient_compression({'type': 'none'})."
        raise UnsupportedDtypeError(call.message(group.key, fact, fix))


def signs_of(group: Group, residuals: MutableMapping[str, Any], threshold: float, prescale: float, size: int) -> Group:
    """What `size` workers sum in place of a group: a new array of -1, 0 and 1; asynchronous. Updates the residual."""
    import mxnet as mx

    total = local_sum(group.values) if len(group.values) > 1 else group.values[0]
    total = (total if prescale == 1.0 else scaled(total, prescale, 1.0)).as_nd_ndarray()
    context = mxnet_compat.context_of(total)
    signs = buffer_like(total, "int8" if size <= _MOST_INT8 else "int32", context=context)
    if 0 not in total.shape:  # the operators refuse these
        with mx.util.np_shape(True), mx.autograd.pause():
            residual, operators = residuals.get(str(group.key)), mx.nd._internal
            if residual is None or residual.shape != total.shape:
                residual = mx.nd.zeros(total.shape, context)
            residuals[str(group.key)] = residual = residual.as_in_context(context)
            mx.nd.elemwise_add(residual, total, out=residual)
            sent = operators._greater_equal_scalar(residual, scalar=threshold)
            mx.nd.elemwise_sub(sent, operators._lesser_equal_scalar(residual, scalar=-threshold), out=sent)
            copy(sent, signs)
            operators._mul_scalar(sent, scalar=threshold, out=sent)
            mx.nd.elemwise_sub(residual, sent, out=residual)
    return Group(group.key, [signs], [signs], then=partial(_expand, signs, threshold, unique(group.outs)))


def _expand(signs: Any, threshold: float, outs: Sequence[Any]) -> None:
    """Write the sum of signs, times the threshold, to every out; asynchronous."""
    import mxnet as mx

    first = next((out for out in outs if mxnet_compat.dtype_name(out) == "float32"), None)
    if first is None:
        first = buffer_like(signs, "float32", context=mxnet_compat.context_of(signs))
    copy(signs, first)
    if 0 not in signs.shape:
        plain = first.as_nd_ndarray()
        with mx.util.np_shape(True), mx.autograd.pause():
            mx.nd._internal._mul_scalar(plain, scalar=threshold, out=plain)
    for out in outs:
        if out is not first:
            copy(first, out)


# -- Residuals as NumPy arrays: in states and files --------------------------------------------------------------------


def values_of(residuals: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of residuals; waits for them."""
    import mxnet as mx

    with mx.util.np_shape(True):
        return {key: residual.asnumpy() for key, residual in residuals.items()}


def arrays_from(values: Mapping[str, Any]) -> dict[str, Any]:
    """What `values_of` was given; on the CPU, from where the next operation fetches it."""
    import mxnet as mx

    with mx.util.np_shape(True):
        return {key: mx.nd.array(value, mx.cpu(), value.dtype) for key, value in values.items()}
