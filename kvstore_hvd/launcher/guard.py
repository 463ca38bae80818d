"""A process that ends the job when the launcher disappears, even by SIGKILL."""

from __future__ import annotations

import contextlib
import os

from kvstore_hvd.launcher.belonging import LEFT_GRACE_S, Remains
from kvstore_hvd.launcher.processes import detach, signals_blocked

__all__ = ["Guard"]

# A guard that is killed is replaced. Whoever kills them all means it.
_MOST_REPLACED = 100


class Guard:
    """Waits until the launcher's end of a pipe closes, and ends what belongs to the job unless `close` was called."""

    def __init__(self, variable: bytes, grace_s: float = LEFT_GRACE_S) -> None:
        self._variable = variable
        self._grace_s = grace_s
        self._left = _MOST_REPLACED
        self._start()

    def _start(self) -> None:
        read, self._write = os.pipe()
        launcher = os.getpid()
        with signals_blocked():
            self.pid = os.fork()
            if self.pid == 0:  # signals stay blocked: only SIGKILL ends it early
                try:
                    self._watch(read, launcher)
                finally:
                    os._exit(0)
        os.close(read)

    def replace(self, pid: int) -> None:
        """A child has ended: if it was this process, somebody killed it, and another one takes its place."""
        if pid != self.pid or not self._left:
            return
        self._left -= 1
        os.close(self._write)
        try:
            self._start()
        except OSError:  # no more processes: the other nets remain
            self.pid, self._left = 0, 0
            self._write = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """The launcher has cleaned up: the guard ends without doing anything."""
        with contextlib.suppress(OSError):
            os.write(self._write, b"done\n")
        os.close(self._write)
        if self.pid:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)

    def _watch(self, read: int, launcher: int) -> None:
        null = os.open(os.devnull, os.O_RDWR)
        detach(f"job-guard of {launcher}".encode(), [null] * 3, [read])
        text = b""
        while data := os.read(read, 4096):
            text += data
        if not text:
            Remains(self._variable, self._grace_s).finish()
