"""Why an elastic job ends, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvstore_hvd.driver.roster import Worker

__all__ = ["Reason", "because_of", "fail_again", "never_meet", "state_lost", "too_few", "too_many_resets"]

_EXIT_FAILED = 1


class Reason(NamedTuple):
    """Exit code and reason of the end of a job, and lines under the reason."""

    code: int
    text: str
    details: tuple[str, ...] = ()


def because_of(culprit: Worker) -> Reason:
    """The job ends with this worker."""
    text = f"worker {culprit.id} ({culprit.slot}) {culprit.ending}."
    text += " Its last lines on stderr:" if culprit.lines else " It wrote nothing to stderr."
    return Reason(culprit.exit_code or _EXIT_FAILED, text, tuple(culprit.lines))


def state_lost(generation: int, has_begun: bool, culprit: Worker | None) -> Reason:
    """Nobody is left who has the state; of the workers of the last world `culprit` was the first to fail."""
    text = f"no worker of generation {generation} is left" + (
        " that has the state of the training." if has_begun else "."
    )
    if culprit is None:
        return Reason(_EXIT_FAILED, text)
    code, first, lines = because_of(culprit)
    return Reason(code, f"{text} First, {first}", lines)


def fail_again(culprit: Worker | None) -> Reason:
    """The workers fail again and again, and `culprit` was the first one to do so in the last generation."""
    text = "workers keep failing, and so do their replacements soon after they start."
    if culprit is None:
        return Reason(_EXIT_FAILED, text)
    code, last, lines = because_of(culprit)
    return Reason(code, f"{text} Most recently, {last}", lines)


def too_few(what: str, needed: int, limit_s: float, details: Sequence[str]) -> Reason:
    """More workers did not come."""
    return Reason(_EXIT_FAILED, f"{what}, {needed} are needed, and no more came within {limit_s:g} s.", tuple(details))


def never_meet(count: int, failure: str) -> Reason:
    """The workers live, but cannot form a world."""
    return Reason(_EXIT_FAILED, f"the rendezvous failed {count} times in a row, the last time with: {failure or '?'}")


def too_many_resets(limit: int) -> Reason:
    """The text is Horovod's."""
    return Reason(
        _EXIT_FAILED, f"Horovod was shutdown because number of resets during elastic job exceeded limit: {limit}"
    )
