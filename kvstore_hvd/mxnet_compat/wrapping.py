"""Replacing a function of MXNet's by a thin wrapper around it, once however often it is asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["is_wrapped", "wrap"]

_WRAPPED = "_kvstore_hvd_wraps"
_MAKER = "_kvstore_hvd_maker"

Maker = Callable[[Callable[..., Any]], Callable[..., Any]]


def wrap(owner: Any, name: str, make: Maker) -> None:
    """Replace the function `name` of a module or class by ``make(original)``, unless `make` has done that before."""
    original = owner.__dict__.get(name)
    if original is None or is_wrapped(original, make):
        return
    wrapper = functools.wraps(original)(make(original))
    setattr(wrapper, _WRAPPED, original)
    setattr(wrapper, _MAKER, _name_of(make))
    setattr(owner, name, wrapper)


def is_wrapped(function: Any, make: Maker | None = None) -> bool:
    """Whether it is such a wrapper, or one that has another around it; of this maker if one is given."""
    while hasattr(function, _WRAPPED):
        if make is None or getattr(function, _MAKER) == _name_of(make):
            return True
        function = getattr(function, _WRAPPED)
    return False


def _name_of(make: Maker) -> str:
    # The makers are often made anew, for the same purpose.
    return f"{make.__module__}.{make.__qualname__}"
