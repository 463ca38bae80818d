"""The output of workers on the launcher's streams and in files: whole lines, each with the rank in front.

Errors that several workers print at about the same time in equal words are shown once, with all of their ranks.
No write waits for a slow reader. Pipes and terminals are opened again for that, because O_NONBLOCK would hold for all
processes that share a descriptor. Regular files are written at once.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import re
import select
import stat
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from kvstore_hvd.base.channel import Poller
from kvstore_hvd.errors import LaunchError, message, printable, rank_list

_MOST_PENDING = 1 << 18  # workers are not read while so many bytes wait to be written
_MOST_EVENTS = 1 << 22  # the event log ends once so many bytes of it wait: an event takes some hundred
_CHUNK = 1 << 16
# A carriage return ends a piece, too, so that progress bars move. At the end of the data it may be half of "\r\n".
_END = re.compile(rb"\r\n|\n|\r(?!\Z)")
_MOST_HELD = 1 << 20  # a longer line is passed on in parts
_PROMPT_S = 0.2  # an unfinished line is shown on a terminal after this time: it may be a prompt
_TAIL_LINES, _TAIL_BYTES = 20, 8192
_IN_SIGHT = 40  # lines of a terminal, about
# Python's words for an exception that it ignores, before a traceback as for any other.
_IGNORED = b"Exception ignored in", b"Error in atexit"  # the second: Python 3.9
_TRACE = b"Traceback (most recent call last):"
# How a program's last words begin: an error of Python, of its command line, or of this package at its end.
_BEGINNINGS = re.escape(_TRACE) + rb'|  File "|usage: |\S*python\S*: |\[rank \d+/\d+\] kvstore_hvd error: '
_LAST_WORDS = re.compile(rb"^(?:" + _BEGINNINGS + rb")", re.M)
_OWN_RANK = re.compile(rb"\[rank (\d+)/")
_MORE_FAILED = re.compile(rb"  \(\d+ other operations? failed too\.\)\n")  # native/mxnet/errors.cpp; a matter of time
_JOIN_S = 0.5  # last words are held back for this time, until other workers have said the same
_MOST_WORDS = 1 << 16
_Take = Callable[[bytes], None]
_ERASE, _DIM, _PLAIN = b"\r\x1b[K", b"\x1b[2m", b"\x1b[0m"


class Sink:
    """A file that is written without waiting for a reader; `name` is for messages."""

    def __init__(self, fd: int, name: str) -> None:
        self.name = name
        self.pending = bytearray()
        self.lost: OSError | None = None  # why it cannot be written any more
        self.open_line: LineStream | None = None  # the stream of an unfinished last line
        self.terminal = os.isatty(fd)
        self.poll_fd = -1  # -1: it is written at once
        self._dropped = False
        self._shown = b""  # the status line
        self._write = self._way(fd)

    def _way(self, fd: int) -> Callable[[bytes], int]:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISFIFO(mode) and not stat.S_ISSOCK(mode) and not self.terminal:
            return lambda data: os.write(fd, data)
        self.poll_fd = fd
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        with contextlib.suppress(OSError):  # it is a socket, or another user's, or nobody reads it
            self.poll_fd = own = os.open(f"/proc/self/fd/{fd}", flags)
            return lambda data: os.write(own, data)
        poll = select.poll()
        poll.register(fd, select.POLLOUT)
        return lambda data: os.write(fd, data[: select.PIPE_BUF]) if poll.poll(0) else 0

    def put(self, data: bytes) -> None:
        if not self._dropped:
            if self._shown:
                self.pending += _ERASE
                self._shown = b""
            self.pending += data

    def show(self, line: bytes) -> None:
        """Keep a status line below all output; an empty one removes it."""
        if line != self._shown and not self.pending and self.open_line is None and not self._dropped:
            self.pending += _ERASE + (_DIM + line + _PLAIN if line else b"")
            self._shown = line

    def flush(self) -> None:
        try:
            while self.pending and (written := self._write(bytes(self.pending[:_CHUNK]))):
                del self.pending[:written]
        except BlockingIOError:
            pass
        except OSError as error:
            self.lost = error
            self.drop()

    def drop(self) -> None:
        """Drop all that has not been written, and all that would follow."""
        self._dropped = True
        self.pending.clear()


class LineStream:
    """One stream of a worker, cut into lines; each is passed to all of `on_line`, too."""

    def __init__(
        self, sink: Sink, prefix: bytes = b"", *on_line: _Take, timestamps: bool = False, shown: bool = True
    ) -> None:
        self._sink, self._prefix, self._on_line = sink, prefix, on_line
        self._timestamps, self._shown = timestamps, shown
        self._at_start = True
        self._held = b""  # the unfinished line
        self._since = 0.0  # time of its last growth

    def feed(self, data: bytes) -> None:
        """Take output in pieces of any size; pass whole lines on."""
        # No line ends in `_held`, unless its last byte begins "\r\n".
        text, start, unseen = self._held + data, 0, max(len(self._held) - 1, 0)
        if text.find(b"\r", unseen) < 0:
            start = text.rfind(b"\n", unseen) + 1
            self._pass(text[:start])
        else:
            for match in _END.finditer(text, unseen):
                self._pass(text[start : match.end()])
                start = match.end()
        self._held = text[start:]
        self._since = time.monotonic()
        if len(self._held) > _MOST_HELD:
            self.flush()

    def flush(self) -> None:
        """Pass the unfinished line on: a prompt, or the last words of a worker."""
        if self._held:
            piece, self._held = self._held, b""
            self._pass(piece)

    def show_prompt(self, now: float) -> float:
        """Pass the unfinished line on if it is time; returns the seconds until it will be."""
        wait_s = self._since + _PROMPT_S - now if self._held and self._sink.terminal else float("inf")
        if wait_s > 0:
            return wait_s
        self.flush()
        return float("inf")

    def _pass(self, piece: bytes) -> None:
        if not piece:
            return
        for tell in self._on_line:
            tell(piece)
        if self._shown:
            self.write(piece)

    def write(self, piece: bytes) -> None:
        """Write lines with their prefix, or a part of one."""
        sink, prefix = self._sink, (_time() if self._timestamps else b"") + self._prefix
        if sink.open_line not in (None, self):
            sink.put(b"\n")
            sink.open_line = None
        # The rest of a line has its prefix already.
        begins = sink.open_line is None or self._at_start
        prefixed = piece[:-1].replace(b"\n", b"\n" + prefix) + piece[-1:] if prefix else piece
        sink.put(prefix + prefixed if begins else prefixed)
        self._at_start = piece.endswith((b"\n", b"\r"))
        sink.open_line = None if piece.endswith(b"\n") else self


def _time() -> bytes:
    now = time.time()
    return time.strftime(f"%Y-%m-%d %H:%M:%S.{int(now % 1 * 1000):03d} ", time.localtime(now)).encode()


def _opened(option: str, path: str, kind: str) -> int:
    """The descriptor of a new file, with a new folder if the user has named a folder."""
    try:
        if kind == "folder":
            os.makedirs(os.path.dirname(path), exist_ok=True)
        # O_NONBLOCK: a pipe may have no reader.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        return os.open(path, flags, 0o666)
    except OSError as error:
        is_pipe = error.errno == errno.ENXIO
        why = "is a pipe that nobody reads" if is_pipe else f"cannot be made: {error.strerror}"
        fact = f"{option}: '{error.filename}' {why}."
        raise LaunchError(message(fact, fix=f"name another {kind}.")) from None


class _Words(NamedTuple):
    """Last words of a worker that are held back until then."""

    until: float
    text: bytearray


def _shared(words: _Words) -> tuple[bytes, set[int]]:
    """What other workers may say, too: the text without this worker's rank; and that rank, if it is there."""
    found, text = _OWN_RANK.search(words.text), _MORE_FAILED.sub(b"", words.text)
    return (text.replace(found[0], b"[rank \0/"), {int(found[1])}) if found else (text, set())


def _short(numbers: Iterable[int]) -> bytes:
    """Numbers of ranks: ``0-2,5``."""
    return rank_list(numbers).partition(" ")[2].replace(" ", "").encode()


class Output:
    """The launcher's streams, the files of ``--output-filename`` for so many ranks, and the event log."""

    # A line of the event log has ``time`` (seconds since 1970), ``monotonic`` (``time.monotonic()`` of this host),
    # ``event`` and the fields of that event.

    def __init__(self, poller: Poller, options: Namespace, count: int) -> None:
        self._poller, self._timestamps, self._shown_ranks = poller, options.timestamps, options.ranks
        self._ours = {1: Sink(1, "standard output")}
        # The same sink if both are one file, so that lines do not mix.
        self._ours[2] = self._ours[1] if os.path.sameopenfile(1, 2) else Sink(2, "standard error")
        self._files: dict[tuple[int, int], Sink] = {}
        self._log: Sink | None = None
        self._streams: dict[tuple[int, int], LineStream] = {}
        self._writers: dict[tuple[int, int], LineStream] = {}
        self._tails: dict[int, Tail] = {}
        self._lines_shown = 0
        self.is_quiet = True  # no worker has written anything
        self._spoken: dict[int, int] = {}  # by worker: the number of its last line on stderr that was shown
        self._words: dict[int, _Words] = {}  # by worker
        folder = options.output_filename
        if options.event_log is not None:
            self._log = Sink(_opened("--event-log", options.event_log, "file"), "the event log")
        for rank in range(count if folder is not None else 0):
            path = os.path.join(folder, f"rank.{rank:0{len(str(count - 1))}d}")
            for fd, name in ((1, "stdout"), (2, "stderr")):
                file = _opened("--output-filename", os.path.join(path, name), "folder")
                self._files[rank, fd] = Sink(file, f"{name} of rank {rank}")
        log = [self._log] if self._log is not None else []
        self._sinks = list(dict.fromkeys([*self._ours.values(), *self._files.values(), *log]))

    def add(self, worker: int, prefix: bytes) -> None:
        self._tails[worker] = Tail()
        shown = self._shown_ranks is None or worker in self._shown_ranks
        for fd in (1, 2):
            kept: list[_Take] = [self._tails[worker].add] if fd == 2 else []
            kept += [self._files[worker, fd].put] if self._files else []
            self._writers[worker, fd] = LineStream(self._ours[fd], prefix, timestamps=self._timestamps)
            may_join = fd == 2 and bool(prefix) and not self._timestamps
            kept += [functools.partial(self._show, worker, fd, may_join)] if shown else []
            self._streams[worker, fd] = LineStream(self._ours[fd], b"", *kept, shown=False)

    def _show(self, worker: int, fd: int, may_join: bool, piece: bytes) -> None:
        """Write output of a worker, or hold last words back."""
        words, begin = self._words.get(worker), _LAST_WORDS.search(piece) if may_join else None
        if words is None and begin is not None:
            self._write(worker, fd, piece[: begin.start()])
            words = self._words[worker] = _Words(time.monotonic() + _JOIN_S, bytearray())
            piece = piece[begin.start() :]
        if words is not None and may_join and len(words.text) + len(piece) < _MOST_WORDS:
            words.text.extend(piece)
            return
        self._release(worker)  # what a worker writes stays in order
        self._write(worker, fd, piece)

    def _write(self, worker: int, fd: int, piece: bytes, *others: int) -> None:
        if not piece:
            return
        self.is_quiet = False
        prefix = b"[%s] " % _short([worker, *others])
        (LineStream(self._ours[fd], prefix) if others else self._writers[worker, fd]).write(piece)
        self._lines_shown += piece.count(b"\n")
        self._spoken.update(dict.fromkeys([worker, *others] if fd == 2 else [], self._lines_shown))

    def _release(self, *workers: int) -> None:
        """Write last words that are held back, once for all workers that have said the same."""
        shared = {each: _shared(words) for each, words in self._words.items()} if self._words.keys() & workers else {}
        for worker in workers:
            if worker not in self._words:
                continue
            words, text = self._words.pop(worker), shared[worker][0]
            others = [each for each in self._words if shared[each][0] == text and text.endswith(b"\n")]
            for each in others:
                del self._words[each]
            ranks = _short(rank for each in (worker, *others) for rank in shared[each][1])
            joined = text.replace(b"[rank \0/", b"[rank %s/" % ranks)
            self._write(worker, 2, joined if others else bytes(words.text), *others)

    def is_in_sight(self, worker: int) -> bool:
        """Whether the last lines of a worker on stderr are the last ones that were shown, or not long before."""
        is_whole = worker in self._spoken and not self._tails[worker].leaves_out
        return is_whole and self._lines_shown - self._spoken[worker] < _IN_SIGHT

    def last_lines(self, worker: int) -> list[str]:
        return self._tails[worker].lines() if worker in self._tails else []

    def feed(self, worker: int, fd: int, data: bytes) -> None:
        """Take output of a worker; empty data closes the stream."""
        stream = self._streams.get((worker, fd))
        if stream is not None and data:
            stream.feed(data)
        elif stream is not None:
            stream.flush()
            del self._streams[worker, fd]

    def say(self, text: str) -> None:
        """Put a line of the launcher on stderr, in order with the output of workers."""
        self._release(*self._words)
        line = f"kvhvdrun: {printable(text)}\n".encode("utf-8", "surrogateescape")
        LineStream(self._ours[2], timestamps=self._timestamps).feed(line)

    def log(self, event: str, fields: Mapping[str, Any]) -> None:
        if self._log is None:
            return
        if len(self._log.pending) > _MOST_EVENTS:
            self.finish_log()
        head = {"time": round(time.time(), 6), "monotonic": round(time.monotonic(), 6), "event": event}
        self._log.put(json.dumps({**head, **fields}).encode() + b"\n")

    def show(self, text: str) -> None:
        """Show the status line if stderr is a terminal."""
        if self.on_terminal:
            # Bytes of other processes must not control the terminal.
            shown = "".join(letter if letter.isascii() and letter.isprintable() else "?" for letter in text)
            self._ours[2].show(shown[: max(2, os.get_terminal_size(2).columns or 80) - 1].encode())

    def step(self) -> float:
        """Write, and show prompts, before each wait; returns the seconds until the next prompt."""
        now = time.monotonic()
        # While workers are not read, the end of a line may be unread: the line is no prompt.
        streams = [] if self.held_up else self._streams.values()
        wait_s = min((stream.show_prompt(now) for stream in streams), default=float("inf"))
        self._release(*[worker for worker, words in self._words.items() if words.until <= now])
        wait_s = min([wait_s, *(words.until - now for words in self._words.values())])
        for sink in self._sinks:
            sink.flush()
            if sink.poll_fd >= 0 and sink.pending:
                self._poller.watch(sink.poll_fd, sink.flush, select.EPOLLOUT)
            elif sink.poll_fd >= 0:
                self._poller.forget(sink.poll_fd)
        return wait_s

    @property
    def on_terminal(self) -> bool:
        return self._ours[2].terminal

    @property
    def held_up(self) -> bool:
        """Whether workers must not be read: too much waits to be written."""
        return any(len(sink.pending) > _MOST_PENDING for sink in self._sinks if sink is not self._log)

    @property
    def pending(self) -> bool:
        return any(sink.pending for sink in self._sinks)

    def finish_log(self) -> None:
        if self._log is not None and self._log.pending:
            self._log.drop()
            self._log.lost = OSError(errno.ETIMEDOUT, "it takes too long")

    def flush_lines(self) -> None:
        for stream in self._streams.values():
            stream.flush()
        self._streams.clear()
        self._release(*self._words)

    def drop(self) -> None:
        """Drop the output that waits to be written, and all that would follow."""
        for sink in self._sinks:
            if sink is not self._log:
                sink.drop()

    def take_lost(self) -> list[tuple[bool, str]]:
        """The files that cannot be written any more: whether our reader has gone, and a text; each only once."""
        lost = []
        for sink in self._sinks:
            if sink.lost is not None:
                ours = sink in self._ours.values()
                what = "What the workers write there from here on is lost" if ours else "What follows is lost there"
                where = "" if ours or sink is self._log else " to its file"
                text = f"{sink.name} cannot be written{where}: {sink.lost.strerror}. {what}."
                lost.append((ours and sink.lost.errno == errno.EPIPE, text))
                sink.lost = None
        return lost


class Tail:
    """The last lines of a stream, bounded in number and bytes, without pieces that a carriage return overwrote."""

    # Exceptions that Python ignores, as in exit handlers, are left out: below the exception that ended the program,
    # they would pass for the cause.

    def __init__(self) -> None:
        self._is_ignored = self._has_text = False  # within an ignored exception; its traceback is over
        self.leaves_out = False  # ignored exceptions
        self._lines: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self._part = b""

    def add(self, piece: bytes) -> None:
        for line in piece.splitlines(keepends=True):
            if line.endswith(b"\n"):
                self._add((self._part + line.rstrip(b"\r\n"))[-_TAIL_BYTES:])
                self._part = b""
            elif line.endswith(b"\r"):
                self._part = b""
            else:
                self._part = (self._part + line)[-_TAIL_BYTES:]

    def _add(self, line: bytes) -> None:
        if line.startswith(_IGNORED):
            self._is_ignored, self._has_text, self.leaves_out = True, False, True
        elif self._is_ignored:
            self._is_ignored = not self._has_text or line.startswith(b" ")
            self._has_text = self._has_text or not (line.startswith(b" ") or line.endswith(_TRACE))
        if not self._is_ignored:
            self._lines.append(line)

    def lines(self) -> list[str]:
        """The lines, oldest first, without their ends; at most 8 KiB together."""
        text = b"\n".join([*self._lines, *([self._part] if self._part else [])])[-_TAIL_BYTES:]
        return text.decode("utf-8", "replace").split("\n") if text else []
