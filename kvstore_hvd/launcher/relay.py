"""Carry what the workers write to the launcher's own streams.

Threads write, one for each stream: neither a disk that stalls nor a reader that stands still holds the launcher up.
When so much waits to be written that memory would grow, the workers' streams are read no longer until some of it is
written, and a worker that writes more waits as it would for a slow reader of its own.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import select
import struct
import termios
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvstore_hvd.launcher.output import LineStream, Sink
from kvstore_hvd.launcher.writer import Wake, Writer

__all__ = ["Relay", "RelayHandler"]

# Reading from workers stops while this much waits to be written.
_MAX_PENDING = 1 << 18
# What a writer is given at once.
_CHUNK = 1 << 16
# An unfinished line is shown on a terminal after this long: it may be a prompt.
_PROMPT_S = 0.2


@dataclass(eq=False)
class _Output:
    """One of the launcher's own streams."""

    fd: int
    sink: Sink
    terminal: bool
    writer: Writer

    @property
    def pending(self) -> int:
        """Bytes that are not written yet."""
        return 0 if self.sink.closed else len(self.sink.pending) + self.writer.pending


@dataclass
class _Input:
    """The launcher's end of one stream of a worker."""

    stream: LineStream
    output: _Output
    prefix_width: int
    terminal: bool
    since: float = 0.0  # when the unfinished line grew last

    @property
    def may_be_prompt(self) -> bool:
        return self.output.terminal and self.stream.holds


class Relay:
    """Reads from all workers and writes to stdout and stderr, without ever blocking on either."""

    def __init__(self, wake: int) -> None:
        self._inputs: dict[int, _Input] = {}
        self._outputs: dict[int, _Output] = {}
        self._lost: list[tuple[int, OSError]] = []
        self._kept: list[Writer] = []  # of files
        self._progress = Wake()
        self._poll = select.poll()
        self._poll.register(wake, select.POLLIN)
        self._poll.register(self._progress, select.POLLIN)

    def connect(self, fd: int, prefix: bytes, *on_line: Callable[[bytes], None]) -> int:
        """Make the way from a worker's stdout or stderr to ours: a terminal if ours is one, else a pipe."""
        output = self._output(fd)
        terminal = False
        if output.terminal:
            try:
                ours, theirs = os.openpty()
                terminal = True
            except OSError:  # no pseudo-terminals in this container
                ours, theirs = os.pipe()
        else:
            ours, theirs = os.pipe()
        if terminal:
            attributes = termios.tcgetattr(theirs)
            attributes[1] &= ~termios.OPOST  # bytes pass as they are
            termios.tcsetattr(theirs, termios.TCSANOW, attributes)
            _copy_window_size(output.fd, theirs, len(prefix))
        self._inputs[ours] = _Input(LineStream(output.sink, prefix, *on_line), output, len(prefix), terminal)
        self._poll.register(ours, select.POLLIN)
        return theirs

    def _output(self, fd: int) -> _Output:
        """The launcher's stream `fd`; one object for both if they are the same file, so that lines do not mix."""
        for known in self._outputs.values():
            if known.fd == fd or os.path.sameopenfile(known.fd, fd):
                self._outputs[fd] = known
                return known
        self._outputs[fd] = _Output(fd, Sink(), os.isatty(fd), Writer(self._progress.set))
        return self._outputs[fd]

    def new_writer(self) -> Writer:
        """A writer for files in which the workers' output is kept: as our own streams in all that follows."""
        self._kept.append(Writer(self._progress.set))
        return self._kept[-1]

    # -- State ----------------------------------------------------------------------------------------------------

    @property
    def reading(self) -> bool:
        """Whether any stream of a worker is still open."""
        return bool(self._inputs)

    @property
    def held_up(self) -> bool:
        """Whether some stream of a worker is not read, because too much waits to be written."""
        return bool(self._full())

    @property
    def pending(self) -> bool:
        """Whether anything waits to be written."""
        return any(each.pending for each in self._outputs.values()) or any(each.pending for each in self._kept)

    def within_line(self, fd: int) -> bool:
        """Whether the last line on our stream `fd` is unfinished."""
        return fd in self._outputs and self._outputs[fd].sink.within_line

    def take_lost(self) -> list[tuple[int, OSError]]:
        """Our streams that can be written no longer, and why; each is told once."""
        self._collect()
        lost, self._lost = self._lost, []
        return lost

    # -- Work -----------------------------------------------------------------------------------------------------

    def say(self, text: str) -> None:
        """Put a line of the launcher's own on stderr, in order with what the workers write there."""
        self.tell(f"kvhvdrun: {text}".encode("utf-8", "surrogateescape"))

    def tell(self, *lines: bytes) -> None:
        """As `say`, with whole lines; their ends are added."""
        LineStream(self._output(2).sink, b"").feed(b"".join(line + b"\n" for line in lines))

    def insert(self, fd: int, data: bytes) -> None:
        """Put data before everything that waits to be written to our stream `fd`: it belongs to no line."""
        self._output(fd).sink.pending[:0] = data

    def push(self, fd: int) -> None:
        """Have what waits to be written to our stream `fd` written before what is read from now on."""
        self._hand_over(self._output(fd))

    def wait(self, seconds: float | None) -> None:
        """Wait until something can be read, written or shown, at most `seconds` (None: without limit), and do it."""
        now = time.monotonic()
        unread = set(self._full())  # what ends a line may be there: it is no prompt
        prompts = [source for fd, source in self._inputs.items() if source.may_be_prompt and fd not in unread]
        times = [max(0.0, source.since + _PROMPT_S - now) for source in prompts]
        if seconds is not None:
            times.append(seconds)
        for fd, _ in self._poll_once(min(times) if times else None):
            if fd in self._inputs:
                self._read(fd)
        now = time.monotonic()
        for fd, source in self._inputs.items():
            if fd in unread:
                source.since = now
            elif source.may_be_prompt and now >= source.since + _PROMPT_S:
                source.stream.flush()

    def flush(self) -> None:
        """Pass unfinished lines on: nothing follows."""
        for source in self._inputs.values():
            source.stream.flush()

    def drop(self) -> None:
        """Give up what has not been written, and all that would follow."""
        for output in self._outputs.values():
            _close_sink(output)
        for writer in self._kept:
            writer.drop()

    def resize(self) -> None:
        """Our terminal has another size: so have the workers'."""
        for fd, source in self._inputs.items():
            if source.terminal:
                _copy_window_size(source.output.fd, fd, source.prefix_width)

    def close(self) -> None:
        """Stop reading from the workers. What is still to be written is: nobody may wait for that any more."""
        for fd in self._inputs:
            os.close(fd)
        self._inputs.clear()
        for writer in (*(output.writer for output in self._outputs.values()), *self._kept):
            writer.close()

    def _poll_once(self, seconds: float | None) -> list[tuple[int, int]]:
        for output in self._outputs.values():
            self._hand_over(output)
        full = self._full()
        for fd in full:
            self._poll.unregister(fd)
        try:
            # Rounded up: waking before the time would spin.
            return self._poll.poll(int(seconds * 1000) + 1 if seconds else seconds)
        finally:
            for fd in full:
                self._poll.register(fd, select.POLLIN)
            self._progress.clear()
            self._collect()

    def _full(self) -> list[int]:
        """Our ends of the streams that must not be read now."""
        is_full = any(writer.pending > _MAX_PENDING for writer in self._kept)
        return [fd for fd, source in self._inputs.items() if is_full or source.output.pending > _MAX_PENDING]

    def _read(self, fd: int) -> None:
        source = self._inputs[fd]
        try:
            data = os.read(fd, 1 << 16)
        except OSError as error:
            if error.errno != errno.EIO:  # how a terminal says that its other end is closed
                raise
            data = b""
        if data:
            source.stream.feed(data)
            source.since = time.monotonic()
            return
        source.stream.flush()
        self._poll.unregister(fd)
        del self._inputs[fd]
        os.close(fd)

    @staticmethod
    def _hand_over(output: _Output) -> None:
        # One chunk at a time: `insert` puts things before all that waits.
        if output.sink.pending and not output.writer.pending:
            output.writer.put(output.fd, bytes(output.sink.pending[:_CHUNK]))
            del output.sink.pending[:_CHUNK]

    def _collect(self) -> None:
        """Hear from the writers what could not be written."""
        for output in set(self._outputs.values()):
            for fd, error in output.writer.take_lost():
                _close_sink(output)
                self._lost.append((fd, error))


class RelayHandler(logging.Handler):
    """Puts diagnostics in order with what the workers write; who reads neither does not hold the process up."""

    def __init__(self, relay: Relay, head: str = "") -> None:
        super().__init__()
        self._relay, self._head = relay, head

    def emit(self, record: logging.LogRecord) -> None:
        """As `logging.Handler.emit`."""
        self._relay.say(f"{self._head}{record.getMessage()}")


def _close_sink(output: _Output) -> None:
    output.sink.pending.clear()
    output.sink.closed = True
    output.writer.drop()


def _copy_window_size(source: int, target: int, used: int) -> None:
    """Give a terminal the size of another, less the columns that the prefix takes."""
    try:
        rows, columns, x, y = struct.unpack("HHHH", fcntl.ioctl(source, termios.TIOCGWINSZ, b"\0" * 8))
        fcntl.ioctl(target, termios.TIOCSWINSZ, struct.pack("HHHH", rows, max(columns - used, 1), x, y))
    except OSError:
        pass
