"""How long tests wait for what has to happen, on a machine that is busy with other things."""

from __future__ import annotations

import os

__all__ = ["PATIENCE", "patient"]

#: What limits are multiplied by; `KVHVD_TEST_PATIENCE` sets it. A load of 20 on two cores slows tests down by less than
#: ten times, and none takes half of its limit on an idle machine.
PATIENCE = float(os.environ.get("KVHVD_TEST_PATIENCE", "4"))


def patient(seconds: float) -> float:
    """A limit after which a test that hangs fails; nothing is proved by how soon it passes."""
    return seconds * PATIENCE
