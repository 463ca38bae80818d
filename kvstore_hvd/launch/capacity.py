"""How many workers this host can take at all; a number beyond that is refused before any of them starts."""

from __future__ import annotations

import resource

from kvstore_hvd.errors import LaunchError, message
from kvstore_hvd.worlds.descriptors import limit_of, open_below

__all__ = ["ELASTIC_FILES", "MAX_WORKERS", "check_count"]

# Ranks that can share memory on one host: kMaxRanks of the native engine.
MAX_WORKERS = 256

# What a daemon has open besides the streams of workers: its own, its line, a listener, the pipes of one start.
_OWN_FILES = 16
#: In an elastic job: for each worker two streams and a line, of which the launcher has no more for its daemons; besides
#: these a listener, an event log, a discovery script, and connections that are refused.
ELASTIC_FILES = 3, 24
_STREAMS = 3  # counted in the above


def check_count(count: int, each: int = 2, own: int = _OWN_FILES) -> None:
    """Refuse a number of workers that cannot be."""
    # `each` is how many files are held open for each worker in one process, `own` those besides.
    if count > MAX_WORKERS:
        raise LaunchError(
            message(f"-np {count}: a job has at most {MAX_WORKERS} workers on one host.", fix="start fewer workers.")
        )
    files = limit_of(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return
    needed = each * count + own + max(0, open_below(files) - _STREAMS)
    if needed > files:
        fact = f"a job of up to {count} workers needs {needed} open files, and only {files} are allowed (ulimit -n)."
        raise LaunchError(message(fact, fix=f"ulimit -n {needed}"))
