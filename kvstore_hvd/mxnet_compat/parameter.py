"""Gluon's parameters, whose arrays may not exist yet, and their gradients, which lie in memory that workers share.

MXNet allocates a parameter's gradients itself. Here they are replaced by arrays of an arena, which the other workers
sum in place: as they are made, when there is a world by then; otherwise as a Trainer is made or, at the latest, before
the next exchange. (KVHVD_ZERO_COPY=0: they stay.)

A graph compiled with ``hybridize(static_alloc=True, static_shape=True)`` keeps the gradient arrays of its first
backward pass for good: whatever replaces them later is never written to. So once a program has such graphs, gradients
that a backward pass may have written stay where they are.
"""

from __future__ import annotations

import ctypes
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Optional

from kvstore_hvd import log
from kvstore_hvd.mxnet_compat import hooks
from kvstore_hvd.mxnet_compat.arrays import context_of, dtype_name, is_block, is_parameter
from kvstore_hvd.mxnet_compat.graph import may_keep_gradients
from kvstore_hvd.mxnet_compat.hooks import children_of, require_mxnet, surround

# Of parameters without arrays: the name on the wire ('' if none) and the call that follows their initialisation. No
# attribute: copies of a network do not wait with it.
_awaiting: weakref.WeakKeyDictionary[Any, list[tuple[str, Callable[[Any], None]]]] = weakref.WeakKeyDictionary()


def is_parameters(thing: Any) -> bool:
    """Whether it is a ``ParameterDict`` or a dict of parameters, not an empty one. Does not import MXNet."""
    mxnet = sys.modules.get("mxnet")
    kinds = (Mapping, getattr(mxnet.gluon, "ParameterDict", Mapping)) if mxnet is not None else ()
    return isinstance(thing, kinds) and bool(thing.keys()) and all(map(is_parameter, thing.values()))


def named_parameters(thing: Any) -> dict[str, Any]:
    """The parameters of a Block, a ``ParameterDict`` or a dict of them, each once, in an order of their names."""
    # Those of a Block are named by their place in it: the names do not depend on what else the process has made.
    named = []
    if is_block(thing):
        named = sorted(thing._collect_params_with_prefix().items(), key=lambda item: item[0])
        thing = thing.collect_params()  # a SymbolBlock has parameters without a place
    named += sorted(((str(name), parameter) for name, parameter in thing.items()), key=lambda item: item[0])
    once: dict[int, tuple[str, Any]] = {}
    for name, parameter in named:
        once.setdefault(id(parameter), (name, parameter))
    return dict(once.values())


def parameters_in(thing: Any) -> list[Any]:
    """The parameters that `named_parameters` names, some of them several times; takes a fraction of the time."""
    if not is_block(thing):
        return list(thing.values())
    # In MXNet 1 a block may have parameters that are no attributes, too.
    found = [*thing._reg_params.values(), *getattr(thing, "_params", {}).values()]
    for child in children_of(thing):
        found += parameters_in(child)
    return found


def arrays_of(parameter: Any) -> Optional[list[Any]]:
    """The arrays of a parameter, one for each device; None while its initialisation waits for a shape."""
    try:
        return list(parameter.list_data())
    except require_mxnet().gluon.parameter.DeferredInitializationError:
        return None


def is_deferred(parameter: Any) -> bool:
    """Whether its initialisation waits for a shape."""
    return bool(parameter._deferred_init)


def initialize(parameter: Any, shape: Sequence[int]) -> None:
    """Finish an initialisation that waits for a shape."""
    parameter.shape = tuple(shape)
    parameter._finish_deferred_init()


def initialize_awaiting(name: str, shape: Sequence[int]) -> bool:
    """Finish the initialisation of parameters that are going to be broadcast under this name then, see `initialize`."""
    # Returns whether there were any that can have the shape.
    awaiting = [parameter for parameter in list(_awaiting) if name in awaited_names(parameter)]
    fitting = [each for each in awaiting if is_deferred(each) and not misfit(each, shape)]
    for parameter in fitting:
        initialize(parameter, shape)
    return bool(fitting)


def misfit(parameter: Any, shape: Sequence[int], dtype: str = "") -> str:
    """What keeps a parameter from having this shape, and this dtype if one is given, in a few words; '' if nothing."""
    own, known = parameter.shape, dtype_name(parameter)
    unknown = (0, -1) if is_deferred(parameter) else ()
    if own is not None and (len(own) != len(shape) or any(a != b for a, b in zip(own, shape) if a not in unknown)):
        return f"shape {tuple(own)} instead of {tuple(shape)}"
    return "" if dtype in ("", known) else f"dtype {known} instead of {dtype}"


def zero_added_gradients(parameter: Any) -> None:
    """Set the gradients of a parameter to zero if the next backward pass would add to them."""
    if parameter.grad_req == "add" and parameter._grad is not None:
        for gradient in parameter.list_grad():
            set_to_zero(gradient)


def awaited_names(parameter: Any) -> Sequence[str]:
    """The names on the wire of the calls of `after_initialization`."""
    return [name for name, _ in _awaiting.get(parameter, ()) if name]


def after_initialization(parameter: Any, name: str, then: Callable[[Any], None]) -> None:
    """Call `then` with the parameter once, as soon as it has its arrays. It uses that name on the wire, '' if none."""
    _awaiting.setdefault(parameter, []).append((name, then))


# -- Gradients ------------------------------------------------------------------------------------------------------

_DTYPES = ("float16", "float32", "float64")
_SEEN = "_kvstore_hvd_grad"


class _Seen:
    """The latest known gradients of a parameter (MXNet replaces the list with the gradients)."""

    __slots__ = ("arena", "gradients", "why_staged")

    def __init__(self, gradients: object = None, arena: object = None, why_staged: str | None = None) -> None:
        self.gradients = gradients
        # Weakly: parameters outlive worlds.
        self.arena: Callable[[], object] = (lambda: None) if arena is None else weakref.ref(arena)
        self.why_staged = why_staged

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Copies of a parameter, pickled ones too, have new gradients."""
        return (_Seen, ())


def note_gradients(parameters: Iterable[Any]) -> None:
    """Take note of gradients before a store of MXNet's uses them."""
    for parameter in parameters:
        if parameter._grad is not None and _SEEN not in parameter.__dict__:
            parameter.__dict__[_SEEN] = _Seen(parameter._grad)


def move_to_arena(parameters: Iterable[Any], arena: Any, unused: bool = False) -> bool:
    """Give parameters gradients in the arena, with the values that the present ones have; None: leave them."""
    # Those that cannot have them (on several devices, sparse, of an integer type, not initialised) are left alone; they
    # are exchanged through staging memory.
    any_looked_at = False
    for parameter in parameters if arena is not None else ():
        gradients = parameter._grad
        if gradients is None:
            continue
        seen = parameter.__dict__.get(_SEEN)
        if seen is not None and seen.gradients is gradients and seen.arena() is arena:
            continue
        used = seen is not None or any(d._fresh_grad for d in parameter._data)
        if may_keep_gradients(used) and not unused:
            why = "a static graph may have its gradient"
        else:
            why = _move(parameter, arena)
        parameter.__dict__[_SEEN] = _Seen(parameter._grad, arena, why)
        any_looked_at = True
    return any_looked_at


def fill(gradient: Any, value: float) -> None:
    """Overwrite all elements; ``[:]`` refuses arrays without dimensions, ``[()]`` sparse ones."""
    gradient[() if gradient.ndim == 0 else slice(None)] = value


def set_to_zero(gradient: Any) -> None:
    """Overwrite a gradient with zeros, a row_sparse one with no rows."""
    mxnet = require_mxnet()
    with mxnet.autograd.pause():
        if gradient.stype == "row_sparse":
            where = context_of(gradient)
            mxnet.nd.sparse.zeros("row_sparse", gradient.shape, where, gradient.dtype).copyto(gradient)
        else:
            fill(gradient, 0)  # Parameter.zero_grad of MXNet 2 refuses arrays of mx.np


def why_staged(parameter: Any) -> str | None:
    """Why a parameter's gradients are exchanged through staging memory; '' if they are not, None if unknown."""
    seen: _Seen = parameter.__dict__.get(_SEEN, _Seen())
    return seen.why_staged


def moved(gradient: Any, arena: Any) -> tuple[Any, str]:
    """A copy of a gradient in the arena and '', or None and why it cannot lie there."""
    where, dtype = context_of(gradient), dtype_name(gradient)
    if gradient.stype != "default":
        return None, str(gradient.stype)
    if (where.device_type, where.device_id) != ("cpu", 0):
        return None, str(where)  # arrays in memory of ours are always on cpu(0)
    if dtype not in _DTYPES:
        return None, dtype
    if 0 in gradient.shape:
        return None, "empty"
    handle = arena.new_array(gradient.shape, dtype)  # 0 when it is full
    if not handle:
        log.once(
            "arena-full",
            logging.WARNING,
            "the memory for shared gradients is full: some are exchanged through staging memory, which takes longer."
            " Its size: KVHVD_ARENA_MIB, or a part of `ulimit -v`.",
        )
        return None, "the arena is full"
    found = type(gradient)(handle=ctypes.c_void_p(handle))
    with require_mxnet().autograd.pause():  # nothing of this belongs to what a caller may be recording
        found[()] = gradient
    return found, ""


def _move(parameter: Any, arena: Any) -> str:
    """Return why it did not."""
    if len(parameter._grad) != 1:
        return f"{len(parameter._grad)} devices"
    (gradient,), (data,) = parameter._grad, parameter._data
    found, why = moved(gradient, arena)
    if found is not None:
        # Marking forgets whether backward() has written the gradient since the last step.
        mxnet, fresh = require_mxnet(), data._fresh_grad
        parameter._grad = [found]
        with mxnet.autograd.pause():
            mxnet.autograd.mark_variables([data], [found], parameter.grad_req)
        data._fresh_grad = fresh
    return why


def _init_impl(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    for _, then in _awaiting.pop(self, ()):
        then(self)


def _allocate(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    move_to_arena([self], hooks.arena(), unused=True)


def patch(mxnet: Any) -> None:
    """Have parameters tell when they have got their arrays, and move gradients to the arena as they are made."""
    surround(mxnet.gluon.Parameter, "_init_impl", _init_impl)
    surround(mxnet.gluon.Parameter, "_init_grad", _allocate)
    surround(mxnet.gluon.Parameter, "cast", _allocate)
