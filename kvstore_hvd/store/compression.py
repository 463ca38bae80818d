"""Gradient compression: as which dtype gradients are summed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvstore_hvd.errors import InvalidRequestError, InvalidTypeError, message

__all__ = ["parse_compression"]


def parse_compression(params: Any) -> bool:
    """Read the parameters of ``set_gradient_compression``: whether to sum float32 and float64 as float16."""
    fix = "use {'type': 'fp16'}, which rounds float32 to float16, or {'type': 'none'}."
    operation = "set_gradient_compression"
    if not isinstance(params, Mapping):
        raise InvalidTypeError(
            message(f"the parameters are a {type(params).__name__}, not a dict.", operation=operation, fix=fix)
        )
    given = dict(params)
    kind = given.pop("type", None)
    if kind is None:
        raise InvalidRequestError(message("the parameters have no 'type'.", operation=operation, fix=fix))
    if kind not in ("none", "fp16"):
        raise InvalidRequestError(message(f"compression {kind!r} is not supported.", operation=operation, fix=fix))
    if given:
        raise InvalidRequestError(
            message(f"compression {kind!r} takes no parameters, but got {sorted(given)}.", operation=operation, fix=fix)
        )
    return bool(kind == "fp16")
