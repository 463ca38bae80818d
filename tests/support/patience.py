"""How long tests wait for what has to happen, on a machine that is busy with other things."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

__all__ = ["PATIENCE", "patient", "until"]

#: What limits are multiplied by; `KVHVD_TEST_PATIENCE` sets it. A load of 20 on two cores slows tests down by less than
#: ten times, and none takes half of its limit on an idle machine.
PATIENCE = float(os.environ.get("KVHVD_TEST_PATIENCE", "4"))


def patient(seconds: float) -> float:
    """A limit after which a test that hangs fails; nothing is proved by how soon it passes."""
    return seconds * PATIENCE


def until(ask: Callable[[], Any]) -> Any:
    """Ask until the answer is true; returns it."""
    end = time.monotonic() + patient(30)
    while not (answer := ask()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)
    return answer
