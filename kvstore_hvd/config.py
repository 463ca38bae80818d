"""The configuration: one frozen object with a field for each setting. Only this module reads the environment.

Variables of this package are named ``KVHVD_*``; a few variables of Horovod count, too. A misspelt ``KVHVD_`` name is an
error. Two prefixes are left to others: ``KVHVD_BUILD_`` (setup.py) and ``KVHVD_TEST_`` (the test suite). An empty value
counts as unset.
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

# Three years: the native engine counts nanoseconds in 64 bits.
_LONGEST_S = 1e8
# Horovod's levels, and those of `logging`.
_LOG_LEVELS = {"trace": "debug", "warn": "warning", "fatal": "critical"}
_LOG_LEVELS |= {name: name for name in ("debug", "info", "warning", "error", "critical")}
_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


# -- Parsers of a variable's text ---------------------------------------------------------------------------------


def _parser(
    expected: str, convert: Callable[[str], Any], is_allowed: Callable[[Any], bool] = lambda value: True
) -> Any:
    """A function from a text to its value; raises ValueError with what was expected."""

    def parse(text: str) -> Any:
        try:
            value = convert(text)
        except (ValueError, KeyError, OSError):  # OSError: a relative path in a folder that has been deleted
            raise ValueError(expected) from None
        if not is_allowed(value):
            raise ValueError(expected)
        return value

    return parse


def _choice(*names: str) -> Any:
    return _parser("one of " + ", ".join(names), str.lower, lambda name: name in names)


_text = str
_path = _parser("a path", os.path.abspath)
_OFF_OR_DEFAULT = {"0": "", "default": "default"}
_path_or_off = _parser(
    "a path, or 0 (off)", lambda text: _OFF_OR_DEFAULT[text] if text in _OFF_OR_DEFAULT else os.path.abspath(text)
)
_seconds = _parser("a number of seconds above 0, at most 1e8", float, lambda value: 0 < value <= _LONGEST_S)
_seconds_or_off = _parser("a number of seconds, 0 (off) to 1e8", float, lambda value: 0 <= value <= _LONGEST_S)
_lease = _parser("a number of seconds, 2 to 1e8", float, lambda value: 2 <= value <= _LONGEST_S)
_count = _parser("a whole number, 0 or more", int, lambda value: value >= 0)
_mebibytes = _parser("a whole number, 2 to 4096", int, lambda value: 2 <= value <= 4096)
_flag = _parser("0 or 1", lambda text: _FLAGS[text.lower()])
_secret = _parser("at least 32 hexadecimal digits", bytes.fromhex, lambda value: len(value) >= 16)
_level = _parser("one of trace, debug, info, warning, error, fatal", lambda text: _LOG_LEVELS[text.lower()])
_counts = _parser("whole numbers with commas between them", lambda text: tuple(map(_count, text.split(","))))


class _Knob:
    """A field of `Config`, read from the first of `variables` that is set; `hidden` values are not printed."""

    # The import of dataclasses would take a tenth of the launcher's start.

    def __init__(self, parse: Any, default: Any, *variables: str, hidden: bool = False) -> None:
        self.parse, self.default, self.variables, self.hidden = parse, default, variables, hidden

    def __get__(self, instance: Config | None, owner: type[Config]) -> Any:
        return self if instance is None else self.default  # of a field without a value in the instance


_knob: Any = _Knob  # type checkers see a value of the field


# -- Variables of launchers ------------------------------------------------------------------------------------


class MPILaunch(NamedTuple):
    """This process by the variables of an MPI launcher, without a call of MPI."""

    launcher: str  # 'Open MPI', 'MPICH' (or another user of PMI), 'PMIx', 'Slurm'
    rank: int | None
    size: int | None  # None if unknown
    variable: str  # the variable that shows the launcher
    version: str = ""  # of the launcher, if known
    survives: bool = False  # the job goes on after a death (`mpirun --with-ft ulfm`)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> MPILaunch | None:
        """Find the MPI launcher of this process, if any."""
        # Slurm's variables count only in a job step of several tasks: a batch script or an ``salloc`` shell has them,
        # too, and is no rank.

        def number(name: str) -> int | None:
            value = environ.get(name, "")
            return int(value) if value.isdigit() else None

        if number("OMPI_COMM_WORLD_SIZE") is not None:
            return cls(
                "Open MPI",
                number("OMPI_COMM_WORLD_RANK"),
                number("OMPI_COMM_WORLD_SIZE"),
                "OMPI_COMM_WORLD_SIZE",
                # Open MPI 5 has its version in a variable, older ones have variables of their ORTE runtime.
                environ.get("OMPI_VERSION", "") or ("4 or older" if "OMPI_MCA_orte_hnp_uri" in environ else ""),
                environ.get("OMPI_MCA_mpi_ft_enable", "").lower() in ("1", "true", "yes", "on", "enabled"),
            )
        tasks = number("SLURM_STEP_NUM_TASKS")
        slurm_step = number("SLURM_STEP_ID") is not None and tasks is not None and tasks > 1
        if number("PMI_SIZE") is not None:
            # Slurm speaks PMI, too, with any MPI.
            return cls("Slurm" if slurm_step else "MPICH", number("PMI_RANK"), number("PMI_SIZE"), "PMI_SIZE")
        if number("PMIX_RANK") is not None:
            return cls("PMIx", number("PMIX_RANK"), tasks, "PMIX_RANK")
        if slurm_step:
            return cls("Slurm", number("SLURM_PROCID"), tasks, "SLURM_STEP_NUM_TASKS")
        return None


# Other launchers of workers: variables that they set for each worker, and the variable with the number of workers, of
# all hosts or (the last) of each host.
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
    """The launcher of `_FOREIGN` that started this worker and others, and their number."""
    for launcher, (variables, size, local_size) in _FOREIGN.items():
        if not all(map(environ.get, variables)) or (horovods_are_ours and size == "HOROVOD_SIZE"):
            continue
        counts = [environ.get(name, "") for name in (size, local_size)]
        workers = math.prod(int(count) for count in counts if count.isdigit())
        if workers > 1 and environ.get("DMLC_ROLE", "worker") == "worker":
            return launcher, workers
    return None


# -- The object ---------------------------------------------------------------------------------------------------


#: The lines of ``kvhvdrun --help``.
HELP = {
    "timeout_s": "Seconds that an operation may wait for stopped workers or those that wait for it; if set, for any.",
    "stall_check_s": "Seconds that an operation may wait before a report says who waits for whom, and where; 0: none.",
    "stall_check_disable": "1 turns stall reports off.",
    "verify_every": "Steps of a Trainer after which the workers compare their parameters, again and again; 0: never.",
    "log_level": "Lowest level of diagnostics shown: trace, debug, info, warning, error, fatal.",
    "allow_local_trainer": "1 allows unsynchronised Trainers in a multi-worker job.",
    "survivor_time_s": "kvhvdrun: seconds that other workers get, after one failed, to report and end on their own.",
    "kill_grace_s": "kvhvdrun: seconds between SIGTERM and SIGKILL when it ends workers.",
}


class Config:
    """All settings. Does not change. `HELP` and the comments are the descriptions in docs/errors.md."""

    timeout_s: float = _knob(_seconds, 600.0, "KVHVD_TIMEOUT")
    # Seconds that workers may take to find each other at the start.
    start_timeout_s: float = _knob(_seconds, 30.0, "KVHVD_START_TIMEOUT", "HOROVOD_START_TIMEOUT")
    # Seconds after which a host that says nothing counts as lost.
    link_timeout_s: float = _knob(_seconds, 10.0, "KVHVD_LINK_TIMEOUT")
    # kvhvdrun: interfaces and networks between hosts, as --network-interfaces: eth0 or 10.0.0.0/8.
    network_interfaces: str = _knob(_text, "", "KVHVD_NETWORK_INTERFACES")
    # What sums of float32 are rounded to on their way between hosts: none, fp16, bf16. Alike on all hosts.
    link_compression: str = _knob(_choice("none", "fp16", "bf16"), "none", "KVHVD_LINK_COMPRESSION")
    # Seconds at exit in which one of a worker's pending operations has to complete; if set, in any case.
    exit_timeout_s: float = _knob(_seconds, 30.0, "KVHVD_EXIT_TIMEOUT")
    stall_check_s: float = _knob(_seconds_or_off, 60.0, "KVHVD_STALL_CHECK_TIME_S", "HOROVOD_STALL_CHECK_TIME_SECONDS")
    stall_check_disable: bool = _knob(_flag, False, "HOROVOD_STALL_CHECK_DISABLE")
    # Seconds after which such a report also fails the world; 0: never.
    stall_shutdown_s: float = _knob(
        _seconds_or_off, 0.0, "KVHVD_STALL_SHUTDOWN_TIME_S", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
    )
    # File that tells after a failure what the workers did before, by default kvhvd-failure-JOB.json; 0: none.
    failure_file: str = _knob(_path_or_off, "default", "KVHVD_FAILURE_FILE")
    # File of figures for Prometheus, one on each host, written every 5 s.
    metrics_file: str = _knob(_path, "", "KVHVD_METRICS_FILE")
    verify_every: int = _knob(_count, 0, "KVHVD_VERIFY_EVERY")
    log_level: str = _knob(_level, "warning", "KVHVD_LOG_LEVEL", "HOROVOD_LOG_LEVEL")
    # 1: once kvstore_hvd is imported, `import horovod.mxnet` finds it where Horovod is not installed.
    as_horovod: bool = _knob(_flag, False, "KVHVD_AS_HOROVOD")
    # 0: lines of diagnostics begin with the time of day.
    log_hide_time: bool = _knob(_flag, True, "HOROVOD_LOG_HIDE_TIME")
    # Instruction set of the reduction kernels: auto, scalar, avx2, avx512.
    simd: str = _knob(_choice("auto", "scalar", "avx2", "avx512"), "auto", "KVHVD_SIMD")
    # 1: optimizers update parameters on the CPU with operators of ours, of the same bits as MXNet's.
    fused_update: bool = _knob(_flag, True, "KVHVD_FUSED_UPDATE")
    # Cores for the communication threads, one for each worker of this host, with commas between them.
    thread_affinity: tuple[int, ...] = _knob(_counts, (), "KVHVD_THREAD_AFFINITY", "HOROVOD_THREAD_AFFINITY")
    # 1: gradients of Gluon's parameters live in memory that workers share.
    zero_copy: bool = _knob(_flag, True, "KVHVD_ZERO_COPY")
    # MiB of address space for a worker's gradients in shared memory; 0: as much as the machine has memory.
    arena_mib: int = _knob(_count, 0, "KVHVD_ARENA_MIB")
    # Algorithm selection thresholds in bytes, NAME=BYTES,...: what benchmarks/tune.py prints.
    thresholds: str = _knob(_text, "", "KVHVD_THRESHOLDS")
    # How arrays on GPUs travel: auto, nccl, kernels (ours, over memory of GPUs), staged (by way of the CPU).
    gpu_path: str = _knob(_choice("auto", "nccl", "kernels", "staged"), "auto", "KVHVD_GPU_PATH")
    # MiB of a GPU's memory in which arrays are gathered, 2 to 4096.
    gpu_staging_mib: int = _knob(_mebibytes, 64, "KVHVD_GPU_STAGING_MIB")
    # Path of the libnccl.so.2 to use instead of the one that is found.
    nccl_library: str = _knob(_text, "", "KVHVD_NCCL_LIBRARY")
    # File that a timeline of all operations is written to; DYNAMIC: only when start_timeline() is called.
    timeline: str = _knob(_text, "", "KVHVD_TIMELINE", "HOROVOD_TIMELINE")
    # 1: mark in that timeline where rounds of operations begin.
    timeline_mark_cycles: bool = _knob(_flag, False, "KVHVD_TIMELINE_MARK_CYCLES", "HOROVOD_TIMELINE_MARK_CYCLES")
    # 1: add the NumPy names that MXNet needs and newer NumPy lacks.
    numpy_shim: bool = _knob(_flag, True, "KVHVD_NUMPY_SHIM")
    allow_local_trainer: bool = _knob(_flag, False, "KVHVD_ALLOW_LOCAL_TRAINER")
    # 1: process sets may be added and removed after hvd.init().
    dynamic_process_sets: bool = _knob(_flag, False, "KVHVD_DYNAMIC_PROCESS_SETS", "HOROVOD_DYNAMIC_PROCESS_SETS")
    survivor_time_s: float = _knob(_seconds, 2.0, "KVHVD_SURVIVOR_TIME")
    kill_grace_s: float = _knob(_seconds, 5.0, "KVHVD_KILL_GRACE")
    # kvhvdrun, elastic or over hosts: seconds for which launcher and daemons may hear nothing of each other.
    lease_s: float = _knob(_lease, 60.0, "KVHVD_LEASE")
    # Elastic training: file that rank 0 writes the state to, and begins from.
    checkpoint: str = _knob(_text, "", "KVHVD_CHECKPOINT")
    # Seconds after which the next commit is written to that file.
    checkpoint_every_s: float = _knob(_seconds, 600.0, "KVHVD_CHECKPOINT_EVERY")
    # kvhvdrun: seconds that an elastic job waits for enough workers.
    elastic_timeout_s: float = _knob(_seconds, 600.0, "KVHVD_ELASTIC_TIMEOUT", "HOROVOD_ELASTIC_TIMEOUT")

    # kvhvdrun sets the variables below for its workers; they are not meant to be set by hand.

    # Set by kvhvdrun: this worker's rank.
    rank: int | None = _knob(_count, None, "KVHVD_RANK")
    # Set by kvhvdrun: number of workers.
    size: int | None = _knob(_count, None, "KVHVD_SIZE")
    # Set by kvhvdrun: rank on this host.
    local_rank: int | None = _knob(_count, None, "KVHVD_LOCAL_RANK")
    # Set by kvhvdrun: workers on this host.
    local_size: int | None = _knob(_count, None, "KVHVD_LOCAL_SIZE")
    # Set by kvhvdrun over hosts: the host of each rank, or of this worker.
    hosts: str = _knob(_text, "", "KVHVD_HOSTS")
    # Set by kvhvdrun: this worker's slot, HOST:INDEX; as long as it runs.
    slot: str = _knob(_text, "", "KVHVD_SLOT")
    # Set by kvhvdrun: random name of the job.
    job: str = _knob(_text, "", "KVHVD_JOB")
    # Set by kvhvdrun: secret of the job, in hexadecimal.
    secret: bytes = _knob(_secret, b"", "KVHVD_SECRET", hidden=True)
    # For tests: splits the workers of one host into virtual hosts.
    test_hosts: tuple[int, ...] = _knob(_counts, (), "KVHVD_TEST_HOSTS")
    # Set by kvhvdrun: number of the world, counted from 0.
    generation: int = _knob(_count, 0, "KVHVD_GENERATION")
    # Set by kvhvdrun: number of this worker in an elastic job.
    worker: int | None = _knob(_count, None, "KVHVD_WORKER")
    # Set by kvhvdrun: name of the socket of the daemon that started this worker.
    daemon: str = _knob(_text, "", "KVHVD_DAEMON")
    # Set by kvhvdrun on a terminal: name of the socket on which it counts the workers that join.
    arrivals: str = _knob(_text, "", "KVHVD_ARRIVALS")

    mpi_launch: MPILaunch | None = None
    foreign_launch: tuple[str, int] | None = None  # the other launcher of this worker, and its number of workers
    unused: tuple[str, ...] = ()  # variables of Horovod that are set and have no effect here

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    @property
    def waits_for_busy(self) -> bool:
        """Whether operations wait beyond `timeout_s` for a worker that computes: not if it is set or kvhvdrun replaces
        workers.
        """
        never_shuts_down = "stall_shutdown_s" in vars(self) and not self.stall_shutdown_s
        return "timeout_s" not in vars(self) and (never_shuts_down or not self._is_replaced)

    @property
    def waits_at_exit(self) -> bool:
        """Whether an exit waits beyond `exit_timeout_s` for late workers: not if it is set or they are replaced."""
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
                from difflib import get_close_matches  # here, for a quick start of the launcher

                close = get_close_matches(name, known, n=1, cutoff=0.6)
                faults.append(f"{name} does not exist" + (f"; did you mean {close[0]}?" if close else "."))
        for name, knob in KNOBS.items():
            for variable in knob.variables:
                text = environ.get(variable, "").strip()
                if not text:
                    continue
                try:
                    values[name] = knob.parse(text)
                except ValueError as error:
                    shown = "its value" if knob.hidden else repr(text)
                    faults.append(f"{variable}: {shown} is not {error}.")
                break
        if faults:
            fact = "the environment has settings that kvstore_hvd cannot use."
            fix = "correct or unset them; docs/errors.md lists every variable."
            raise ConfigError(message(fact, details=faults, fix=fix))
        ours = horovod_variables.OF_WORKERS if horovod_variables.are_ours(environ, values.get("job", "")) else ()
        return cls(
            **values,
            mpi_launch=MPILaunch.from_environ(environ),
            foreign_launch=_foreign_launch(environ, bool(ours)),
            unused=tuple(sorted(n for n in environ if n.startswith("HOROVOD_") and n not in (*known, *ours))),
        )

    @classmethod
    def describe(cls) -> str:
        """Each variable that users need, for ``kvhvdrun --help``."""
        from textwrap import fill

        indent: dict[str, Any] = {"initial_indent": " " * 24, "subsequent_indent": " " * 24}
        knobs = [(KNOBS[name], fill(text, 78, **indent)) for name, text in HELP.items()]
        return "\n".join(f"  {' or '.join(knob.variables)} [{_shown(knob.default)}]\n{text}" for knob, text in knobs)


KNOBS = {name: knob for name, knob in vars(Config).items() if isinstance(knob, _Knob)}


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    return f"{value:g}" if isinstance(value, float) else str(value)


def known_variables() -> tuple[str, ...]:
    """The names of all variables with an effect."""
    return tuple(name for knob in KNOBS.values() for name in knob.variables)


_current: Config | None = None
_lock = threading.Lock()


def config() -> Config:
    """The configuration of this process, as of the last time that the environment was read."""
    with _lock:
        return _read() if _current is None else _current


def reload() -> Config:
    """Read the environment again, because a program may set variables after its imports."""
    with _lock:
        return _read()


def _read() -> Config:
    """Replace the configuration. The program's own settings of `logging` stay unless the environment changes."""
    global _current
    before, _current = _current, Config.from_environ(os.environ)
    level, hide_time = _current.log_level, _current.log_hide_time
    if (level, hide_time) == ("warning", True) and "kvstore_hvd.log" not in sys.modules:
        return _current  # these are the settings of `log` at its import, which the start of the launcher avoids
    from kvstore_hvd import log

    if before is None or before.log_level != level:
        log.logger.setLevel(level.upper())
    log.with_time = not hide_time
    return _current


def tell_unused() -> None:
    """Log once which variables of Horovod are set without an effect here, and why."""
    if config().unused:
        import logging

        from kvstore_hvd import log

        reasons = "\n".join(f"  {name}: {horovod_variables.reason(name)}" for name in config().unused)
        text = "these variables of Horovod have no effect here:\n%s"
        log.once("unused-horovod-variables", logging.WARNING, text, reasons)


def cache_folder() -> str:
    """The folder of this user's caches, which may not exist."""
    return os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "kvstore_hvd")


def environment() -> dict[str, str]:
    """A copy of this process's environment, for another process."""
    return dict(os.environ)


def prepare_mxnet() -> None:
    """Set the variables that MXNet reads at its import, unless the user has."""
    # MXNet's pool of threads for prioritised operations serves this package only. One thread submits operations in the
    # order of their priority, and a burst of gradients wakes one thread.
    os.environ.setdefault("MXNET_CPU_PRIORITY_NTHREADS", "1")


def pass_alias_on() -> None:
    """Let child processes that import this package answer for Horovod's name, too."""
    os.environ["KVHVD_AS_HOROVOD"] = "1"
