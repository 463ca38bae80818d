"""Which hosts an elastic job may use: a fixed list, or what a script says every second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Union

from kvstore_hvd.errors import LaunchError
from kvstore_hvd.launch.capacity import MAX_WORKERS
from kvstore_hvd.launch.hosts import slots_of
from kvstore_hvd.launch.state import how_it_ended

__all__ = ["DiscoveryError", "FixedHosts", "HostDiscovery", "HostDiscoveryScript", "hosts_of_script"]

# From the start of one run of a script to the start of the next one, and at most for one run.
_EVERY_S = 1.0
_LIMIT_S = 10.0
_MAX_OUTPUT = 1 << 16
_MAX_ERRORS = 8192  # the end of what it writes to standard error


class DiscoveryError(Exception):
    """The hosts could not be found out; the text says why."""


class FixedHosts:
    """Hosts that stay as they are."""

    def __init__(self, hosts: Mapping[str, int]) -> None:
        self._hosts: dict[str, int] | None = _usable(hosts)
        self.slots = sum(self._hosts.values())

    def poll(self, now: float) -> dict[str, int] | None:
        """The hosts, once."""
        hosts, self._hosts = self._hosts, None
        return hosts

    def deadline(self) -> float | None:
        """Never."""
        return None


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

    # Each run is a task of a daemon, with a number below 0 in the place of a worker's. `start` and `kill` are called
    # with that number, and `heard` is told what the daemon says of it.

    slots = 0

    def __init__(self, command: str, default: int) -> None:
        self.command = ["/bin/sh", "-c", command]
        self.start: Callable[[int], None]
        self.kill: Callable[[int], None]
        self._default = default
        self._task = 0
        self._running = False
        self._ended = ""  # how it ended, until `poll` has been told; else empty
        self._code = 0
        self._next = self._kill_at = 0.0
        self._late = False
        self._output, self._errors = bytearray(), bytearray()

    def poll(self, now: float) -> dict[str, int] | None:
        """The hosts that the script has printed, once it has ended; starts it when it is time."""
        if self._ended:
            return self._hosts()
        if not self._running and now >= self._next:
            self._next, self._kill_at, self._late = now + _EVERY_S, now + _LIMIT_S, False
            self._output.clear()
            self._errors.clear()
            self._task, self._running = self._task - 1, True
            self.start(self._task)
        elif self._running and now >= self._kill_at and not self._late:
            self._late = True
            self.kill(self._task)
        return None

    def deadline(self) -> float | None:
        """When the script is started, or killed."""
        if not self._running:
            return self._next
        return None if self._late else self._kill_at

    def heard(self, message: Mapping[str, Any]) -> None:
        """A daemon says something of a run."""
        if message["worker"] != self._task or not self._running:
            return
        if message["t"] == "out" and message["fd"] == 1:
            self._output += message.get("raw", b"")[: _MAX_OUTPUT + 1 - len(self._output)]
        elif message["t"] == "out":
            self._errors += message.get("raw", b"")
            del self._errors[:-_MAX_ERRORS]
        elif message["t"] == "exited":
            self._code, self._running, self._ended = message["code"], False, how_it_ended(message["code"])
        elif message["t"] == "not_started":
            self.lost(f"cannot be started: {message['text']}")

    def lost(self, text: str) -> None:
        """There is nothing any more that it could run on, because of what `text` says."""
        if self._running:
            self._code, self._running, self._ended = -1, False, text

    def _hosts(self) -> dict[str, int]:
        how, self._ended = self._ended, ""
        words = self._errors.decode("utf-8", "replace").strip().splitlines()[-3:]
        said = f"; it says: {' / '.join(words)}" if words else ""
        if self._late:
            raise DiscoveryError(f"the host discovery script took more than {_LIMIT_S:g} s and was killed{said}")
        if self._code:
            raise DiscoveryError(f"the host discovery script {how}{said}")
        if len(self._output) > _MAX_OUTPUT:
            raise DiscoveryError(f"the host discovery script printed more than {_MAX_OUTPUT} bytes{said}")
        try:
            return hosts_of_script(self._output.decode(), self._default)
        except (UnicodeDecodeError, LaunchError) as error:
            first = str(error).splitlines()[0].rstrip(".")
            raise DiscoveryError(f"what the host discovery script printed are no hosts: {first}") from None


HostDiscovery = Union[FixedHosts, HostDiscoveryScript]
