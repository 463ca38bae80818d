"""Gradient compression: with which dtype gradients travel between the workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore_hvd.errors import InvalidRequestError, message

__all__ = ["Compression", "parse_compression"]


@dataclass(frozen=True)
class Compression:
    """A way to make gradients smaller on the wire.

    Parameters
    ----------
    type : str
        ``'none'`` or ``'fp16'``.
    """

    type: str = "none"

    @property
    def is_active(self) -> bool:
        """Whether anything travels in another dtype than its own."""
        return self.type != "none"

    def wire_dtype(self, dtype: str) -> str:
        """The dtype in which an array of `dtype` travels.

        ``fp16`` halves float32 and quarters float64; other dtypes are left alone. The sum is formed in float32 and
        rounded once; a value or a sum beyond 65504 becomes infinite.
        """
        return "float16" if self.type == "fp16" and dtype in ("float32", "float64") else dtype


def parse_compression(params: Any) -> Compression:
    """Read the parameters of ``set_gradient_compression``.

    Parameters
    ----------
    params : mapping
        ``{'type': 'fp16'}`` or ``{'type': 'none'}``.

    Raises
    ------
    TypeError
        `params` is not a mapping.
    InvalidRequestError
        The type is missing or unknown, or there are other parameters.
    """
    fix = "use {'type': 'fp16'}, which halves float32, or {'type': 'none'}."
    operation = "set_gradient_compression"
    if not isinstance(params, Mapping):
        raise TypeError(
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
    return Compression(kind)
