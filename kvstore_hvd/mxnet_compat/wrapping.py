"""Replacing a function of MXNet's by a thin wrapper around it, once however often it is asked for."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["is_wrapped", "wrap"]

_WRAPPED = "_kvstore_hvd_wraps"


def wrap(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the function `name` of a module or class by ``make(original)``, unless that was done before."""
    original = owner.__dict__.get(name)
    if original is None or is_wrapped(original):
        return
    wrapper = functools.wraps(original)(make(original))
    setattr(wrapper, _WRAPPED, original)
    setattr(owner, name, wrapper)


def is_wrapped(function: Any) -> bool:
    """Whether it is such a wrapper."""
    return hasattr(function, _WRAPPED)
