"""What the system refuses a worker that joins a world, told with what helps against it."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator

from kvstore_hvd.errors import LaunchError, message
from kvstore_hvd.worlds.topology import Topology

__all__ = ["refusals_explained"]

_DENIED = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EINVAL)
_FIXES = {
    errno.EMFILE: "allow more open files (ulimit -n), or close some before the worker joins.",
    errno.ENFILE: "the whole machine has too many open files: close some, or raise fs.file-max.",
    errno.EFBIG: "allow larger files (ulimit -f unlimited): the memory that workers share counts as one.",
    errno.ENOMEM: "allow more address space (ulimit -v), or make less of it needed: KVHVD_ARENA_MIB=64.",
    errno.EAGAIN: "allow more processes and threads (ulimit -u, and pids.max of the control group).",
    errno.ENOSPC: "make room in memory, or start fewer workers.",
}


@contextlib.contextmanager
def refusals_explained(topology: Topology) -> Iterator[None]:
    """Turn what the system refuses within the block into a LaunchError that tells what helps."""
    try:
        yield
    except OSError as error:
        # Errors of the native engine say what was tried, and why not.
        fact = f"the system refuses what a world of workers needs: {error.strerror or error}."
        raise LaunchError(message(fact, **topology.speaker, fix=_fix(error.errno))) from error
    except RuntimeError as error:
        if str(error) != "can't start new thread":  # Python's words for EAGAIN
            raise
        fact = "the system refuses what a world of workers needs: a thread."
        raise LaunchError(message(fact, **topology.speaker, fix=_FIXES[errno.EAGAIN])) from error


def _fix(number: int | None) -> str:
    if number in _DENIED:
        return "a sandbox (seccomp, SELinux, gVisor) forbids this or does not have it: allow it, or run outside of it."
    return _FIXES.get(number or 0, "see the reason; the kernel's log (dmesg) may tell more.")
