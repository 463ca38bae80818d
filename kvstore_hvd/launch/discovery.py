"""The host discovery script of an elastic job, run every second."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from typing import Any

from kvstore_hvd.errors import LaunchError, message
from kvstore_hvd.launch.daemons import Daemons
from kvstore_hvd.launch.hosts import slots_of
from kvstore_hvd.launch.state import EXIT_FAILED, StartError, how_it_ended

#: The host of the script.
HERE = "localhost"
# Seconds between the starts of two runs.
_EVERY_S = 1.0
# Seconds of the longest run.
_LIMIT_S = 10.0
_MAX_OUTPUT = 1 << 16
_MAX_ERRORS = 8192  # kept of standard error, its end
_MAX_LINE = 200  # of a line that an error quotes
_FIX = f"it has to end within {_LIMIT_S:g} s, and to print HOST or HOST:N in each line."
_FIXES = {126: "chmod +x the script.", 127: "check the path of the script, as in ./discover.sh."}


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
        self._ended = ""  # how the last run ended; empty once `poll` has returned its hosts
        self._code = 0
        self._next = self._started = 0.0
        self._killed = ""  # why the run was killed
        self._fault = ""  # of the last run
        self._output, self._errors = bytearray(), bytearray()

    def poll(self, now: float) -> dict[str, int] | None:
        """The hosts of a run that has ended, else None. Starts the next run when it is time. Raises StartError."""
        if self._ended:
            try:
                hosts = self._hosts()
            except StartError as error:
                self._fault = str(error)
                raise
            self._fault = "" if hosts else message(f"{self._name} names no host{self._quote()}.", fix=_FIX)
            return hosts
        if not self._running and now >= self._next:
            self._next, self._started, self._killed = now + _EVERY_S, now, ""
            self._output.clear()
            self._errors.clear()
            self._task, self._running = self._task - 1, True
            try:
                self.daemons.start(HERE)
            except OSError as error:
                self.lost(f"cannot be started: {error}")
            none = {"share": [], "line": False, "stdin": False, "capture": True}
            task = {"worker": self._task, "command": self.command, "environment": self._environment}
            self.daemons.send(HERE, "start", **task, **none)
        elif self._running and now >= self._started + _LIMIT_S:
            self._kill(f"took more than {_LIMIT_S:g} s")
        return None

    def _kill(self, why: str) -> None:
        if not self._killed:
            self._killed = why
            self.daemons.send(HERE, "signal", worker=self._task, signal=int(signal.SIGKILL), ended=True)

    def starts_at(self) -> float:
        """The time of the next run; infinite during a run."""
        return math.inf if self._running else self._next

    def fault(self, now: float) -> str:
        """How the last run failed, or that this one takes long; empty if neither."""
        if self._fault or not self._running or now < self._started + _EVERY_S:
            return self._fault
        seconds = f"{now - self._started:.0f} s"
        return message(f"{self._name} is still running after {seconds}{self._quote()}.", fix=_FIX)

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
            self._code, self._running, self._ended = message["code"], False, how_it_ended(message["code"])
        elif message["t"] == "not_started":
            self.lost(f"cannot be started: {message['text']}")

    def lost(self, text: str) -> None:
        """End the run, if there is one, for this reason."""
        if self._running:
            self._code, self._running, self._ended = -1, False, text

    def _quote(self) -> str:
        """The last lines on standard error, or else of the hosts, for the end of a sentence."""
        text = (self._errors.strip() or self._output[-_MAX_ERRORS:].strip()).decode("utf-8", "backslashreplace")
        return f"; it says: {' / '.join(line[:_MAX_LINE] for line in text.splitlines()[-3:])}" if text else ""

    def _hosts(self) -> dict[str, int]:
        how, code, fix, self._ended = self._ended, EXIT_FAILED, _FIX, ""
        if self._killed:
            fact = f"{self._name} {self._killed} and was killed{self._quote()}."
        elif self._code:
            fix = _FIXES.get(self._code, "see what it says; it is run by /bin/sh, in the working folder.")
            code = self._code if self._code in _FIXES else EXIT_FAILED
            fact = f"{self._name} {how}{self._quote()}."
        else:
            try:
                return hosts_of_script(self._output.decode("utf-8-sig", "backslashreplace"), self._default)
            except LaunchError as error:
                fact = f"what {self._name} printed are no hosts: {str(error).splitlines()[0].rstrip('.')}."
        raise StartError(message(fact, fix=fix), code)
