"""Options of horovodrun that stand for variables of workers, or have no use here; and the words of other launchers.

Options that kvhvdrun has are in command.py, under the names of horovodrun, too. docs/migrating-from-horovod.md has all.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Optional

from kvstore_hvd.config import KNOBS
from kvstore_hvd.errors import LaunchError, message
from kvstore_hvd.horovod.variables import reason


class Option(NamedTuple):
    """One option of horovodrun."""

    name: str
    variable: str = ""  # of Horovod, which it sets
    value: Optional[str] = None  # what to; None: what the option is given
    text: str = ""  # without a variable: why it has no effect
    instead: str = ""  # of one that is refused: what to do
    is_flag: bool = False  # without a variable: it is given nothing


def _switch(name: str, variable: str, on: str = "1", off: str = "0") -> tuple[Option, Option]:
    return Option(f"--{name}", variable, on), Option(f"--no-{name}", variable, off)


_MARK, _CHECK, _HIDE = "HOROVOD_TIMELINE_MARK_CYCLES", "HOROVOD_STALL_CHECK_DISABLE", "HOROVOD_LOG_HIDE_TIME"
_TUNING = ("log-file", "warmup-samples", "steps-per-sample", "bayes-opt-max-samples", "gaussian-process-noise")

OPTIONS = (
    *_switch("timeline-mark-cycles", _MARK),
    *_switch("stall-check", _CHECK, "0", "1"),
    Option("--stall-check-warning-time-seconds", "HOROVOD_STALL_CHECK_TIME_SECONDS"),
    Option("--stall-check-shutdown-time-seconds", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"),
    Option("--log-level", "HOROVOD_LOG_LEVEL"),
    Option("--log-with-timestamp", _HIDE, "0"),
    Option("--log-without-timestamp", _HIDE, "1"),
    *_switch("log-hide-timestamp", _HIDE),
    Option("--thread-affinity", "HOROVOD_THREAD_AFFINITY"),
    Option("--fusion-threshold-mb", "HOROVOD_FUSION_THRESHOLD"),
    Option("--cycle-time-ms", "HOROVOD_CYCLE_TIME"),
    Option("--cache-capacity", "HOROVOD_CACHE_CAPACITY"),
    Option("--disable-cache", "HOROVOD_CACHE_CAPACITY", "0"),
    *_switch("hierarchical-allreduce", "HOROVOD_HIERARCHICAL_ALLREDUCE"),
    *_switch("hierarchical-allgather", "HOROVOD_HIERARCHICAL_ALLGATHER"),
    *_switch("torus-allreduce", "HOROVOD_TORUS_ALLREDUCE"),
    *_switch("autotune", "HOROVOD_AUTOTUNE"),
    *(Option(f"--autotune-{name}", f"HOROVOD_AUTOTUNE_{name.upper()}") for name in _TUNING),
    *_switch("mpi-threads-disable", "HOROVOD_MPI_THREADS_DISABLE"),
    Option("--num-nccl-streams", "HOROVOD_NUM_NCCL_STREAMS"),
    Option("--gloo-timeout-seconds", "HOROVOD_GLOO_TIMEOUT_SECONDS"),
    Option("--gloo", "HOROVOD_CONTROLLER", "gloo"),
    Option("--mpi", text="workers need no MPI; mpirun in the place of kvhvdrun connects hosts by it", is_flag=True),
    Option("--tcp", text="hosts are connected by TCP, and workers of a host share memory", is_flag=True),
    Option("--binding-args", text="they are mpirun's; --bind-cores gives each worker its share of the cores"),
    Option("--mpi-args", instead="start with mpirun: mpirun -np N ARGS python train.py; or set variables by -x."),
    Option("--jsrun", instead="start with jsrun or mpirun itself, in the place of kvhvdrun.", is_flag=True),
)
# Groups of Horovod's YAML files, and what the options of their names begin with.
GROUPS = {"params": "", "library_options": "", "logging": "log-"}
GROUPS |= {name: f"{name}-".replace("_", "-") for name in ("autotune", "timeline", "stall_check")}

# Of torchrun and DeepSpeed.
OTHERS = dict.fromkeys(("--nproc_per_node", "--nproc-per-node", "--num_gpus", "--np"), "-np N")
OTHERS |= dict.fromkeys(("--nnodes", "--num_nodes", "--include"), "-H HOST:N,...")


class _Collect(argparse.Action):
    def __call__(self, parser: Any, options: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        options.of_horovodrun = [*(options.of_horovodrun or ()), (self.const, values)]


def add_options(add: Callable[..., Any]) -> None:
    """Let a parser collect them in ``of_horovodrun``; its help does not show them."""
    for option in OPTIONS:
        is_flag = option.is_flag or option.value is not None
        given: dict[str, Any] = {"nargs": 0} if is_flag else {}
        add(option.name, action=_Collect, dest="of_horovodrun", const=option, help=argparse.SUPPRESS, **given)


def apply(given: Iterable[tuple[Option, Any]], variables: dict[str, str]) -> list[str]:
    """Set what the options stand for; returns a line for each that has no effect."""
    lines: dict[str, None] = {}
    for option, value in given:
        knob = next((each for each in KNOBS.values() if option.variable in each.variables), None)
        if option.instead:
            raise LaunchError(message(f"{option.name} is for horovodrun with MPI.", fix=option.instead))
        if knob is None:
            lines[f"{option.name} has no effect: {option.text or reason(option.variable)}."] = None
            continue
        text = value if option.value is None else option.value
        try:
            knob.parse(text)
        except ValueError as error:
            raise LaunchError(message(f"{option.name}: '{text}' is not {error}.", fix="see docs/errors.md.")) from None
        for name in knob.variables:  # one may have precedence
            variables.pop(name, None)
        variables[option.variable] = text
    return list(lines)


def flat(group: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The options that a group of Horovod's YAML file stands for."""
    begin = GROUPS[group]
    return {begin.rstrip("-") if name == "enabled" else f"{begin}{name}": value for name, value in values.items()}
