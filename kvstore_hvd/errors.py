"""Every exception that this package raises, and the form of their texts.

Two families. *Lost worlds* (`HorovodInternalError` and its subclasses): the world of workers is broken; every later
operation raises the same error until the world is reset, and elastic training recovers from it. *User errors*: one
call was wrong; it fails, no array is changed, and the world stays usable. `HostsUpdatedInterrupt` is in neither:
nothing has failed.

Texts have one form::

    [rank 0/4] allreduce 'dense0_weight' (key 3): ranks disagree on shape.
      (256, 784): ranks 0-2
      (128, 784): rank 3
      Fix: build the same network on every rank.
"""

from __future__ import annotations

import builtins
import itertools
import re
from collections.abc import Iterable

__all__ = [
    "ConfigError",
    "DivergedError",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "InputFailedError",
    "InvalidRequestError",
    "InvalidTypeError",
    "KVHvdError",
    "LaunchError",
    "MismatchError",
    "NotInitializedError",
    "PeerLostError",
    "RunError",
    "ShutdownError",
    "TimeoutError",
    "TransportError",
    "UnsupportedDtypeError",
    "UnsupportedMethodError",
    "UnsynchronisedTrainerError",
]


class KVHvdError(RuntimeError):
    """Base of every exception of this package."""


# -- Lost worlds: latched until the world is reset ----------------------------------------------------------------


class HorovodInternalError(KVHvdError):
    """The world of workers is lost. Base of the errors that elastic training recovers from; named as in Horovod."""


class PeerLostError(HorovodInternalError):
    """Another worker died, ended early, or raised while this one needed it."""


class TimeoutError(HorovodInternalError, builtins.TimeoutError):
    """Another worker did not arrive at an operation in time. Also caught as the builtin of this name."""


class TransportError(HorovodInternalError):
    """The memory or the link between workers failed, or the world was aborted."""


# -- User errors: one call fails, the world stays usable ----------------------------------------------------------


class MismatchError(KVHvdError):
    """The workers disagree about an operation (its kind, shape, dtype, root or scale). Raised on every worker."""


class InputFailedError(KVHvdError):
    """An operation's input could not be computed or used on some worker, or MXNet refused it. Raised on every one."""


class InvalidRequestError(KVHvdError, ValueError):
    """A request that is wrong on its own, whatever the other workers do."""


class InvalidTypeError(KVHvdError, TypeError):
    """An argument is of a type that cannot be used, whatever the other workers do."""


class UnsupportedMethodError(KVHvdError, NotImplementedError):
    """A method of MXNet's other stores, which this store does not have."""


class UnsupportedDtypeError(KVHvdError, TypeError):
    """Arrays of this dtype (or storage type) cannot take part in this operation."""


class UnsynchronisedTrainerError(KVHvdError):
    """A Trainer would train alone although there are several workers."""


class DivergedError(KVHvdError):
    """The workers' parameters, which must be equal, are not. Raised on every worker."""


class LaunchError(KVHvdError):
    """The workers could not be started, or could not find each other."""


class RunError(KVHvdError):
    """A function that `run` has called in workers has not returned a result on all of them."""


class ShutdownError(KVHvdError):
    """The engine was shut down, was never started, or is used in a forked child."""


class NotInitializedError(ShutdownError, ValueError):
    """Something of the Horovod API is called before init() or after shutdown()."""


class ConfigError(KVHvdError, ValueError):
    """An environment variable or option of this package is misspelt or has a value that is not allowed."""


# -- No error: workers come or go ---------------------------------------------------------------------------------


class HostsUpdatedInterrupt(RuntimeError):
    """Workers are about to come or go; elastic training leaves the training function with it, to meet them.

    As in Horovod, not an error of the package: ``except KVHvdError`` around a training step does not catch it.

    Parameters
    ----------
    skip_sync : bool
        Whether workers only leave: the workers that stay have no state to hand over.
    """

    def __init__(self, skip_sync: bool = False) -> None:
        super().__init__(skip_sync)
        self.skip_sync = skip_sync

    def __str__(self) -> str:
        return "workers are about to come or go; elastic.run meets them."


# -- Texts --------------------------------------------------------------------------------------------------------


def fault_of_text(text: str) -> str:
    """Why a name cannot be sent to the other workers, or '': names are sent as UTF-8, which has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return f"cannot be written down: {error}."
    return ""


# Bytes that are no UTF-8 (U+DC80 to U+DCFF) are left as they are; other lone surrogates cannot be written.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udc7f\udd00-\udfff]")


def printable(text: str) -> str:
    """A text of other hosts or programs for a terminal: control characters, which could command it, as escapes."""
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def rank_list(ranks: Iterable[int]) -> str:
    """Name a set of ranks for people: ``'rank 3'``, ``'ranks 0-2, 5'``, ``'no rank'`` when empty."""
    every = sorted(set(ranks))
    # Consecutive ranks have one difference to their places in the list.
    runs = [[rank for _, rank in run] for _, run in itertools.groupby(enumerate(every), lambda one: one[1] - one[0])]
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{'rank' if len(every) == 1 else 'ranks'} {text}" if every else "no rank"


def rounded(value: float) -> str:
    """Three digits, or all of a large number: ``'0.0123'``, ``'14.2'``, ``'1,234'``."""
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def message(
    fact: str,
    *,
    rank: int | None = None,
    size: int | None = None,
    within: str = "",
    operation: str = "",
    name: str = "",
    key: object = None,
    details: Iterable[str] = (),
    fix: str = "",
) -> str:
    """The text of an error: ``[rank r/size, within] operation 'name' (key k): fact``, details, ``Fix: fix``.

    The fact is a sentence; what is empty is left out; `within` is the rank in a process set.
    """
    prefix = "" if rank is None else f"[rank {rank}/{'?' if size is None else size}{within and f', {within}'}] "
    subject = " ".join(filter(None, (operation, name and f"'{name}'", "" if key is None else f"(key {key})")))
    lines = f"{prefix}{subject}{subject and ': '}{fact}", *details, *([f"Fix: {fix}"] if fix else [])
    return "\n  ".join(lines)
