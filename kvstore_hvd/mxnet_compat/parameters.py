"""Gluon's parameters, whose arrays may not exist yet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional

__all__ = ["after_initialization", "arrays_of", "awaited_names", "initialize", "is_deferred"]

# The method with which a parameter makes its arrays, whatever led to it.
_MAKES = "_init_impl"
# Under what names it is going to be broadcast then.
_AWAITED = "_kvstore_hvd_awaited"


def arrays_of(parameter: Any) -> Optional[list[Any]]:
    """The arrays of a parameter, one for each device; None while its initialisation waits for a shape.

    Raises
    ------
    RuntimeError
        It has not been initialised, or is sparse.
    """
    import mxnet

    try:
        return list(parameter.list_data())
    except mxnet.gluon.parameter.DeferredInitializationError:
        return None


def is_deferred(parameter: Any) -> bool:
    """Whether its initialisation waits for a shape."""
    return bool(parameter._deferred_init)


def initialize(parameter: Any, shape: Sequence[int]) -> None:
    """Finish an initialisation that waits for a shape.

    Raises
    ------
    AssertionError
        The shape is not one that the parameter can have.
    """
    parameter.shape = tuple(shape)
    parameter._finish_deferred_init()


def awaited_names(parameter: Any) -> Sequence[str]:
    """The names on the wire that `after_initialization` was told."""
    names: Sequence[str] = vars(parameter).get(_AWAITED, ())
    return names


def after_initialization(parameter: Any, name: str, then: Callable[[], None]) -> None:
    """Call `then` once, as soon as a parameter has got its arrays. It uses that name on the wire."""
    make = getattr(parameter, _MAKES)  # of the class, or what an earlier call put there

    def make_and_tell(*args: Any, **kwargs: Any) -> None:
        make(*args, **kwargs)
        vars(parameter).pop(_MAKES, None)
        vars(parameter).pop(_AWAITED, None)
        then()

    setattr(parameter, _AWAITED, (*awaited_names(parameter), name))
    setattr(parameter, _MAKES, make_and_tell)
