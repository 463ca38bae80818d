"""Which core the communication threads of a worker run on, where the user has chosen one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

from kvstore_hvd.errors import ConfigError, message

__all__ = ["chosen_core", "threads_on"]


def chosen_core(cores: Sequence[int], local_rank: int, local_size: int) -> int | None:
    """The core for a worker's communication threads; None when the user has chosen none.

    All that can be wrong is looked for on every worker, whomever it concerns.

    Raises
    ------
    ConfigError
        There is not a core for every worker of this host, or a core that this host does not have.
    """
    if not cores:
        return None
    present = os.cpu_count() or 1
    if len(cores) < local_size or max(cores) >= present:
        raise ConfigError(
            message(
                f"KVHVD_THREAD_AFFINITY (or HOROVOD_THREAD_AFFINITY) names the cores {', '.join(map(str, cores))} for "
                f"{local_size} workers on this host, which has the cores 0 to {present - 1}.",
                fix="name one core for each worker of the host, with commas between them.",
            )
        )
    return cores[local_rank]


@contextlib.contextmanager
def threads_on(core: int | None) -> Iterator[None]:
    """Threads that are started inside run on this core and no other; None changes nothing.

    Raises
    ------
    ConfigError
        This process may not use the core.
    """
    if core is None:
        yield
        return
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {core})
    except OSError as error:
        raise ConfigError(
            message(
                f"KVHVD_THREAD_AFFINITY (or HOROVOD_THREAD_AFFINITY): core {core} cannot be used: {error.strerror}.",
                fix="name cores that this container may use, or unset it.",
            )
        ) from None
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
