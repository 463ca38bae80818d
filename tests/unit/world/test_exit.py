"""How an exit handler sees whether the program ends early, and the end of one that cannot end."""

import itertools
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvstore_hvd.base.cores import Deadline
from kvstore_hvd.errors import MismatchError
from kvstore_hvd.native import Waiting
from kvstore_hvd.world import exit as exit_module
from kvstore_hvd.world.exit import ExitWatchdog, early_end
from support.patience import patient


class MXNetError(Exception):
    """Has such texts."""


FIX = "\n  Fix: correct the ValueError on rank 3"
FAILED = MXNetError("Traceback (most recent call last):\n  File x.cc, line 3\nMXNetError: Check failed: n > 0")


def test_a_traceback_of_our_errors_has_no_calls_of_libraries(monkeypatch):
    seen, library, ours = [], {"__name__": "mxnet.base"}, {"__name__": "kvstore_hvd.elastic.run"}
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: seen.append(traceback.extract_tb(trace)))
    exit_module.shorten_tracebacks.__wrapped__()
    exec("def call(error): raise error", library)
    exec("def call(error, inner): inner(error)\ndef fail(error): raise error", ours)
    for error, inner in ((MismatchError("ours"), 0), (KeyError("theirs"), 0), (KeyError("ours"), ours["fail"])):
        try:
            ours["call"](error, inner or library["call"])
        except Exception as caught:
            sys.excepthook(type(caught), caught, caught.__traceback__)
    assert [len(frames) for frames in seen] == [1, 2, 3]


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({}, ""),
        ({"last_value": ValueError(" one line\nanother")}, f"ValueError: one line{FIX}"),
        ({"last_value": FAILED}, "MXNetError: Check failed: n > 0\n  Fix: correct the MXNetError on rank 3"),
        ({"last_exc": KeyboardInterrupt(), "last_value": None}, "KeyboardInterrupt"),
        ({"last_value": MismatchError("ours.")}, "MismatchError: ours\n  Fix: see the error of rank 3"),
        ({"last_value": ValueError("before"), "ps1": ">>> "}, ""),  # an interactive session has gone on
        ({"last_value": ValueError("in the script of python -i"), "interactive": 1}, ""),
    ],
)
def test_an_unhandled_exception_is_the_reason(monkeypatch, attributes, reason):
    flags = SimpleNamespace(interactive=attributes.get("interactive", 0))
    monkeypatch.setattr(exit_module, "sys", SimpleNamespace(flags=flags, **attributes))
    assert early_end("rank 3") == reason


@pytest.mark.parametrize("is_early", [False, True])
def test_the_limit_begins_anew_with_each_operation_that_completes(is_early):
    """In any of the worlds, all of which fail; not after an error of the program."""
    completed = ((number, 1) for number in itertools.count()) if is_early else iter([(0, 2), (0, 2), (1, 1), (1, 1)])
    watchdog, aborted = ExitWatchdog(), []
    idle = SimpleNamespace(counts=lambda: (0, 1), waiting=lambda age_s: [], abort=aborted.append)
    engine = SimpleNamespace(counts=lambda: next(completed, (1, 1)), waiting=lambda age_s: [])
    engine.abort = lambda text: aborted.append(text) or watchdog.left.set()
    began = time.monotonic()
    watchdog.leaving(1.0, lambda: [idle, engine], "text", is_early)
    assert watchdog.left.wait(patient(10))
    assert aborted == ["text"] * 2
    assert is_early or time.monotonic() - began > 1.15  # it completes at the second look, 0.2 s after the beginning


LATE = Waiting("s0/1", "barrier", 1.0, 0.0, (1,), False)


def test_what_else_prolongs_the_limit(monkeypatch, setting):
    """MXNet that computes, for some time, while nothing is pending; late workers, unless the limit was set."""
    clock = itertools.count()
    times = {name: lambda: next(clock) for name in ("process_time", "monotonic")}
    monkeypatch.setattr(exit_module, "time", SimpleNamespace(**times))

    def prolongs(pending, late, busy_s=99):
        engine, busy = SimpleNamespace(counts=lambda: (3, pending), waiting=lambda age_s: late), Deadline(busy_s)
        return len({exit_module._progress([engine], 1.0, busy) for _ in range(2)}) == 2

    assert prolongs(0, []) and not prolongs(0, [], busy_s=0) and not prolongs(1, [])
    assert prolongs(1, [LATE])
    assert not any(prolongs(1, [replace(LATE, **each)]) for each in ({"announced_by_all": True}, {"name": "~left"}))
    setting(KVHVD_EXIT_TIMEOUT="1")
    assert not prolongs(1, [LATE])


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
