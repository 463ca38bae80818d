"""The launcher as a process of a program that calls a function: kvhvdrun, that tells the program why a job fails."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

from kvstore_hvd.calling.reports import Kind, Reporter, Sender
from kvstore_hvd.launch import command
from kvstore_hvd.launch.options import Caller

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Run kvhvdrun with the arguments of `launcher_command`; returns its exit code."""
    # When the thread that has started it ends, which waits for it as long as the program lives, the job ends as by
    # SIGTERM.
    parent, call, reports = (int(argument) for argument in sys.argv[1:4])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        return 128 + signal.SIGTERM
    # The thread may have held signals back.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for fd in (call, reports):
        os.set_inheritable(fd, False)  # only the workers get them
    reporter = Reporter(reports)

    def tell(kind: Kind, text: str) -> None:
        with contextlib.suppress(OSError):  # the program has ended, and so does this process
            reporter.send(kind, Sender(), text)

    caller = Caller((call, reports), lambda text: tell(Kind.REFUSED, text), lambda text: tell(Kind.ENDED, text))
    return command.main(sys.argv[4:], caller)
