"""Record when every operation of every worker waited and ran, for Perfetto or chrome://tracing (docs/timeline.md)."""

from __future__ import annotations

import os
from typing import Union

__all__ = ["start_timeline", "stop_timeline"]


def start_timeline(file_path: Union[str, os.PathLike[str]], mark_cycles: bool = False) -> None:
    """Begin to record the operations of all workers; every worker must call it.

    Joins the world first if this process never did. When this worker leaves its world (`shutdown`, or the end of the
    program), the recording is written as by `stop_timeline`. Goes on over a `reset`.

    Parameters
    ----------
    file_path : str or os.PathLike
        The file to write, replaced if it exists; the path of rank 0 counts. It is written when the recording ends;
        until then each worker writes to ``<file_path>.rank-<rank>.part``.
    mark_cycles : bool
        Mark where rounds begin: series of submissions in which no name occurs twice, in training the steps. The choice
        of rank 0 counts.

    Raises
    ------
    InvalidRequestError
        A timeline is being recorded already, or the path cannot be written to; raised on every worker.
    HorovodInternalError
        The world is lost.
    ShutdownError
        This worker left its world, or is a forked child.
    """
    from kvstore_hvd.world import process

    process.current().start_timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """End the recording; every worker must call it. The file is there when it returns.

    Does nothing without a recording. Operations under way are not in the file: read their results
    (``mx.nd.waitall()``) before.

    Raises
    ------
    KVHvdError
        The file could not be written; raised on every worker. The workers' parts stay beside it.
    HorovodInternalError
        The world is lost. The file is made by the last worker that ends its recording, unless one has died.
    """
    from kvstore_hvd.world import process

    process.current().stop_timeline()
