"""How far apart two ways of computing the same thing may be, from the number of their roundings.

MXNet has other kernels for other instruction sets and numbers of threads. They sum in another order, or fuse a
multiplication and an addition, so a bound that one machine keeps is none: it has to follow from the arithmetic.
"""

from __future__ import annotations

import math

import numpy as np

__all__ = ["apart", "sgd_roundings"]

# Of a sum of independent roundings, in standard deviations and with some room for terms that cancel.
_CHANCE = 4.0


def apart(roundings: int, dtype: str = "float32") -> float:
    """The most that two results differ, relative to the size of their terms, after so many roundings to either.

    Each is off by up to half a unit in the last place, to either side, so n of them by the square root of n such
    (Higham and Mary, SIAM J. Sci. Comput. 41, 2019), and two results by that of 2 n.
    """
    return _CHANCE * math.sqrt(2 * roundings) * float(np.finfo(dtype).eps) / 2


def sgd_roundings(widths: list[int], batch: int, steps: int) -> int:
    """Those on the way to a weight that plain SGD has trained, where the layers' inputs and outputs are so wide.

    A value is a sum of as many products as its layer has inputs, on the way back of as many as it has outputs, and a
    gradient of as many as there are samples; each step also rounds the update, and the weight.
    """
    forward, backward = sum(widths[:-1]), sum(widths[2:])
    return steps * (forward + backward + batch + 2)
