"""What a job consists of: its workers, and how long they may take to end."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore_hvd.errors import LaunchError, message

__all__ = ["EXIT_NOT_STARTED", "Caller", "Limits", "Plan", "StartError", "WorkerPlan", "not_started"]

EXIT_NOT_STARTED = 126
_FIXES = {
    **dict.fromkeys(
        (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE), "see ulimit -u, ulimit -n and free memory."
    ),
    errno.ENOEXEC: "a script's first line names its interpreter, such as #!/bin/sh.",
}


class StartError(LaunchError):
    """A worker cannot be started; `code` is the exit code that shells use for this kind of failure."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def not_started(what: str, error: OSError) -> StartError:
    """The error that `what` (``'a worker'``) could not be started because the system refused something."""
    fix = _FIXES.get(error.errno or 0, "see the reason; a sandbox may forbid it.")
    return StartError(message(f"{what} could not be started: {error}.", fix=fix), EXIT_NOT_STARTED)


@dataclass(frozen=True)
class Limits:
    """Seconds: what the others get after a failure to end on their own, and then between SIGTERM and SIGKILL."""

    survivor_time_s: float
    kill_grace_s: float


@dataclass(frozen=True)
class WorkerPlan:
    """How to start one worker."""

    command: Sequence[str]
    environment: dict[str, str]
    cores: tuple[int, ...] = ()


@dataclass(frozen=True)
class Caller:
    """A program that has started the launcher to call one of its functions in the workers, see launch/call.py.

    Every worker inherits the `descriptors`. `refuse` is called with why the job cannot be started, `tell` with why it
    has failed; the launcher writes neither then: the program raises it.
    """

    descriptors: tuple[int, ...]
    refuse: Callable[[str], None]
    tell: Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """How to start a job. `variable` is the environment entry (``b'NAME=value'``) that all of its processes carry."""

    workers: Sequence[WorkerPlan]
    variable: bytes
    limits: Limits
    capture: bool = True  # False: the workers write straight to the launcher's streams
    prefix: bool = True
    verbose: bool = False
    output_folder: str | None = None  # where what the workers write is kept too
    caller: Caller | None = None
