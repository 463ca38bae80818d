"""The configuration: one frozen object, one field per knob. The only place that reads the process's environment.

Variables of this package are named ``KVHVD_*``; a few of Horovod's are honoured too. A ``KVHVD_`` name that does not
exist is an error, so that a misspelt knob cannot be overlooked; two prefixes are left to others: ``KVHVD_BUILD_``
(setup.py) and ``KVHVD_TEST_`` (the test suite). An empty value counts as unset.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

from kvstore_hvd.errors import ConfigError, message
from kvstore_hvd.horovod import variables as horovod_variables

RESERVED_PREFIXES = ("KVHVD_BUILD_", "KVHVD_TEST_")

_LOG_LEVELS = {
    "trace": "debug",
    "debug": "debug",
    "info": "info",
    "warning": "warning",
    "warn": "warning",
    "error": "error",
    "fatal": "critical",
    "critical": "critical",
}


# -- Parsers: text -> value, ValueError with what was expected ----------------------------------------------------


# Three years: the native engine counts nanoseconds in 64 bits.
_LONGEST_S = 1e8


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= _LONGEST_S:
        raise ValueError
    return value


_seconds.expected = "a number of seconds above 0, at most 1e8"  # type: ignore[attr-defined]


def _lease(text: str) -> float:
    value = _seconds(text)
    if value < 2:
        raise ValueError
    return value


_lease.expected = "a number of seconds, 2 to 1e8"  # type: ignore[attr-defined]


def _seconds_or_off(text: str) -> float:
    return 0.0 if float(text) == 0 else _seconds(text)


_seconds_or_off.expected = "a number of seconds, 0 (off) to 1e8"  # type: ignore[attr-defined]


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise ValueError
    return value


_count.expected = "a whole number, 0 or more"  # type: ignore[attr-defined]


def _mebibytes(text: str) -> int:
    value = int(text)
    if not 2 <= value <= 4096:
        raise ValueError
    return value


_mebibytes.expected = "a whole number, 2 to 4096"  # type: ignore[attr-defined]


def _flag(text: str) -> bool:
    value = text.lower()
    if value in ("1", "true", "yes", "on"):
        return True
    if value in ("0", "false", "no", "off"):
        return False
    raise ValueError


_flag.expected = "0 or 1"  # type: ignore[attr-defined]


def _secret(text: str) -> bytes:
    value = bytes.fromhex(text)
    if len(value) < 16:
        raise ValueError
    return value


_secret.expected = "at least 32 hexadecimal digits"  # type: ignore[attr-defined]


def _text(text: str) -> str:
    return text


_text.expected = "text"  # type: ignore[attr-defined]


def _level(text: str) -> str:
    try:
        return _LOG_LEVELS[text.lower()]
    except KeyError:
        raise ValueError from None


_level.expected = "one of trace, debug, info, warning, error, fatal"  # type: ignore[attr-defined]


def _cores(text: str) -> tuple[int, ...]:
    return tuple(_count(core) for core in text.split(","))


_cores.expected = "numbers of cores with commas between them"  # type: ignore[attr-defined]


def _placement(text: str) -> str:
    for number in text.split("/" if "/" in text else ","):
        _count(number)
    return text


_placement.expected = "2 (hosts), 2,1 (ranks of each) or 0/1/0 (host of each rank)"  # type: ignore[attr-defined]


def _choice(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in names:
            raise ValueError
        return text.lower()

    parse.expected = "one of " + ", ".join(names)  # type: ignore[attr-defined]
    return parse


class _Knob:
    """A field of `Config` that is read from the first of `variables` that is set; `hidden` values are not printed."""

    # Not a field of a dataclass: importing those takes a tenth of the time in which the launcher starts.

    def __init__(self, parse: Any, default: Any, *variables: str, doc: str, hidden: bool = False) -> None:
        self.parse, self.default, self.variables, self.doc, self.hidden = parse, default, variables, doc, hidden

    def __get__(self, instance: Config | None, owner: type[Config]) -> Any:
        return self if instance is None else self.default  # a value that was read hides this


def _knob(*arguments: Any, **more: Any) -> Any:
    """A `_Knob`, which type checkers take for a value of its field."""
    return _Knob(*arguments, **more)


# -- The launcher of an MPI, as far as its variables tell ---------------------------------------------------------


class MPILaunch(NamedTuple):
    """What the variables of an MPI launcher say about this process; nothing here has asked MPI itself."""

    launcher: str  # 'Open MPI', 'MPICH' (or another user of PMI), 'PMIx', 'Slurm'
    rank: int | None
    size: int | None  # None when the launcher does not say
    variable: str  # the variable that gave it away
    version: str = ""  # of the launcher, where it says so
    survives: bool = False  # deaths do not end the job (`mpirun --with-ft ulfm`)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> MPILaunch | None:
        """Find the MPI launcher that started this process; None when there is none."""
        # Slurm's variables count only inside a job step with several tasks: a batch script or an ``salloc`` shell has
        # them too without being a rank.

        def number(name: str) -> int | None:
            value = environ.get(name, "")
            return int(value) if value.isdigit() else None

        if number("OMPI_COMM_WORLD_SIZE") is not None:
            return cls(
                "Open MPI",
                number("OMPI_COMM_WORLD_RANK"),
                number("OMPI_COMM_WORLD_SIZE"),
                "OMPI_COMM_WORLD_SIZE",
                # Open MPI 5 says its version; older ones show themselves by the variables of their ORTE runtime.
                environ.get("OMPI_VERSION", "") or ("4 or older" if "OMPI_MCA_orte_hnp_uri" in environ else ""),
                environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes", "on", "enabled"),
            )
        tasks = number("SLURM_STEP_NUM_TASKS")
        slurm_step = number("SLURM_STEP_ID") is not None and tasks is not None and tasks > 1
        if number("PMI_SIZE") is not None:
            # Slurm speaks PMI too, and then to any MPI.
            return cls("Slurm" if slurm_step else "MPICH", number("PMI_RANK"), number("PMI_SIZE"), "PMI_SIZE")
        if number("PMIX_RANK") is not None:
            return cls("PMIx", number("PMIX_RANK"), tasks, "PMIX_RANK")
        if slurm_step:
            return cls("Slurm", number("SLURM_PROCID"), tasks, "SLURM_STEP_NUM_TASKS")
        return None


# Launchers of workers that are neither ours nor of an MPI: variables that all of them set for each worker, and the one
# with the number of workers, of all hosts or (the second) of each.
_FOREIGN = {
    "Horovod's launcher": ((), "HOROVOD_SIZE", ""),
    "a launcher for MXNet's parameter servers (launch.py, bpslaunch)": (
        ("DMLC_ROLE", "DMLC_PS_ROOT_URI"),
        "DMLC_NUM_WORKER",
        "BYTEPS_LOCAL_SIZE",
    ),
    "torchrun, or a launcher like it,": (("RANK", "LOCAL_RANK", "MASTER_ADDR"), "WORLD_SIZE", ""),
}


def _foreign_launch(environ: Mapping[str, str], horovods_are_ours: bool) -> tuple[str, int] | None:
    """The launcher among `_FOREIGN` that started this worker beside others, and how many; None if none did."""
    for launcher, (variables, size, local_size) in _FOREIGN.items():
        if not all(map(environ.get, variables)) or (horovods_are_ours and size == "HOROVOD_SIZE"):
            continue
        counts = [environ.get(name, "") for name in (size, local_size)]
        workers = math.prod(int(count) for count in counts if count.isdigit())
        if workers > 1 and environ.get("DMLC_ROLE", "worker") == "worker":
            return launcher, workers
    return None


# The variables that `kvhvdrun --help` shows.
_OF_USERS = (
    "timeout_s",
    "stall_check_s",
    "stall_check_disable",
    "verify_every",
    "log_level",
    "allow_local_trainer",
    "survivor_time_s",
    "kill_grace_s",
)


# -- The object ---------------------------------------------------------------------------------------------------


class Config:
    """Every knob, with its unit, default and variable. Does not change."""

    timeout_s: float = _knob(
        _seconds,
        600.0,
        "KVHVD_TIMEOUT",
        doc="Seconds that an operation may wait for workers that are stopped or wait for it; if set, for any worker.",
    )
    start_timeout_s: float = _knob(
        _seconds,
        30.0,
        "KVHVD_START_TIMEOUT",
        "HOROVOD_START_TIMEOUT",
        doc="Seconds that workers may take to find each other at the start.",
    )
    link_timeout_s: float = _knob(
        _seconds, 10.0, "KVHVD_LINK_TIMEOUT", doc="Seconds after which a host that says nothing counts as lost."
    )
    network_interfaces: str = _knob(
        _text,
        "",
        "KVHVD_NETWORK_INTERFACES",
        doc="kvhvdrun: interfaces and networks between hosts, as --network-interfaces: eth0 or 10.0.0.0/8.",
    )
    link_compression: str = _knob(
        _choice("none", "fp16", "bf16"),
        "none",
        "KVHVD_LINK_COMPRESSION",
        doc="What sums of float32 are rounded to on their way between hosts: none, fp16, bf16. Alike on all hosts.",
    )
    exit_timeout_s: float = _knob(
        _seconds,
        30.0,
        "KVHVD_EXIT_TIMEOUT",
        doc="Seconds at exit in which one of a worker's pending operations has to complete; if set, in any case.",
    )
    stall_check_s: float = _knob(
        _seconds_or_off,
        60.0,
        "KVHVD_STALL_CHECK_TIME_S",
        "HOROVOD_STALL_CHECK_TIME_SECONDS",
        doc="Seconds that an operation may wait before a report says who waits for whom, and where; 0: no reports.",
    )
    stall_check_disable: bool = _knob(_flag, False, "HOROVOD_STALL_CHECK_DISABLE", doc="1 turns stall reports off.")
    stall_shutdown_s: float = _knob(
        _seconds_or_off,
        0.0,
        "KVHVD_STALL_SHUTDOWN_TIME_S",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
        doc="Seconds after which such a report also fails the world; 0: never.",
    )
    verify_every: int = _knob(
        _count,
        0,
        "KVHVD_VERIFY_EVERY",
        doc="Steps of a Trainer after which the workers compare their parameters, again and again; 0: never.",
    )
    log_level: str = _knob(
        _level,
        "warning",
        "KVHVD_LOG_LEVEL",
        "HOROVOD_LOG_LEVEL",
        doc="Lowest level of diagnostics shown: trace, debug, info, warning, error, fatal.",
    )
    as_horovod: bool = _knob(
        _flag,
        False,
        "KVHVD_AS_HOROVOD",
        doc="1: once kvstore_hvd is imported, `import horovod.mxnet` finds it where Horovod is not installed.",
    )
    log_hide_time: bool = _knob(
        _flag, True, "HOROVOD_LOG_HIDE_TIME", doc="0: lines of diagnostics begin with the time of day."
    )
    simd: str = _knob(
        _choice("auto", "scalar", "avx2", "avx512"),
        "auto",
        "KVHVD_SIMD",
        doc="Instruction set of the reduction kernels: auto, scalar, avx2, avx512.",
    )
    thread_affinity: tuple[int, ...] = _knob(
        _cores,
        (),
        "KVHVD_THREAD_AFFINITY",
        "HOROVOD_THREAD_AFFINITY",
        doc="Cores for the communication threads, one for each worker of this host, with commas between them.",
    )
    zero_copy: bool = _knob(
        _flag, True, "KVHVD_ZERO_COPY", doc="1: gradients of Gluon's parameters live in memory that workers share."
    )
    arena_mib: int = _knob(
        _count,
        0,
        "KVHVD_ARENA_MIB",
        doc="MiB of address space for a worker's gradients in shared memory; 0: as much as the machine has memory.",
    )
    thresholds: str = _knob(
        _text,
        "",
        "KVHVD_THRESHOLDS",
        doc="Algorithm selection thresholds in bytes, NAME=BYTES,...: what benchmarks/tune.py prints.",
    )
    gpu_path: str = _knob(
        _choice("auto", "nccl", "kernels", "staged"),
        "auto",
        "KVHVD_GPU_PATH",
        doc="How arrays on GPUs travel: auto, nccl, kernels (ours, over memory of GPUs), staged (by way of the CPU).",
    )
    gpu_staging_mib: int = _knob(
        _mebibytes, 64, "KVHVD_GPU_STAGING_MIB", doc="MiB of a GPU's memory in which arrays are gathered, 2 to 4096."
    )
    nccl_library: str = _knob(
        _text, "", "KVHVD_NCCL_LIBRARY", doc="Path of the libnccl.so.2 to use instead of the one that is found."
    )
    timeline: str = _knob(
        _text,
        "",
        "KVHVD_TIMELINE",
        "HOROVOD_TIMELINE",
        doc="File that a timeline of all operations is written to; DYNAMIC: only when start_timeline() is called.",
    )
    timeline_mark_cycles: bool = _knob(
        _flag,
        False,
        "KVHVD_TIMELINE_MARK_CYCLES",
        "HOROVOD_TIMELINE_MARK_CYCLES",
        doc="1: mark in that timeline where rounds of operations begin.",
    )
    numpy_shim: bool = _knob(
        _flag, True, "KVHVD_NUMPY_SHIM", doc="1: add the NumPy names that MXNet needs and newer NumPy lacks."
    )
    allow_local_trainer: bool = _knob(
        _flag,
        False,
        "KVHVD_ALLOW_LOCAL_TRAINER",
        doc="1 allows unsynchronised Trainers in a multi-worker job.",
    )
    dynamic_process_sets: bool = _knob(
        _flag,
        False,
        "KVHVD_DYNAMIC_PROCESS_SETS",
        "HOROVOD_DYNAMIC_PROCESS_SETS",
        doc="1: process sets may be added and removed after hvd.init().",
    )
    survivor_time_s: float = _knob(
        _seconds,
        2.0,
        "KVHVD_SURVIVOR_TIME",
        doc="kvhvdrun: seconds that the other workers get, after one failed, to report and end on their own.",
    )
    kill_grace_s: float = _knob(
        _seconds, 5.0, "KVHVD_KILL_GRACE", doc="kvhvdrun: seconds between SIGTERM and SIGKILL when it ends workers."
    )
    lease_s: float = _knob(
        _lease,
        60.0,
        "KVHVD_LEASE",
        doc="kvhvdrun, elastic or over hosts: seconds for which launcher and daemons may hear nothing of each other.",
    )
    checkpoint: str = _knob(
        _text, "", "KVHVD_CHECKPOINT", doc="Elastic training: file that rank 0 writes the state to, and begins from."
    )
    checkpoint_every_s: float = _knob(
        _seconds, 600.0, "KVHVD_CHECKPOINT_EVERY", doc="Seconds after which the next commit is written to that file."
    )
    elastic_timeout_s: float = _knob(
        _seconds,
        600.0,
        "KVHVD_ELASTIC_TIMEOUT",
        "HOROVOD_ELASTIC_TIMEOUT",
        doc="kvhvdrun: seconds that an elastic job waits for enough workers.",
    )
    # Set by kvhvdrun for its workers; not meant to be set by hand.
    rank: int | None = _knob(_count, None, "KVHVD_RANK", doc="Set by kvhvdrun: this worker's rank.")
    size: int | None = _knob(_count, None, "KVHVD_SIZE", doc="Set by kvhvdrun: number of workers.")
    local_rank: int | None = _knob(_count, None, "KVHVD_LOCAL_RANK", doc="Set by kvhvdrun: rank on this host.")
    local_size: int | None = _knob(_count, None, "KVHVD_LOCAL_SIZE", doc="Set by kvhvdrun: workers on this host.")
    hosts: str = _knob(
        _text, "", "KVHVD_HOSTS", doc="Set by kvhvdrun over hosts: the host of each rank, or of this worker."
    )
    slot: str = _knob(
        _text, "", "KVHVD_SLOT", doc="Set by kvhvdrun: this worker's slot, HOST:INDEX; as long as it runs."
    )
    job: str = _knob(_text, "", "KVHVD_JOB", doc="Set by kvhvdrun: random name of the job.")
    secret: bytes = _knob(
        _secret, b"", "KVHVD_SECRET", doc="Set by kvhvdrun: secret of the job, in hexadecimal.", hidden=True
    )
    test_hosts: str = _knob(
        _placement, "", "KVHVD_TEST_HOSTS", doc="For tests: splits the workers of one host into virtual hosts."
    )
    generation: int = _knob(_count, 0, "KVHVD_GENERATION", doc="Set by kvhvdrun: number of the world, counted from 0.")
    worker: int | None = _knob(
        _count, None, "KVHVD_WORKER", doc="Set by kvhvdrun: number of this worker in an elastic job."
    )
    daemon: str = _knob(
        _text, "", "KVHVD_DAEMON", doc="Set by kvhvdrun: name of the socket of the daemon that started this worker."
    )
    # Read from the variables of others.
    mpi_launch: MPILaunch | None = None
    foreign_launch: tuple[str, int] | None = None  # a launcher that is neither ours nor of an MPI, and its workers
    unused: tuple[str, ...] = ()  # HOROVOD_* variables that are set and have no effect here

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    @property
    def waits_for_busy(self) -> bool:
        """Whether a worker that computes is waited for beyond `timeout_s`: unless it was set, or would be replaced."""
        never_shuts_down = "stall_shutdown_s" in vars(self) and not self.stall_shutdown_s
        return "timeout_s" not in vars(self) and (never_shuts_down or not self._is_replaced)

    @property
    def waits_at_exit(self) -> bool:
        """Whether an exit waits for late workers beyond `exit_timeout_s`: unless it was set, or they are replaced."""
        return "exit_timeout_s" not in vars(self) and not self._is_replaced

    @property
    def _is_replaced(self) -> bool:
        return bool(self.daemon) and self.worker is not None

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name} of a configuration does not change.")

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> Config:
        """Read a configuration from `environ`."""
        faults: list[str] = []
        values: dict[str, Any] = {}
        known = known_variables()
        for name in sorted(environ):
            if name.startswith("KVHVD_") and name not in known and not name.startswith(RESERVED_PREFIXES):
                from difflib import get_close_matches  # the launcher starts without it

                close = get_close_matches(name, known, n=1, cutoff=0.6)
                faults.append(f"{name} does not exist" + (f"; did you mean {close[0]}?" if close else "."))
        for name, knob in KNOBS.items():
            for variable in knob.variables:
                text = environ.get(variable, "").strip()
                if not text:
                    continue
                try:
                    values[name] = knob.parse(text)
                except ValueError:
                    shown = "its value" if knob.hidden else repr(text)
                    faults.append(f"{variable}: {shown} is not {knob.parse.expected}.")
                break
        if faults:
            raise ConfigError(
                message(
                    "the environment has settings that kvstore_hvd cannot use.",
                    details=faults,
                    fix="correct or unset them; docs/errors.md lists every variable.",
                )
            )
        ours = horovod_variables.OF_WORKERS if horovod_variables.are_ours(environ, values.get("job", "")) else ()
        return cls(
            **values,
            mpi_launch=MPILaunch.from_environ(environ),
            foreign_launch=_foreign_launch(environ, bool(ours)),
            unused=tuple(sorted(n for n in environ if n.startswith("HOROVOD_") and n not in (*known, *ours))),
        )

    @classmethod
    def describe(cls) -> str:
        """A table of the variables that users need (name, default, meaning), one line each, for ``kvhvdrun --help``."""
        knobs = [KNOBS[name] for name in _OF_USERS]
        return "\n".join(f"{' or '.join(knob.variables)} [{_shown(knob.default)}]: {knob.doc}" for knob in knobs)


KNOBS = {name: knob for name, knob in vars(Config).items() if isinstance(knob, _Knob)}


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    return f"{value:g}" if isinstance(value, float) else str(value)


def known_variables() -> tuple[str, ...]:
    """The names of all variables that have an effect."""
    return tuple(name for knob in KNOBS.values() for name in knob.variables)


_current: Config | None = None
_lock = threading.Lock()


def config() -> Config:
    """The configuration of this process: what the environment said when it was read last."""
    with _lock:
        return _read() if _current is None else _current


def reload() -> Config:
    """Read the environment again: a program may set variables after its imports. Returns the new configuration."""
    with _lock:
        return _read()


def _read() -> Config:
    """Replace the configuration; what the program itself has told `logging` stays unless the environment changes."""
    global _current
    before, now = _current, Config.from_environ(os.environ)
    _current = now
    if now.log_level == KNOBS["log_level"].default and now.log_hide_time and "kvstore_hvd.log" not in sys.modules:
        return now  # so is `log` at its import, which loads `logging`; the launcher starts without it
    from kvstore_hvd import log

    if before is None or before.log_level != now.log_level:
        log.set_level(now.log_level)
    if before is None or before.log_hide_time != now.log_hide_time:
        log.set_time(not now.log_hide_time)
    return now


def tell_unused() -> None:
    """Say once which variables of Horovod are set and have no effect here, and why."""
    unused = config().unused
    if unused:
        import logging

        from kvstore_hvd import log

        log.once(
            "unused-horovod-variables",
            logging.WARNING,
            "these variables of Horovod have no effect here:\n%s",
            "\n".join(f"  {name}: {horovod_variables.reason(name)}" for name in unused),
        )


def cache_folder() -> str:
    """Where this user's files may lie that can be made again; need not exist."""
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "kvstore_hvd")


def environment() -> dict[str, str]:
    """A copy of the environment of this process, to start another process with."""
    return dict(os.environ)


def prepare_mxnet() -> None:
    """Set what MXNet reads when it is imported, where the user has not."""
    # Its pool of threads for prioritised operations serves this package only. With one thread, which only hands
    # operations on, they are handed on in the order of their priority, and a burst of gradients wakes one thread.
    os.environ.setdefault("MXNET_CPU_PRIORITY_NTHREADS", "1")


def pass_alias_on() -> None:
    """Have the processes that this one starts answer for Horovod's name too, once they import this package."""
    os.environ["KVHVD_AS_HOROVOD"] = "1"
