"""The start of links: native threads that exchange what the workers of each host have reduced.

They do so by MPI or, in jobs without, by TCP. A link calls MPI by the addresses of a few functions of the library
that mpi4py has loaded. Messages that Python itself sent would wait for the interpreter lock, for milliseconds beside a
busy program.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import os
import time
from typing import Any

from kvstore_hvd import native
from kvstore_hvd.base.clocks import Deadline
from kvstore_hvd.config import config
from kvstore_hvd.errors import HorovodInternalError, LaunchError, message
from kvstore_hvd.worlds.connections import connect_hosts
from kvstore_hvd.worlds.topology import World

__all__ = ["end_links_at_exit", "start_link"]

_FUNCTIONS = ("MPI_Isend", "MPI_Irecv", "MPI_Test", "MPI_Cancel", "MPI_Iprobe")
# Tags of one world, see transport.hpp; worlds of one meeting: that of all, and 511 joins of process sets. Tags return
# after 15 meetings or more (MPI promises 32,767 tags; today's libraries have 2^29).
_TAGS, _WORLDS = 4, 512
_LOOK_S = 0.02  # how often to look whether the links have met


def start_link(world: World, segment: native.Segment) -> None:
    """On local rank 0 of each host of a world on several: start the host's link, and wait for those of the others."""
    topology = world.topology
    if topology.host_count == 1:
        return
    for rank, (host, pid) in enumerate(zip(topology.hosts, topology.pids)):
        segment.introduce(rank, pid, host)
    transport = _mpi_transport(world) if world.communicator is not None else _tcp_transport(world)
    link = native.Link(
        segment,
        transport,
        config().timeout_s,
        config().link_timeout_s,
        f"{native.abi()} {config().link_compression} {config().thresholds}",
        native.DTYPES[{"none": "float32", "fp16": "float16", "bf16": "bfloat16"}[config().link_compression]],
    )
    try:
        _meet(world, link)
    except BaseException:
        link.give_up()
        raise


@functools.lru_cache(maxsize=1)
def end_links_at_exit() -> None:
    """Have this process not end before its links are over: other hosts may need them. Where there is no MPI."""
    atexit.register(lambda: native.stop_links(config().exit_timeout_s))


def _tcp_transport(world: World) -> native.Transport:
    _close_in_children()
    return native.tcp_transport(connect_hosts(world))


@functools.lru_cache(maxsize=1)
def _close_in_children() -> None:
    # Other hosts would take this worker for alive as long as a forked child holds its connections.
    os.register_at_fork(after_in_child=native.close_connections)


def _mpi_transport(world: World) -> native.Transport:
    topology = world.topology
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        fact = "MPI was initialised without MPI_THREAD_MULTIPLE, which several hosts need."
        fix = "call init() before MPI is initialised, or leave mpi4py.rc.thread_level as it is ('multiple')."
        raise LaunchError(message(fact, **topology.speaker, fix=fix))
    most_tags = (MPI.COMM_WORLD.Get_attr(MPI.TAG_UB) or 32767) // _TAGS
    return native.mpi_transport(
        _functions(MPI),
        _handle(MPI, world.communicator),
        # Under MPI the lowest rank of a host has its local rank 0.
        [topology.rank_of_all(ranks[0]) for ranks in topology.ranks_by_host.values()],
        (world.meeting * _WORLDS + world.index % _WORLDS) % most_tags * _TAGS,
    )


def _meet(world: World, link: native.Link) -> None:
    topology, limit_s = world.topology, config().start_timeout_s
    deadline = Deadline(limit_s)
    try:
        while missing := link.missing():
            why = world.lost()
            if not why and deadline.left() <= 0:
                why = f"{topology.rank_list(missing)} did not arrive within {limit_s:g} s."
            if why:
                fix = "see whether they failed or create no store; KVHVD_START_TIMEOUT (seconds) gives them more time."
                hosts = dict.fromkeys(topology.hosts[rank] for rank in missing)
                details = [f"{host}: {topology.rank_list(topology.ranks_by_host[host])}" for host in hosts]
                raise LaunchError(message(why, **topology.speaker, details=details, fix=fix))
            time.sleep(deadline.wait_s(_LOOK_S))
    except HorovodInternalError as error:
        fact, _, fix = str(error).partition("\n  Fix: ")
        raise LaunchError(message(f"{fact}.", **topology.speaker, fix=f"{fix}." if fix else fix)) from error


def _functions(mpi: Any) -> dict[str, int]:
    library = ctypes.CDLL(mpi.__file__)
    found = {name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in _FUNCTIONS}
    # MPI_STATUS_IGNORE is 1 in MPICH, whose handles are ints, and 0 in Open MPI and in the ABI of MPI 5.
    is_mpich = mpi._sizeof(mpi.Comm) == ctypes.sizeof(ctypes.c_int)
    return {**found, "byte": _handle(mpi, mpi.BYTE), "ignored_status": 1 if is_mpich else 0}


def _handle(mpi: Any, value: Any) -> int:
    return int(mpi._handleof(value)) & 0xFFFFFFFFFFFFFFFF
