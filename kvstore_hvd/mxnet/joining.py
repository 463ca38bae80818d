"""``join()``: for workers that have used up their input."""

from __future__ import annotations

from typing import Any

from kvstore_hvd.join import zeros
from kvstore_hvd.mxnet.calls import NAMESPACE, agree_on_numbers
from kvstore_hvd.mxnet.process_sets import ProcessSet, global_process_set

__all__ = ["join"]


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
        This worker is not a member of the set, or there is no world.
    HorovodInternalError
        The world is lost.
    """
    world = process_set.world("join")
    last = zeros.join(world, f"{NAMESPACE}/join")
    with world.submitting():
        agree_on_numbers(world)
    return int((process_set.ranks or [])[last])
