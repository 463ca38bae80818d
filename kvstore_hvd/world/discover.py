"""Find out which world this process belongs to.

The source is chosen once, in this order, and logged:

1. an MPI communicator passed to `discover`;
2. kvhvdrun's variables (no MPI is imported);
3. MPI, when the variables of an MPI launcher ask for more than one rank, or the application has initialised mpi4py;
4. none of them: a world of one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from collections.abc import Sequence
from typing import Any

from kvstore_hvd import log
from kvstore_hvd.config import Config, config, tell_unused
from kvstore_hvd.errors import InvalidRequestError, LaunchError, message
from kvstore_hvd.world.mpi import check_ranks, initialised_mpi, mpi_world
from kvstore_hvd.world.topology import Host, Topology, World
from kvstore_hvd.world.worker_line import meet


def discover(comm: Any = None) -> World:
    """Find this process's world. Collective over the ranks of the world when MPI is the source."""
    cfg = config()
    ranks, communicator = _split(comm)
    world: World | None
    if cfg.rank is not None or cfg.size is not None:
        if communicator is not None and communicator.Get_size() <= 1 and (cfg.size or 0) > 1:
            fact = f"kvhvdrun started {cfg.size} workers without MPI: the communicator given to init() has size 1."
            fix = "call init() without comm (or with a list of ranks), or start with mpirun."
            raise LaunchError(message(fact, fix=fix))
        world = mpi_world(cfg.mpi_launch, communicator) if communicator is not None else _launcher_world(cfg, ranks)
    elif communicator is not None:
        world = mpi_world(cfg.mpi_launch, communicator)
    elif initialised_mpi() is not None or (cfg.mpi_launch is not None and cfg.mpi_launch.size != 1):
        world = mpi_world(cfg.mpi_launch, ranks)
    else:
        _refuse_foreign_launch(cfg)
        if ranks is not None:
            check_ranks(ranks, 1)
        world = None
    world = world or single_world()
    topology = world.topology
    log.set_rank(topology.rank, topology.size)
    if topology.rank == 0:
        tell_unused()
    log.logger.info(
        "rank %d of %d, local rank %d of %d on %s, found by %s",
        topology.rank,
        topology.size,
        topology.local_rank,
        topology.local_size,
        topology.host,
        {"launcher": "kvhvdrun's variables", "mpi": "MPI", "single": "nobody: a world of one"}[topology.source],
    )
    return world


def single_world() -> World:
    """A world of this process alone."""
    return World(Topology.of(0, [Host.here()], source="single"), secrets.token_hex(8), secrets.token_bytes(32))


def _split(comm: Any) -> tuple[Sequence[int] | None, Any]:
    """Tell a list of ranks from a communicator (recognised without importing mpi4py)."""
    if comm is None:
        return None, None
    if hasattr(comm, "Get_size") and hasattr(comm, "Dup"):
        return None, comm
    if isinstance(comm, (str, bytes)) or not hasattr(comm, "__iter__"):
        raise InvalidRequestError(
            message(
                f"comm is {type(comm).__name__}, expected an mpi4py communicator or a list of ranks.",
                fix="init(), init(comm=MPI.COMM_WORLD) or init(comm=[0, 1]).",
            )
        )
    return list(comm) or None, None


def _launcher_world(cfg: Config, ranks: Sequence[int] | None) -> World | None:
    rank, size = cfg.rank, cfg.size
    missing = [
        variable
        for variable, value in (
            ("KVHVD_RANK", rank),
            ("KVHVD_SIZE", size),
            ("KVHVD_JOB", cfg.job or None),
            ("KVHVD_SECRET", cfg.secret or None),
        )
        if value is None
    ]
    if rank is None or size is None or missing:
        raise LaunchError(
            message(
                f"kvhvdrun's variables are incomplete: {', '.join(missing)} not set.",
                fix="start with `kvhvdrun -np N python train.py`; do not set these variables by hand.",
            )
        )
    if rank >= size:
        raise LaunchError(message(f"KVHVD_RANK={rank} is not below KVHVD_SIZE={size}.", fix="start with kvhvdrun."))
    launch = cfg.mpi_launch
    if launch is not None and launch.launcher != "Slurm" and launch.size != 1:
        raise LaunchError(
            message(
                "this worker was started by kvhvdrun and by mpirun, one inside the other.",
                details=[f"kvhvdrun: rank {rank} of {size}; {launch.launcher}: rank {launch.rank} of {launch.size}"],
                fix="use one of them: `mpirun -np N python train.py` or `kvhvdrun -np N python train.py`.",
            )
        )
    job, chosen = cfg.job, tuple(range(size))
    if ranks is not None:
        chosen = check_ranks(ranks, size)
        if rank not in chosen:
            return None
        if chosen != tuple(range(size)):
            # Worlds of one job must not meet each other's sockets.
            job += "." + hashlib.sha256(repr(chosen).encode()).hexdigest()[:16]
    if cfg.hosts:
        return dataclasses.replace(meet(rank, chosen), job=job)
    topology = Topology.of(
        chosen.index(rank), [Host.here()] * len(chosen), generation=cfg.generation, source="launcher"
    )
    return World(topology, job, cfg.secret)


def _refuse_foreign_launch(cfg: Config) -> None:
    if cfg.foreign_launch is None:
        return
    launcher, workers = cfg.foreign_launch
    raise LaunchError(
        message(
            f"{launcher} started {workers} workers; kvstore_hvd cannot find them, and each would train alone.",
            fix=f"start with `kvhvdrun -np {workers} python train.py` or `mpirun -np {workers} python train.py`.",
        )
    )
