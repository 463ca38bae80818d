"""A worker's end of a world of several: the host's shared segment, and this worker's engine, arena and GPU thread."""

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
from kvstore_hvd.world.gpus import create_executor
from kvstore_hvd.world.links import end_links_at_exit, start_link
from kvstore_hvd.world.meeting import share_segment
from kvstore_hvd.world.mpi import end_with_mpi, note_world
from kvstore_hvd.world.topology import Inside, Topology, World

# For the arenas of all workers of a host: a part of the 128 TiB that a process has. A process set takes a 32nd of what
# the world of all takes, so that a worker can be in many.
_ADDRESS_SPACE = 32 << 40
_SHIFT_INSIDE = 5
# Open files of a worker that joins: a socket for each worker of the host; listener, selector, memory and doorbell; over
# hosts four for the link's thread; and some for files that other threads open meanwhile.
_OWN_FILES, _LINK_FILES, _SPARE_FILES = 4, 4, 8

_DENIED = (errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EINVAL)
_FIXES = {
    errno.EMFILE: "allow more open files (ulimit -n), or close some before the worker joins.",
    errno.ENFILE: "the whole machine has too many open files: close some, or raise fs.file-max.",
    errno.EFBIG: "allow larger files (ulimit -f unlimited): the memory that workers share counts as one.",
    errno.ENOMEM: "allow more address space (ulimit -v), or make less of it needed: KVHVD_ARENA_MIB=64.",
    errno.EAGAIN: "allow more processes and threads (ulimit -u, and pids.max of the control group).",
    errno.ENOSPC: "make room in memory, or start fewer workers.",
}


class Connection:
    """Joins the world; returns once all workers of the host have the segment. Never used again after `close`."""

    def __init__(self, world: World) -> None:
        topology = world.topology
        _check_room(topology)
        self._is_over_hosts = topology.host_count > 1
        if self._is_over_hosts and world.communicator is None:
            end_links_at_exit()
        elif self._is_over_hosts:
            end_with_mpi()
        changes = _thresholds()
        place = topology.ranks_by_host[topology.host].index(topology.rank)
        core = cores.chosen_core(config().thread_affinity, topology.local_rank, topology.local_size)
        with refusals_explained(topology):
            segment = _shared_segment(world, changes)
            if not segment.has_core_for_each:
                text = "there are more workers%s than cores that they may use: a worker that waits does not spin"
                log.once(f"cores{topology.group}", logging.INFO, text, topology.group)
            # Not kept: the engine holds the segment until this worker leaves, the arena as long as arrays lie in it.
            try:
                with cores.threads_on(core):
                    engine = self.engine = native.Engine(
                        segment, place, config().timeout_s, True, topology.host, config().waits_for_busy, _activity()
                    )
                try:
                    self._arena = native.Arena(segment, place)
                    #: Memory for arrays that the other workers of the host reduce in place; None where there is none.
                    self.arena = self._arena if self._arena.capacity else None
                    engine.protect(self._arena)
                except BaseException:
                    engine.shutdown("it has no room for its arena")
                    raise
            finally:
                del segment  # or an error's traceback would keep it
            self._device = DeviceThread(
                engine, lambda device: create_executor(engine, topology, device), dict(topology.speaker)
            )
        note_world(is_lost=False)  # all workers live: they have met again
        if not native.has_pidfds():
            text = "this system has no pidfds (Linux 5.3): that a worker died is noticed up to half a second later"
            log.once("pidfds", logging.WARNING, text)

    def start_device(self, device: int) -> None:
        """Be ready for operations on arrays of a GPU, before the first one is submitted."""
        self._device.start(device)

    def mxnet_adapter(self) -> native.MXNetAdapter:
        """A new adapter for arrays of the MXNet in this process."""
        library, naive = mxnet_compat.libmxnet_path(), mxnet_compat.engine_is_naive()
        return native.MXNetAdapter(self.engine, library, naive, self._arena)

    def close(self, reason: str = "") -> None:
        """Leave the world. Waits for this worker's pending operations, unless a reason for leaving early is given."""
        # Descriptors and memory are given back at once; the arena when no array lies in it any more.
        if self._is_over_hosts and self.engine.health() is not None:
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
    """What this process is doing, as it tells the other workers in all of its worlds."""
    return native.Activity()


def _shared_segment(world: World, changes: str) -> native.Segment:
    """The segment of this world, which one of its workers creates."""
    topology = world.topology
    created: list[native.Segment] = []
    hosts = topology.ranks_by_host

    def create(told: Sequence[str]) -> int:
        inside = topology.inside or Inside(0, (), 0)
        with refusals_explained(topology):  # the others are told the same
            created.append(
                native.Segment.create(
                    topology.local_size,
                    _arena_bytes(topology),
                    changes,
                    inside.number,
                    inside.size,
                    inside.ranks,
                    cores.suffice([*told, *told[:1]] if len(hosts) > 1 else told),  # the link's thread is one more
                    list(hosts).index(topology.host),
                    list(hosts.values()) if len(hosts) > 1 else (),
                )
            )
            # Its thread serves all workers of the host, not only this one, which may be bound to a core.
            with cores.threads_on_any(cores.together(told)):
                start_link(world, created[0])
        return created[0].fd

    fd = share_segment(world, create, version=native.abi(), tell=cores.describe())
    if created:
        return created.pop()
    try:
        return native.Segment.attach(fd)
    finally:
        os.close(fd)


def _thresholds() -> str:
    """The user's, checked on every worker although those of the one that creates the segment count."""
    changes = config().thresholds
    try:
        native.thresholds(changes)
    except ValueError as error:
        details = [f"KVHVD_THRESHOLDS: {error}"]
        fix = "correct or unset it; benchmarks/tune.py finds values for this machine."
        fact = "the environment has a setting that kvstore_hvd cannot use."
        raise ConfigError(message(fact, details=details, fix=fix)) from None
    return changes


def _arena_bytes(topology: Topology) -> int:
    if not config().zero_copy:
        return 0
    available = _ADDRESS_SPACE
    # The arenas are mapped, and count as a file.
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE):
        limit = cores.limit_of(kind)
        if limit != resource.RLIM_INFINITY:
            available = min(available, limit // 4)
    if topology.inside is not None:
        available >>= _SHIFT_INSIDE
    available //= topology.local_size
    # Address space, not memory: what nobody writes to does not exist.
    wanted = config().arena_mib << 20 or _memory_bytes() or available
    if wanted > available:
        text = "gradients of at most %d MiB are shared in place%s"
        log.once(f"arena{topology.group}", logging.INFO, text, available >> 20, topology.group)
    return min(wanted, available)


def _memory_bytes() -> int:
    """Of this machine; 0 where the system does not tell, as in a sandbox without sysinfo(2)."""
    try:
        return max(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), 0)
    except (OSError, ValueError):
        return 0


def _check_room(topology: Topology) -> None:
    """Raise LaunchError where this process lacks open files for one more world; other worlds have theirs already."""
    limit = cores.limit_of(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return
    needed = topology.local_size + _OWN_FILES + _SPARE_FILES + (_LINK_FILES if topology.host_count > 1 else 0)
    used = cores.open_below(limit)
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


@contextlib.contextmanager
def refusals_explained(topology: Topology) -> Iterator[None]:
    """Turn what the system refuses within the block into a LaunchError that tells what helps."""
    try:
        yield
    except OSError as error:
        # Errors of the native engine say what was tried, and why not.
        fact = f"the system refuses what a world of workers needs: {error.strerror or error}."
        fix = _FIXES.get(error.errno or 0, "see the reason; the kernel's log (dmesg) may tell more.")
        if error.errno in _DENIED:
            fix = (
                "a sandbox (seccomp, SELinux, gVisor) forbids this or does not have it: allow it, or run outside of it."
            )
        raise LaunchError(message(fact, **topology.speaker, fix=fix)) from error
    except RuntimeError as error:
        if str(error) != "can't start new thread":  # Python's words for EAGAIN
            raise
        fact = "the system refuses what a world of workers needs: a thread."
        raise LaunchError(message(fact, **topology.speaker, fix=_FIXES[errno.EAGAIN])) from error
