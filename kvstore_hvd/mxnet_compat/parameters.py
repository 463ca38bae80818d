"""Gluon's parameters, whose arrays may not exist yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

__all__ = ["after_initialization", "arrays_of"]

# The method with which a parameter makes its arrays, whatever led to it.
_MAKES = "_init_impl"


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


def after_initialization(parameter: Any, then: Callable[[], None]) -> None:
    """Call `then` once, as soon as a parameter has got its arrays."""
    make = getattr(parameter, _MAKES)  # of the class, or what an earlier call put there

    def make_and_tell(*args: Any, **kwargs: Any) -> None:
        make(*args, **kwargs)
        vars(parameter).pop(_MAKES, None)
        then()

    setattr(parameter, _MAKES, make_and_tell)
