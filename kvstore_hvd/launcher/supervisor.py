"""The loop of kvhvdrun: start workers, pass output and signals on, end all when one fails, clean up."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import signal
import socket
import stat
import struct
import sys
import termios
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvstore_hvd.launcher import processes
from kvstore_hvd.launcher.output import LineStream, Sink, Tail

__all__ = ["Limits", "Plan", "Supervisor", "WorkerPlan"]

# Ask workers to end; who does not is killed after the grace.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED = (signal.SIGUSR1, signal.SIGUSR2)
_OWN = (signal.SIGCHLD, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)
# Not the first cause of a failure: a worker that ends with it tells of another's end.
_SECONDARY = b"PeerLostError"
# Reading from workers stops while this much waits to be written.
_MAX_PENDING = 1 << 18
# An unfinished line is shown on a terminal after this long: it may be a prompt.
_PROMPT_S = 0.2
# Once all processes are gone, how long a pipe may stay open (held by a process of another user).
_DRAIN_S = 2.0


@dataclass(frozen=True)
class Limits:
    """Seconds: what the others get after a failure to end on their own, and then between SIGTERM and SIGKILL."""

    survivor_time_s: float
    kill_grace_s: float


@dataclass(frozen=True)
class WorkerPlan:
    """How to start one worker."""

    command: Sequence[str]
    environment: dict[str, str]
    cores: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """How to start a job. `variable` is the environment entry (``b'NAME=value'``) that all of its processes carry."""

    workers: Sequence[WorkerPlan]
    variable: bytes
    limits: Limits
    capture: bool = True  # False: the workers write straight to the launcher's streams
    prefix: bool = True
    verbose: bool = False


@dataclass
class _Worker:
    rank: int
    pid: int = 0
    code: int | None = None  # exit code, or -signal; None while it runs
    ended_by_us: bool = False
    tail: Tail = field(default_factory=Tail)


@dataclass
class _Input:
    """The launcher's end of one stream of a worker."""

    stream: LineStream
    sink: _Output
    prefix_width: int
    terminal: bool
    since: float = 0.0  # when the unfinished line grew last


@dataclass
class _Output:
    """One of the launcher's own streams."""

    fd: int
    sink: Sink
    terminal: bool
    chunk: int


class Supervisor:
    """Runs one job; use once. Call from the main thread, with no other threads running."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._workers: list[_Worker] = []
        self._ended: list[_Worker] = []  # in the order in which they ended
        self._inputs: dict[int, _Input] = {}
        self._outputs: dict[int, _Output] = {}
        self._stop_at: float | None = None
        self._kill_at: float | None = None
        self._asked: int | None = None  # the first signal that asked the job to end
        self._gone_at: float | None = None  # when the last process of the job was gone
        self._poll = select.poll()
        self._wake: socket.socket

    def run(self) -> int:
        """Run the job to its end.

        Returns
        -------
        int
            0 when every worker returned 0; otherwise the exit code of the worker that failed first, 128 + n when
            signal n killed it.

        Raises
        ------
        OSError
            A worker could not be started; those already running have been killed.
        """
        processes.adopt_orphans()
        guard = processes.Guard(self._plan.variable)
        restore = self._catch_signals()
        try:
            self._start(guard)
            self._loop(guard)
        finally:
            self._sweep(guard)
            self._reap()
            guard.close()
            restore()
            for fd in list(self._inputs):
                os.close(fd)
        self._last_words()
        return self._exit_code()

    # -- Start ----------------------------------------------------------------------------------------------------

    def _catch_signals(self) -> Callable[[], None]:
        """Have signals arrive as bytes on a socket that the loop polls; returns how to undo it."""
        self._wake, writer = socket.socketpair()
        self._wake.setblocking(False)
        writer.setblocking(False)
        before = {}
        for number in (*_ENDING, *_PASSED, *_OWN):
            # What is ignored stays ignored, for the workers too: nohup, and background jobs of simple shells.
            if signal.getsignal(number) is not signal.SIG_IGN:
                before[number] = signal.signal(number, lambda number, frame: None)
        old = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._poll.register(self._wake, select.POLLIN)

        def restore() -> None:
            signal.set_wakeup_fd(old)
            for number, handler in before.items():
                signal.signal(number, handler)
            self._wake.close()
            writer.close()

        return restore

    def _start(self, guard: processes.Guard) -> None:
        for rank, plan in enumerate(self._plan.workers):
            worker = _Worker(rank)
            ends: list[int] = []
            try:
                stdout = self._pipe(worker, 1, ends) if self._plan.capture else None
                stderr = self._pipe(worker, 2, ends) if self._plan.capture else None
                stdin = None
                if rank > 0:
                    stdin = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                    ends.append(stdin)
                worker.pid = processes.spawn(plan.command, plan.environment, stdin, stdout, stderr, plan.cores)
            finally:
                for fd in ends:
                    os.close(fd)
            guard.add(worker.pid)
            self._workers.append(worker)
            if self._plan.verbose:
                self._say(f"rank {rank} is process {worker.pid}")

    def _pipe(self, worker: _Worker, fd: int, ends: list[int]) -> int:
        """Make the way from a worker's stdout or stderr to ours: a terminal if ours is one, else a pipe."""
        output = self._output(fd)
        prefix = f"[{worker.rank}] ".encode() if self._plan.prefix else b""
        terminal = False
        if output.terminal:
            try:
                ours, theirs = os.openpty()
                terminal = True
            except OSError:  # no pseudo-terminals in this container
                ours, theirs = os.pipe()
        else:
            ours, theirs = os.pipe()
        ends.append(theirs)
        if terminal:
            attributes = termios.tcgetattr(theirs)
            attributes[1] &= ~termios.OPOST  # bytes pass as they are
            termios.tcsetattr(theirs, termios.TCSANOW, attributes)
            _copy_window_size(output.fd, theirs, len(prefix))
        stream = LineStream(output.sink, prefix, worker.tail.add if fd == 2 else None)
        self._inputs[ours] = _Input(stream, output, len(prefix), terminal)
        self._poll.register(ours, select.POLLIN)
        return theirs

    def _output(self, fd: int) -> _Output:
        """The launcher's stream `fd`; one object for both if they are the same file, so that lines do not mix."""
        for known in self._outputs.values():
            if known.fd == fd or os.path.sameopenfile(known.fd, fd):
                self._outputs[fd] = known
                return known
        # A pipe that can be written takes PIPE_BUF bytes without blocking.
        chunk = select.PIPE_BUF if stat.S_ISFIFO(os.fstat(fd).st_mode) else 1 << 16
        self._outputs[fd] = _Output(fd, Sink(), os.isatty(fd), chunk)
        return self._outputs[fd]

    # -- The loop -------------------------------------------------------------------------------------------------

    def _loop(self, guard: processes.Guard) -> None:
        while True:
            self._reap()
            now = time.monotonic()
            if self._gone_at is None and all(worker.code is not None for worker in self._workers):
                self._sweep(guard)
                self._gone_at = now
            if self._gone_at is not None and (not self._inputs or now > self._gone_at + _DRAIN_S):
                for source in self._inputs.values():
                    source.stream.flush()
                if not self._any_pending():
                    return
            self._act_on_time(now)
            for fd, events in self._poll_once(self._next_event(now)):
                if fd == self._wake.fileno():
                    self._on_signals(self._wake.recv(4096))
                elif fd in self._inputs:
                    self._read(fd)
                elif events:
                    self._write(fd)

    def _next_event(self, now: float) -> float | None:
        """Seconds until something must be done even if nothing happens; None for never."""
        times = [t for t in (self._stop_at, self._kill_at) if t is not None]
        times += [source.since + _PROMPT_S for source in self._inputs.values() if self._may_be_prompt(source)]
        if self._gone_at is not None and self._inputs:
            times.append(self._gone_at + _DRAIN_S)
        return max(0.0, min(times) - now) if times else None

    def _poll_once(self, seconds: float | None) -> list[tuple[int, int]]:
        outputs = {output.fd: output for output in self._outputs.values()}
        for output in outputs.values():
            if output.sink.pending:
                self._poll.register(output.fd, select.POLLOUT)
        full = [fd for fd, source in self._inputs.items() if len(source.sink.sink.pending) > _MAX_PENDING]
        for fd in full:
            self._poll.unregister(fd)
        try:
            # Rounded up: waking before the time would spin.
            return self._poll.poll(None if seconds is None else int(seconds * 1000) + 1)
        finally:
            for fd in full:
                self._poll.register(fd, select.POLLIN)
            for output in outputs.values():
                if output.sink.pending:
                    self._poll.unregister(output.fd)

    def _may_be_prompt(self, source: _Input) -> bool:
        return source.sink.terminal and source.stream.holds

    def _act_on_time(self, now: float) -> None:
        if self._stop_at is not None and now >= self._stop_at:
            self._stop_at = None
            self._signal_all(signal.SIGTERM, ours=True)
            self._kill_at = now + self._plan.limits.kill_grace_s
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            self._signal_all(signal.SIGKILL, ours=True)
        for source in self._inputs.values():
            if self._may_be_prompt(source) and now >= source.since + _PROMPT_S:
                source.stream.flush()

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

    def _write(self, fd: int) -> None:
        output = next(output for output in self._outputs.values() if output.fd == fd)
        try:
            count = os.write(fd, output.sink.pending[: output.chunk])
        except BlockingIOError:
            return
        except OSError as error:
            # The reader has gone. Alone, the program would end by SIGPIPE; so does the job.
            output.sink.pending.clear()
            output.sink.closed = True
            if error.errno == errno.EPIPE:
                self._ask_to_end(signal.SIGPIPE, signal.SIGTERM)
            return
        del output.sink.pending[:count]

    def _any_pending(self) -> bool:
        return any(output.sink.pending for output in self._outputs.values())

    # -- Processes and signals ------------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Collect every child that has ended: workers, and orphans that we adopted."""
        workers = {worker.pid: worker for worker in self._workers}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            worker = workers.get(pid)
            if worker is not None and worker.code is None:
                self._on_end(worker, os.waitstatus_to_exitcode(status))

    def _on_end(self, worker: _Worker, code: int) -> None:
        worker.code = code
        self._ended.append(worker)
        if self._plan.verbose:
            self._say(f"rank {worker.rank} {_ending(code)}")
        # What it left behind may hold locks, ports, or the pipes that we read.
        with contextlib.suppress(OSError):
            os.killpg(worker.pid, signal.SIGKILL)
        if code != 0 and self._asked is None and self._stop_at is None and self._kill_at is None:
            self._stop_at = time.monotonic() + self._plan.limits.survivor_time_s

    def _on_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number in _ENDING:
                if number == signal.SIGINT and self._asked == signal.SIGINT:
                    self._signal_all(signal.SIGKILL, ours=True)
                    if self._gone_at is not None:  # only the reader of our output keeps us
                        for output in self._outputs.values():
                            output.sink.pending.clear()
                            output.sink.closed = True
                else:
                    self._ask_to_end(number, number)
            elif number in _PASSED:
                self._signal_all(number)
            elif number == signal.SIGTSTP:
                self._signal_all(signal.SIGSTOP)
                os.kill(os.getpid(), signal.SIGSTOP)
            elif number == signal.SIGCONT:
                self._signal_all(signal.SIGCONT)
            elif number == signal.SIGWINCH:
                for fd, source in self._inputs.items():
                    if source.terminal:
                        _copy_window_size(source.sink.fd, fd, source.prefix_width)

    def _ask_to_end(self, cause: int, number: int) -> None:
        if self._asked is None:
            self._asked = cause
            self._stop_at = None
        self._signal_all(number, ours=cause != number)
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self._plan.limits.kill_grace_s

    def _signal_all(self, number: int, *, ours: bool = False) -> None:
        """Send a signal to the groups of all workers that still run, as a terminal would."""
        for worker in self._workers:
            if worker.code is None:
                worker.ended_by_us = worker.ended_by_us or ours
                with contextlib.suppress(OSError):
                    os.killpg(worker.pid, number)

    def _sweep(self, guard: processes.Guard) -> None:
        """Kill everything of the job that still runs."""
        sessions = [worker.pid for worker in self._workers]

        def find() -> list[int]:
            self._reap()
            return processes.job_processes(self._plan.variable, sessions, os.getpid(), [guard.pid])

        processes.kill_job(find)

    # -- The end --------------------------------------------------------------------------------------------------

    def _culprit(self) -> _Worker | None:
        """The worker whose failure came first, not counting those that failed because another did."""
        failed = [worker for worker in self._ended if worker.code and not worker.ended_by_us]
        for worker in failed:
            if not any(_SECONDARY in line for line in worker.tail.lines()):
                return worker
        return failed[0] if failed else None

    def _exit_code(self) -> int:
        culprit = self._culprit()
        if culprit is not None and culprit.code is not None:
            return culprit.code if culprit.code > 0 else 128 - culprit.code
        if self._asked is not None and (self._asked == signal.SIGPIPE or any(worker.code for worker in self._ended)):
            return 128 + self._asked
        return 0

    def _last_words(self) -> None:
        worker = self._culprit()
        if worker is None or worker.code is None or self._asked is not None:
            return
        lines = worker.tail.lines()
        if not self._plan.capture and worker.code > 0:
            return  # its words have just been seen
        text = f"rank {worker.rank} of {len(self._workers)} (pid {worker.pid}) {_ending(worker.code)}."
        if len(self._workers) > 1:
            text += " Its last lines on stderr:" if lines else " It wrote nothing to stderr."
        block = [f"kvhvdrun: {text}".encode(), *(b"    " + line for line in lines)]
        start = b"\n" if self._plan.capture and self._output(2).sink.within_line else b""
        with contextlib.suppress(OSError):
            _write_all(2, start + b"\n".join(block) + b"\n")

    def _say(self, text: str) -> None:
        """Write a line of our own to stderr, in order with what the workers write there."""
        line = f"kvhvdrun: {text}\n".encode()
        if self._plan.capture:
            LineStream(self._output(2).sink, b"").feed(line)
        else:
            sys.stderr.flush()
            with contextlib.suppress(OSError):
                _write_all(2, line)


def _ending(code: int) -> str:
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _copy_window_size(source: int, target: int, used: int) -> None:
    """Give a terminal the size of another, less the columns that the prefix takes."""
    try:
        rows, columns, x, y = struct.unpack("HHHH", fcntl.ioctl(source, termios.TIOCGWINSZ, b"\0" * 8))
        fcntl.ioctl(target, termios.TIOCSWINSZ, struct.pack("HHHH", rows, max(columns - used, 1), x, y))
    except OSError:
        pass
