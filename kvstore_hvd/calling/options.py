"""The options of `run`, which are Horovod's, as arguments of kvhvdrun."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvstore_hvd.errors import InvalidRequestError, message

__all__ = ["Options"]


@dataclass(frozen=True)
class Options:
    """What has an effect here; see `run` for the meaning, and None for what is left to kvhvdrun."""

    num_proc: int | None
    min_num_proc: int | None
    max_num_proc: int | None
    slots: int | None
    reset_limit: int | None
    cooldown_range: Sequence[float] | None
    hosts: str | None
    hostfile: str | None
    start_timeout: float | None
    output_filename: str | None
    verbose: object

    @property
    def is_elastic(self) -> bool:
        """Whether workers may come and go."""
        return self.min_num_proc is not None or self.max_num_proc is not None

    def arguments(self) -> list[str]:
        """The arguments of kvhvdrun, which checks their values."""
        # 1 is what nobody has asked for, where there are fewest or most workers.
        count = None if self.is_elastic and self.num_proc == 1 else self.num_proc
        named = [
            ("--num-proc", count),
            ("--min-np", self.min_num_proc),
            ("--max-np", self.max_num_proc),
            ("--slots-per-host", self.slots),
            ("--reset-limit", self.reset_limit),
            ("--hosts", self.hosts),
            ("--hostfile", self.hostfile),
            ("--start-timeout", self.start_timeout),
            ("--output-filename", self.output_filename),
        ]
        words = [f"{name}={value}" for name, value in named if value is not None]
        if self.cooldown_range is not None:
            words += ["--blacklist-cooldown-range", *_two_numbers(self.cooldown_range)]
        return [*words, *(["--verbose"] if self.verbose else [])]


def _two_numbers(given: Sequence[float]) -> list[str]:
    try:
        lower, upper = (f"{float(each):g}" for each in given)
    except (TypeError, ValueError):
        fact = f"cooldown_range is {given!r}, expected two numbers of seconds."
        raise InvalidRequestError(message(fact, operation="run", fix="for example cooldown_range=(10, 300)")) from None
    return [lower, upper]
