"""What becomes of the values of one key."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

#: As kTwoBit and kStates in mismatch.cpp.
_TWO_BIT, STATES = 0x32626974, 0x73746174
STATES_FIX = "call hvd.broadcast_trainer_states(trainer) after load_states on one rank, or load_states on every rank."


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

    @functools.cached_property
    def is_scaled(self) -> bool:
        """Whether the result differs from the value where there is only one."""
        return self.prescale != 1.0 or self.postscale != 1.0

    @property
    def is_plain(self) -> bool:
        """Whether it is a sum, of whatever precision, and nothing else."""
        return self.op == "sum" and not (self.is_scaled or self.threshold or self.group)

    def tied_to_states(self, states: Sequence[int]) -> Reduction:
        """How gradients are summed where the workers compare a number of updates, and which parameters have states."""
        told = zlib.crc32(repr(states).encode()) & 0xFFFF
        return replace(self, group=STATES << 32 | told << 16 | min(len(states) - 1, 0xFFFF))

    @property
    def of_signs(self) -> Reduction:
        """How the signs of 2bit compression are summed: the workers compare their thresholds as a group."""
        return Reduction(group=_TWO_BIT << 32 | int(np.float32(self.threshold).view(np.uint32)))


SUM = Reduction()
