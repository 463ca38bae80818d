"""Which cores communication threads run on: one that the user has chosen, or those of all workers of a host."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from kvstore_hvd.errors import ConfigError, message

__all__ = ["chosen_core", "threads_on", "threads_on_any"]


def chosen_core(cores: Sequence[int], local_rank: int, local_size: int) -> int | None:
    """The core for a worker's communication threads; None when the user has chosen none."""
    # All that can be wrong is looked for on every worker, whomever it concerns.
    if not cores:
        return None
    refused = [core for core in cores if not _may_use(core)]
    if len(cores) < local_size or refused:
        why = f", of which it may not use {', '.join(map(str, refused))}" if refused else ""
        raise ConfigError(
            message(
                f"KVHVD_THREAD_AFFINITY (or HOROVOD_THREAD_AFFINITY) names the cores {', '.join(map(str, cores))} for "
                f"{local_size} workers on this host{why}.",
                fix="name one core for each worker of the host, which it may use, with commas between them.",
            )
        )
    return cores[local_rank]


def _may_use(core: int) -> bool:
    # Tried, on this thread: numbers of cores may have gaps, and neither how many there are nor the affinity that this
    # process happens to have says which ones its control group allows.
    try:
        with _pinned({core}):
            return True
    except (OSError, OverflowError):  # the latter: no system has so many
        return False


@contextlib.contextmanager
def threads_on(core: int | None) -> Iterator[None]:
    """Threads that are started inside run on this core and no other; None changes nothing."""
    if core is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_pinned({core}))
        except OSError as error:
            fact = f"KVHVD_THREAD_AFFINITY (or HOROVOD_THREAD_AFFINITY): core {core} cannot be used: {error.strerror}."
            fix = "name cores that this container may use, or unset it."
            raise ConfigError(message(fact, fix=fix)) from None
        yield


@contextlib.contextmanager
def threads_on_any(cores: set[int]) -> Iterator[None]:
    """Threads that are started inside run on these cores, as far as this process may use them."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(_pinned(cores))
        yield


@contextlib.contextmanager
def _pinned(cores: set[int]) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
