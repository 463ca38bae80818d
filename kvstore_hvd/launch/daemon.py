"""The daemon of an elastic job on one host.

Starts and reaps the workers of its host as the launcher tells it, carries what they write, and passes messages on
between them and the launcher. It decides nothing but this: when the launcher is gone, or has said nothing while this
daemon ran for the length of its lease, it ends its workers and itself.

It is a fork of the launcher, and outlives it: it has to end the workers, and to say why.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from kvstore_hvd.base.channel import Channel, ChannelError
from kvstore_hvd.base.clocks import Deadline, RunningClock
from kvstore_hvd.launch.connections import Connections
from kvstore_hvd.launch.local_workers import LocalWorker, LocalWorkers, NotStarted
from kvstore_hvd.launcher import processes
from kvstore_hvd.launcher.belonging import LEFT_GRACE_S, Remains
from kvstore_hvd.launcher.capacity import MAX_WORKERS
from kvstore_hvd.launcher.guard import Guard
from kvstore_hvd.launcher.relay import Relay, RelayHandler
from kvstore_hvd.launcher.signals import ENDING, SignalInbox
from kvstore_hvd.launcher.writer import write_within
from kvstore_hvd.log import logger
from kvstore_hvd.worlds.authentication import peer_process

__all__ = ["BEAT_S", "Daemon", "DaemonSettings"]

BEAT_S = 0.5
# After the loss of the launcher everything has to be gone within five seconds.
_ORPHAN_GRACE_S = 1.0
# Once the workers have been killed: for the kernel to end them, and for the launcher to hear of it.
_KILLED_S = 1.0
_GOODBYE_S = 1.0
_LAST_WORDS_S = 0.5
# Out of descriptors or memory.
_SCARCE_S = 0.1
_LONGEST_OF_WORKERS = 1 << 20  # bytes of a message
_READS = 100  # of a line whose end is awaited: a worker that writes without end must not hold up the others


@dataclass(frozen=True)
class DaemonSettings:
    """How a daemon finds its launcher, and how it treats its workers."""

    host: str  # its name, as the user wrote it
    line_fd: int  # to the launcher
    last_words_fd: int  # the launcher's standard error, for the case that the launcher is gone
    kill_grace_s: float  # seconds between SIGTERM and SIGKILL
    lease_s: float  # seconds for which the launcher may be silent
    prefix: bool  # put '[id] ' before lines of output
    keep: Sequence[int] = ()  # descriptors that its workers inherit


class Daemon:
    """Runs the workers of one host; use once, in a process of its own."""

    def __init__(self, settings: DaemonSettings) -> None:
        self._settings = settings
        # Every process of this daemon carries it in its environment, and no other does.
        self._name = f"kvstore_hvd-{os.urandom(16).hex()}"
        self._code = 0
        self._clock = RunningClock()
        self._launcher: Channel
        self._listener: socket.socket
        self._inbox: SignalInbox
        self._connections: Connections
        self._relay: Relay
        self._workers: LocalWorkers
        self._remains: Remains
        self._heard_at = 0.0  # when the launcher said something last
        self._beat_at = 0.0
        self._suspended = False  # the launcher has been stopped with its job, and cannot say anything
        self._why = ""  # we are ending, and this is the reason
        self._kill_at = 0.0
        self._give_up_at = float("inf")

    def run(self) -> int:
        """Do the launcher's work until it says that it is done, or is gone."""
        processes.adopt_orphans()
        with ExitStack() as stack:
            variable = f"KVHVD_DAEMON={self._name}".encode()
            left_grace_s = min(LEFT_GRACE_S, self._settings.kill_grace_s)
            guard = Guard(variable, left_grace_s)
            stack.callback(guard.close)
            self._inbox = stack.enter_context(SignalInbox())
            self._listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self._listener.setblocking(False)
            self._listener.bind(f"\0{self._name}")
            self._listener.listen(MAX_WORKERS)
            self._connections = Connections(self._inbox, self._listener)
            stack.callback(self._connections.close_all)
            self._launcher = Channel(socket.socket(fileno=self._settings.line_fd))
            self._connections.add(self._launcher)
            self._relay = Relay(self._connections.fileno())
            stack.callback(self._relay.close)
            logging.getLogger().addHandler(RelayHandler(self._relay, "daemon: "))
            self._workers = LocalWorkers(
                self._relay, guard, variable, left_grace_s, self._settings.prefix, self._settings.keep
            )
            self._remains = Remains(variable, left_grace_s, os.getpid(), lambda: [guard.pid])
            stack.callback(self._remains.finish)
            self._heard_at = self._clock.now()
            while not self._done():
                self._connections.arm()
                self._relay.wait(self._next_event())
                self._turn()
            self._say_goodbye()
        return self._code

    # -- The loop -------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        for connection in self._connections.ready():
            if connection is self._launcher:
                self._hear_launcher()
            for worker in self._workers:
                if connection is worker.line:
                    self._hear(worker)
        # After the lines: one that has been closed makes room for a new one.
        self._accept()
        for number in self._inbox.take():
            if number in ENDING:
                why = f"the daemon on {self._settings.host} got {signal.Signals(number).name}"
                self._relay.say(why)
                self._end(why, self._settings.kill_grace_s, code=1)
        self._on_ends(self._workers.reap())
        for fd, error in self._relay.take_lost():
            self._lose(f"descriptor {fd}, which leads to the launcher, cannot be written: {error.strerror}")
        self._act_on_time(self._clock.now())

    def _done(self) -> bool:
        now = self._clock.now()
        if not self._why or (self._workers and now < self._give_up_at):
            return False
        if not self._remains.step(now):
            return False
        self._on_ends(self._workers.reap())
        return True

    def _next_event(self) -> float:
        """Seconds until something must be done even if nothing happens."""
        times = [self._kill_at if self._why else float("inf")]
        if not self._suspended:
            times.append(self._beat_at)
        times += [worker.kill_at for worker in self._workers if worker.kill_at is not None]
        if self._remains.look_at is not None:
            times.append(self._remains.look_at)
        return min(max(0.0, min(times) - self._clock.now()), self._workers.wait_s(), BEAT_S)

    def _act_on_time(self, now: float) -> None:
        if now >= self._beat_at and not self._suspended:
            self._beat_at = now + BEAT_S
            self._tell({"t": "beat"})
        # What has arrived meanwhile has been read by now, and while this process stood still its clock did, too.
        if now > self._heard_at + self._settings.lease_s and not self._suspended:
            self._lose(f"the launcher has said nothing for {self._settings.lease_s:g} s (KVHVD_LEASE)")
        for worker in self._workers:
            if worker.kill_at is not None and now >= worker.kill_at:
                worker.kill_at = None
                self._workers.signal(worker, signal.SIGKILL)
        if self._why and now >= self._kill_at:
            self._kill_at = float("inf")
            self._give_up_at = now + _KILLED_S
            for worker in self._workers:
                self._workers.signal(worker, signal.SIGKILL)

    # -- The launcher ---------------------------------------------------------------------------------------------

    def _hear_launcher(self) -> None:
        try:
            messages = self._launcher.receive()
        except ChannelError as error:
            self._lose(f"the line to the launcher is lost: {str(error).rstrip('.')}")
            return
        for message in messages:
            self._obey(message)
            self._heard_at = self._clock.now()

    def _obey(self, message: dict[str, Any]) -> None:
        kind = message["t"]
        if kind == "start":
            self._start(message)
        elif kind == "to":
            self._pass_on(message["worker"], message["message"])
        elif kind == "signal":
            self._signal(message)
        elif kind == "end":
            self._end(message["text"] or "the job has ended", self._settings.kill_grace_s, code=0)

    def _start(self, message: dict[str, Any]) -> None:
        worker = message["worker"]
        if self._why:
            self._tell({"t": "not_started", "worker": worker, "text": self._why})
            return
        environment = {**message["environment"], "KVHVD_DAEMON": self._name}
        try:
            started = self._workers.start(worker, message["command"], environment, message["cores"])
        except NotStarted as error:
            self._tell({"t": "not_started", "worker": worker, "text": str(error)})
        else:
            self._tell({"t": "started", "worker": worker, "pid": started.pid})

    def _pass_on(self, worker: int, message: dict[str, Any]) -> None:
        running = self._workers.get(worker)
        if running is None or running.line is None:
            logger.info("worker %d has no line any more; not delivered: %s", worker, message["t"])
            return
        running.line.send(message)

    def _signal(self, message: dict[str, Any]) -> None:
        everyone = message["worker"] is None
        if everyone and message["signal"] == signal.SIGWINCH:
            self._relay.resize()
        found = list(self._workers) if everyone else [self._workers.get(message["worker"])]
        for worker in found:
            if worker is None:
                continue  # it has just ended
            self._workers.signal(worker, message["signal"])
            if message["ended"] and worker.kill_at is None:
                worker.kill_at = self._clock.now() + self._settings.kill_grace_s
        if everyone and message["signal"] in (signal.SIGSTOP, signal.SIGCONT):
            # Ctrl-Z: next it stops itself, and cannot say anything until it goes on.
            self._suspended = message["signal"] == signal.SIGSTOP

    def _tell(self, message: dict[str, Any]) -> None:
        self._launcher.send(message)

    # -- The workers ----------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        """Take one connection, if it is from a worker that has none, or from what that has started."""
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            logger.warning("a connection could not be accepted, and has to wait: %s", error.strerror)
            time.sleep(_SCARCE_S)  # it would wake us for nothing, again and again
            return
        line, pid = Channel(accepted, _LONGEST_OF_WORKERS), peer_process(accepted)[0]
        worker = next((each for each in self._workers if processes.descends_from(pid, each.pid)), None)
        # The end of an earlier line of this worker may not have been read yet.
        for _ in range(_READS):
            if worker is None or not self._hear(worker):
                break
        if worker is not None and worker.line is None:
            worker.line = line
            self._connections.add(line)
            return
        text = f"another process of worker {worker.id} has called init() already." if worker else "it is no worker."
        logger.info("refused the connection of process %d: %s", pid, text)
        line.send({"t": "refused", "text": text})
        line.close()

    def _hang_up(self, worker: LocalWorker) -> None:
        if worker.line is not None:
            self._connections.close(worker.line)
            worker.line = None

    def _hear(self, worker: LocalWorker) -> bool:
        """Pass on what a worker says; whether there may be more."""
        if worker.line is None:
            return False
        try:
            messages = worker.line.receive()
        except ChannelError as error:
            # Its process decides what that means for it; the end of the process is what counts.
            logger.info("closed the line of worker %d: %s", worker.id, error)
            self._hang_up(worker)
            return False
        for message in messages:
            self._tell({"t": "from", "worker": worker.id, "message": message})
        return bool(messages)

    def _on_ends(self, ended: list[LocalWorker]) -> None:
        if not ended:
            return
        # Its last words may still be on their way: what it wrote, and then the end of the stream.
        for _ in range(2):
            self._relay.wait(0)
        for worker in ended:
            while self._hear(worker):
                pass
            self._hang_up(worker)
            lines = [line.decode("utf-8", "replace") for line in worker.tail.lines()]
            self._tell({"t": "exited", "worker": worker.id, "code": worker.code, "lines": lines})

    # -- The end --------------------------------------------------------------------------------------------------

    def _lose(self, why: str) -> None:
        """The launcher is gone, or as good as that."""
        self._connections.close(self._launcher)
        is_news = not self._why
        self._end(why, min(_ORPHAN_GRACE_S, self._settings.kill_grace_s), code=1)
        if is_news:
            self._relay.drop()
            self._speak_for_launcher(f"{why}. The workers on {self._settings.host} are being ended.")

    def _end(self, why: str, grace_s: float, code: int) -> None:
        """Ask all workers to end, and start no more of them; who still runs after the grace is killed."""
        now = self._clock.now()
        if not self._why:
            self._why, self._code, self._kill_at = why, code, now + grace_s
            for worker in self._workers:
                self._workers.signal(worker, signal.SIGTERM)
        elif self._kill_at != float("inf"):
            self._kill_at = min(self._kill_at, now + grace_s)

    def _speak_for_launcher(self, text: str) -> None:
        """Write to its standard error: to ours nobody listens any more."""
        # A terminal that is held, a full pipe or a disk that stalls must not keep us.
        write_within(self._settings.last_words_fd, f"kvhvdrun: {text}\n".encode(), _LAST_WORDS_S)

    def _say_goodbye(self) -> None:
        """Let the launcher have all that was said, within a second, and all that was written, whenever it reads that.

        The launcher does not read while the reader of its own output stands still. It kills this process when it will
        not read any more. A launcher that is lost may be stopped: nobody waits for that one.
        """
        reads = self._launcher.fileno() >= 0
        deadline = Deadline(_GOODBYE_S)
        self._relay.flush()
        while self._launcher.wants_to_write and deadline.left() > 0:
            self._launcher.flush()
            self._relay.wait(0.01)
        self._connections.close(self._launcher)  # the launcher misses no beats of a line that has ended
        while self._relay.pending and (reads or deadline.left() > 0):
            self._relay.wait(0.01)
