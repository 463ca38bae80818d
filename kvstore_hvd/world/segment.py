"""A worker's part of a world of several: the host's shared segment, and this worker's engine, arena and GPU thread.

The worker with local rank 0 creates the segment, and the host's link in a world on several hosts, once all workers of
the host have come. It sends the others the descriptor of the segment (`meeting`); they map it. Then each worker makes
its engine, which matches its operations with the others' in the segment, and its arena, the part of the segment in
which gradients may lie.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import resource
from collections.abc import Iterator, Sequence

from kvstore_hvd import log, mxnet_compat, native
from kvstore_hvd.base import cores
from kvstore_hvd.config import config
from kvstore_hvd.errors import ConfigError, LaunchError, message
from kvstore_hvd.gpu.executor import DeviceThread
from kvstore_hvd.world.exit import end_links_at_exit, note_world
from kvstore_hvd.world.gpus import create_executor
from kvstore_hvd.world.links import start_link
from kvstore_hvd.world.meeting import share_segment
from kvstore_hvd.world.topology import Place, World

# Address space for the arenas of all workers of a host, of the 128 TiB of a process.
_ADDRESS_SPACE = 32 << 40
# A process set takes a 32nd of what the world of all takes, so that a worker can be in many.
_SET_SHIFT = 5
# Open files of a worker that joins, beside a socket for each worker of the host: listener, selector, memory, doorbell.
_OWN_FILES = 4
# Open files of the link's thread, over hosts.
_LINK_FILES = 4
# Open files that other threads of this process may need meanwhile.
_SPARE_FILES = 8

_FIXES = {
    errno.EMFILE: "allow more open files (ulimit -n), or close some before the worker joins.",
    errno.ENFILE: "the whole machine has too many open files: close some, or raise fs.file-max.",
    errno.EFBIG: "allow larger files (ulimit -f unlimited): the memory that workers share counts as one.",
    errno.ENOMEM: "allow more address space (ulimit -v), or make less of it needed: KVHVD_ARENA_MIB=64.",
    errno.EAGAIN: "allow more processes and threads (ulimit -u, and pids.max of the control group).",
    errno.ENOSPC: "make room in memory, or start fewer workers.",
    **dict.fromkeys(
        (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EINVAL),
        "a sandbox (seccomp, SELinux, gVisor) forbids this or does not have it: allow it, or run outside of it.",
    ),
}


class Connection:
    """Joins the world; returns once all workers of the host have the segment. Never used again after `close`."""

    def __init__(self, world: World) -> None:
        topology = world.topology
        _check_room(topology)
        with_mpi = topology.source == "mpi"
        if topology.host_count > 1 or with_mpi:
            end_links_at_exit(with_mpi)
        changes = _thresholds()
        # The segment's own order of ranks, which does not follow the launcher's slots.
        index = topology.ranks_by_host[topology.host].index(topology.rank)
        chosen = cores.chosen_cores(config().thread_affinity, topology.local_rank, topology.local_size)
        with refusals_explained(topology):
            segment = _shared_segment(world, changes)
            if not segment.has_core_for_each:
                text = "there are more workers%s than cores that they may use: a worker that waits does not spin"
                log.once(f"cores{topology.group}", logging.INFO, text, topology.group)
            # The engine holds the segment until this worker leaves, the arena as long as arrays lie in the arena.
            try:
                with cores.threads_on(chosen):
                    engine = self.engine = native.Engine(
                        segment, index, config().timeout_s, True, topology.host, config().waits_for_busy, _activity()
                    )
                try:
                    self._arena = native.Arena(segment, index)
                    #: Memory for arrays that the other workers of the host reduce in place; None where there is none.
                    self.arena = self._arena if self._arena.capacity else None
                    engine.protect(self._arena)
                except BaseException:
                    engine.shutdown("it has no room for its arena")
                    raise
            finally:
                del segment  # or an error's traceback would keep it
            self._device = DeviceThread(
                engine, lambda device: create_executor(engine, topology, device), topology.prefix
            )
        note_world(is_lost=False)
        if not native.has_pidfds():
            text = "this system has no pidfds (Linux 5.3): that a worker died is noticed up to half a second later"
            log.once("pidfds", logging.WARNING, text)

    def start_device(self, device: int) -> None:
        """Prepare for operations on arrays of a GPU, before the first one is submitted."""
        self._device.start(device)

    def mxnet_adapter(self) -> native.MXNetAdapter:
        """A new adapter for arrays of the MXNet in this process."""
        library, naive = mxnet_compat.libmxnet_path(), mxnet_compat.engine_is_naive()
        return native.MXNetAdapter(self.engine, library, naive, self._arena)

    def close(self, reason: str = "") -> None:
        """Leave the world. Waits for this worker's pending operations, unless a reason for leaving early is given."""
        # Descriptors and memory are freed at once; the arena when no array lies in it any more.
        if reason or self.engine.health() is not None:
            note_world(is_lost=True)
        try:
            if not self.engine.shutdown(reason):
                text = "another worker's GPU has not finished the last operations: its results may be wrong"
                log.logger.warning(text)
        finally:
            self._device.stop()
            self._arena.retire()


@functools.lru_cache(1)
def _activity() -> native.Activity:
    """The activity of this process, which the other workers of all of its worlds see."""
    return native.Activity()


def _shared_segment(world: World, changes: str) -> native.Segment:
    topology = world.topology
    created: list[native.Segment] = []
    hosts, is_over_hosts = topology.ranks_by_host, topology.host_count > 1

    def create(workers: Sequence[str]) -> int:
        """Create it on local rank 0, with the descriptions of the cores of all workers of the host."""
        number = topology.set_number
        with refusals_explained(topology):  # the other workers get the same text
            created.append(
                native.Segment.create(
                    topology.local_size,
                    _arena_bytes(topology),
                    changes,
                    number,
                    topology.size_of_all if number else 0,
                    topology.all_ranks if number else (),
                    # Over hosts, the link's thread is one more.
                    cores.suffice([*workers, *workers[:1]] if is_over_hosts else workers),
                    list(hosts).index(topology.host),
                    list(hosts.values()) if is_over_hosts else (),
                    list(zip(topology.hosts, topology.pids)) if is_over_hosts else (),
                    world.job,
                    topology.generation,
                )
            )
            # The link's thread serves all workers of the host; this worker may be bound to a core.
            with cores.threads_on(cores.together(workers)):
                start_link(world, created[0])
        return created[0].fd

    fd = share_segment(world, create, version=native.abi(), payload=cores.describe())
    if created:
        return created.pop()
    try:
        return native.Segment.attach(fd)
    finally:
        os.close(fd)


def _thresholds() -> str:
    """The user's thresholds, checked on every worker; those of local rank 0 count."""
    changes = config().thresholds
    try:
        native.thresholds(changes)
    except ValueError as error:
        fix = "correct or unset it; benchmarks/tune.py finds values for this machine."
        raise ConfigError(message(f"KVHVD_THRESHOLDS: {error}", fix=fix)) from None
    return changes


def _arena_bytes(topology: Place) -> int:
    if not config().zero_copy:
        return 0
    # The arenas are mapped, and count as a file; a link maps that of a host's only worker once more.
    limits = {cores.limit_of(resource.RLIMIT_AS), cores.limit_of(resource.RLIMIT_FSIZE)} - {resource.RLIM_INFINITY}
    available = min([_ADDRESS_SPACE, *(limit // 4 for limit in limits)])
    if topology.set_number:
        available >>= _SET_SHIFT
    available //= topology.local_size
    try:
        memory = max(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 0)
    except (OSError, ValueError):  # a sandbox without sysinfo(2)
        memory = 0
    # Address space, not memory: a page that is never written takes none.
    wanted = config().arena_mib << 20 or memory or available
    if wanted > available:
        text = "gradients of at most %d MiB are shared in place%s"
        log.once(f"arena{topology.group}", logging.INFO, text, available >> 20, topology.group)
    return min(wanted, available)


def _check_room(topology: Place) -> None:
    """Raise LaunchError where this process lacks open files for one more world."""
    limit = cores.limit_of(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    needed = topology.local_size + _OWN_FILES + _SPARE_FILES + (_LINK_FILES if topology.host_count > 1 else 0)
    used = cores.open_below(limit)
    if limit - used < needed:
        what = f"process set {topology.set_number}" if topology.set_number else "the world"
        takes = f"joining {what} of {topology.size} workers takes {needed} open files"
        details = [f"{limit} are allowed (ulimit -n), {used} are in use."]
        fix = f"`ulimit -n {max(4096, 2 * (used + needed))}` before the start; each process set takes as many files as "
        fix += "it has members, and a few more."
        fact = f"{takes}, and this process has {limit - used} left."
        raise LaunchError(message(fact, **topology.prefix, details=details, fix=fix))


@contextlib.contextmanager
def refusals_explained(topology: Place) -> Iterator[None]:
    """Turn errors of the system within the block into a LaunchError that names a fix."""
    fact = "the system refuses what a world of workers needs: "
    try:
        yield
    except OSError as error:
        # Errors of the native engine name the call and the reason.
        fix = _FIXES.get(error.errno or 0, "see the reason; the kernel's log (dmesg) may tell more.")
        raise LaunchError(message(f"{fact}{error.strerror or error}.", **topology.prefix, fix=fix)) from error
    except RuntimeError as error:
        if str(error) != "can't start new thread":  # Python's words for EAGAIN
            raise
        raise LaunchError(message(f"{fact}a thread.", **topology.prefix, fix=_FIXES[errno.EAGAIN])) from error
