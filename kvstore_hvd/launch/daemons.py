"""The launcher's side of its daemons: one process and one line for each host.

On another host than this one a remote shell starts the daemon. Then the process is the shell.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import IO, Any

from kvstore_hvd import __version__
from kvstore_hvd.base.channel import OF_DAEMON, TO_DAEMON, Channel, ChannelError, Poller
from kvstore_hvd.base.clocks import RunningClock
from kvstore_hvd.config import environment
from kvstore_hvd.launch import processes
from kvstore_hvd.launch.daemon import BEAT_S, GREETING, Daemon
from kvstore_hvd.launch.hosts import is_here, shell_command
from kvstore_hvd.launch.state import Settings, how_it_ended

# A daemon that has missed so many beats may have messages of workers that have not come.
_SILENT_S = 4 * BEAT_S
# The launcher waits longer than a daemon by this, over one beat: when it counts a host as lost, no worker runs there.
_LEASE_EXTRA_S = 0.4
# For a daemon of this host; or the lease, where that is longer.
_START_S = 60.0
# A line that ends because its daemon died is followed by the end of the guard, which first ends what is left there.
_NEWS_S = 4.0
_CLOSED = "the other side closed the connection"
_SHOWN_LINES, _SHOWN_BYTES = 3, 1 << 12  # the last ones of a remote shell
_REMOTE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "remote.py")
_Hear = Callable[[str, dict[str, Any]], None]
_Lost = Callable[[str, str, bool], None]
# Exit codes of a shell that has not reached its host: 255 of ssh; others have no code of their own for that.
_UNREACHED = (1, 255)


class _Daemon:
    """The daemon of a host, and the guard beside it, or the remote shell that leads to both."""

    has_come: bool = False  # it has said that it is up
    fault: str = ""  # how the line ended
    ending: bool = False  # it was told to end
    given_up: bool = False  # it was killed because it did not
    code: int | None = None  # its own, or that of its guard
    unacknowledged: int = 0  # bytes of output
    shell: str = ""  # the name of the remote shell
    errors: IO[bytes] | None = None  # what the shell has written to standard error

    def __init__(self, host: str, guard: int, line: Channel, heard_at: float, lease_s: float, start_s: float) -> None:
        self.host, self.line, self.heard_at = host, line, heard_at
        # Process ids; guard: or that of the shell; 0 when it was killed, -1 when both have ended.
        self.guard = self.pid = guard
        self.lease_s, self.start_s = lease_s, start_s  # `start_s`: within which it has to come


class Daemons:
    """All daemons of a job. `hear` gets a host and a message of its daemon; raises ChannelError if that cannot be."""

    def __init__(
        self, poller: Poller, clock: RunningClock, settings: Settings, shell: Sequence[str], hear: _Hear
    ) -> None:
        self._poller, self._clock, self._hear = poller, clock, hear
        self._settings, self._shell = settings, shell
        self._running: dict[str, _Daemon] = {}
        self._beat_at = 0.0

    def __bool__(self) -> bool:
        return bool(self._running)

    def start(self, host: str) -> None:
        """Start the daemon of a host, if there is none."""
        if host in self._running:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            start = self._start_here if is_here(host) else self._start_elsewhere
            daemon = self._running[host] = start(host, ours, theirs)
        self._poller.add(daemon.line, lambda: self._receive(daemon))

    def _start_here(self, host: str, ours: socket.socket, theirs: socket.socket) -> _Daemon:
        settings = self._settings
        # The end of a launcher ends its line; the lease is for one that stands still, which a static job waits for.
        lease_s = settings.lease_s if settings.replaces else float("inf")
        run = lambda: Daemon(Channel(theirs, TO_DAEMON), host, settings.kill_grace_s, lease_s, {}).run()  # noqa: E731
        name = f"of {os.getpid()} for {host}"
        guard = processes.run_guarded(name, (), theirs.fileno(), run, settings.kill_grace_s)
        return _Daemon(host, guard, Channel(ours, OF_DAEMON), self._clock.now(), lease_s, max(_START_S, lease_s))

    def _start_elsewhere(self, host: str, ours: socket.socket, theirs: socket.socket) -> _Daemon:
        settings = self._settings
        limits = [str(settings.kill_grace_s), str(settings.lease_s)]
        folder = ""  # it has been deleted
        with contextlib.suppress(FileNotFoundError):
            folder = os.getcwd()
        command = shell_command(self._shell or ["ssh"], host, [sys.executable, _REMOTE, host, *limits, folder])
        errors = os.fdopen(os.memfd_create("errors"), "rb")
        pid = processes.spawn(command, environment(), [theirs.fileno(), theirs.fileno(), errors.fileno()])
        times = self._clock.now(), settings.lease_s, settings.start_timeout_s
        daemon = _Daemon(host, pid, Channel(ours, OF_DAEMON, greeting=GREETING), *times)
        daemon.shell, daemon.errors = os.path.basename(command[0]), errors
        return daemon

    def send(self, host: str, kind: str, **fields: Any) -> None:
        """Say something to the daemon of a host; without effect if it is lost."""
        daemon = self._running.get(host)
        if daemon is not None and not daemon.fault:
            daemon.line.send({"t": kind, **fields})

    def send_all(self, kind: str, **fields: Any) -> None:
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
            if daemon.shell and not daemon.has_come:
                _kill(daemon)
        self.send_all("end", text=text)

    def give_up(self) -> None:
        """Kill them, and their workers with them; the second time, those that the kernel does not end are let go."""
        for host, daemon in list(self._running.items()):
            if daemon.given_up:
                self._remove(self._running[host])
            daemon.given_up = True
            _kill(daemon)

    def _receive(self, daemon: _Daemon) -> None:
        now = self._clock.now()
        if daemon.has_come:
            daemon.heard_at = now
        try:
            for message in daemon.line.receive():
                self._take(daemon, message)
        except ChannelError as error:
            daemon.fault, daemon.heard_at = str(error).rstrip("."), now
            self._poller.close_channel(daemon.line)

    def _take(self, daemon: _Daemon, message: dict[str, Any]) -> None:
        if (message["t"] == "up") is daemon.has_come:
            raise ChannelError(f"'{message['t']}' came {'again' if daemon.has_come else 'before its daemon was up'}.")
        if message["t"] == "up":
            if message["version"] != __version__:
                raise ChannelError(f"kvstore_hvd has version {message['version']} there, and {__version__} here")
            daemon.pid, daemon.has_come, daemon.heard_at = message["pid"], True, self._clock.now()
        daemon.unacknowledged += len(message.get("raw", b""))
        self._hear(daemon.host, message)

    def _remove(self, daemon: _Daemon) -> None:
        self._poller.close_channel(daemon.line)
        del self._running[daemon.host]

    def reaped(self, pid: int, code: int) -> None:
        """A child of ours has ended."""
        for daemon in self._running.values():
            if pid == daemon.guard and not daemon.shell:
                # A guard that was killed has left us the daemon itself.
                daemon.code, daemon.guard = code if code <= 128 else 128 - code, 0 if code < 0 else -1
            elif pid == (daemon.guard if daemon.shell else daemon.pid):
                daemon.code, daemon.guard = code, -1

    def act_on_time(self, lost: _Lost) -> float:
        """Send beats, and give up daemons. Returns when to be called again."""
        # `lost` gets the host and fate of each, and whether a host that was not reached may be reached later.
        now = self._clock.now()
        if now >= self._beat_at:
            self._beat_at = now + BEAT_S
            self.send_all("beat")
        for host, daemon in list(self._running.items()):
            why = _fate(daemon, now)
            if not why:
                continue
            _kill(daemon)
            self._remove(daemon)
            is_unreached = bool(daemon.shell) and not daemon.has_come and daemon.fault == _CLOSED
            may_come = is_unreached and daemon.code in (_UNREACHED[1:] if daemon.shell == "ssh" else _UNREACHED)
            lost(host, why + _last_lines(daemon), may_come)
        heard = [daemon for daemon in self._running.values() if daemon.has_come and not daemon.fault]
        return min([self._beat_at, *(daemon.heard_at + daemon.lease_s + _LEASE_EXTRA_S for daemon in heard)])

    def are_awaited(self) -> bool:
        """Whether one of them has been started, and has not come."""
        return any(not daemon.has_come for daemon in self._running.values())

    def are_silent(self) -> bool:
        """Whether one of them has missed beats, and with it what its workers may have said."""
        silent_since = self._clock.now() - _SILENT_S
        heard = [daemon for daemon in self._running.values() if daemon.has_come and not daemon.fault]
        return any(daemon.heard_at < silent_since for daemon in heard)


def _fate(daemon: _Daemon, now: float) -> str:
    """What happened to a daemon that is lost; empty while it is not."""
    silent = now - daemon.heard_at
    if daemon.fault:
        if daemon.code is not None and not daemon.shell:
            return f"its daemon (pid {daemon.pid}) {how_it_ended(daemon.code)}"
        if daemon.code is not None:
            what = "the line to its daemon was lost" if daemon.has_come else "its daemon did not come"
            fault = f"{daemon.fault}; " if daemon.fault != _CLOSED else ""
            return f"{what}: {fault}'{daemon.shell}' {how_it_ended(daemon.code)}"
        return f"the line to its daemon was lost: {daemon.fault}" if silent >= _NEWS_S and not daemon.ending else ""
    limit_s = daemon.lease_s + _LEASE_EXTRA_S if daemon.has_come else daemon.start_s
    if silent < limit_s:
        return ""
    if not daemon.has_come:
        return f"its daemon did not come within {limit_s:g} s"
    return f"its daemon has said nothing for {limit_s:g} s (KVHVD_LEASE)"


def _last_lines(daemon: _Daemon) -> str:
    """What a remote shell has said last, with what else it printed in place of a daemon's messages."""
    said = daemon.line.skipped if not daemon.has_come else b""
    if daemon.errors is not None:
        size = os.fstat(daemon.errors.fileno()).st_size
        said += b"\n" + os.pread(daemon.errors.fileno(), _SHOWN_BYTES, max(0, size - _SHOWN_BYTES))
    lines = [line.strip() for line in said.decode("utf-8", "replace").splitlines() if line.strip()][-_SHOWN_LINES:]
    return f". '{daemon.shell}' says: {' / '.join(lines).rstrip('.')}" if lines else ""


def _kill(daemon: _Daemon) -> None:
    # Only children of ours get a signal, unreaped: a number is nobody else's then.
    with contextlib.suppress(OSError):
        if daemon.guard > 0 and daemon.shell:
            os.killpg(daemon.guard, signal.SIGKILL)
        elif daemon.guard > 0:
            os.kill(daemon.guard, processes.KILL_DAEMON)
        elif daemon.guard == 0:
            os.kill(daemon.pid, signal.SIGKILL)
