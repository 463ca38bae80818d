"""How an exit handler sees whether the program ends early, and the end of one that cannot end."""

import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from kvstore_hvd.errors import MismatchError
from kvstore_hvd.world import exit as exit_module
from kvstore_hvd.world.exit import ExitWatchdog, early_end
from support.patience import patient


class MXNetError(Exception):
    """Has such texts."""


FIX = "\n  Fix: correct the ValueError on rank 3"
FAILED = MXNetError("Traceback (most recent call last):\n  File x.cc, line 3\nMXNetError: Check failed: n > 0")


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({}, ""),
        ({"last_value": ValueError(" one line\nanother")}, f"ValueError: one line{FIX}"),
        ({"last_value": FAILED}, "MXNetError: Check failed: n > 0\n  Fix: correct the MXNetError on rank 3"),
        ({"last_exc": KeyboardInterrupt(), "last_value": None}, "KeyboardInterrupt"),
        ({"last_value": MismatchError("ours has a fix")}, "MismatchError: ours has a fix"),
        ({"last_value": ValueError("before"), "ps1": ">>> "}, ""),  # an interactive session has gone on
        ({"last_value": ValueError("in the script of python -i"), "interactive": 1}, ""),
    ],
)
def test_an_unhandled_exception_is_the_reason(monkeypatch, attributes, reason):
    flags = SimpleNamespace(interactive=attributes.get("interactive", 0))
    monkeypatch.setattr(exit_module, "sys", SimpleNamespace(flags=flags, **attributes))
    assert early_end("rank 3") == reason


def test_the_limit_begins_anew_with_each_operation_that_completes():
    counts, watchdog = iter([(0, 2), (0, 2), (1, 1), (1, 1)]), ExitWatchdog()
    engine = SimpleNamespace(counts=lambda: next(counts, (1, 1)), waiting=lambda age_s: [])
    engine.abort = lambda text: watchdog.left.set()
    began = time.monotonic()
    watchdog.leaving(1.0, lambda: [engine], "", is_early=False)
    assert watchdog.left.wait(patient(10))
    assert time.monotonic() - began > 1.15  # the operation completes at the second look, 0.2 s after the beginning


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_the_watchdog_ends_a_process_whose_output_nobody_reads(full_pipe, stream):
    program = """
import sys, threading
from kvstore_hvd.world import exit
exit._LAST_RESORT_S = 0
sys.stdout = open(1, "w")  # buffered, whatever the environment says
sys.stdout.write("not flushed")
exit.ExitWatchdog().leaving(0, list, "", True)
threading.Event().wait(100)
"""
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, stream: full_pipe}
    process = subprocess.Popen([sys.executable, "-c", program], **streams)
    try:
        assert process.wait(patient(60)) == 1
    finally:
        process.kill()
        process.wait()
