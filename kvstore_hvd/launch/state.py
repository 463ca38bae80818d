"""The settings of a job, and the actions that its decisions ask for."""

from __future__ import annotations

import signal
from typing import Any, NamedTuple, Union

from kvstore_hvd.errors import LaunchError
from kvstore_hvd.launch.hosts import MAX_WORKERS, Slot

EXIT_FAILED, EXIT_NOT_STARTED = 1, 126
#: Stands for another reason than a change of the hosts.
NO_CHANGE = 0


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
