"""Limits of this process."""

from __future__ import annotations

import errno
import os
import resource


def open_below(limit: int) -> int:
    """How many descriptors with numbers below the limit are open."""
    try:
        entries = os.listdir("/proc/self/fd")
    except OSError as error:
        return limit if error.errno in (errno.EMFILE, errno.ENFILE) else 0
    return sum(int(entry) < limit for entry in entries) - 1  # one is that of the listing


def limit_of(kind: int) -> int:
    """The soft limit of this process, see `resource.getrlimit`; unlimited if the system does not tell."""
    # An unknown limit that is exceeded later shows as an error of that call.
    try:
        return resource.getrlimit(kind)[0]
    except OSError:
        return resource.RLIM_INFINITY
