"""What becomes of the values of one key."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SUM", "Reduction"]


@dataclass(frozen=True)
class Reduction:
    """What becomes of the values of one key."""

    op: str = "sum"
    prescale: float = 1.0
    postscale: float = 1.0
    as_half: bool = False
    weight: float = 1.0
    group: int = 0

    @property
    def is_scaled(self) -> bool:
        """Whether the result differs from the value where there is only one."""
        return self.prescale != 1.0 or self.postscale != 1.0

    @property
    def is_plain(self) -> bool:
        """Whether it is a sum, of whatever precision, and nothing else."""
        return self.op == "sum" and not self.is_scaled


SUM = Reduction()
