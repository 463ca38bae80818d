"""The sockets of a running elastic job under attack: nothing that others send changes anything, or stays.

The launcher's TCP socket and the daemon's Unix socket get bytes of no sense, handshakes that are cut, altered, repeated
or made with another secret, and connections that do not read or say nothing. Some attackers know the secret, and still
are neither the daemon nor a worker. KVHVD_TEST_SEED chooses another sequence; a failure names its own.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import socket
import struct
from pathlib import Path
from typing import Any

import pytest

from kvstore_hvd.wire import Address, Connection, WireError
from kvstore_hvd.wire.authentication import mac
from kvstore_hvd.wire.connection import _MAGIC
from support.jobs import LIMIT_S, Job, processes

pytestmark = [pytest.mark.timeout(500), pytest.mark.slow]


def environ(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(entry.decode().partition("=")[::2] for entry in entries if entry)  # type: ignore[misc]


def listening_port(pid: int) -> int:
    """The TCP port of 127.0.0.1 that a process listens on."""
    own = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
            host, port = fields[1].split(":")
            assert host == "0100007F", "it listens for others than this host"
            return int(port, 16)
    raise AssertionError(f"process {pid} does not listen")


class Target:
    """A job with two workers that train nothing, and what an attacker may find out about it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        job.until_joined(0, 1)
        self.workers = {worker: job.pid(worker) for worker in (0, 1)}
        (self.daemon,) = job.daemons()
        variables = environ(self.workers[0])
        self.secret = bytes.fromhex(variables["KVHVD_SECRET"])
        self.addresses: dict[str, Address] = {
            "launcher": ("127.0.0.1", listening_port(job.process.pid)),
            "daemon": variables["KVHVD_DAEMON"],
        }

    def open(self, target: str) -> socket.socket:
        address = self.addresses[target]
        while True:
            family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
            connected = socket.socket(family, socket.SOCK_STREAM)
            connected.settimeout(LIMIT_S)
            if not connected.connect_ex(b"\0" + address.encode() if isinstance(address, str) else address):
                return connected
            connected.close()  # many wait already

    def usage(self) -> dict[str, tuple[int, int]]:
        """Descriptors and KiB of memory of launcher and daemon."""
        found = {}
        for name, pid in (("launcher", self.job.process.pid), ("daemon", self.daemon)):
            status = Path(f"/proc/{pid}/status").read_text()
            found[name] = (len(os.listdir(f"/proc/{pid}/fd")), int(status.partition("VmRSS:")[2].split()[0]))
        return found


class Attacker:
    """Sends one thing after the other, to one socket or the other."""

    def __init__(self, target: Target, seed: int) -> None:
        self.target = target
        self.sent = 0
        self.random = random.Random(seed)
        self._open: list[socket.socket | Connection] = []
        self._recorded = {name: self._record(name) for name in target.addresses}

    def _record(self, target: str) -> bytes:
        """The bytes that a process with the secret sends, which a stranger may have seen on its way."""
        connection = Connection(self.target.open(target), self.target.secret, "client", self._identity())
        while not connection._peer_nonce:
            select.select([connection], [], [], LIMIT_S)
            connection.receive()
        body = connection._nonce + connection._own_identity
        proof = mac(self.target.secret, _MAGIC, b"hello", connection._peer_nonce, body)
        connection.close()
        return struct.pack("!I", len(body)) + proof + body

    def _identity(self) -> dict[str, Any]:
        return self.random.choice(
            [
                {"role": "daemon", "host": "localhost", "pid": self.target.daemon},
                {"role": "daemon", "host": "127.0.0.9", "pid": os.getpid()},
                {"role": "worker", "worker": 0, "pid": self.target.workers[0]},
                {"role": "worker", "worker": 1 << 60, "pid": os.getpid()},
                {"role": "launcher"},
                {"role": None, "host": [], "worker": {}},
                {},
            ]
        )

    def step(self) -> None:
        """One attack."""
        target = self.random.choice(["launcher", "daemon"])
        attack = self.random.choice([self._bytes, self._bytes, self._altered, self._other_secret, self._with_secret])
        with contextlib.suppress(OSError, WireError):
            attack(target)
        self.sent += 1
        while len(self._open) > 80:
            self._open.pop(self.random.randrange(len(self._open))).close()

    def end(self) -> None:
        """Go away."""
        for each in self._open:
            each.close()

    def _bytes(self, target: str) -> None:
        stranger = self.target.open(target)
        self._open.append(stranger)
        kind = self.random.randrange(4)
        if kind == 0:
            stranger.sendall(self.random.randbytes(self.random.choice((1, 3, 4, 36, 100, 4096, 20_000))))
        elif kind == 1:
            length = self.random.choice((0, 1, 32, 4096, 4097, 1 << 20, (1 << 32) - 1))
            stranger.sendall(struct.pack("!I", length) + self.random.randbytes(100))
        elif kind == 2:
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        if self.random.random() < 0.3:
            stranger.shutdown(socket.SHUT_WR)

    def _altered(self, target: str) -> None:
        """A handshake that was seen before: as it was, cut, or changed."""
        data = bytearray(self._recorded[target])
        kind = self.random.randrange(3)
        if kind == 0:
            data = data[: self.random.randrange(len(data))]
        elif kind == 1:
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        stranger = self.target.open(target)
        self._open.append(stranger)
        stranger.sendall(data)

    def _other_secret(self, target: str) -> None:
        secret = self.random.choice([b"", bytes(32), self.target.secret[:-1]])
        connection = Connection(self.target.open(target), secret, "client", self._identity())
        self._open.append(connection)
        select.select([connection], [], [], LIMIT_S)
        connection.receive()

    def _with_secret(self, target: str) -> None:
        """One who knows the secret, but is nobody whom the job waits for; it says what others would, or anything."""
        connection = Connection(self.target.open(target), self.target.secret, "client", self._identity())
        self._open.append(connection)
        while not connection.is_authenticated:
            assert select.select([connection], [], [], LIMIT_S)[0]
            connection.receive()
        for _ in range(self.random.randrange(4)):
            connection.send(self._message())
            self.sent += 1

    def _message(self) -> dict[str, Any]:
        return self.random.choice(
            [
                {"t": "exited", "worker": 0, "code": 1, "lines": []},
                {"t": "started", "worker": 0, "pid": 1},
                {"t": "from", "worker": 1, "message": {"t": "finished"}},
                {"t": "from", "worker": 1, "message": {"t": "ready", "generation": 0, "cause": "lost", "text": ""}},
                {"t": "ready", "generation": 0, "cause": "timeout", "text": ""},
                {"t": "finished"},
                {"t": "end", "text": "over"},
                {"t": "signal", "worker": None, "signal": 9, "ended": True},
                {"t": "beat"},
                {"t": "x" * self.random.choice((1, 100_000))},
                {"t": None},
                {},
            ]
        )


@pytest.mark.parametrize(
    "count", [pytest.param(1_000, id="short"), pytest.param(25_000, id="long", marks=pytest.mark.fuzz)]
)
def test_attacks_change_nothing(start: Any, count: int) -> None:
    seed = int(os.environ.get("KVHVD_TEST_SEED", "1"))
    job = start("--min-np 2 --max-np 2", acts="steps=1000000")
    target = Target(job)
    attacker = Attacker(target, seed)
    for _ in range(100):  # what is allocated once
        attacker.step()
    before = list(job.events())
    usage = target.usage()
    while attacker.sent < count:
        attacker.step()
    attacker.end()
    told = f"KVHVD_TEST_SEED={seed}, {attacker.sent} messages"
    assert job.process.poll() is None, told
    assert job.events() == before, told
    assert set(processes(job.marker)) >= {job.process.pid, target.daemon, *target.workers.values()}, told
    # Strangers that said nothing have their time; then everything is as it was.
    for name, (descriptors, memory) in usage.items():
        job.until(lambda: target.usage()[name][0] <= descriptors, f"the descriptors of the {name}")  # noqa: B023
        assert target.usage()[name][1] < memory + 8192, f"{told}: memory of the {name}"
    # And the job does what it would have done.
    job.kill(0)
    job.until_joined(1, 2)
    assert target.secret.hex() not in job.end(128 + signal.SIGTERM, signal.SIGTERM).err
