"""Gradients in shared memory: Gluon's parameters get gradient arrays that the other workers sum in place.

MXNet allocates a parameter's gradients itself. Here they are replaced by arrays of an arena: as they are made, when
there is a world by then (see the wrapper of ``Parameter._init_grad``); otherwise as a Trainer is made or, at the
latest, before the next exchange.

A graph compiled with ``hybridize(static_alloc=True, static_shape=True)`` keeps the gradient arrays of its first
backward pass for good: whatever replaces them later is never written to. So once a program has such graphs, gradients
that a backward pass may have written stay where they are.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from kvstore_hvd import log
from kvstore_hvd.mxnet_compat.arrays import context_of, dtype_name, stype_of
from kvstore_hvd.mxnet_compat.graphs import has_static_shape

__all__ = ["NewArray", "look_at", "move_to_arena", "note_early_graphs", "note_graph", "why_staged"]

#: (shape, dtype) -> NDArrayHandle of an array in this worker's arena, of unspecified content; 0 when it is full.
NewArray = Callable[["tuple[int, ...]", str], int]

_DTYPES = ("float16", "float32", "float64")
_SEEN = "_kvstore_hvd_grad"
# Why a parameter's gradients stay where they are; for reports.
_WHY = "_kvstore_hvd_why_staged"

# Whether this process has compiled a graph that keeps its gradient arrays.
_static_graphs = False
# Whether that was before we could see whose gradients it uses.
_early_graphs = False


class _Seen:
    """The gradients of a parameter that we have looked at last (MXNet makes a new list to replace them)."""

    __slots__ = ("arena", "gradients")

    def __init__(self, gradients: object = None, arena: object = None) -> None:
        self.gradients = gradients
        # Weakly: parameters outlive worlds.
        self.arena: Callable[[], object] = (lambda: None) if arena is None else weakref.ref(arena)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Copies of a parameter, pickled ones too, have gradients that nobody has looked at."""
        return (_Seen, ())


def note_graph(flags: Iterable[tuple[str, Any]]) -> None:
    """Take note of the flags of a graph that MXNet compiles."""
    global _static_graphs
    if has_static_shape(flags):
        _static_graphs = True


def note_early_graphs() -> None:
    """Take note that there are graphs of which nobody knows the flags."""
    global _static_graphs, _early_graphs
    _static_graphs = _early_graphs = True


def look_at(parameters: Iterable[Any]) -> None:
    """Take note of gradients that somebody else is about to use."""
    for parameter in parameters:
        if parameter._grad is not None and _SEEN not in parameter.__dict__:
            parameter.__dict__[_SEEN] = _Seen(parameter._grad)


def move_to_arena(parameters: Iterable[Any], arena: object, new_array: NewArray, unused: bool = False) -> bool:
    """Give parameters gradients in the arena, with the values that the present ones have."""
    # Those that cannot have them (on several devices, sparse, of an integer type, not initialised) are left alone; they
    # are exchanged through staging memory.
    any_looked_at = False
    for parameter in parameters:
        gradients = parameter._grad
        if gradients is None:
            continue
        seen = parameter.__dict__.get(_SEEN)
        if seen is not None and seen.gradients is gradients and seen.arena() is arena:
            continue
        used = _early_graphs or seen is not None or any(d._fresh_grad for d in parameter._data)
        if _static_graphs and used and not unused:
            why = "a static graph may have its gradient"
        else:
            why = _move(parameter, new_array)
        parameter.__dict__[_SEEN] = _Seen(parameter._grad, arena)
        parameter.__dict__[_WHY] = why
        any_looked_at = True
    return any_looked_at


def set_to_zero(gradient: Any) -> None:
    """Overwrite a gradient with zeros, a row_sparse one with no rows."""
    import mxnet

    with mxnet.autograd.pause():
        if stype_of(gradient) == "row_sparse":
            where = context_of(gradient)
            mxnet.nd.sparse.zeros("row_sparse", gradient.shape, where, gradient.dtype).copyto(gradient)
        else:
            # Parameter.zero_grad of MXNet 2 refuses arrays of mx.np.
            gradient[() if gradient.ndim == 0 else slice(None)] = 0


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
    where, dtype = context_of(gradient), dtype_name(gradient)
    if (where.device_type, where.device_id) != ("cpu", 0):
        return str(where)  # arrays in memory of ours are always on cpu(0)
    if dtype not in _DTYPES:
        return dtype
    if 0 in gradient.shape:
        return "empty"
    handle = new_array(gradient.shape, dtype)
    if not handle:
        log.once(
            "arena-full",
            logging.WARNING,
            "the memory for shared gradients is full: some are exchanged through staging memory, which takes longer."
            " Its size: KVHVD_ARENA_MIB, or a part of `ulimit -v`.",
        )
        return "the arena is full"
    moved = type(gradient)(handle=ctypes.c_void_p(handle))
    # Marking forgets whether backward() has written the gradient since the last step.
    fresh = data._fresh_grad
    with mxnet.autograd.pause():  # nothing of this belongs to what a caller may be recording
        moved[()] = gradient
        parameter._grad = [moved]
        mxnet.autograd.mark_variables([data], [moved], parameter.grad_req)
    data._fresh_grad = fresh
    return ""
