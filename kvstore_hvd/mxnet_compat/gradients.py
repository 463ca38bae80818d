"""Gradients in shared memory: Gluon's parameters get gradient arrays that the other workers sum in place.

MXNet allocates a parameter's gradients itself. Here they are replaced by arrays of an arena: as they are made, when
there is a world by then (see the wrapper of ``Parameter._init_grad``); otherwise, and after MXNet has replaced them
(``cast``), before the next exchange.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from typing import Any

from kvstore_hvd.mxnet_compat.arrays import context_of, dtype_name, stype_of

__all__ = ["NewArray", "move_to_arena", "why_staged"]

#: (shape, dtype) -> NDArrayHandle of an array in this worker's arena, of unspecified content; 0 when it takes none.
NewArray = Callable[["tuple[int, ...]", str], int]

# The list of arrays that we have looked at last: MXNet makes a new one whenever it replaces them.
_SEEN = "_kvstore_hvd_grad"
# Why a parameter's gradients stay where they are; for reports.
_WHY = "_kvstore_hvd_why_staged"


def move_to_arena(parameters: Iterable[Any], arena: object, new_array: NewArray) -> bool:
    """Give parameters gradients in the arena, with the values that the present ones have.

    Those that cannot have them (on several devices, sparse, of an integer type, not initialised) are left alone; they
    are exchanged through staging memory.

    Parameters
    ----------
    parameters : iterable of mxnet.gluon.Parameter
    arena : object
        Stands for the arena; when it is another one than before, gradients move again.
    new_array : callable
        See `NewArray`.

    Returns
    -------
    bool
        Whether any was looked at: `why_staged` may say something else than before.
    """
    any_looked_at = False
    for parameter in parameters:
        gradients = parameter._grad
        if gradients is None:
            continue
        seen = parameter.__dict__.get(_SEEN)
        if seen is not None and seen[0] is gradients and seen[1] is arena:
            continue
        why = _move(parameter, new_array)
        parameter.__dict__[_SEEN] = (parameter._grad, arena)
        parameter.__dict__[_WHY] = why
        any_looked_at = True
    return any_looked_at


def why_staged(parameter: Any) -> str | None:
    """Why a parameter's gradients are exchanged through staging memory; '' if they are not, None if nobody knows."""
    why: str | None = parameter.__dict__.get(_WHY)
    return why


def _move(parameter: Any, new_array: NewArray) -> str:
    """Return why it did not."""
    import mxnet

    if len(parameter._grad) != 1:
        return f"{len(parameter._grad)} devices"
    (gradient,) = parameter._grad
    (data,) = parameter._data
    if stype_of(gradient) != "default":
        return stype_of(gradient)
    where = context_of(gradient)
    if (where.device_type, where.device_id) != ("cpu", 0):
        return str(where)  # arrays in memory of ours are always on cpu(0)
    handle = new_array(gradient.shape, dtype_name(gradient))
    if not handle:
        return f"no room for {gradient.shape} of {dtype_name(gradient)}"
    moved = type(gradient)(handle=ctypes.c_void_p(handle))
    moved[()] = gradient
    # Marking forgets whether backward() has written the gradient since the last step.
    fresh = data._fresh_grad
    parameter._grad = [moved]
    mxnet.autograd.mark_variables([data], [moved], parameter.grad_req)
    data._fresh_grad = fresh
    return ""
