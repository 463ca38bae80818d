"""Signals to the launcher, turned into data that its loop can wait for together with everything else."""

from __future__ import annotations

import signal
import socket
from typing import Any

__all__ = ["ENDING", "PASSED", "SignalInbox"]

# Ask the job to end.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# The workers' business alone.
PASSED = (signal.SIGUSR1, signal.SIGUSR2)
# For the launcher: a worker has ended, the terminal stops us, lets us go on, changes its size.
_OWN = (signal.SIGCHLD, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)


class SignalInbox:
    """Collects the signals that arrive while it is open: a context manager, for the main thread only."""

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}

    def __enter__(self) -> SignalInbox:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        # Before the handlers, which do nothing themselves: a signal in between would be lost.
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for number in (*ENDING, *PASSED, *_OWN):
            # An ignored signal stays ignored, for the workers too: nohup, and background jobs of simple shells. But
            # without SIGCHLD the launcher would not hear that a worker has ended, nor the kernel keep its exit code.
            if number == signal.SIGCHLD or signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, lambda number, frame: None)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        """The descriptor that can be read when signals have arrived."""
        return self._reader.fileno()

    def take(self) -> bytes:
        """The numbers of the signals that have arrived since the last call, in order; does not wait."""
        try:
            return self._reader.recv(4096)
        except BlockingIOError:
            return b""
