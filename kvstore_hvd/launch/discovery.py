"""Which hosts an elastic job may use: a fixed list, or what a script says every second."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Protocol

from kvstore_hvd.errors import LaunchError
from kvstore_hvd.launch.children import Child
from kvstore_hvd.launcher.capacity import MAX_WORKERS
from kvstore_hvd.launcher.guard import Guard
from kvstore_hvd.launcher.hosts import refuse_others, slots_of
from kvstore_hvd.launcher.workers import how_it_ended

__all__ = ["DiscoveryError", "FixedHosts", "HostDiscovery", "HostDiscoveryScript", "hosts_of_script"]

# From the start of one run of a script to the start of the next one, and at most for one run.
_EVERY_S = 1.0
_LIMIT_S = 10.0
_MAX_OUTPUT = 1 << 16


class DiscoveryError(Exception):
    """The hosts could not be found out; the text says why."""


class HostDiscovery(Protocol):
    """Tells which hosts there are."""

    slots: int  # of all hosts, where that is known from the start; else 0

    def start(self) -> None:
        """Prepare, before there are sockets."""

    def poll(self, now: float) -> dict[str, int] | None:
        """The hosts, with the slots of each, if they have been found out anew since the last call."""

    def deadline(self) -> float | None:
        """When `poll` has something to do even if nothing happens; None for never."""

    def reaped(self, pid: int, code: int) -> None:
        """A child of this process has ended, and been reaped: with this exit code, or minus a signal's number."""

    def close(self) -> None:
        """End that process."""


class FixedHosts:
    """Hosts that stay as they are."""

    def __init__(self, hosts: Mapping[str, int]) -> None:
        refuse_others(hosts)
        self._hosts: dict[str, int] | None = _usable(hosts)
        self.slots = sum(self._hosts.values())

    def start(self) -> None:
        """Nothing to prepare."""

    def poll(self, now: float) -> dict[str, int] | None:
        """The hosts, once."""
        hosts, self._hosts = self._hosts, None
        return hosts

    def deadline(self) -> float | None:
        """Never."""
        return None

    def reaped(self, pid: int, code: int) -> None:
        """Nobody's here."""

    def close(self) -> None:
        """Nothing to end."""


def hosts_of_script(text: str, default: int = 1) -> dict[str, int]:
    """The hosts that a script has printed: ``host`` or ``host:slots`` in each line, ``#`` before comments."""
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    # A host without slots is there, but takes no worker.
    return _usable(slots_of([line for line in lines if line and not line.endswith(":0")], default))


def _usable(hosts: Mapping[str, int]) -> dict[str, int]:
    # Each slot is looked at for every decision.
    return {host: min(count, MAX_WORKERS) for host, count in hosts.items()}


class HostDiscoveryScript:
    """Runs a script again and again; never two at once, and none for long."""

    slots = 0

    def __init__(self, command: str, default: int, environment: dict[str, str], job: str) -> None:
        self._command = command
        self._default = default
        # Not the job's own name: what the script starts is to be found, but is none of the daemons' business.
        name = f"{job}-discovery"
        self._environment = {**environment, "KVHVD_JOB": name}
        self._variable = f"KVHVD_JOB={name}".encode()
        self._guard: Guard | None = None
        self._child: Child | None = None
        self._next = 0.0
        self._kill_at = 0.0
        self._late = False

    def start(self) -> None:
        """Have what the script starts end even if we are killed."""
        self._guard = Guard(self._variable)

    def poll(self, now: float) -> dict[str, int] | None:
        """The hosts that the script has printed, once it has ended; starts it when it is time."""
        if self._child is None:
            if now >= self._next:
                self._start(now)
            return None
        self._child.read()
        if self._child.code is None:
            if now >= self._kill_at and not self._late:
                self._late = True
                self._child.signal(signal.SIGKILL)
            return None
        child = self._child
        self._let_go(child)
        return self._hosts(child)

    def deadline(self) -> float | None:
        """When the script is started, or killed."""
        if self._child is None:
            return self._next
        return None if self._late else self._kill_at

    def reaped(self, pid: int, code: int) -> None:
        """The script has ended, or its guard."""
        if self._child is not None and self._child.pid == pid:
            self._child.code = code
        elif self._guard is not None:
            self._guard.replace(pid)

    def close(self) -> None:
        """End the script."""
        if self._child is not None:
            self._child.signal(signal.SIGKILL)
            self._let_go(self._child)
        if self._guard is not None:
            self._guard.close()
            self._guard = None

    def _let_go(self, child: Child) -> None:
        child.close()
        self._child = None

    def _start(self, now: float) -> None:
        self._next, self._kill_at, self._late = now + _EVERY_S, now + _LIMIT_S, False
        try:
            self._child = Child(["/bin/sh", "-c", self._command], self._environment, self._variable, _MAX_OUTPUT)
        except OSError as error:
            raise DiscoveryError(f"the host discovery script cannot be started: {error}") from None

    def _hosts(self, child: Child) -> dict[str, int]:
        words = child.errors.decode("utf-8", "replace").strip().splitlines()[-3:]
        said = f"; it says: {' / '.join(words)}" if words else ""
        if self._late:
            raise DiscoveryError(f"the host discovery script took more than {_LIMIT_S:g} s and was killed{said}")
        if child.code:
            raise DiscoveryError(f"the host discovery script {how_it_ended(child.code)}{said}")
        if child.overflown:
            raise DiscoveryError(f"the host discovery script printed more than {_MAX_OUTPUT} bytes{said}")
        try:
            return hosts_of_script(child.output.decode(), self._default)
        except (UnicodeDecodeError, LaunchError) as error:
            first = str(error).splitlines()[0].rstrip(".")
            raise DiscoveryError(f"what the host discovery script printed are no hosts: {first}") from None
