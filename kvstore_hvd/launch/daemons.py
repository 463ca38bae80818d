"""The launcher's side of its daemons: one process and one line for each host."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

from kvstore_hvd.base.channel import Channel, ChannelError
from kvstore_hvd.base.clocks import RunningClock
from kvstore_hvd.launch import processes
from kvstore_hvd.launch.connections import Poller
from kvstore_hvd.launch.daemon import BEAT_S, Daemon
from kvstore_hvd.launch.state import how_it_ended

__all__ = ["Daemons"]

# Whoever has missed so many beats may have something to say that has not come.
_SILENT_S = 3 * BEAT_S
# By so much longer than a daemon waits for us: when we count its host as lost, it has ended everything there.
_LEASE_EXTRA_S = 1.0
# Or the lease, where that is longer.
_START_S = 60.0
# A line that ends because its daemon died is followed by the end of the guard, which first ends what is left there.
_NEWS_S = 4.0


class _Daemon:
    """The daemon of a host, and the guard beside it."""

    has_come: bool = False  # it has said something
    fault: str = ""  # how the line ended
    ending: bool = False  # it was told to end
    given_up: bool = False  # it was killed because it did not
    code: int | None = None  # its own, or that of its guard
    unacknowledged: int = 0  # bytes of output

    def __init__(self, host: str, guard: int, line: Channel, heard_at: float) -> None:
        self.host, self.line, self.heard_at = host, line, heard_at
        self.guard = self.pid = guard  # process ids; guard: 0 when it was killed, -1 when both have ended


class Daemons:
    """All daemons of a job. `hear` is called with what they say."""

    def __init__(
        self,
        poller: Poller,
        clock: RunningClock,
        kill_grace_s: float,
        lease_s: float,
        hear: Callable[[dict[str, Any]], None],
    ) -> None:
        self._poller, self._clock, self._hear = poller, clock, hear
        self._grace_s, self._lease_s = kill_grace_s, lease_s
        self._running: dict[str, _Daemon] = {}
        self._beat_at = 0.0

    def __bool__(self) -> bool:
        return bool(self._running)

    # -- Starting -------------------------------------------------------------------------------------------------

    def start(self, host: str) -> None:
        """Start the daemon of a host, if there is none."""
        if host in self._running:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            run = lambda: Daemon(Channel(theirs), host, self._grace_s, self._lease_s).run()  # noqa: E731
            grace_s = min(processes.LEFT_GRACE_S, self._grace_s)
            try:
                keep = {0, 1, 2, theirs.fileno()}
                guard = processes.fork_guarded(f"of {os.getpid()} for {host}", keep, run, grace_s)
            except OSError:
                ours.close()
                raise
        daemon = self._running[host] = _Daemon(host, guard, Channel(ours), self._clock.now())
        self._poller.add(daemon.line, lambda: self._receive(daemon))

    # -- Sending --------------------------------------------------------------------------------------------------

    def send(self, host: str, kind: str, **fields: Any) -> None:
        """Say something to the daemon of a host; without effect if it is lost."""
        daemon = self._running.get(host)
        if daemon is not None and not daemon.fault:
            daemon.line.send({"t": kind, **fields})

    def send_all(self, kind: str, **fields: Any) -> None:
        """Say something to all of them."""
        for host in self._running:
            self.send(host, kind, **fields)

    def acknowledge(self) -> None:
        """Let them send more output: what has come is written, or nearly so."""
        for daemon in self._running.values():
            if daemon.unacknowledged:
                self.send(daemon.host, "ack", bytes=daemon.unacknowledged)
                daemon.unacknowledged = 0

    def end(self, text: str) -> None:
        """Have all of them end their workers and themselves."""
        for daemon in self._running.values():
            daemon.ending = True
        self.send_all("end", text=text)

    def give_up(self) -> None:
        """Kill them, and their workers with them; the second time, those that the kernel does not end are let go."""
        for host, daemon in list(self._running.items()):
            if daemon.given_up:
                self._poller.close_channel(self._running.pop(host).line)
            daemon.given_up = True
            _kill(daemon)

    # -- What happens ---------------------------------------------------------------------------------------------

    def _receive(self, daemon: _Daemon) -> None:
        daemon.heard_at = self._clock.now()
        try:
            messages = daemon.line.receive()
        except ChannelError as error:
            daemon.fault = str(error).rstrip(".")
            self._poller.close_channel(daemon.line)
            return
        for message in messages:
            daemon.has_come = True
            if message["t"] == "up":
                daemon.pid = message["pid"]
            daemon.unacknowledged += len(message.get("raw", b""))
            self._hear(message)

    def reaped(self, pid: int, code: int) -> None:
        """A child of ours has ended."""
        for daemon in self._running.values():
            if pid == daemon.guard:
                # A guard that was killed has left us the daemon itself.
                daemon.code, daemon.guard = code if code <= 128 else 128 - code, 0 if code < 0 else -1
            elif pid == daemon.pid:
                daemon.code, daemon.guard = code, -1

    def act_on_time(self, lost: Callable[[str, str], None]) -> None:
        """Send beats, and give up daemons: `lost` is called with the host of each and what happened to it."""
        now = self._clock.now()
        if now >= self._beat_at:
            self._beat_at = now + BEAT_S
            self.send_all("beat")
        for host, daemon in list(self._running.items()):
            why = _fate(daemon, now, self._lease_s)
            if not why:
                continue
            _kill(daemon)
            self._poller.close_channel(daemon.line)
            del self._running[host]
            lost(host, why)

    def are_silent(self) -> bool:
        """Whether one of them has missed beats, and with it what its workers may have said."""
        silent_since = self._clock.now() - _SILENT_S
        heard = [daemon for daemon in self._running.values() if daemon.has_come and not daemon.fault]
        return any(daemon.heard_at < silent_since for daemon in heard)

    def deadline(self) -> float:
        """When `act_on_time` has something to do."""
        return self._beat_at


def _fate(daemon: _Daemon, now: float, lease_s: float) -> str:
    """What happened to a daemon that is lost; empty while it is not."""
    silent = now - daemon.heard_at
    if daemon.fault:
        if daemon.code is not None:
            return f"its daemon (pid {daemon.pid}) {how_it_ended(daemon.code)}"
        return f"the line to its daemon was lost: {daemon.fault}" if silent >= _NEWS_S and not daemon.ending else ""
    limit_s = lease_s + _LEASE_EXTRA_S if daemon.has_come else max(_START_S, lease_s)
    if silent < limit_s:
        return ""
    if not daemon.has_come:
        return f"its daemon did not come within {limit_s:g} s"
    return f"its daemon has said nothing for {limit_s:g} s (KVHVD_LEASE)"


def _kill(daemon: _Daemon) -> None:
    # Only children of ours get a signal, unreaped: a number is nobody else's then.
    with contextlib.suppress(OSError):
        if daemon.guard > 0:
            os.kill(daemon.guard, processes.KILL_DAEMON)
        elif daemon.guard == 0:
            os.kill(daemon.pid, signal.SIGKILL)
