"""A worker of an elastic job that trains nothing: it says on its line what a real one would say.

As a program: ``elastic_worker.py [act ...]``. An act is ``name`` or ``name=value``, or ``N:name=value`` for the worker
with number N alone. Steps are counted over all epochs; each takes 20 ms.

=================  ==================================================================================================
``steps=N``        end well after so many steps (default: never)
``until=FILE``     end well as soon as FILE is there, after the step that is under way
``die``            SIGKILL at the step of ``at`` (default 0: as soon as the world has been joined)
``stop``           the same, by SIGSTOP
``timeout``        at that step, say that an operation has timed out
``at=N``           see there
``die_at=WHEN``    SIGKILL at ``ready`` or ``world`` (before it says that it has joined)
``deaf``           ignore SIGTERM, and being told to leave or to fail
=================  ==================================================================================================

Workers of one world watch each other's processes: when one is gone, the others say that they have lost it. They commit
at each step; a commit is where they look for updates. What happens is printed as a line each.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
from typing import Any

from kvstore_hvd.base.channel import Channel, ChannelError

_STEP_S = 0.02


class Left(Exception):
    """This worker is not needed, or the job ends."""


class FakeWorker:
    """One worker with its line."""

    def __init__(self, acts: dict[str, str]) -> None:
        self.acts = acts
        self.id = int(os.environ["KVHVD_WORKER"])
        self.steps = 0
        self.generation = -1
        self.update = 0
        self.lost = -1  # the last generation that is void
        self.inbox: list[dict[str, Any]] = []
        if "deaf" in acts:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connected.connect("\0" + os.environ["KVHVD_DAEMON"])
        self.line = Channel(connected)

    def moment(self, when: str) -> None:
        """Die or stop here, if that is the act."""
        if self.acts.get("die_at") == when:
            os.kill(os.getpid(), signal.SIGKILL)

    def say(self, kind: str, **fields: Any) -> None:
        """Say something to the launcher."""
        self.line.send({"t": kind, **fields})

    def hear(self, seconds: float) -> None:
        """Take what there is, and wait for it if there is nothing."""
        if select.select([self.line], [], [], seconds)[0]:
            self.inbox += self.line.receive()
        for message in self.inbox:
            if message["t"] in ("leave", "fail") and "deaf" not in self.acts:
                print(f"{message['t']}: {message.get('text', '')}", flush=True)
                raise Left(message["t"])
            if message["t"] == "lost":
                self.lost = max(self.lost, message["generation"])
            if message["t"] == "updated":
                self.update = message["result"]

    def take(self, *kinds: str) -> dict[str, Any]:
        """Wait for a message of these types; those before it count no more."""
        while True:
            for position, message in enumerate(self.inbox):
                if message["t"] in kinds:
                    del self.inbox[: position + 1]
                    return message
            self.hear(1.0)

    def first_world(self) -> dict[str, Any]:
        """Enter the job; the first world."""
        self.say("enter", host=[os.uname().nodename] * 2, pid=os.getpid(), addresses=[], ranks=[])
        answer = self.take("rank", "world")
        return answer if answer["t"] == "world" else self.next_world("start")

    def next_world(self, cause: str) -> dict[str, Any]:
        """Say that a world is waited for; the next one that is given."""
        self.moment("ready")
        self.say("ready", generation=self.generation, cause=cause, text="", unreached=[])
        return self.take("world")

    def run(self) -> None:
        """Train."""
        world = self.first_world()
        while True:
            self.generation, self.update = world["generation"], 0
            print(f"generation {world['generation']} rank {world['rank']} of {world['size']}", flush=True)
            self.moment("world")
            self.say("joined", generation=self.generation)
            cause = self.train()
            if not cause:
                break
            world = self.next_world(cause)
        print(f"done after {self.steps} steps", flush=True)
        self.say("finished")
        os._exit(0)

    def train(self) -> str:
        """Step until the world is lost or another one is to come (why), or all is done (empty)."""
        while self.steps < int(self.acts.get("steps", "1000000")) and not os.path.exists(self.acts.get("until", "")):
            if self.steps >= int(self.acts.get("at", "0")):
                if "die" in self.acts:
                    os.kill(os.getpid(), signal.SIGKILL)
                if "stop" in self.acts:
                    os.kill(os.getpid(), signal.SIGSTOP)
                if self.acts.pop("timeout", None) is not None:
                    return "timeout"
            end = time.monotonic() + _STEP_S
            while (left := end - time.monotonic()) > 0:
                self.hear(left)
                if self.lost >= self.generation:
                    return "lost"
            self.steps += 1
            if self.update:
                return "updated"
        return ""


def acts_of(worker: int, arguments: list[str]) -> dict[str, str]:
    """The acts that are for this worker."""
    acts = {}
    for argument in arguments:
        who, _, act = argument.rpartition(":")
        if who in ("", str(worker)):
            name, _, value = act.partition("=")
            acts[name] = value
    return acts


def main() -> None:
    """Be a worker."""
    worker = FakeWorker(acts_of(int(os.environ["KVHVD_WORKER"]), sys.argv[1:]))
    try:
        worker.run()
    except Left as error:
        sys.exit(0 if str(error) == "leave" else 1)
    except ChannelError as error:
        print(f"the line is lost: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
