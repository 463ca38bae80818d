"""The sockets of a running elastic job under attack: nothing that others send changes anything, or stays.

The launcher's TCP socket and the daemon's Unix socket get bytes of no sense, handshakes that are cut, altered, repeated
or made with another secret, and connections that do not read or say nothing. Some attackers know the secret, and still
are neither the daemon nor a worker. KVHVD_TEST_SEED chooses another sequence; a failure names its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvstore_hvd.wire import Address, Connection, WireError
from kvstore_hvd.wire.authentication import mac
from kvstore_hvd.wire.connection import _MAGIC
from support.jobs import LIMIT_S, end_by, processes, variables_of
from support.launchers import kvhvdrun

WORKER = Path(__file__).resolve().parents[1] / "support" / "elastic_worker.py"

# Slow: the short choice of tests is for another MXNet and MPI, which nothing here has to do with.
pytestmark = [pytest.mark.timeout(500), pytest.mark.slow]


def eventually(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def environ(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(entry.decode().partition("=")[::2] for entry in entries if entry)  # type: ignore[misc]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])


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


class Job:
    """A job with two workers that train nothing, and what an attacker may find out about it."""

    def __init__(self, marker: str, folder: Path) -> None:
        self.log = folder / "events"
        options = ["--min-np", "2", "--max-np", "2", "--event-log", str(self.log)]
        self.launcher = subprocess.Popen(
            [*kvhvdrun().prefix, *options, sys.executable, str(WORKER)],
            env=variables_of(marker),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        eventually(lambda: self.count("generation_joined") == 1, "the first world")
        self.workers = {event["worker"]: event["pid"] for event in self.events() if event["event"] == "worker_started"}
        self.daemon = parent(self.workers[0])
        self.secret = bytes.fromhex(environ(self.workers[0])["KVHVD_SECRET"])
        self.addresses: dict[str, Address] = {
            "launcher": ("127.0.0.1", listening_port(self.launcher.pid)),
            "daemon": environ(self.workers[0])["KVHVD_DAEMON"],
        }

    def events(self) -> list[dict[str, Any]]:
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.endswith("}")]

    def count(self, name: str) -> int:
        return sum(event["event"] == name for event in self.events())

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
        for name, pid in (("launcher", self.launcher.pid), ("daemon", self.daemon)):
            status = Path(f"/proc/{pid}/status").read_text()
            found[name] = (len(os.listdir(f"/proc/{pid}/fd")), int(status.partition("VmRSS:")[2].split()[0]))
        return found


@pytest.fixture
def job(marker: str, tmp_path: Path) -> Iterator[Job]:
    job = Job(marker, tmp_path)
    yield job
    if job.launcher.poll() is None:
        job.launcher.kill()
        job.launcher.communicate()


class Attacker:
    """Sends one thing after the other, to one socket or the other."""

    def __init__(self, job: Job, seed: int) -> None:
        self.job = job
        self.sent = 0
        self.random = random.Random(seed)
        self._open: list[socket.socket | Connection] = []
        self._recorded = {target: self._record(target) for target in job.addresses}

    def _record(self, target: str) -> bytes:
        """The bytes that a process with the secret sends, which a stranger may have seen on its way."""
        connection = Connection(self.job.open(target), self.job.secret, "client", self._identity())
        while not connection._peer_nonce:
            select.select([connection], [], [], LIMIT_S)
            connection.receive()
        body = connection._nonce + connection._own_identity
        proof = mac(self.job.secret, _MAGIC, b"hello", connection._peer_nonce, body)
        connection.close()
        return struct.pack("!I", len(body)) + proof + body

    def _identity(self) -> dict[str, Any]:
        return self.random.choice(
            [
                {"role": "daemon", "host": "localhost", "pid": self.job.daemon},
                {"role": "daemon", "host": "127.0.0.9", "pid": os.getpid()},
                {"role": "worker", "worker": 0, "pid": self.job.workers[0]},
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
        stranger = self.job.open(target)
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
        stranger = self.job.open(target)
        self._open.append(stranger)
        stranger.sendall(data)

    def _other_secret(self, target: str) -> None:
        secret = self.random.choice([b"", bytes(32), self.job.secret[:-1]])
        connection = Connection(self.job.open(target), secret, "client", self._identity())
        self._open.append(connection)
        select.select([connection], [], [], LIMIT_S)
        connection.receive()

    def _with_secret(self, target: str) -> None:
        """One who knows the secret, but is nobody whom the job waits for; it says what others would, or anything."""
        connection = Connection(self.job.open(target), self.job.secret, "client", self._identity())
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
def test_attacks_change_nothing(job: Job, marker: str, count: int) -> None:
    seed = int(os.environ.get("KVHVD_TEST_SEED", "1"))
    attacker = Attacker(job, seed)
    for _ in range(100):  # what is allocated once
        attacker.step()
    before = job.events()
    usage = job.usage()
    while attacker.sent < count:
        attacker.step()
    attacker.end()
    told = f"KVHVD_TEST_SEED={seed}, {attacker.sent} messages"
    assert job.launcher.poll() is None, told
    assert job.events() == before, told
    assert set(processes(marker)) >= {job.launcher.pid, job.daemon, *job.workers.values()}, told
    # Strangers that said nothing have their time; then everything is as it was.
    for name, (descriptors, memory) in usage.items():
        eventually(lambda: job.usage()[name][0] <= descriptors, f"the descriptors of the {name}")  # noqa: B023
        assert job.usage()[name][1] < memory + 8192, f"{told}: memory of the {name}"
    # And the job does what it would have done.
    os.kill(job.workers[0], signal.SIGKILL)
    eventually(lambda: job.count("generation_joined") == 2, "a world with the worker's successor")
    code, _, err = end_by(job.launcher, signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
    assert job.secret.hex().encode() not in err
    assert processes(marker) == []


def test_the_secret_is_in_no_command_line_and_no_file_for_others(job: Job, marker: str) -> None:
    secret = job.secret.hex().encode()
    found = processes(marker)
    assert {job.launcher.pid, job.daemon, *job.workers.values()} <= set(found)
    for pid in found:
        assert secret not in Path(f"/proc/{pid}/cmdline").read_bytes()
        assert Path(f"/proc/{pid}/environ").stat().st_mode & 0o077 == 0
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                path = Path(os.readlink(f"/proc/{pid}/fd/{fd}"))
                if path.is_file():
                    assert secret not in path.read_bytes()
    code, _, err = end_by(job.launcher, signal.SIGTERM)
    assert code == 128 + signal.SIGTERM
    assert secret not in err
    assert secret not in job.log.read_bytes()
