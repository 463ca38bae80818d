"""The data of a job: settings, workers, and the actions that its decisions ask for."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Union

from kvstore_hvd.errors import LaunchError
from kvstore_hvd.launch.hosts import MAX_WORKERS, Slot

EXIT_FAILED, EXIT_NOT_STARTED = 1, 126
#: Stands for another reason than a change of the hosts.
NO_CHANGE = 0
# After this time in a world, earlier crashes in the slot of a worker count no more.
_LONG_LIFE_S = 600.0


class StartError(LaunchError):
    """A job cannot be started, or go on; `code` is the exit code."""

    def __init__(self, text: str, code: int = EXIT_NOT_STARTED) -> None:
        super().__init__(text)
        self.code = code


def how_it_ended(code: int) -> str:
    """How a process with this exit code (or -signal) ended, as the end of a sentence."""
    names = {number.value: number.name for number in signal.Signals}
    return f"exited with code {code}" if code >= 0 else f"was killed by {names.get(-code, f'signal {-code}')}"


class Settings(NamedTuple):
    """What the user asked for. Times in seconds."""

    job: str
    min_np: int
    max_np: int = MAX_WORKERS
    first_np: int | None = None  # slots to wait for at the start; None: min_np
    replaces: bool = True  # workers that fail; else a failure ends the job after `survivor_time_s`
    reset_limit: int | None = None
    elastic_timeout_s: float = 600.0
    timeout_s: float = 600.0
    start_timeout_s: float = 30.0
    survivor_time_s: float = 2.0
    exit_timeout_s: float = 30.0  # of a worker that has trained, from the request to leave to its end
    kill_grace_s: float = 5.0
    lease_s: float = 60.0
    cooldown: tuple[float, float] = (10.0, 300.0)


class Start(NamedTuple):
    worker: int
    slot: Slot


class Tell(NamedTuple):
    worker: int
    message: dict[str, Any]


class Kill(NamedTuple):
    worker: int
    number: int  # of the signal


class Note(NamedTuple):
    event: str  # for the event log, with its fields
    fields: dict[str, Any]
    news: str = ""  # for stderr; may be empty


class End(NamedTuple):
    code: int
    reason: str = ""  # empty: the job has succeeded
    details: tuple[str, ...] = ()
    lines: tuple[str, ...] | None = None  # the last ones on stderr of the worker that is the reason
    worker: int = -1  # that worker
    grace_s: float = 0.0  # in which workers may end by themselves


Action = Union[Start, Tell, Kill, Note, End]


class Worker:
    """One worker, from its start until after its end. Times are of the job's clock. Ids are never used twice."""

    pid: int = 0  # 0: not started yet
    entry: Mapping[str, Any] | None = None  # the message of its init(): host, pid, addresses
    generation: int = -1  # the last one that was given out to it
    ready: bool = False  # it waits for its next world
    ready_at: float = 0.0  # of a newcomer
    joined_at: float | None = None  # time of its first world
    synced: bool = False  # it has the state of the training
    finished: bool = False  # the function of run() has returned
    removed_by: int = NO_CHANGE  # the change of the hosts that removed its slot
    leaving: bool = False  # it has been asked to leave
    told_to_end: bool = False  # it has got SIGTERM, because it did not leave
    killed: str = ""  # why it was killed; it counts as crashed from then on
    act_at: float = math.inf  # deadline of its leaving, or of its end after a signal
    code: int | None = None  # exit code, or -signal; None while it runs
    lines: Sequence[str] = ()  # the last ones on stderr
    lost: str = ""  # why its host was lost

    def __init__(self, number: int, slot: Slot, started_at: float, change: int) -> None:
        # `change`: that of the hosts because of which it starts.
        self.id, self.slot, self.started_at, self.change = number, slot, started_at, change

    @property
    def alive(self) -> bool:
        return self.code is None and not self.killed

    @property
    def taking_part(self) -> bool:
        """Whether it may be in the next world."""
        return self.alive and not self.leaving and not self.finished

    @property
    def ending(self) -> str:
        """How it ended, as the end of a sentence."""
        if self.lost:
            return f"was lost with its host {self.slot.host}: {self.lost}"
        text = how_it_ended(self.code or 0)
        return f"{text} ({self.killed})" if self.killed else text

    def has_lived_long(self, now: float) -> bool:
        return self.joined_at is not None and now - self.joined_at >= _LONG_LIFE_S

    def __str__(self) -> str:
        return f"worker {self.id} ({self.slot})"
