"""The decisions about an elastic job, driven by a test: it says what happens, and when."""

import json
import signal
from collections.abc import Sequence
from typing import Any, Optional

from kvstore_hvd.base.channel import OF_WORKER, TO_WORKER, Kinds, take
from kvstore_hvd.launch.jobs import Job
from kvstore_hvd.launch.state import Action, End, Kill, Note, Settings, Start, Tell


def sent(message: dict[str, Any], kinds: Kinds) -> dict[str, Any]:
    text = json.loads(json.dumps(message))
    assert take(text, kinds) == text
    return take(text, kinds)


class Play:
    """A job whose workers do what the test says. `seen` is everything that the job has asked for, in order."""

    def __init__(self, hosts: Optional[dict[str, int]] = None, **settings: Any) -> None:
        self.now = 1000.0
        self.settings = Settings(**{"job": "play", "min_np": 1, **settings})
        self.lines: dict[int, tuple[str, ...]] = {}
        self.job = Job(self.settings, self.now, lambda worker: self.lines.get(worker, ()))
        self.seen: list[Action] = []
        self._take()
        if hosts is not None:
            self.hosts(hosts)

    def hosts(self, hosts: dict[str, int]) -> None:
        self.job.hosts(hosts, self.now)
        self._take()

    def wait(self, seconds: float) -> None:
        """Let time pass, with a tick at each deadline on the way."""
        end = self.now + seconds
        while self.ending is None and self.job.wake_at <= end:
            self.now = max(self.now, self.job.wake_at)
            self.job.tick(self.now)
            self._take()
            assert self.job.wake_at > self.now, "a deadline that has been acted on stays"
        self.now = end

    def say(self, worker: int, kind: str, **fields: Any) -> None:
        self.job.heard(worker, sent({"t": kind, **fields}, OF_WORKER), self.now)
        self._take()

    def enter(self, worker: int, identity: str = "machine", ranks: Sequence[int] = ()) -> None:
        host, addresses = ["name", identity], [f"10.0.0.{worker}:1"]
        self.say(worker, "enter", host=host, pid=100 + worker, addresses=addresses, ranks=ranks)

    def start_all(self) -> None:
        for number in range(self.settings.max_np):
            self.job.started(number, 100 + number, self.now)
        self._take()

    def ready(self, *workers: int, cause: str = "lost", unreached: Sequence[int] = ()) -> None:
        """Workers wait for their next world: the first one of a job from init() on, others when they say so."""
        for worker in workers:
            known = self.job.workers[worker]
            if known.entry is None:
                self.enter(worker)
                if known.phase == "ready" or known.generation >= 0:
                    continue
            why = "start" if known.generation < 0 else cause
            fields = {"cause": why, "text": "", "unreached": list(unreached)}
            self.say(worker, "ready", generation=known.generation, **fields)

    def meet(self) -> list[int]:
        generation = self.job.generation
        for member in generation.members:
            self.say(member.id, "joined", generation=generation.number)
        return self.members

    def begin(self) -> list[int]:
        self.ready(*self.running)
        return self.meet()

    def commit(self) -> list[int]:
        self.ready(*self.members, cause="updated")
        return self.meet()

    def end(self, worker: int, code: int = 0, *lines: str) -> None:
        self.lines[worker] = lines
        self.job.exited(worker, code, self.now)
        self._take()

    def kill(self, *workers: int) -> None:
        for worker in workers:
            self.end(worker, -signal.SIGKILL)

    def lose_host(self, host: str, text: str) -> None:
        self.job.host_lost(host, text, self.now)
        self._take()

    @property
    def running(self) -> list[int]:
        return [worker.id for worker in self.job.running]

    @property
    def members(self) -> list[int]:
        return [worker.id for worker in self.job.generation.members]

    @property
    def generation(self) -> int:
        return self.job.generation.number

    @property
    def ending(self) -> Optional[End]:
        ends = [action for action in self.seen if isinstance(action, End)]
        assert len(ends) <= 1
        return ends[0] if ends else None

    @property
    def outcome(self) -> tuple[int, str]:
        assert self.ending is not None
        return self.ending.code, self.ending.reason

    def starts(self) -> list[tuple[int, str]]:
        return [(action.worker, str(action.slot)) for action in self.seen if isinstance(action, Start)]

    def told(self, worker: int, kind: str = "") -> list[dict[str, Any]]:
        return [
            action.message
            for action in self.seen
            if isinstance(action, Tell) and action.worker == worker and kind in ("", action.message["t"])
        ]

    def signals(self, worker: int) -> list[int]:
        return [action.number for action in self.seen if isinstance(action, Kill) and action.worker == worker]

    def notes(self, event: str) -> list[dict[str, Any]]:
        return [action.fields for action in self.seen if isinstance(action, Note) and action.event == event]

    @property
    def news(self) -> list[str]:
        return [action.news for action in self.seen if isinstance(action, Note) and action.news]

    def _take(self) -> None:
        for action in self.job.take():
            if isinstance(action, Tell):
                sent(action.message, TO_WORKER)
            self.seen.append(action)


def begun(hosts: dict[str, int], **settings: Any) -> Play:
    play = Play(hosts, **settings)
    play.begin()
    return play
