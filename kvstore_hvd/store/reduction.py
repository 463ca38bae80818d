"""What becomes of the values of one key."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["SUM", "Reduction"]


#: As kTwoBit in mismatch.cpp.
_TWO_BIT = 0x32626974


@dataclass(frozen=True)
class Reduction:
    """What becomes of the values of one key."""

    op: str = "sum"
    prescale: float = 1.0
    postscale: float = 1.0
    as_half: bool = False
    weight: float = 1.0
    group: int = 0
    threshold: float = 0.0  # of 2bit compression; 0 is none

    @property
    def is_scaled(self) -> bool:
        """Whether the result differs from the value where there is only one."""
        return self.prescale != 1.0 or self.postscale != 1.0

    @property
    def is_plain(self) -> bool:
        """Whether it is a sum, of whatever precision, and nothing else."""
        return self.op == "sum" and not self.is_scaled and not self.threshold

    @property
    def of_signs(self) -> Reduction:
        """How the signs of 2bit compression are summed: the workers compare their thresholds as a group."""
        return Reduction(group=_TWO_BIT << 32 | int(np.float32(self.threshold).view(np.uint32)))


SUM = Reduction()
