"""How long tests wait for what has to happen, on a machine that is busy with other things."""

from __future__ import annotations

import os

__all__ = ["PATIENCE", "of_the_product", "patient"]

#: What limits are multiplied by; `KVHVD_TEST_PATIENCE` sets it. A load of 20 on two cores slows tests down by less than
#: ten times, and none takes half of its limit on an idle machine.
PATIENCE = float(os.environ.get("KVHVD_TEST_PATIENCE", "4"))
_MOST = 16.0


def patient(seconds: float) -> float:
    """A limit after which a test that hangs fails; nothing is proved by how soon it passes."""
    return seconds * PATIENCE


def of_the_product(seconds: int) -> int:
    """A deadline of the product that a test lets pass, in whole seconds: longer while the machine is busy.

    Workers that are merely slow must not miss it, and on an idle machine nobody shall wait for long.
    """
    busy = os.getloadavg()[0] / len(os.sched_getaffinity(0))
    return round(seconds * min(max(busy, 1.0), _MOST))
