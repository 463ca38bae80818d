"""How long tests wait for conditions and for children, on a machine that is busy with other things."""

import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

#: What limits are multiplied by; `KVHVD_TEST_PATIENCE` sets it. A load of 20 on two cores slows tests down by less than
#: ten times, and none takes half of its limit on an idle machine.
PATIENCE = float(os.environ.get("KVHVD_TEST_PATIENCE", "4"))


def patient(seconds: float) -> float:
    """A limit after which a test that hangs fails; nothing is proved by how soon it passes."""
    return seconds * PATIENCE


def until(ask: Callable[[], Any], what: Callable[[], str] = lambda: "waited in vain") -> Any:
    """Ask until the answer is true; returns it. `what` says why it is not."""
    end = time.monotonic() + patient(30)
    while not (answer := ask()):
        assert time.monotonic() < end, what()
        time.sleep(0.002)
    return answer


def in_child(work: Callable[[], Any]) -> None:
    """Fork, have the child do `work`, and fail unless it comes to its end."""
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            work()
        except BaseException as error:
            print(f"child: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
