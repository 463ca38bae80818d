"""How values are combined: Horovod's ops."""

from __future__ import annotations

import enum
import functools
from typing import Any

from kvstore_hvd.errors import InvalidRequestError, InvalidTypeError
from kvstore_hvd.store.keys import Call
from kvstore_hvd.store.reduction import Reduction


class ReduceOp(enum.IntEnum):
    """The ops, with Horovod's numbers."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT


def reduction(
    call: Call,
    op: Any,
    prescale: Any,
    postscale: Any,
    allowed: tuple[ReduceOp, ...] = (Average, Sum, Min, Max, Product),
) -> Reduction:
    """What the engine is to do.

    Raises
    ------
    InvalidRequestError
        The op is not one of those allowed.
    InvalidTypeError
        A factor is not a number.
    """
    fix = _use_one_of(allowed)
    try:
        chosen = ReduceOp(op)
    except ValueError:
        raise InvalidRequestError(call.message(None, f"there is no op {op!r}.", fix)) from None
    if chosen not in allowed:
        fact = f"op {chosen.name.capitalize()} is not supported."
        raise InvalidRequestError(call.message(None, fact, fix))
    factors = []
    for role, factor in (("prescale_factor", prescale), ("postscale_factor", postscale)):
        try:
            factors.append(float(factor))
        except (TypeError, ValueError):
            raise InvalidTypeError(call.message(None, f"{role} is {factor!r}.", "pass a number.")) from None
    return Reduction(chosen.name.lower(), prescale=factors[0], postscale=factors[1])


@functools.cache
def _use_one_of(allowed: tuple[ReduceOp, ...]) -> str:
    return f"use one of {', '.join(f'hvd.{each.name.capitalize()}' for each in allowed)}."
