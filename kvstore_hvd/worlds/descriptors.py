"""Limits of this process, and whether it may open as many files as its part in a world takes."""

from __future__ import annotations

import errno
import os
import resource
from typing import TYPE_CHECKING

from kvstore_hvd.errors import LaunchError, message

if TYPE_CHECKING:
    from kvstore_hvd.worlds.topology import Topology

__all__ = ["check_room", "limit_of", "open_below"]

# While workers join: the socket of each, the listener and its selector, or what watches them afterwards, whichever is
# more; the shared memory, and a bell.
_OWN = 4
# Over hosts: what wakes the link's thread, and wakes it from here.
_LINK = 4
# For files that are opened meanwhile, of libraries that are being loaded among them.
_SPARE = 8


def check_room(topology: Topology) -> None:
    """Refuse a world for which this process lacks descriptors; those of other worlds, process sets, are taken already.

    Raises
    ------
    LaunchError
        There are too few.
    """
    limit = limit_of(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    needed = topology.local_size + _OWN + _SPARE + (_LINK if topology.host_count > 1 else 0)
    used = open_below(limit)
    if limit - used >= needed:
        return
    what = f"process set {topology.inside.number}" if topology.inside is not None else "the world"
    raise LaunchError(
        message(
            f"joining {what} of {topology.size} workers takes {needed} open files, and this process has "
            f"{limit - used} left.",
            **topology.speaker,
            details=[f"{limit} are allowed (ulimit -n), {used} are in use."],
            fix=f"`ulimit -n {max(4096, 2 * (used + needed))}` before the start; each process set takes as many files "
            "as it has members, and a few more.",
        )
    )


def open_below(limit: int) -> int:
    """How many descriptors with numbers below the limit are open."""
    try:
        entries = os.listdir("/proc/self/fd")
    except OSError as error:
        return limit if error.errno in (errno.EMFILE, errno.ENFILE) else 0
    return sum(int(entry) < limit for entry in entries) - 1  # one is that of the listing


def limit_of(kind: int) -> int:
    """The soft limit of this process, see `resource.getrlimit`; unlimited where the system does not tell."""
    # Whoever goes beyond a limit that was not told is refused by the system itself, which is told then.
    try:
        return resource.getrlimit(kind)[0]
    except OSError:
        return resource.RLIM_INFINITY
