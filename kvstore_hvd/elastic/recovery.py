"""Which errors training recovers from, and where."""

from __future__ import annotations

from kvstore_hvd import errors
from kvstore_hvd.errors import HorovodInternalError, InputFailedError, PeerLostError, message
from kvstore_hvd.world import process

REPLACES = "start with `kvhvdrun --min-np 1 --max-np N python train.py`, which replaces workers."
_LOST = tuple(
    name
    for name in errors.__all__
    if isinstance(getattr(errors, name), type) and issubclass(getattr(errors, name), HorovodInternalError)
)


def as_lost_world(error: BaseException) -> HorovodInternalError | None:
    """The error as one that tells of a lost world; None if it is another one."""
    # MXNet raises the errors of our operations as their classes where it can. Where it cannot, as in a graph, it raises
    # an ``MXNetError`` with their name and text. An operation on what a lost one should have computed fails with an
    # `InputFailedError`, whose text has that of the lost one.
    if isinstance(error, HorovodInternalError):
        return error
    if type(error).__name__ != "MXNetError" and not isinstance(error, InputFailedError):
        return None
    for line in str(error).splitlines():
        for name in _LOST:
            place = line.find(f"{name}: [rank ")
            if place >= 0:
                lost: HorovodInternalError = getattr(errors, name)(line[place + len(name) + 2 :])
                lost.__cause__ = error
                return lost
    return None


def check_recoverable(error: HorovodInternalError) -> None:
    """Check that the workers that are left can meet again."""
    if process.current().line is not None or not isinstance(error, PeerLostError):
        return  # whoever lives meets again
    fact = "training cannot recover: a worker has died, and this job cannot go on without it."
    raise PeerLostError(
        message(fact, details=[line for line in str(error).splitlines() if "Fix: " not in line], fix=REPLACES)
    ) from error
