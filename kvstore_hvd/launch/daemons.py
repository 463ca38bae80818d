"""The launcher's side of its daemons: a process and a control connection for each host.

On another host than this one a remote shell starts the daemon. Then the process is the shell.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from kvstore_hvd import __version__
from kvstore_hvd.base.channel import OF_DAEMON, TO_DAEMON, Channel, ChannelError, Poller
from kvstore_hvd.base.cores import RunningClock
from kvstore_hvd.config import environment
from kvstore_hvd.errors import LaunchError, message
from kvstore_hvd.launch import processes
from kvstore_hvd.launch.daemon import BEAT_S, GREETING, Daemon
from kvstore_hvd.launch.hosts import is_here, shell_command, slots_of
from kvstore_hvd.launch.state import EXIT_FAILED, Settings, StartError, how_it_ended

# After so many missed beats of a daemon, messages of its workers may be on the way.
_SILENT_S = 4 * BEAT_S
# The launcher waits for longer than a daemon, by more than a beat: no worker runs on a host that counts as lost.
_LEASE_EXTRA_S = 0.4
# Time for a daemon of this host to start; or the lease, if that is longer.
_START_S = 60.0
# A daemon that died closes its connection first. Its guard ends when it has ended the processes that the daemon left.
_NEWS_S = 4.0
_CLOSED = "the other side closed the connection"
_SHOWN_LINES, _SHOWN_BYTES = 3, 1 << 12  # the last ones of a remote shell
_PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "__main__.py")
_Hear = Callable[[str, dict[str, Any]], None]
_Lost = Callable[[str, str, bool], None]
# Exit codes of a shell that has not reached its host: ssh has 255, other shells have no special code.
_UNREACHED = (1, 255)
#: The host of the discovery script.
HERE = "localhost"
_SCRIPT_EVERY_S, _SCRIPT_LIMIT_S = 1.0, 10.0  # between the starts of two runs; of the longest run
_MAX_OUTPUT = 1 << 16
_MAX_ERRORS = 8192  # kept of standard error, its end
_MAX_LINE = 200  # of a line that an error quotes
_SCRIPT_FIX = f"it has to end within {_SCRIPT_LIMIT_S:g} s, and to print HOST or HOST:N in each line."
_SCRIPT_FIXES = {126: "chmod +x the script.", 127: "check the path of the script, as in ./discover.sh."}


class _Daemon:
    """The daemon of a host, and its guard or the remote shell that leads to it."""

    has_come: bool = False  # its 'up' has arrived
    fault: str = ""  # how the connection ended
    ending: bool = False  # it was told to end
    given_up: bool = False  # it was killed because it did not end
    code: int | None = None  # exit code of the daemon, its guard or the shell
    unacknowledged: int = 0  # bytes of output
    shell: str = ""  # the name of the remote shell
    errors: IO[bytes] | None = None  # standard error of the shell

    def __init__(
        self, host: str, guard: int, connection: Channel, heard_at: float, lease_s: float, start_s: float
    ) -> None:
        self.host, self.connection, self.heard_at = host, connection, heard_at
        # Process ids. `guard` is that of the shell, if there is one; 0: the guard was killed, -1: all have ended.
        self.guard = self.pid = guard
        self.lease_s, self.start_s = lease_s, start_s  # `start_s`: time to come up


class Daemons:
    """All daemons of a job. `hear` gets each host and message; it raises ChannelError if the message cannot be."""

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
        """Start the daemon of a host, if there is none. Raises OSError."""
        if host in self._running:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            start = self._start_here if is_here(host) else self._start_elsewhere
            daemon = self._running[host] = start(host, ours, theirs)
        self._poller.add(daemon.connection, lambda: self._receive(daemon))

    def _start_here(self, host: str, ours: socket.socket, theirs: socket.socket) -> _Daemon:
        settings = self._settings
        # The end of the launcher ends the connection. The lease is for a launcher that stands still; without
        # replacements the job waits for it.
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
        command = shell_command(self._shell or ["ssh"], host, [sys.executable, _PROGRAM, host, *limits, folder])
        errors = os.fdopen(os.memfd_create("errors"), "rb")
        pid = processes.spawn(command, environment(), [theirs.fileno(), theirs.fileno(), errors.fileno()])
        times = self._clock.now(), settings.lease_s, settings.start_timeout_s
        daemon = _Daemon(host, pid, Channel(ours, OF_DAEMON, greeting=GREETING), *times)
        daemon.shell, daemon.errors = os.path.basename(command[0]), errors
        return daemon

    def send(self, host: str, kind: str, **fields: Any) -> None:
        """Send a message to the daemon of a host, unless it is lost."""
        daemon = self._running.get(host)
        if daemon is not None and not daemon.fault:
            daemon.connection.send({"t": kind, **fields})

    def send_all(self, kind: str, **fields: Any) -> None:
        for host in self._running:
            self.send(host, kind, **fields)

    def acknowledge(self) -> None:
        """Let daemons send more output: the output received is written, or nearly so."""
        for daemon in self._running.values():
            if daemon.unacknowledged:
                self.send(daemon.host, "ack", bytes=daemon.unacknowledged)
                daemon.unacknowledged = 0

    def end(self, text: str) -> None:
        for daemon in self._running.values():
            daemon.ending = True
            if daemon.shell and not daemon.has_come:
                _kill(daemon)
        self.send_all("end", text=text)

    def give_up(self) -> None:
        """Kill all daemons and their workers; forget those that have been killed before and still run."""
        for daemon in list(self._running.values()):
            if daemon.given_up:
                self._remove(daemon)
            daemon.given_up = True
            _kill(daemon)

    def _receive(self, daemon: _Daemon) -> None:
        now = self._clock.now()
        try:
            for message in daemon.connection.receive():
                kind = message["t"]
                if (kind == "up") is daemon.has_come:
                    raise ChannelError(f"'{kind}' came {'again' if daemon.has_come else 'before its daemon was up'}.")
                if kind == "up":
                    if message["version"] != __version__:
                        raise ChannelError(
                            f"kvstore_hvd has version {message['version']} there, and {__version__} here"
                        )
                    daemon.pid, daemon.has_come = message["pid"], True
                daemon.unacknowledged += len(message.get("raw", b""))
                self._hear(daemon.host, message)
            if daemon.has_come:
                daemon.heard_at = now
        except ChannelError as error:
            daemon.fault, daemon.heard_at = str(error).rstrip("."), now
            self._poller.close_channel(daemon.connection)

    def _remove(self, daemon: _Daemon) -> None:
        self._poller.close_channel(daemon.connection)
        del self._running[daemon.host]

    def reaped(self, pid: int, code: int) -> None:
        for daemon in self._running.values():
            if pid == daemon.guard and not daemon.shell:
                # A guard that was killed has left us the daemon itself.
                daemon.code, daemon.guard = code if code <= 128 else 128 - code, 0 if code < 0 else -1
            elif pid == (daemon.guard if daemon.shell else daemon.pid):
                daemon.code, daemon.guard = code, -1

    def act_on_time(self, lost: _Lost) -> float:
        """Send beats, and remove lost daemons. Returns when to be called again."""
        # `lost` gets host and fate of a lost daemon, and whether its host may be reached later.
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
        return min([self._beat_at, *(daemon.heard_at + daemon.lease_s + _LEASE_EXTRA_S for daemon in self._up())])

    def _up(self) -> list[_Daemon]:
        return [daemon for daemon in self._running.values() if daemon.has_come and not daemon.fault]

    def are_awaited(self) -> bool:
        """Whether a daemon has been started and is not up."""
        return any(not daemon.has_come for daemon in self._running.values())

    def are_silent(self) -> bool:
        """Whether a daemon has missed beats, so that messages of its workers may be on the way."""
        silent_since = self._clock.now() - _SILENT_S
        return any(daemon.heard_at < silent_since for daemon in self._up())


def _fate(daemon: _Daemon, now: float) -> str:
    """How a daemon was lost; empty if it is not."""
    silent, lost = now - daemon.heard_at, "the connection to its daemon was lost"
    if daemon.fault:
        if daemon.code is not None and not daemon.shell:
            return f"its daemon (pid {daemon.pid}) {how_it_ended(daemon.code)}"
        if daemon.code is not None:
            what = lost if daemon.has_come else "its daemon did not come"
            fault = f"{daemon.fault}; " if daemon.fault != _CLOSED else ""
            return f"{what}: {fault}'{daemon.shell}' {how_it_ended(daemon.code)}"
        return f"{lost}: {daemon.fault}" if silent >= _NEWS_S and not daemon.ending else ""
    limit_s = daemon.lease_s + _LEASE_EXTRA_S if daemon.has_come else daemon.start_s
    if silent < limit_s:
        return ""
    if not daemon.has_come:
        return f"its daemon did not come within {limit_s:g} s"
    return f"its daemon has said nothing for {limit_s:g} s (KVHVD_LEASE)"


def _last_lines(daemon: _Daemon) -> str:
    """The last lines of a remote shell on standard error, or on standard output before the daemon's messages."""
    printed = daemon.connection.skipped if not daemon.has_come else b""
    if daemon.errors is not None:
        size = os.fstat(daemon.errors.fileno()).st_size
        printed += b"\n" + os.pread(daemon.errors.fileno(), _SHOWN_BYTES, max(0, size - _SHOWN_BYTES))
    lines = [line.strip() for line in printed.decode("utf-8", "replace").splitlines() if line.strip()][-_SHOWN_LINES:]
    return f". '{daemon.shell}' says: {' / '.join(lines).rstrip('.')}" if lines else ""


def _kill(daemon: _Daemon) -> None:
    # Only unreaped children get a signal: no other process has their numbers.
    with contextlib.suppress(OSError):
        if daemon.guard > 0 and daemon.shell:
            os.killpg(daemon.guard, signal.SIGKILL)
        elif daemon.guard > 0:
            os.kill(daemon.guard, processes.KILL_DAEMON)
        elif daemon.guard == 0:
            os.kill(daemon.pid, signal.SIGKILL)


# -- The host discovery script of an elastic job -----------------------------------------------------------------------


def hosts_of_script(text: str, default: int = 1) -> dict[str, int]:
    """The hosts that a script has printed: ``host`` or ``host:slots`` in each line, ``#`` before comments."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    slots = slots_of(filter(None, lines), default, least=0)
    return {host: count for host, count in slots.items() if count}  # a host with 0 slots takes no worker now


class HostDiscoveryScript:
    """Runs a script again and again; never two at once, and none for long."""

    # Each run is a task of this host's daemon, with a number below 0 in place of a worker's.

    daemons: Daemons

    def __init__(self, command: str, environment: Mapping[str, str], default: int) -> None:
        self._name = f"the host discovery script '{command}'"
        self.command = ["/bin/sh", "-c", command]
        self._environment, self._default = environment, default
        self._task = 0
        self._running = False
        self._result: dict[str, int] | StartError | None = None  # of the last run, for `poll`
        self._next = self._started = 0.0
        self._killed = ""  # why the run was killed
        self._fault = ""  # of the last run
        self._output, self._errors = bytearray(), bytearray()

    def poll(self, now: float) -> dict[str, int] | None:
        """The hosts of a run that has ended, else None. Starts the next run when it is time. Raises StartError."""
        result, self._result = self._result, None
        if isinstance(result, StartError):
            raise result
        if result is not None:
            return result
        if not self._running and now >= self._next:
            self._next, self._started, self._killed = now + _SCRIPT_EVERY_S, now, ""
            self._output.clear()
            self._errors.clear()
            self._task, self._running = self._task - 1, True
            try:
                self.daemons.start(HERE)
            except OSError as error:
                self.lost(f"cannot be started: {error}")
            none = {"share": [], "control": False, "stdin": False, "capture": True}
            task = {"worker": self._task, "command": self.command, "environment": self._environment}
            self.daemons.send(HERE, "start", **task, **none)
        elif self._running and now >= self._started + _SCRIPT_LIMIT_S:
            self._kill(f"took more than {_SCRIPT_LIMIT_S:g} s")
        return None

    def _kill(self, why: str) -> None:
        if not self._killed:
            self._killed = why
            self.daemons.send(HERE, "signal", worker=self._task, signal=int(signal.SIGKILL))

    def starts_at(self) -> float:
        """The time of the next run; infinite during a run."""
        return math.inf if self._running else self._next

    def fault(self, now: float) -> str:
        """How the last run failed, or that this one takes long; empty if neither."""
        if self._fault or not self._running or now < self._started + _SCRIPT_EVERY_S:
            return self._fault
        seconds = f"{now - self._started:.0f} s"
        return message(f"{self._name} is still running after {seconds}{self._quote()}.", fix=_SCRIPT_FIX)

    def heard(self, message: Mapping[str, Any]) -> None:
        if message["worker"] != self._task or not self._running:
            return
        if message["t"] == "out" and message["fd"] == 1:
            self._output += message.get("raw", b"")[: _MAX_OUTPUT + 1 - len(self._output)]
            if len(self._output) > _MAX_OUTPUT:
                self._kill(f"printed more than {_MAX_OUTPUT} bytes")
        elif message["t"] == "out":
            self._errors += message.get("raw", b"")
            del self._errors[:-_MAX_ERRORS]
        elif message["t"] == "exited":
            self._end(message["code"], how_it_ended(message["code"]))
        elif message["t"] == "not_started":
            self.lost(f"cannot be started: {message['text']}")

    def lost(self, text: str) -> None:
        """End the run, if there is one, for this reason."""
        if self._running:
            self._end(-1, text)

    def _quote(self) -> str:
        """The last lines on standard error, or else of the hosts, for the end of a sentence."""
        text = (self._errors.strip() or self._output[-_MAX_ERRORS:].strip()).decode("utf-8", "backslashreplace")
        return f"; it says: {' / '.join(line[:_MAX_LINE] for line in text.splitlines()[-3:])}" if text else ""

    def _end(self, code: int, how: str) -> None:
        self._running, exit_code, fix = False, EXIT_FAILED, _SCRIPT_FIX
        if self._killed:
            fact = f"{self._name} {self._killed} and was killed{self._quote()}."
        elif code:
            fix = _SCRIPT_FIXES.get(code, "see what it says; it is run by /bin/sh, in the working folder.")
            exit_code = code if code in _SCRIPT_FIXES else EXIT_FAILED
            fact = f"{self._name} {how}{self._quote()}."
        else:
            try:
                hosts = hosts_of_script(self._output.decode("utf-8-sig", "backslashreplace"), self._default)
            except LaunchError as error:
                fact = f"what {self._name} printed are no hosts: {str(error).splitlines()[0].rstrip('.')}."
            else:
                fact = f"{self._name} names no host{self._quote()}."
                self._result, self._fault = hosts, "" if hosts else message(fact, fix=fix)
                return
        self._result = StartError(message(fact, fix=fix), exit_code)
        self._fault = str(self._result)
