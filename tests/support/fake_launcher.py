"""A launcher of one daemon that decides nothing: tests say what it sends, and look at what it hears."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from kvstore_hvd.base.channel import Channel, ChannelError
from support.jobs import LIMIT_S, processes, variables_of

__all__ = ["LINE", "FakeLauncher"]

# What a worker's program begins with if it speaks to its daemon.
LINE = """
import json, os, select, signal, socket, subprocess, sys, threading, time
from kvstore_hvd.base.channel import Channel, ChannelError
def open_line():
    connected = socket.socket(socket.AF_UNIX)
    connected.connect('\\0' + os.environ['KVHVD_DAEMON'])
    return Channel(connected)
def hear(line):
    messages = []
    while not messages:
        select.select([line], [line] if line.wants_to_write else [], [])
        line.flush()
        messages = line.receive()
    return messages
def closed(line):
    try:
        while True:
            hear(line)
    except ChannelError:
        return True
def forever():
    threading.Event().wait(100)
"""


class FakeLauncher:
    """Starts one daemon, keeps its lease, and collects what it says; use as a context manager."""

    def __init__(self, marker: str, *, kill_grace_s: float = 5.0, lease_s: float = 60.0) -> None:
        self.heard: list[dict[str, Any]] = []
        self.written: defaultdict[tuple[int, int], bytes] = defaultdict(bytes)  # by worker and descriptor
        self.deaf = False  # it acknowledges no output
        self.beats = 0
        self.ended: str = ""  # how the line to the daemon ended
        self.silent = False
        self._beat_at = 0.0
        self._taken = 0
        self._marker = marker
        self._environment = variables_of(marker)
        ours, theirs = socket.socketpair()
        self._last_words, write = os.pipe()
        pipes: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": write}
        how: Any = {"env": self._environment, "pass_fds": [theirs.fileno()], "start_new_session": True}
        start = "import socket, sys; from kvstore_hvd.base.channel import Channel"
        line = f"Channel(socket.socket(fileno={theirs.fileno()}))"
        run = f"Daemon({line}, 'localhost', {kill_grace_s}, {lease_s}, {{}}).run()"
        command = [sys.executable, "-c", f"{start}; from kvstore_hvd.launch.daemon import Daemon; sys.exit({run})"]
        self.daemon = subprocess.Popen(command, **pipes, **how)
        os.close(write)
        theirs.close()
        self.line = Channel(ours)

    def __enter__(self) -> FakeLauncher:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.daemon.kill()
        self.daemon.wait()
        deadline = time.monotonic() + LIMIT_S
        while processes(self._marker) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.line.close()
        os.close(self._last_words)

    def send(self, kind: str, **fields: Any) -> None:
        self.line.send({"t": kind, **fields})

    def start(self, worker: int, program: str) -> None:
        self.start_command(worker, [sys.executable, "-c", LINE + program])

    def start_command(self, worker: int, command: list[str], share: tuple[int, ...] = (), **variables: str) -> None:
        environment = {**self._environment, "PYTHONUNBUFFERED": "1", **variables}
        how: Any = {"share": list(share), "control": True, "stdin": False, "capture": True}
        self.send("start", worker=worker, command=command, environment=environment, **how)

    def pump(self) -> None:
        """Hear what there is, and keep the lease."""
        if self.ended:
            return
        if not self.silent and time.monotonic() >= self._beat_at:
            self._beat_at = time.monotonic() + 0.5
            self.send("beat")
        self.line.flush()
        try:
            messages = self.line.receive()
        except ChannelError as error:
            self.ended = str(error)
            return
        for message in messages:
            if message["t"] == "beat":
                self.beats += 1
            elif message["t"] == "out":
                self.written[message["worker"], message["fd"]] += message.get("raw", b"")
                if not self.deaf:
                    self.send("ack", bytes=len(message.get("raw", b"")))
            else:
                self.heard.append(message)

    def wait(self, condition: Callable[[], object], what: str = "") -> None:
        """Pump until the condition holds; fails after a minute."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            heard = str(self.heard)[-3000:]
            assert time.monotonic() < deadline, f"waited in vain for {what or condition}; heard: {heard}"
            self.pump()
            select.select([] if self.ended else [self.line], [], [], 0.02)

    def next(self, kind: str, worker: int | None = None) -> dict[str, Any]:
        """The next message of this type, of this worker; those before it are passed over."""
        while True:
            self.wait(lambda: self._taken < len(self.heard), f"{kind} of worker {worker}")
            message = self.heard[self._taken]
            self._taken += 1
            if message["t"] == kind and worker in (None, message.get("worker")):
                return message

    def told(self, worker: int) -> dict[str, Any]:
        message: dict[str, Any] = self.next("from", worker)["message"]
        return message

    def settle(self) -> None:
        """Wait until the daemon has done whatever it was told before, and has found time for two beats."""
        before = self.beats
        self.wait(lambda: self.beats >= before + 2 or self.ended)

    def end(self) -> int:
        """End the daemon as a launcher would; its exit code."""
        self.send("end", text="")
        self.wait(lambda: self.ended)
        self.line.close()
        return self.daemon.wait(LIMIT_S)

    def last_words(self) -> bytes:
        """What the daemon has written to standard error, which it shares with the launcher."""
        assert select.select([self._last_words], [], [], LIMIT_S)[0]
        return os.read(self._last_words, 1 << 16)
