"""The workers' world: they share memory on each host, and links exchange between hosts what each has reduced."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Callable, Sequence
from typing import Any

from kvstore_hvd import log, native
from kvstore_hvd.base import cores
from kvstore_hvd.comm import affinity
from kvstore_hvd.comm.base import Communicator, Request
from kvstore_hvd.comm.device.devices import DeviceThread
from kvstore_hvd.comm.device.executors import create_executor
from kvstore_hvd.comm.link import end_links_at_exit, start_link
from kvstore_hvd.comm.refusals import refusals_explained
from kvstore_hvd.config import config
from kvstore_hvd.errors import ConfigError, KVHvdError, message
from kvstore_hvd.native.records import EngineStatistics, Missed, TimelineEvent, Waiting
from kvstore_hvd.worlds.descriptors import check_room, limit_of
from kvstore_hvd.worlds.mpi.world import end_with_mpi, world_was_lost
from kvstore_hvd.worlds.rendezvous import share_segment
from kvstore_hvd.worlds.topology import Inside, Topology, World

__all__ = ["ShmCommunicator"]

# For the arenas of all workers of a host: a part of the 128 TiB that a process has. A process set takes a 32nd of what
# the world of all takes, so that a worker can be in many.
_ADDRESS_SPACE = 32 << 40
_SHIFT_INSIDE = 5
# What passes its deadline the engine fails by itself, and a little later: its error says more than that time is over.
_PATIENCE_S = 5.0


class ShmCommunicator(Communicator):
    """Joins the shared memory of the world's workers; returns once this worker has it."""

    def __init__(self, world: World) -> None:
        topology = world.topology
        check_room(topology)
        self._is_over_hosts = topology.host_count > 1
        if self._is_over_hosts and world.communicator is None:
            end_links_at_exit()
        elif self._is_over_hosts:
            end_with_mpi()
        changes = _thresholds()
        place = topology.ranks_by_host[topology.host].index(topology.rank)
        core = affinity.chosen_core(config().thread_affinity, topology.local_rank, topology.local_size)
        with refusals_explained(topology):
            segment = _shared_segment(world, changes)
            if not segment.has_core_for_each:
                text = "there are more workers%s than cores that they may use: a worker that waits does not spin"
                log.once(f"cores{topology.group}", logging.INFO, text, topology.group)
            # Not kept: the engine holds the segment until this worker leaves, the arena as long as arrays lie in it.
            try:
                with affinity.threads_on(core):
                    self._engine = native.Engine(segment, place, config().timeout_s, True, topology.host)
                try:
                    self._arena = native.Arena(segment, place)
                    self._engine.protect(self._arena)
                except BaseException:
                    self._engine.shutdown("it has no room for its arena")
                    raise
            finally:
                del segment  # or an error's traceback would keep it
            self._device: DeviceThread | None = DeviceThread(
                self._engine, lambda device: create_executor(self, topology, device), topology.speaker
            )
        if not native.has_pidfds():
            text = "this system has no pidfds (Linux 5.3): that a worker died is noticed up to half a second later"
            log.once("pidfds", logging.WARNING, text)

    def start_device(self, device: int) -> None:
        """See `Communicator.start_device`."""
        if self._device is not None:  # after `shutdown` the next request fails
            self._device.start(device)

    def submit(self, request: Request) -> native.Work:
        """See `Communicator.submit`."""
        return self._engine.submit(native_request(request))

    def run(self, request: Request) -> None:
        """See `Communicator.run`."""
        self._engine.run(native_request(request))

    def prepare(self, request: Request, result: Any, owner: Any) -> Callable[[], Any]:
        """See `Communicator.prepare`."""
        return self._engine.prepare(native_request(request), result, owner)

    def wait(self, work: native.Work) -> None:
        """See `Communicator.wait`."""
        self._engine.wait(work)

    def wait_for_all(self) -> bool:
        """See `Communicator.wait_for_all`."""
        return self._engine.wait_for_all(config().timeout_s + _PATIENCE_S)

    def is_met(self, work: native.Work) -> bool:
        """See `Communicator.is_met`."""
        return self._engine.is_met(work)

    def health(self) -> KVHvdError | None:
        """See `Communicator.health`."""
        return self._engine.health()

    def abort(self, text: str) -> None:
        """See `Communicator.abort`."""
        self._engine.abort(text)

    def shutdown(self, reason: str = "") -> None:
        """See `Communicator.shutdown`."""
        if self._is_over_hosts and self._engine.health() is not None:
            world_was_lost()
        try:
            if not self._engine.shutdown(reason):
                text = "another worker's GPU has not finished the last operations: its results may be wrong"
                log.logger.warning(text)
        finally:
            # The thread makes its executor by way of this object: a cycle, which nobody has to look for.
            device, self._device = self._device, None
            if device is not None:
                device.stop()
            self._arena.retire()

    def report(self) -> EngineStatistics:
        """See `Communicator.report`."""
        return self._engine.report()

    def start_timeline(self, capacity: int) -> None:
        """See `Communicator.start_timeline`."""
        self._engine.start_timeline(capacity)

    def stop_timeline(self) -> None:
        """See `Communicator.stop_timeline`."""
        self._engine.stop_timeline()

    def take_timeline(self) -> tuple[list[TimelineEvent], int]:
        """See `Communicator.take_timeline`."""
        return self._engine.take_timeline()

    def waiting(self, age_s: float) -> list[Waiting] | None:
        """See `Communicator.waiting`."""
        return self._engine.waiting(age_s)

    def missed(self, most: int, described: bool = False) -> list[Missed] | None:
        """See `Communicator.missed`."""
        return self._engine.missed(most, described)

    def process(self, rank: int) -> tuple[int, str]:
        """See `Communicator.process`."""
        return self._engine.process(rank)

    def mxnet_adapter(self, library_path: str, naive: bool) -> native.MXNetAdapter:
        """See `Communicator.mxnet_adapter`."""
        return native.MXNetAdapter(self._engine, library_path, naive, self._arena)

    @property
    def arena(self) -> native.Arena | None:
        """See `Communicator.arena`."""
        return self._arena if self._arena.capacity else None

    @property
    def bytes_in_place(self) -> int:
        """See `Communicator.bytes_in_place`."""
        return self._engine.bytes_in_place


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
            with affinity.threads_on_any(cores.together(told)):
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
        raise ConfigError(
            message("the environment has a setting that kvstore_hvd cannot use.", details=details, fix=fix)
        ) from None
    return changes


def _arena_bytes(topology: Topology) -> int:
    if not config().zero_copy:
        return 0
    available = _ADDRESS_SPACE
    # The arenas are mapped, and count as a file.
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_FSIZE):
        limit = limit_of(kind)
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


def native_request(request: Request) -> native.Request:
    """The same for the engine."""
    return native.Request(vars(request))
