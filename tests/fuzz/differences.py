"""What may differ between ranks that do the same: one table, from which random programs and trainings draw. Hosts
differ in tests/run.py (KVHVD_TEST_HOSTS) and tests/native/test_programs, builds in tests/native/test_records."""

import random
from typing import Any

#: Values of one rank, and the chance that every rank draws a value of its own, instead of one for all.
DIFFERENCES: dict[str, tuple[Any, float]] = {
    "memory": (("elsewhere", "arena"), 0.5),  # of arrays, of gradients
    "device": ((0, 0, 0, 1), 0.2),
    "clock": ((0.0, 0.002, 0.02), 1.0),  # seconds that a rank is late
    "rows": (range(-2, 4), 1.0),  # beside those that all have
    "samples": (range(1, 9), 1.0),  # in a step
    "fresh gradient": ((True, True, False), 1.0),  # with ignore_stale_grad
}


def drawn(name: str, draw: random.Random, ranks: int) -> tuple[Any, ...]:
    """A value for each of so many ranks."""
    values, chance = DIFFERENCES[name]
    if chance < 1 and draw.random() >= chance:
        return (draw.choice(values),) * ranks
    return tuple(draw.choice(values) for _ in range(ranks))
