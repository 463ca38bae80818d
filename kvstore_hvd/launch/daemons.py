"""The launcher's side of its daemons: one process and one line for each host."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from kvstore_hvd.launch.connections import Connections
from kvstore_hvd.launch.daemon_settings import DaemonSettings, daemon_command
from kvstore_hvd.launcher import processes
from kvstore_hvd.launcher.relay import Relay
from kvstore_hvd.launcher.workers import how_it_ended
from kvstore_hvd.log import logger
from kvstore_hvd.wire import Connection, WireError
from kvstore_hvd.wire.messages import DAEMON, IDENTITIES, check

__all__ = ["Daemons"]

_BEAT_S = 0.5
# Whoever has missed so many beats may have something to say that has not come.
_SILENT_S = 3 * _BEAT_S
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
    heard_at: float
    line: Connection | None = None
    unsent: list[dict[str, Any]] = field(default_factory=list)  # while there is no line yet
    fault: str = ""  # how the line ended
    ending: bool = False  # it was told to end
    given_up: bool = False  # it was killed because it did not
    code: int | None = None


class Daemons:
    """All daemons of a job."""

    def __init__(
        self, settings: DaemonSettings, environment: dict[str, str], relay: Relay, connections: Connections[Connection]
    ) -> None:
        self._settings = settings
        self._environment = environment
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
        with ExitStack() as ends:
            stdin, write = os.pipe()
            ends.callback(os.close, stdin)
            ends.callback(os.close, write)
            stdout = self._relay.connect(1, b"")
            ends.callback(os.close, stdout)
            stderr = self._relay.connect(2, b"")
            ends.callback(os.close, stderr)
            last_words = os.dup(2)
            ends.callback(os.close, last_words)
            settings = replace(self._settings, host=host, last_words_fd=last_words)
            job = f"KVHVD_JOB={self._settings.job}".encode()
            pid = processes.spawn(
                daemon_command(),
                self._environment,
                stdin,
                stdout,
                stderr,
                job,
                outlives=True,
                keep=[last_words, *settings.keep],
            )
            os.write(write, settings.line())  # far less than a pipe holds
        self._running[host] = _Daemon(host, pid, now)

    def admit(self, line: Connection, now: float) -> None:
        """Take a connection that knows the secret for a daemon's, if it is from one that has none."""
        daemon = self._expected(line.identity or {})
        if daemon is None:
            logger.info("refused a connection: it is not from a daemon that is waited for.")
            line.close()
            return
        daemon.line, daemon.heard_at = line, now
        self._connections.add(line)
        for message in daemon.unsent:
            line.send(message)
        daemon.unsent.clear()

    def _expected(self, identity: dict[str, Any]) -> _Daemon | None:
        with contextlib.suppress(WireError):
            check(identity, {"daemon": IDENTITIES["daemon"]}, "role")
            daemon = self._running.get(identity["host"])
            if daemon is not None and daemon.pid == identity["pid"] and daemon.line is None and not daemon.fault:
                return daemon
        return None

    # -- Sending --------------------------------------------------------------------------------------------------

    def send(self, host: str, message: dict[str, Any]) -> None:
        """Say something to the daemon of a host; without effect if it is lost."""
        daemon = self._running.get(host)
        if daemon is None or daemon.fault:
            return
        if daemon.line is None:
            daemon.unsent.append(message)
        else:
            daemon.line.send(message)

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
                del self._running[host]
            daemon.given_up = True
            _kill(daemon)

    # -- What happens ---------------------------------------------------------------------------------------------

    def hear(self, line: Connection, now: float) -> tuple[str, list[dict[str, Any]]]:
        """The host of a connection that can be read, and what its daemon says."""
        (daemon,) = (daemon for daemon in self._running.values() if daemon.line is line)
        messages = []
        try:
            for message in line.receive():
                check(message, DAEMON)
                messages.append(message)
            daemon.heard_at = now
        except WireError as error:
            self.refuse(daemon.host, str(error), now)
        return daemon.host, messages

    def refuse(self, host: str, fault: str, now: float) -> None:
        """Close the line to a daemon: it ended, or said what it may not say."""
        daemon = self._running[host]
        if daemon.line is not None:
            self._connections.close(daemon.line)
        daemon.line, daemon.fault, daemon.heard_at = None, fault.rstrip("."), now

    def reaped(self, pid: int, code: int) -> None:
        """A child of ours has ended."""
        for daemon in self._running.values():
            if daemon.pid == pid:
                daemon.code = code

    def act_on_time(self, now: float, lost: Callable[[str, str], None]) -> None:
        """Send beats, and give up daemons: `lost` is called with the host of each and what happened to it."""
        if now >= self._beat_at:
            self._beat_at = now + _BEAT_S
            for daemon in self._running.values():
                if daemon.line is not None:
                    daemon.line.send({"t": "beat"})
        for host, daemon in list(self._running.items()):
            why = _fate(daemon, now, self._settings.lease_s)
            if not why:
                continue
            _kill(daemon)
            if daemon.line is not None:
                self._connections.close(daemon.line)
            del self._running[host]
            lost(host, why)

    def are_silent(self, now: float) -> bool:
        """Whether one of them has missed beats, and with it what its workers may have said."""
        running = [daemon for daemon in self._running.values() if daemon.line is not None and daemon.code is None]
        return any(now - daemon.heard_at > _SILENT_S for daemon in running)

    def deadline(self) -> float:
        """When `act_on_time` has something to do."""
        return self._beat_at


def _fate(daemon: _Daemon, now: float, lease_s: float) -> str:
    """What happened to a daemon that is lost; empty while it is not."""
    silent = now - daemon.heard_at
    if daemon.code is not None:
        # Its line ends, too, but there may be messages left in it.
        is_read = daemon.line is None or silent >= _NEWS_S
        return f"its daemon (pid {daemon.pid}) {how_it_ended(daemon.code)}" if is_read else ""
    if daemon.fault:
        return f"the line to its daemon was lost: {daemon.fault}" if silent >= _NEWS_S and not daemon.ending else ""
    if daemon.line is None:
        limit_s = max(_START_S, lease_s)
        return f"its daemon did not come within {limit_s:g} s" if silent >= limit_s else ""
    limit_s = lease_s + _LEASE_EXTRA_S
    return f"its daemon has said nothing for {limit_s:g} s (KVHVD_LEASE)" if silent >= limit_s else ""


def _kill(daemon: _Daemon) -> None:
    if daemon.code is None:  # unreaped, and so its number is its own
        with contextlib.suppress(OSError):
            os.killpg(daemon.pid, signal.SIGKILL)
