"""A worker of a job that calls a function: fetches it, calls it, and reports what it returns or raises."""

from __future__ import annotations

import os
import signal
import sys
from types import TracebackType
from typing import Any

from kvstore_hvd.calling.failure import Failure, failure_of
from kvstore_hvd.calling.parcel import unpack
from kvstore_hvd.calling.paths import take_path
from kvstore_hvd.calling.reports import Kind, Reporter, Sender
from kvstore_hvd.config import config
from kvstore_hvd.process import process

__all__ = ["main"]

_EXIT_FAILED = 1


def main() -> int:
    """Call the function; the arguments are those of `worker_command`."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    call, reports = (int(argument) for argument in sys.argv[1:3])
    _hide_our_frames()
    reporter = Reporter(reports)
    try:
        func, args, kwargs = _fetch(call)
    except Exception as error:
        what = "the function or its arguments cannot be read:"
        fix = "modules that they need must be importable in the workers, too."
        reporter.send(Kind.FAILED, _sender(), failure_of(error, error.__traceback__, what, fix))
        raise
    try:
        result = func(*args, **kwargs)
    except SystemExit as error:
        reporter.send(Kind.FAILED, _sender(), _left(error))
        if config().worker is None and error.code in (None, 0):
            return _EXIT_FAILED  # the others need not go on; but one of an elastic job may have been told to leave
        raise
    except BaseException as error:
        reporter.send(Kind.FAILED, _sender(), failure_of(error, _shown(error.__traceback__), "the function raised"))
        raise
    return _report(reporter, result)


def _report(reporter: Reporter, result: Any) -> int:
    try:
        reporter.send(Kind.RESULT, _sender(), result)
    except BrokenPipeError:
        return _EXIT_FAILED  # the program has gone: nobody waits for it
    except Exception as error:  # noqa: BLE001 - pickling may raise anything; the program has to be told
        verb = "written" if isinstance(error, OSError) else "pickled"
        what = f"the result, a {type(result).__module__}.{type(result).__qualname__}, cannot be {verb}:"
        fix = "return what can be pickled, such as numbers, arrays and dictionaries of them."
        reporter.send(Kind.FAILED, _sender(), failure_of(error, None, what, fix))
        return _EXIT_FAILED
    return 0


def _fetch(call: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    values = unpack(call)
    # What the function needs of modules is found where the program finds it.
    take_path(*next(values))
    sys.argv[:] = next(values)
    called: tuple[Any, tuple[Any, ...], dict[str, Any]] = next(values)
    os.close(call)
    return called


def _sender() -> Sender:
    known = config()
    if known.worker is None:
        return Sender(known.rank or 0, known.size or 1)
    place = process.current().last_place
    if place is None:
        return Sender(worker=known.worker)
    return Sender(place.rank, place.size, place.generation, known.worker)


def _left(error: SystemExit) -> Failure:
    shown = "" if error.code is None else repr(error.code)
    return Failure(
        f"the function called sys.exit({shown}), and has no result.", fix="return from the function instead."
    )


def _shown(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that begins in the function, if any does."""
    ours = (globals(), sys.modules["__main__"].__dict__)
    part = trace
    while part is not None and any(part.tb_frame.f_globals is each for each in ours):
        part = part.tb_next
    return part or trace


def _hide_our_frames() -> None:
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        trace = _shown(trace)
        shown(kind, error.with_traceback(trace), trace)

    sys.excepthook = hook
