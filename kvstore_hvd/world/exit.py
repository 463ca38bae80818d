"""The end of a process, and of a forked child.

Exit handlers run in the reverse order of their registration, so at the end of a process:
1. `Process.leave_at_exit` leaves all worlds; an `ExitWatchdog` limits its time. It is registered anew when MXNet is
   imported, to run before MXNet's handler.
2. MXNet's handler waits for MXNet's operations.
3. The process waits for its links, which may still forward sums that other hosts need.
4. MPI_Finalize, by our handler where the program has not initialised MPI. It may wait for ranks that are lost: after a
   lost world, MPI has 5 s to end.
A forked child shares the connections of its parent: it closes its copies of their sockets (`links`, `control`),
forgets the worlds (`Process.after_fork_in_child`), and ends without MPI_Finalize.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import functools
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Any, NoReturn

from kvstore_hvd import log, native
from kvstore_hvd.base.cores import Deadline
from kvstore_hvd.config import config
from kvstore_hvd.errors import HorovodInternalError, KVHvdError, message
from kvstore_hvd.mxnet_compat.hooks import in_one_line
from kvstore_hvd.world.stall import LIBRARIES

_MAX_REASON = 500
# Time for MXNet's pending operations after an expired `ExitWatchdog` has failed the world.
_LAST_RESORT_S = 5.0
# Time to write the last line of the log, whose reader may be stopped.
_LAST_WORDS_S = 1.0
# Time between two looks at the progress of leaving.
_LOOK_S = 0.1
# The part of a core that a process uses at least whose MXNet computes.
_BUSY = 0.1
# For how many times the limit at exit MXNet may compute without an operation of this worker: other threads may be busy.
_MOST_BUSY = 20
# Time for MPI to end after a lost world.
_MPI_END_S = 5.0

Engines = Callable[[], Sequence["native.Engine"]]  # of all worlds that the process leaves

_was_lost = False


def early_end(who: str = "") -> str:
    """Why the program ends early, for an exit handler: ``'ValueError: ...'``, or '' when it ends in good order."""
    # With `who`, this worker's name, a second line says what to do about an error of the program: ``' Fix: ...'``.
    error = _unhandled()
    if error is None:
        return ""
    reason = in_one_line(error)[:_MAX_REASON].rstrip(".")
    if not who or not isinstance(error, Exception) or isinstance(error, HorovodInternalError):
        return reason
    fix = f"see the error of {who}" if isinstance(error, KVHvdError) else f"correct the {type(error).__name__} on {who}"
    return f"{reason}\n  Fix: {fix}"


def _unhandled() -> BaseException | None:
    # Only unhandled exceptions of the main thread are seen (Ctrl-C among them): an interactive session goes on after
    # them, and ``sys.exit(1)`` leaves no trace.
    if hasattr(sys, "ps1") or sys.flags.interactive:
        return None
    # last_exc came with Python 3.12; older ones have last_value only.
    return getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)


def end_by_force(text: str) -> NoReturn:
    """End this process with code 1, and with an error in the log if that can be written within a second."""

    def write() -> None:
        log.logger.error(text)
        sys.stdout.flush()

    writer = threading.Thread(target=write, name="kvstore_hvd-last-words", daemon=True)
    with contextlib.suppress(RuntimeError):  # no more threads
        writer.start()
        writer.join(_LAST_WORDS_S)
    os._exit(1)


class ExitWatchdog:
    """Fails the worlds of a process that leaves them without progress, and ends the process 5 s later."""

    # The thread is started beforehand and sleeps until then, because Python starts no threads once it ends.

    def __init__(self) -> None:
        self._leaving: queue.SimpleQueue[tuple[float, Engines, str, bool]] = queue.SimpleQueue()
        #: Set when the process has left: the watchdog does nothing.
        self.left = threading.Event()
        threading.Thread(target=self._watch, name="kvstore_hvd-exit", daemon=True).start()

    def leaving(self, limit_s: float, engines: Engines, text: str, is_early: bool) -> None:
        """Fail these engines with the text unless an operation completes within the limit, again and again."""
        self._leaving.put((limit_s, engines, text, is_early))

    def _watch(self) -> None:
        limit_s, engines, text, is_early = self._leaving.get()
        busy = Deadline(_MOST_BUSY * limit_s)
        # After an exception of the program something may be wrong with MXNet itself: no progress prolongs the limit.
        if self._has_left_within(limit_s, lambda: None if is_early else _progress(engines(), limit_s, busy)):
            return
        pending = sum(engine.counts()[1] for engine in engines())
        for engine in engines():
            engine.abort(text)
        if not self._has_left_within(_LAST_RESORT_S, lambda: None):
            fact = f"the program has ended, but MXNet has not; pending operations: {pending}. It is ended by force."
            fix = "mx.nd.waitall() at the end of the program shows which one hangs."
            end_by_force(message(fact, fix=f"{fix} KVHVD_EXIT_TIMEOUT (seconds) allows longer waits."))

    def _has_left_within(self, limit_s: float, progress: Callable[[], object]) -> bool:
        deadline, before = Deadline(limit_s), progress()
        while not self.left.wait(min(deadline.wait_s(), _LOOK_S)):
            now = progress()
            if now != before:
                deadline, before = Deadline(limit_s), now
            elif deadline.left() <= 0:
                return False
        return True


def _progress(engines: Sequence[native.Engine], limit_s: float, busy: Deadline) -> tuple[int, float]:
    """Changes as operations complete or wait for late workers, and while MXNet computes and none is pending."""
    counts = [engine.counts() for engine in engines]
    may_compute = busy.left() > 0 and not any(pending for _, pending in counts)
    mark = int(time.process_time() / limit_s / _BUSY) if may_compute else 0.0
    # Operations have a deadline of their own, which tells late workers that compute from stopped ones.
    waiting = [one for engine in engines for one in engine.waiting(0.0) or ()]
    is_late = any(not (one.announced_by_all or one.name.startswith(native.PATIENT)) for one in waiting)
    if is_late and config().waits_at_exit:
        mark = time.monotonic()
    return sum(over for over, _ in counts), mark


# -- Links and MPI --------------------------------------------------------------------------------------------------


@functools.cache
def end_links_at_exit(with_mpi: bool) -> None:
    """Have this process wait for its links at its end, or in MPI_Finalize, if the program calls that before."""
    atexit.register(_end_links, with_mpi)
    if with_mpi:
        from mpi4py import MPI

        # MPI_Finalize begins with the attributes of COMM_SELF.
        MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=lambda *_: _end_links(with_mpi)), 0)


def note_world(is_lost: bool) -> None:
    """Note whether the latest world is lost: MPI may wait for processes that are lost, and gets a limit then."""
    global _was_lost
    _was_lost = is_lost


@functools.cache
def shorten_tracebacks() -> None:
    """Have an error that ends the program show no calls of this package; one of this package: of no library."""
    shown = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        trace = _without(trace, LIBRARIES if isinstance(error, KVHvdError) else {"kvstore_hvd"})
        shown(kind, error.with_traceback(trace), trace)

    sys.excepthook = hook


def _without(trace: TracebackType | None, libraries: Collection[str]) -> TracebackType | None:
    """A traceback without the calls within libraries; as it is without others, or where this package has slipped."""
    found, rest, name = [], trace, ""
    while rest is not None:
        name = str(rest.tb_frame.f_globals.get("__name__")).partition(".")[0]
        if name not in libraries:
            found.append(rest)
        rest = rest.tb_next
    if libraries == {name}:
        return trace
    made: TracebackType | None = None
    for each in reversed(found):
        made = TracebackType(made, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return made or trace


def _end_links(with_mpi: bool) -> None:
    limit_s = config().exit_timeout_s
    if not native.stop_links(limit_s):
        log.logger.info("workers of other hosts have not left within %g s", limit_s)
    if with_mpi and _was_lost:
        text = f"MPI has not ended within {_MPI_END_S:g} s of a lost world; this process ends by force.\n"
        native.end_within(_MPI_END_S, f"kvstore_hvd error: {text}")


@functools.cache
def finalise_mpi_at_exit(mpi: Any) -> None:
    """Have this process call MPI_Finalize at its end, and its forked children end without that."""
    owner, libc = os.getpid(), ctypes.CDLL(None)

    def end() -> None:
        if os.getpid() == owner and not mpi.Is_finalized():
            with contextlib.suppress(mpi.Exception):  # of ranks that are lost
                mpi.Finalize()

    def in_child() -> None:
        with contextlib.suppress(AttributeError):  # glibc has it
            libc.on_exit(libc._exit, None)  # with the exit code, before the destructors of MPI's library

    atexit.register(end)
    os.register_at_fork(after_in_child=in_child)


@functools.cache
def end_children_without_mpi() -> None:
    """Have forked children end without MPI_Finalize where the program has loaded mpi4py, which would call it there."""
    # Exit handlers are not told the exit code: `raise SystemExit(3)` of a child is not seen here.
    owner, leave, codes = os.getpid(), sys.exit, [0]

    def noting(status: Any = None, /) -> None:
        codes[0] = status if isinstance(status, int) else 0 if status is None else 1
        leave(status)

    def in_child() -> None:
        vars(sys).pop("last_value", None)  # of the parent
        for module, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
            setattr(module, name, noting)

    # Handlers from before the first init() do not run in a child.
    def end() -> None:
        if os.getpid() != owner:
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(AttributeError, OSError, ValueError):
                    stream.flush()
            os._exit(1 if hasattr(sys, "last_value") else codes[0] & 0xFF)

    os.register_at_fork(after_in_child=in_child)
    atexit.register(end)
