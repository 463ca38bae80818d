"""A worker's control connection to the launcher of an elastic job, or of a static job on several hosts.

The launcher gives out the worlds of a job, one after the other; a static job has one. The daemon that started the
worker forwards the messages. A thread receives them: it queues the worker's rank in the next world, and reports at once
that the present world is lost, or that workers come or go. A worker without its control connection is unsupervised, and
ends.
"""

from __future__ import annotations

import os
import queue
import select
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

from kvstore_hvd import log
from kvstore_hvd.base.channel import TO_WORKER, Channel, ChannelError, peer_process
from kvstore_hvd.config import config
from kvstore_hvd.errors import LaunchError, message
from kvstore_hvd.world.exit import end_by_force
from kvstore_hvd.world.links import own_addresses
from kvstore_hvd.world.topology import Host, Place, World, virtual_hosts


class ControlConnection:
    """The control connection of this process. Any thread may call its methods."""

    def __init__(self, daemon: str, secret: bytes, worker: int) -> None:
        #: Called when a generation is lost, with it and the reason. From another thread, as the next one.
        self.on_lost: Callable[[int, str], None] = lambda generation, text: None
        #: Called when workers are to come or go, with a number that grows and a `HostUpdateResult`.
        self.on_update: Callable[[int, int], None] = lambda number, result: None
        self._secret, self._worker, self._test_hosts = secret, worker, config().test_hosts
        self._pid = os.getpid()
        self._channel = Channel(_connected(daemon), TO_WORKER)
        self._lock = threading.Lock()  # of senders; one thread may receive meanwhile
        self._worlds: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._generation = -1  # of the latest world that was given out
        self._lost = -1, ""  # the latest generation that is lost, and why
        self._number, self._result = 0, 0  # of the latest update
        self._number_then = 0  # as the present world was given out
        os.register_at_fork(after_in_child=self._channel.close)
        threading.Thread(target=self._listen, name="kvstore_hvd-control", daemon=True).start()

    # -- Worlds -------------------------------------------------------------------------------------------------------

    def enter(self, ranks: Sequence[int] = ()) -> tuple[World, bool]:
        """The first world, once all workers of a new job have come; in a static job those with these ranks."""
        here = Host.here()
        about = {"host": [here.name, here.identity], "pid": os.getpid(), "ranks": list(ranks)}
        self._send("enter", **about, addresses=own_addresses() if config().hosts else [])
        answer = self._take()
        return self._world(answer), answer["t"] == "world"

    def next_world(self, cause: str, text: str, unreached: Sequence[int] = ()) -> World:
        """Wait for the next world, after the present one was lost or left, or these ranks of it were not reached."""
        self._send("ready", generation=self._generation, cause=cause, text=text, unreached=list(unreached))
        return self._world(self._take())

    def joined(self, world: World) -> None:
        """Report that the workers of a world have met."""
        self._send("joined", generation=world.topology.generation)

    def synced(self) -> None:
        """Report that this worker has the state of the training, and could broadcast it."""
        self._send("synced", generation=self._generation)

    def finished(self) -> None:
        """Report the end of training on this worker: it needs no replacement."""
        self._send("finished")

    def why_lost(self, generation: int) -> str:
        """Why a generation is lost; empty as long as it is not."""
        lost, text = self._lost
        return text if generation <= lost else ""

    @property
    def update(self) -> tuple[int, int] | None:
        """Number and result of an update that came after the present world was given out, if any did."""
        return (self._number, self._result) if self._number > self._number_then else None

    def _take(self) -> dict[str, Any]:
        while True:
            answer = self._worlds.get()  # the launcher has deadlines; without it `_end` ends this process
            if answer["t"] == "fail":
                fact = f"the job ends: {answer['text']}"
                raise LaunchError(message(fact, operation="worker", name=str(self._worker), fix=answer["fix"]))
            if answer["t"] == "leave":
                log.logger.info("this worker is not needed any more")
                raise SystemExit(0)
            if answer["t"] == "rank" or not (text := self.why_lost(answer["generation"])):
                return answer
            # The world was lost before this worker joined it: the launcher waits for its request for the next one.
            self._send("ready", generation=answer["generation"], cause="meeting", text=text, unreached=[])

    def _world(self, answer: dict[str, Any]) -> World:
        generation = answer.get("generation", -1)
        hosts = [Host(name, identity) for name, identity in answer["hosts"]]
        more = {"generation": generation, "pids": tuple(answer["pids"]), "local_rank_of": answer["local_ranks"]}
        if self._test_hosts:
            hosts, more["local_rank_of"] = virtual_hosts(hosts, self._test_hosts), ()
        return World(
            Place.of(answer["rank"], hosts, source="launcher", **more),
            answer.get("job", ""),
            self._secret,
            lost=lambda: self.why_lost(generation),
            meeting=generation,
            addresses=tuple(map(tuple, answer["addresses"])),
        )

    # -- The connection -----------------------------------------------------------------------------------------------

    def _send(self, kind: str, **fields: Any) -> None:
        if self._pid != os.getpid():
            return  # a forked child
        with self._lock:
            self._channel.send({"t": kind, **fields})
            while self._channel.wants_to_write:
                writable = select.poll()
                writable.register(self._channel, select.POLLOUT)
                writable.poll(1000)
                self._channel.flush()

    def _listen(self) -> None:
        readable = select.poll()
        readable.register(self._channel, select.POLLIN)
        try:
            while True:
                readable.poll()
                for each in self._channel.receive():
                    self._on_message(each)
        except Exception as error:  # noqa: BLE001 - an unsupervised worker must not go on
            if self._pid == os.getpid():
                self._end(error)

    def _on_message(self, received: dict[str, Any]) -> None:
        kind = received["t"]
        if kind == "refused":
            raise ChannelError(received["text"])
        if kind == "lost":
            lost = received["generation"], received["text"]
            self._lost = max(self._lost, lost)
            self.on_lost(*lost)
        elif kind == "updated":
            self._number, self._result = received["number"], received["result"]
            self.on_update(self._number, self._result)
        else:
            if kind == "world":
                self._generation, self._number_then = received["generation"], self._number
            self._worlds.put(received)

    def _end(self, error: Exception) -> None:
        """End the process: it must not train on beside a job that goes on without it."""
        end_by_force(f"the control connection to the daemon of this job is lost: {error} This process ends.")


def _connected(daemon: str) -> socket.socket:
    """A socket to the daemon of this job, which knows its workers by their processes."""
    fix = "start with kvhvdrun; a process that a worker started cannot take its place."
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.connect(f"\0{daemon}")
    except OSError as error:
        made.close()
        raise LaunchError(message(f"the daemon of the job does not answer: {error}.", fix=fix)) from None
    user = peer_process(made)[1]
    if user != os.geteuid() and 0 not in (user, os.geteuid()):  # root: by sudo, one of the two may be another user
        made.close()
        raise LaunchError(message(f"user {user} answers in place of the daemon of the job.", fix=fix))
    return made


_current: ControlConnection | None = None
_lock = threading.Lock()


def control_connection() -> ControlConnection | None:
    """The control connection of this process; None unless it is a worker of an elastic job."""
    known = config()
    return None if not known.daemon or known.worker is None else _of(known.worker)


def failure_sender() -> Callable[[str], None] | None:
    """Sends the launcher what this host's workers did before a failure; None where no connection leads to it."""
    connection = _current
    return None if connection is None else lambda part: connection._send("failure", part=part)


def meet(rank: int, ranks: Sequence[int]) -> World:
    """The world of these ranks of a static job on several hosts. Collective over them."""
    return _of(rank).enter(ranks)[0]


def _of(worker: int) -> ControlConnection:
    global _current
    with _lock:
        _current = _current or ControlConnection(config().daemon, config().secret, worker)
        return _current
