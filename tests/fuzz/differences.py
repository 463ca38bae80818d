"""What may differ between ranks that do the same: one table, from which random programs and trainings draw.

Values of an entry are those of one rank. `drawn_by` says who draws it; entries that nobody draws name their tests.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple


class Difference(NamedTuple):
    """One entry; `chance`: that every rank draws a value of its own, instead of one for all."""

    values: Sequence[Any]
    chance: float
    drawn_by: tuple[str, ...]


DIFFERENCES = {
    "memory": Difference(("elsewhere", "arena"), 0.5, ("programs", "trainings")),  # of arrays, of gradients
    "device": Difference((0, 0, 0, 1), 0.2, ("programs",)),
    "clock": Difference((0.0, 0.002, 0.02), 1.0, ("programs", "trainings")),  # seconds that a rank is late
    "rows": Difference(range(-2, 4), 1.0, ("programs",)),  # beside those that all have
    "samples": Difference(range(1, 9), 1.0, ("trainings",)),  # in a step
    "fresh gradient": Difference((True, True, False), 1.0, ("trainings",)),  # with ignore_stale_grad
    "host": Difference((), 0.0, ("tests/run.py: KVHVD_TEST_HOSTS", "tests/native: test_programs")),
    "build": Difference((), 0.0, ("tests/native: test_records", "tests/unit/world")),
    "dtype of states": Difference((), 0.0, ("tests/unit/elastic/test_gluon_state.py",)),
}


def drawn(name: str, draw: random.Random, ranks: int) -> tuple[Any, ...]:
    """A value for each of so many ranks."""
    values, chance, _ = DIFFERENCES[name]
    if chance < 1 and draw.random() >= chance:
        return (draw.choice(values),) * ranks
    return tuple(draw.choice(values) for _ in range(ranks))
