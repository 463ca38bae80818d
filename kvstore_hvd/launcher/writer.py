"""Writing that nobody waits for: a disk may stall, and a reader may stand still."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import threading
import time
from collections.abc import Callable

from kvstore_hvd.errors import LaunchError, message

__all__ = ["Wake", "Writer", "write_within"]

# While the only thing to do is to wait for a writer.
_LOOK_S = 0.01


class Wake:
    """A descriptor that can be read once `set` was called, from any thread. It stays open until the process ends."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        for fd in (self._reader, self._writer):
            os.set_blocking(fd, False)

    def fileno(self) -> int:
        """The descriptor."""
        return self._reader

    def set(self) -> None:
        """Make the descriptor readable."""
        with contextlib.suppress(BlockingIOError):  # then it is readable already
            os.write(self._writer, b"\0")

    def clear(self) -> None:
        """Until the next `set` it is not readable any more."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 4096)


class Writer:
    """Writes to descriptors, in order, on a thread of its own, which begins with the first `put`."""

    # Its owner bounds the memory: by what it puts while much is `pending`. The thread does not keep the process from
    # ending.

    def __init__(self, on_progress: Callable[[], None] = lambda: None) -> None:
        self._on_progress = on_progress
        self._queue: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending = 0
        self._failed: set[int] = set()
        self._lost: list[tuple[int, OSError]] = []
        self._dropped = False
        self._thread: threading.Thread | None = None

    @property
    def pending(self) -> int:
        """Bytes that were put and are not written yet."""
        with self._lock:
            return 0 if self._dropped else self._pending

    @property
    def is_idle(self) -> bool:
        """Whether the thread is at nothing, and will not be."""
        with self._lock:
            return not self._pending

    def put(self, fd: int, data: bytes) -> None:
        """Have `data` written. It is dropped if something could not be written to this descriptor before."""
        with self._lock:
            if self._dropped or not data:
                return
            self._pending += len(data)
        self._queue.put((fd, data))
        if self._thread is None:
            self._start()

    def take_lost(self) -> list[tuple[int, OSError]]:
        """The descriptors that can be written no longer, and why; each is told once."""
        with self._lock:
            lost, self._lost = self._lost, []
            return lost

    def drop(self) -> None:
        """Give up what is not written yet, but for what the thread is at, and all that would follow."""
        with self._lock:
            self._dropped = True

    def wait(self, limit_s: float) -> bool:
        """Wait until all is written, or dropped; returns False when it is not within so many seconds."""
        end = time.monotonic() + limit_s
        while self.pending:
            if time.monotonic() >= end:
                return False
            time.sleep(_LOOK_S)
        return True

    def close(self) -> None:
        """The thread ends once everything is written."""
        self._queue.put(None)

    def _start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="kvstore_hvd-writer", daemon=True)
        # Signals are for the main thread; but a background job is stopped by SIGTTOU when its terminal wants that.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() - {signal.SIGTTOU})
        try:
            self._thread.start()
        except RuntimeError as error:
            self._thread = None
            fix = "allow more processes and threads (ulimit -u, and pids.max of the control group)."
            raise LaunchError(message("the system refuses a thread that writes output.", fix=fix)) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            fd, data = item
            error = None
            if not self._dropped and fd not in self._failed:
                try:
                    _write_all(fd, data)
                except OSError as caught:
                    error = caught
                    self._failed.add(fd)
            with self._lock:
                self._pending -= len(data)
                if error is not None:
                    self._lost.append((fd, error))
            self._on_progress()


def write_within(fd: int, data: bytes, limit_s: float) -> bool:
    """Write `data`, and wait for that for so many seconds at most; returns whether all was written."""
    writer = Writer()
    writer.put(fd, data)
    is_through = writer.wait(limit_s)
    writer.drop()
    writer.close()
    return is_through and not writer.take_lost()


def _write_all(fd: int, data: bytes) -> None:
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:  # somebody who shares it has set that it does not block
            poll = select.poll()
            poll.register(fd, select.POLLOUT)
            poll.poll()
