"""The launcher's side of its daemons: one process and one line for each host."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn

from kvstore_hvd.base.channel import Channel, ChannelError
from kvstore_hvd.launch.connections import Connections
from kvstore_hvd.launch.daemon import BEAT_S, Daemon, DaemonSettings
from kvstore_hvd.launch.options import ElasticPlan
from kvstore_hvd.launcher import processes
from kvstore_hvd.launcher.relay import Relay
from kvstore_hvd.launcher.workers import how_it_ended

__all__ = ["Daemons"]

# Whoever has missed so many beats may have something to say that has not come.
_SILENT_S = 3 * BEAT_S
# By so much longer than a daemon waits for us: when we count its host as lost, it has ended everything there.
_LEASE_EXTRA_S = 1.0
# Or the lease, where that is longer.
_START_S = 60.0
# A line that ends because its daemon died is followed by the news of that.
_NEWS_S = 0.5


@dataclass
class _Daemon:
    host: str
    pid: int
    line: Channel
    heard_at: float
    has_come: bool = False  # it has said something
    fault: str = ""  # how the line ended
    ending: bool = False  # it was told to end
    given_up: bool = False  # it was killed because it did not
    code: int | None = None


class Daemons:
    """All daemons of a job."""

    def __init__(self, plan: ElasticPlan, relay: Relay, connections: Connections) -> None:
        self._plan = plan
        self._relay = relay
        self._connections = connections
        self._running: dict[str, _Daemon] = {}
        self._beat_at = 0.0

    def __bool__(self) -> bool:
        return bool(self._running)

    # -- Starting -------------------------------------------------------------------------------------------------

    def start(self, host: str, now: float) -> None:
        """Start the daemon of a host, if there is none."""
        if host in self._running:
            return
        plan, settings = self._plan, self._plan.settings
        keep = () if plan.caller is None else plan.caller.descriptors
        with ExitStack() as ends:
            ours, theirs = map(ends.enter_context, socket.socketpair())
            stdin = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            ends.callback(os.close, stdin)
            stdout = self._relay.connect(1, b"")
            ends.callback(os.close, stdout)
            stderr = self._relay.connect(2, b"")
            ends.callback(os.close, stderr)
            last_words = os.dup(2)
            ends.callback(os.close, last_words)
            line = theirs.fileno()
            daemon = DaemonSettings(host, line, last_words, settings.kill_grace_s, settings.lease_s, plan.prefix, keep)
            name = f"job-daemon of {os.getpid()} for {host}".encode()
            job = f"KVHVD_JOB={settings.job}".encode()
            pid = processes.fork(name, [stdin, stdout, stderr], [line, last_words, *keep], job)
            if pid == 0:
                _run(daemon)
            self._running[host] = _Daemon(host, pid, Channel(ours.dup()), now)
        self._connections.add(self._running[host].line)

    # -- Sending --------------------------------------------------------------------------------------------------

    def send(self, host: str, message: dict[str, Any]) -> None:
        """Say something to the daemon of a host; without effect if it is lost."""
        if host in self._running:
            self._running[host].line.send(message)

    def send_all(self, message: dict[str, Any]) -> None:
        """Say something to all of them."""
        for host in list(self._running):
            self.send(host, message)

    def end(self, text: str) -> None:
        """Have all of them end their workers and themselves."""
        for daemon in self._running.values():
            daemon.ending = True
        self.send_all({"t": "end", "text": text})

    def give_up(self) -> None:
        """Kill them, and their workers with them; the second time, those that the kernel does not end are let go."""
        for host, daemon in list(self._running.items()):
            if daemon.given_up:
                self._connections.close(self._running.pop(host).line)
            daemon.given_up = True
            _kill(daemon)

    # -- What happens ---------------------------------------------------------------------------------------------

    def hear(self, line: Channel, now: float) -> list[dict[str, Any]]:
        """What the daemon behind a line that can be read says."""
        (daemon,) = (daemon for daemon in self._running.values() if daemon.line is line)
        daemon.heard_at = now
        try:
            messages = line.receive()
        except ChannelError as error:
            daemon.fault = str(error).rstrip(".")
            self._connections.close(line)
            return []
        daemon.has_come = daemon.has_come or bool(messages)
        return messages

    def reaped(self, pid: int, code: int) -> None:
        """A child of ours has ended."""
        for daemon in self._running.values():
            if daemon.pid == pid:
                daemon.code = code

    def act_on_time(self, now: float, lost: Callable[[str, str], None]) -> None:
        """Send beats, and give up daemons: `lost` is called with the host of each and what happened to it."""
        if now >= self._beat_at:
            self._beat_at = now + BEAT_S
            self.send_all({"t": "beat"})
        for host, daemon in list(self._running.items()):
            why = _fate(daemon, now, self._plan.settings.lease_s)
            if not why:
                continue
            _kill(daemon)
            self._connections.close(daemon.line)
            del self._running[host]
            lost(host, why)

    def are_silent(self, now: float) -> bool:
        """Whether one of them has missed beats, and with it what its workers may have said."""
        return any(
            daemon.has_come and not daemon.fault and daemon.code is None and now - daemon.heard_at > _SILENT_S
            for daemon in self._running.values()
        )

    def deadline(self) -> float:
        """When `act_on_time` has something to do."""
        return self._beat_at


def _run(settings: DaemonSettings) -> NoReturn:
    """Be the daemon, in a process that was forked."""
    code = 1
    try:
        gc.freeze()  # objects of the launcher must not close descriptors that are others' here
        logging.getLogger().handlers.clear()
        code = Daemon(settings).run()
    except BaseException:  # noqa: BLE001 - nothing of the launcher may run in this process
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _fate(daemon: _Daemon, now: float, lease_s: float) -> str:
    """What happened to a daemon that is lost; empty while it is not."""
    silent = now - daemon.heard_at
    if daemon.code is not None:
        # Its line ends, too, but there may be messages left in it.
        is_read = daemon.fault or silent >= _NEWS_S
        return f"its daemon (pid {daemon.pid}) {how_it_ended(daemon.code)}" if is_read else ""
    if daemon.fault:
        return f"the line to its daemon was lost: {daemon.fault}" if silent >= _NEWS_S and not daemon.ending else ""
    limit_s = lease_s + _LEASE_EXTRA_S if daemon.has_come else max(_START_S, lease_s)
    if silent < limit_s:
        return ""
    if not daemon.has_come:
        return f"its daemon did not come within {limit_s:g} s"
    return f"its daemon has said nothing for {limit_s:g} s (KVHVD_LEASE)"


def _kill(daemon: _Daemon) -> None:
    if daemon.code is None:  # unreaped, and so its number is its own
        with contextlib.suppress(OSError):
            os.kill(daemon.pid, signal.SIGKILL)
