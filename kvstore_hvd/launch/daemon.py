"""The daemon of a job on one host.

It starts and reaps the workers of its host for the launcher, and passes on their output, and messages between them and
the launcher. It outlives the launcher: when the launcher has ended or been silent for the length of the lease, the
daemon ends the workers and itself. On the launcher's host it is a fork of the launcher. Elsewhere a remote shell starts
`serve`, whose standard input and output are the control connection.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from typing import Any

from kvstore_hvd import __version__
from kvstore_hvd.base.channel import OF_WORKER, TO_DAEMON, Channel, ChannelError, Poller, peer_process
from kvstore_hvd.base.cores import RunningClock, usable_cores
from kvstore_hvd.config import environment
from kvstore_hvd.launch import processes
from kvstore_hvd.launch.hosts import MAX_WORKERS
from kvstore_hvd.launch.state import EXIT_NOT_STARTED

BEAT_S = 0.25
#: Ends the output of a login shell before the first message of a daemon on another host.
GREETING = b"\0kvstore_hvd daemon\n"
WINDOW = 1 << 18  # bytes of output that a daemon may send before the launcher has acknowledged some of it
_ORPHAN_GRACE_S = 1.0  # of workers after the loss of the launcher; all has to be gone within five seconds
_KILLED_S = 1.0  # for the kernel to end killed workers, and for the launcher to hear of it
# Time that a stream may stay open (held by a process of another user) after the last process of the job.
_DRAIN_S = 2.0
_SCARCE_S = 0.1  # pause when descriptors or memory are short
_LONGEST_OF_WORKERS = 1 << 20  # bytes of a message
_READS = 100  # of a connection that is to end: a worker that writes without end must not hold up the others
_CHUNK = 1 << 16  # capacity of a pipe


class _Worker:
    """A process that this daemon has started; a negative number is that of a task of the launcher."""

    connection: Channel | None = None
    kill_at = math.inf  # deadline of a worker that has been signalled to end

    def __init__(self, number: int, pid: int, streams: dict[int, int]) -> None:
        # `pid` is also of its group and session, `streams` are our ends by its descriptors 1 and 2.
        self.id, self.pid, self.streams = number, pid, streams


class Daemon:
    """Runs the workers of one host; use once, in a process of its own."""

    def __init__(
        self, launcher: Channel, host: str, kill_grace_s: float, lease_s: float, variables: Mapping[str, str]
    ) -> None:
        # `host`: its name as the user wrote it. `kill_grace_s`: between SIGTERM and SIGKILL. `lease_s`: the longest
        # silence of the launcher. `variables`: inherited by workers where the launcher sets none.
        self._launcher, self._host, self._variables = launcher, host, variables
        self._grace_s, self._lease_s = kill_grace_s, lease_s
        self._name = f"kvstore_hvd-{os.urandom(16).hex()}"  # of the socket for workers
        self._poller = Poller()
        self._clock = RunningClock()
        self._left_grace_s = min(processes.LEFT_GRACE_S, kill_grace_s)
        self._reaper = processes.Reaper(self._left_grace_s)
        self._workers: dict[int, _Worker] = {}
        self._streams: dict[int, tuple[int, int]] = {}  # by our end: worker, and its descriptor
        self._window = WINDOW
        self._heard_at = self._clock.now()  # time of the last message of the launcher
        self._beat_at = 0.0
        self._is_scarce = False  # a connection could not be accepted for want of descriptors, which has been reported
        self._suspended = False  # the launcher has been stopped with its job, and cannot send
        self._why = ""  # this daemon ends, for this reason
        self._code = 0
        self._leaving = ""  # a signal ends this daemon, and the workers may leave until `_leave_until`
        self._leave_until = self._kill_at = math.inf

    def run(self) -> int:
        """Work until the launcher is done or lost; returns 0, or 1 when it is lost."""
        processes.adopt_orphans()
        self._inbox = processes.SignalInbox()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.setblocking(False)
        self._listener.bind(f"\0{self._name}")
        self._listener.listen(MAX_WORKERS)
        self._poller.watch(self._inbox.fileno(), lambda: None)
        self._poller.watch(self._listener.fileno(), self._accept)
        self._poller.add(self._launcher, self._hear_launcher)
        self._tell("up", pid=os.getpid(), version=__version__)
        while not self._why:
            self._turn()
        self._finish()
        return self._code

    # -- The loop -------------------------------------------------------------------------------------------------

    def _turn(self, until: float = math.inf) -> None:
        """Wait for events, until then at most, and do what is due."""
        now = self._clock.now()
        awaited = now + BEAT_S if self._suspended else min(self._beat_at, self._heard_at + self._lease_s)
        kill_at = min((worker.kill_at for worker in self._workers.values()), default=math.inf)
        wait_s = min(until, self._leave_until, awaited, kill_at) - now
        self._poller.wait(min(wait_s, self._reaper.wait_s(), BEAT_S))
        for number in self._inbox.take():
            if number in processes.ENDING and not self._leaving:
                name = signal.Signals(number).name
                self._leaving = f"the daemon on {self._host} (pid {os.getpid()}) was ended by {name}"
                self._leave_until = self._clock.now() + self._grace_s
                self._tell("ending", text=self._leaving, code=128 + number)
        by_pid = {worker.pid: worker for worker in self._workers.values()}
        for pid, code in self._reaper.reap():
            if pid in by_pid:
                self._on_end(by_pid[pid], code)
        self._act_on_time(self._clock.now())

    def _finish(self) -> None:
        """Wait for the ends of workers or kill them, end the processes that they have left, and send all output."""

        def turn(until: float, while_any: Collection[object] = (None,)) -> None:
            while while_any and self._clock.now() < until:
                self._turn(until)

        turn(self._kill_at, self._workers)
        for worker in self._workers.values():
            self._reaper.signal(worker.pid, signal.SIGKILL)
        turn(self._clock.now() + _KILLED_S, self._workers)
        for pause_s in processes.end_children(self._left_grace_s):
            turn(self._clock.now() + pause_s)
        until = self._clock.now() + _DRAIN_S
        while self._launcher.fileno() >= 0:
            now = self._clock.now()
            if self._window <= 0:  # the launcher waits for the reader of its own output
                until = now + _DRAIN_S
            if not self._launcher.wants_to_write and not (self._streams and now < until):
                break
            self._turn(now + BEAT_S)

    def _act_on_time(self, now: float) -> None:
        if now >= self._beat_at and not self._suspended:
            self._beat_at = now + BEAT_S
            self._tell("beat")
        # All pending input has been read before the lease is judged, and the clock excludes time stopped.
        if now >= self._heard_at + self._lease_s and not self._suspended:
            # Without a grace: the launcher gives this host up soon after the lease, counted from an earlier beat.
            self._lose(f"the launcher has said nothing for {self._lease_s:g} s (KVHVD_LEASE)", 0.0)
            self._lease_s = math.inf
        is_empty = not any(number >= 0 for number in self._workers)
        if self._leaving and not self._why and (is_empty or now >= self._leave_until):
            self._end(self._leaving, 0.0, code=1)
        for worker in self._workers.values():
            if now >= worker.kill_at:
                worker.kill_at = math.inf
                self._reaper.signal(worker.pid, signal.SIGKILL)

    # -- The launcher ---------------------------------------------------------------------------------------------

    def _hear_launcher(self) -> None:
        try:
            messages = self._launcher.receive()
        except ChannelError as error:
            self._lose(f"the connection to the launcher is lost: {str(error).rstrip('.')}")
            return
        for message in messages:
            kind = message["t"]
            if kind == "start":
                self._start(message)
            elif kind == "ack":
                self._window += message["bytes"]
                for end in self._streams:
                    self._watch(end)
            elif kind == "to":
                worker = self._workers.get(message["worker"])
                if worker is not None and worker.connection is not None:
                    worker.connection.send(message["message"])
            elif kind == "signal":
                self._signal(message)
            elif kind == "end":
                self._end(message["text"] or "the job has ended", self._grace_s, code=0)
            self._heard_at = self._clock.now()

    def _start(self, message: dict[str, Any]) -> None:
        number = message["worker"]
        if self._why:
            self._tell("not_started", worker=number, text=self._why, errno=0)
            return
        variables = {**self._variables, **message["environment"]}
        if message["control"]:
            variables["KVHVD_DAEMON"] = self._name
        cores = processes.share_of_cores(usable_cores(), *message["share"]) if message["share"] else ()
        ours: dict[int, int] = {}
        theirs: dict[int, int] = {}
        try:
            if not message["stdin"]:
                theirs[0] = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            for fd in (1, 2) if message["capture"] else ():
                ours[fd], theirs[fd] = os.pipe()
                os.set_blocking(ours[fd], False)
            pid = processes.spawn(message["command"], variables, [theirs.get(fd) for fd in range(3)], cores)
        except (OSError, ValueError, IndexError, subprocess.SubprocessError) as error:
            for end in ours.values():
                os.close(end)
            text = str(error) or type(error).__name__
            self._tell("not_started", worker=number, text=text, errno=getattr(error, "errno", None) or 0)
            return
        finally:
            for end in theirs.values():
                os.close(end)
        self._reaper.add(pid)
        self._workers[number] = _Worker(number, pid, ours)
        for fd, end in ours.items():
            self._streams[end] = number, fd
            self._watch(end)
        self._tell("started", worker=number, pid=pid)

    def _signal(self, message: dict[str, Any]) -> None:
        everyone = message["worker"] is None
        for worker in self._workers.values():
            if worker.id != message["worker"] and not (everyone and worker.id >= 0):
                continue
            self._reaper.signal(worker.pid, message["signal"])
            if message["signal"] in processes.ENDING:
                worker.kill_at = min(worker.kill_at, self._clock.now() + self._grace_s)
        if everyone and message["signal"] in (signal.SIGSTOP, signal.SIGCONT):
            # Ctrl-Z: the launcher stops itself next.
            self._suspended = message["signal"] == signal.SIGSTOP

    def _tell(self, kind: str, raw: bytes = b"", **fields: Any) -> None:
        if self._launcher.fileno() >= 0:
            self._launcher.send({"t": kind, **fields}, raw)

    # -- Output of workers ----------------------------------------------------------------------------------------

    def _watch(self, end: int) -> None:
        if self._window > 0:
            self._poller.watch(end, lambda: self._read(end))

    def _read(self, end: int) -> int:
        """Send some output of a worker; returns the number of bytes read."""
        number, fd = self._streams[end]
        try:
            data = os.read(end, _CHUNK)
        except BlockingIOError:
            return 0
        self._tell("out", data, worker=number, fd=fd)
        self._window -= len(data)
        if not data:
            self._close_stream(end)
        if self._window <= 0:
            for each in self._streams:
                self._poller.forget(each)
        return len(data)

    def _close_stream(self, end: int) -> None:
        self._poller.forget(end)
        del self._streams[end]
        os.close(end)

    # -- Messages of workers --------------------------------------------------------------------------------------

    def _accept(self) -> bool:
        """Accept a connection of a worker, or a process that it has started, if it has no other; False: none came."""
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:
            return False
        except OSError as error:
            if not self._is_scarce:
                text = f"the daemon on {self._host} has to let a worker wait: {error.strerror}."
                self._tell("say", text=f"{text}\n  Fix: see ulimit -n and ulimit -u there, and free memory.")
            self._is_scarce = True
            time.sleep(_SCARCE_S)  # the listener stays readable
            return False
        connection, pid = Channel(accepted, OF_WORKER, _LONGEST_OF_WORKERS), peer_process(accepted)[0]
        worker = next((each for each in self._workers.values() if processes.descends_from(pid, each.pid)), None)
        # The end of an earlier connection of this worker may be unread.
        for _ in range(_READS):
            if worker is None or not self._hear(worker):
                break
        if worker is not None and worker.connection is None:
            worker.connection = connection
            self._poller.add(connection, lambda: self._hear(worker))
            return True
        text = f"another process of worker {worker.id} has called init() already." if worker else "it is no worker."
        connection.send({"t": "refused", "text": text})
        connection.close()
        return True

    def _hang_up(self, worker: _Worker) -> None:
        if worker.connection is not None:
            self._poller.close_channel(worker.connection)
            worker.connection = None

    def _hear(self, worker: _Worker) -> bool:
        """Pass messages of a worker on; returns whether there may be more."""
        if worker.connection is None:
            return False
        try:
            messages = worker.connection.receive()
        except ChannelError:  # the end of the process is what counts
            self._hang_up(worker)
            return False
        for message in messages:
            message.pop("raw", None)
            self._tell("from", worker=worker.id, message=message)
        return bool(messages)

    # -- The end --------------------------------------------------------------------------------------------------

    def _on_end(self, worker: _Worker, code: int) -> None:
        # Since the last look it may have connected, written and ended.
        while self._accept():
            pass
        while self._hear(worker):
            pass
        self._hang_up(worker)
        # Its last words are sent before its end, even if the window is full: a pipe holds no more than a chunk.
        for end in worker.streams.values():
            count = 0
            while end in self._streams and count < _CHUNK and (read := self._read(end)):
                count += read
            if worker.id < 0 and end in self._streams:  # processes that a task has left are not heard
                self._close_stream(end)
        del self._workers[worker.id]
        self._tell("exited", worker=worker.id, code=code)

    def _lose(self, why: str, grace_s: float = _ORPHAN_GRACE_S) -> None:
        self._poller.close_channel(self._launcher)
        is_news = not self._why
        self._end(why, min(grace_s, self._grace_s), code=1)
        # A held terminal or a full pipe must not block.
        if is_news and select.select([], [2], [], 0)[1]:
            with contextlib.suppress(OSError):
                os.write(2, f"kvhvdrun: {why}. The workers on {self._host} are being ended.\n".encode())

    def _end(self, why: str, grace_s: float, code: int) -> None:
        """Send SIGTERM to all workers, SIGKILL after the grace, and start no more of them."""
        self._leave_until = math.inf
        self._kill_at = min(self._kill_at, self._clock.now() + grace_s)
        if not self._why:
            self._why, self._code = why, code
            for worker in self._workers.values():
                self._reaper.signal(worker.pid, signal.SIGTERM if worker.id >= 0 else signal.SIGKILL)


def serve(host: str, kill_grace_s: str, lease_s: str, folder: str) -> None:
    """Be the guard of a daemon on another host than the launcher's, in this folder; does not return."""
    reader, writer = io.FileIO(os.dup(0)), io.FileIO(os.dup(1), "w")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)  # descriptor 1 is for messages only
    os.close(null)
    try:
        os.chdir(folder or os.curdir)
    except OSError as error:
        fact = f"{host} cannot use {folder} ({error.strerror}): start kvhvdrun in a folder that all hosts have"
        print(fact, file=sys.stderr)
        sys.exit(EXIT_NOT_STARTED)  # 1 could be the code of a remote shell that has not reached this host
    writer.write(GREETING)
    grace_s, variables = float(kill_grace_s), environment()
    run = lambda: Daemon(Channel(reader, TO_DAEMON, writer=writer), host, grace_s, float(lease_s), variables).run()  # noqa: E731
    processes.run_guarded(f"for {host}", {writer.fileno()}, reader.fileno(), run, grace_s, fork=False)
