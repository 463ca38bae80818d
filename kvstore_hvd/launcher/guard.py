"""A process that ends the job when the launcher disappears, even by SIGKILL."""

from __future__ import annotations

import contextlib
import ctypes
import os

from kvstore_hvd.launcher.belonging import LEFT_GRACE_S, Remains
from kvstore_hvd.launcher.processes import signals_blocked

__all__ = ["Guard"]

_PR_SET_NAME = 15
# A guard that is killed is replaced. Whoever kills them all means it.
_MOST_REPLACED = 100

_libc = ctypes.CDLL(None, use_errno=True)


class Guard:
    """Waits until the launcher's end of a pipe closes, and ends what belongs to the job unless `close` was called."""

    # It does not have the launcher's name, so that `pkill -9 kvhvdrun` does not hit both.

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
        os.setsid()  # out of reach of the terminal's Ctrl-C
        # Holding the launcher's streams would keep `kvhvdrun ... | reader` open after the launcher's death; and holding
        # its sockets, others would take it for alive.
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        for fd in sorted(int(entry) for entry in os.listdir("/proc/self/fd")):
            if fd > 2 and fd != read:
                with contextlib.suppress(OSError):  # that of the listing itself
                    os.close(fd)
        _rename(f"job-guard of {launcher}".encode())
        text = b""
        while data := os.read(read, 4096):
            text += data
        if not text:
            Remains(self._variable, self._grace_s).finish()


def _rename(name: bytes) -> None:
    """Change the name of this process, and its command line, which lies where the kernel has put it."""
    _libc.prctl(_PR_SET_NAME, name, 0, 0, 0)  # its first 15 bytes
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # fields 48 and 49 of proc(5): arg_start, arg_end
    if 0 < start < end:
        ctypes.memset(start, 0, end - start)
        ctypes.memmove(start, name, min(len(name), end - start - 1))
