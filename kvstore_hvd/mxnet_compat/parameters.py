"""Gluon's parameters, whose arrays may not exist yet."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

from kvstore_hvd.mxnet_compat.arrays import is_parameter
from kvstore_hvd.mxnet_compat.wrapping import wrap

__all__ = [
    "after_initialization",
    "arrays_of",
    "awaited_names",
    "initialize",
    "initialize_awaiting",
    "is_block",
    "is_deferred",
    "is_parameters",
    "misfit",
    "named_parameters",
    "parameters_in",
    "zero_added_gradients",
]

# Of parameters without arrays: the name on the wire, '' if none, and what follows once there are arrays. No attribute:
# a copy of a network does not take part in what the network waits for.
_awaiting: weakref.WeakKeyDictionary[Any, list[tuple[str, Callable[[Any], None]]]] = weakref.WeakKeyDictionary()


def is_block(thing: object) -> bool:
    """Whether it is a Block of Gluon. Does not import MXNet."""
    mxnet = sys.modules.get("mxnet")
    return mxnet is not None and isinstance(thing, mxnet.gluon.Block)


def is_parameters(thing: Any) -> bool:
    """Whether it is a ``ParameterDict`` or a dict of parameters, not an empty one. Does not import MXNet."""
    mxnet = sys.modules.get("mxnet")
    kinds = (Mapping, getattr(mxnet.gluon, "ParameterDict", Mapping)) if mxnet is not None else ()
    return isinstance(thing, kinds) and bool(thing.keys()) and all(map(is_parameter, thing.values()))


def named_parameters(thing: Any) -> dict[str, Any]:
    """The parameters of a Block, a ``ParameterDict`` or a dict of them, each once, in an order of their names."""
    # Those of a Block are named by their place in it, so that the names do not depend on what else the process has
    # made.
    named = []
    if is_block(thing):
        named = sorted(thing._collect_params_with_prefix().items(), key=lambda item: item[0])
        thing = thing.collect_params()  # a SymbolBlock does not tell the place of all
    named += sorted(((str(name), parameter) for name, parameter in thing.items()), key=lambda item: item[0])
    once: dict[int, tuple[str, Any]] = {}
    for name, parameter in named:
        once.setdefault(id(parameter), (name, parameter))
    return dict(once.values())


def parameters_in(thing: Any) -> list[Any]:
    """The parameters that `named_parameters` names, some of them several times; takes a fraction of the time."""
    if not is_block(thing):
        return list(thing.values())
    found: list[Any] = []
    waiting = [thing]
    while waiting:
        block = waiting.pop()
        found += block._reg_params.values()
        if hasattr(block, "_params"):  # MXNet 1: those that are no attributes, too
            found += block._params.values()
        children = block._children.values()
        waiting += [child() if isinstance(child, weakref.ref) else child for child in children]  # MXNet 2, MXNet 1
    return found


def arrays_of(parameter: Any) -> Optional[list[Any]]:
    """The arrays of a parameter, one for each device; None while its initialisation waits for a shape."""
    import mxnet

    try:
        return list(parameter.list_data())
    except mxnet.gluon.parameter.DeferredInitializationError:
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
    fitting = [each for each in awaiting if is_deferred(each) and not _misfit_of_shape(each, shape)]
    for parameter in fitting:
        initialize(parameter, shape)
    return bool(fitting)


def misfit(parameter: Any, shape: Sequence[int], dtype: str) -> str:
    """What keeps a parameter from having this shape and dtype, as a few words; '' if nothing does."""
    import numpy as np

    wrong = _misfit_of_shape(parameter, shape)
    if wrong:
        return wrong
    own_dtype = np.dtype([("bfloat16", np.uint16)]) if parameter.dtype == "bfloat16" else np.dtype(parameter.dtype)
    own_name = own_dtype.names[0] if own_dtype.names else own_dtype.name
    return "" if own_name == dtype else f"dtype {own_name} instead of {dtype}"


def _misfit_of_shape(parameter: Any, shape: Sequence[int]) -> str:
    own = parameter.shape
    unknown = (0, -1) if is_deferred(parameter) else ()
    if own is not None and (len(own) != len(shape) or any(a != b for a, b in zip(own, shape) if a not in unknown)):
        return f"shape {tuple(own)} instead of {tuple(shape)}"
    return ""


def zero_added_gradients(parameter: Any) -> None:
    """Set the gradients of a parameter to zero if the next backward pass would add to them."""
    if parameter.grad_req == "add" and parameter._grad is not None:
        for gradient in parameter.list_grad():
            # Parameter.zero_grad of MXNet 2 refuses arrays of mx.np.
            gradient[() if gradient.ndim == 0 else slice(None)] = 0


def awaited_names(parameter: Any) -> Sequence[str]:
    """The names on the wire that `after_initialization` was told."""
    return [name for name, _ in _awaiting.get(parameter, ()) if name]


def after_initialization(parameter: Any, name: str, then: Callable[[Any], None]) -> None:
    """Call `then` with the parameter once, as soon as it has its arrays. It uses that name on the wire, '' if none."""
    _awaiting.setdefault(parameter, []).append((name, then))


def patch(mxnet: Any) -> None:
    """Have parameters tell when they have got their arrays, see `after_initialization`."""

    def initializing(original: Callable[..., Any]) -> Callable[..., Any]:
        def _init_impl(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            for _, then in _awaiting.pop(self, ()):
                then(self)

        return _init_impl

    wrap(mxnet.gluon.Parameter, "_init_impl", initializing)
