"""``join()``: for workers that have used up their input."""

from __future__ import annotations

from typing import Any

from kvstore_hvd.errors import InvalidRequestError
from kvstore_hvd.join import zeros
from kvstore_hvd.join.context import is_uneven
from kvstore_hvd.mxnet.calls import make_call
from kvstore_hvd.mxnet.process_sets import ProcessSet, global_process_set


def join(device: Any = -1, process_set: ProcessSet = global_process_set) -> int:
    """Wait until all workers have called this; until then, contribute zeros to every allreduce of the others.

    Averages are still divided by the number of all workers; in minima, maxima and products this worker does not count.
    Parameters are not updated here meanwhile: broadcast them afterwards from the rank that is returned, or use
    `kvstore_hvd.join.Join`, which keeps them equal. Other operations than allreduce fail on the workers that call
    them, with InvalidRequestError or InputFailedError, and can be repeated when all have joined.

    Parameters
    ----------
    device : int
        Without effect.
    process_set : ProcessSet
        Whose workers.

    Returns
    -------
    int
        The rank of the worker that joined last, among all workers; the same on all.

    Raises
    ------
    InvalidRequestError, NotInitializedError
        This worker is not a member of the set, it is within a `Join`, or there is no world.
    MismatchError
        Another worker waits at the end of a `Join`.
    HorovodInternalError
        The world is lost.
    """
    world = process_set.world("join")
    if is_uneven() and not world.is_alone:
        fact, fix = "it cannot be used within Join, whose workers wait for each other at its end.", "call it after it."
        raise InvalidRequestError(make_call(world, "join").message(None, fact, fix))
    last = zeros.join(world)
    with world.submitting():
        world.agree_on_numbers()
    return int((process_set.ranks or [])[last])
