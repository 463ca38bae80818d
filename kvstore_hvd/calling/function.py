"""`run`: call a function in workers, and return what it returns in each of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstore_hvd.calling.options import Options
from kvstore_hvd.calling.outcome import Outcome
from kvstore_hvd.calling.parcel import pack
from kvstore_hvd.calling.paths import prefixes
from kvstore_hvd.calling.process import run_launcher
from kvstore_hvd.calling.programs import worker_command
from kvstore_hvd.calling.reports import Reports
from kvstore_hvd.config import environment, reload
from kvstore_hvd.errors import InvalidRequestError, InvalidTypeError, LaunchError, message

__all__ = ["run"]


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int = 1,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[float] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: object = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
) -> list[Any]:
    """Call a function in new workers on this host, wait for all of them, and return what it returns in each.

    For notebooks and programs that have no launcher around them. The workers are those of kvhvdrun, with the
    environment, ``sys.path``, ``sys.argv`` and working folder of this process; what they write appears here, with the
    rank before each line. Nothing of them is left when this returns or raises, Ctrl-C included.

    Parameters
    ----------
    func : callable
        The function; it calls ``hvd.init()`` itself. It, its arguments and its results are pickled by cloudpickle,
        which takes lambdas, closures and what a notebook or script defines by value, and what it imports from modules
        by name.
    args, kwargs : sequence and mapping, optional
        Its arguments, the same in all workers.
    num_proc, np : int, optional
        Number of workers.
    min_num_proc, min_np, max_num_proc, max_np : int, optional
        Minimum and maximum world size; giving either makes the job elastic. Training that is to survive changes of the
        workers belongs in a function that `elastic.run` wraps.
    slots, reset_limit, cooldown_range : int, int and pair of float, optional
        For elastic jobs: slots of a host that is listed without a number; maximum number of resets; how many seconds a
        slot stays empty after repeated crashes.
    hosts, hostfile : str, optional
        Where they run, which can only be this host, and how many at most: ``'localhost:4'``, or a file with such lines.
    start_timeout : float, optional
        Seconds that the workers may take to find each other.
    output_filename : str, optional
        Folder that gets a copy of what each rank writes; not for elastic jobs.
    verbose : bool or int, optional
        Say what is started, and how it ended.
    executable : str, optional
        The Python of the workers; by default that of this process.
    ssh_port, ssh_identity_file, disable_cache, network_interface, use_gloo : optional
        Accepted for Horovod's sake, without effect: there are no other hosts, checks of them, or controllers.
    use_mpi, mpi_args : optional
        Refused: these workers find each other without MPI.

    Returns
    -------
    list
        The results in the order of ranks. For an elastic job, those of the ranks of its last world; for workers that
        joined no world, in the order of their numbers.

    Raises
    ------
    RunError
        The function has raised an exception on some rank, which is the cause and whose traceback is in the text; or a
        rank has no result: it was killed, called ``sys.exit``, or the result cannot be pickled.
    LaunchError
        The workers cannot be started.
    InvalidRequestError, InvalidTypeError, ConfigError
        An argument or the environment is wrong. Nothing has been started.
    """
    options = Options(
        _one_of("num_proc", num_proc, "np", np, default=1),
        _one_of("min_num_proc", min_num_proc, "min_np", min_np),
        _one_of("max_num_proc", max_num_proc, "max_np", max_np),
        slots,
        reset_limit,
        cooldown_range,
        hosts,
        hostfile,
        start_timeout,
        output_filename,
        verbose,
    )
    _check(func, args, kwargs)
    if hosts is not None and hostfile is not None:
        fix = "give one of them."
        raise InvalidRequestError(message("both hosts and hostfile name hosts.", operation="run", fix=fix))
    if use_mpi or mpi_args is not None:
        fact = "use_mpi and mpi_args cannot be honoured: run starts workers that find each other without MPI."
        fix = "omit them, or put the function into a script: mpirun -np N python script.py"
        raise InvalidRequestError(message(fact, operation="run", fix=fix))
    if not (executable or sys.executable):
        raise LaunchError(message("this process does not know its Python.", operation="run", fix="pass executable."))
    reload()  # what the environment says now; a wrong setting is an error here
    # Through a pipe, Python would hold back lines for kilobytes.
    inherited = {"PYTHONUNBUFFERED": "1", **environment()}
    call = _packed(func, args, kwargs or {})
    try:
        with Reports() as reports, Outcome() as outcome:
            command = worker_command(executable or sys.executable, call, reports.inherited)
            code = run_launcher([*options.arguments(), "--", *command], inherited, call, reports, outcome.hear)
            return outcome.results(code)
    finally:
        os.close(call)


def _one_of(
    name: str, value: int | None, short: str, short_value: int | None, default: int | None = None
) -> int | None:
    """The value of an option that has two names."""
    if short_value is None or short_value == value:
        return value
    if value != default:
        fact = f"{name} is {value} and {short} is {short_value}, which are the same option."
        raise InvalidRequestError(message(fact, operation="run", fix="give one of them."))
    return short_value


def _check(func: Any, args: Any, kwargs: Any) -> None:
    fact = ""
    if not callable(func):
        fact = f"func is {func!r}, which cannot be called."
    elif not isinstance(args, (tuple, list)):
        fact = f"args is a {type(args).__name__}, expected a tuple."
    elif kwargs is not None and not isinstance(kwargs, Mapping):
        fact = f"kwargs is a {type(kwargs).__name__}, expected a dict."
    if fact:
        raise InvalidTypeError(message(fact, operation="run", fix="run(func, (1, 2), {'name': 3}, np=2)"))


def _packed(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    try:
        return pack((list(sys.path), prefixes()), list(sys.argv), (func, tuple(args), dict(kwargs)))
    except OSError as error:
        fact = f"the function and its arguments cannot be written to a temporary file: {error}."
        raise LaunchError(message(fact, operation="run", fix="set TMPDIR to a folder with more room.")) from error
    except Exception as error:
        fact = f"the function or its arguments cannot be pickled: {type(error).__name__}: {error}."
        fix = "make what cannot be pickled (locks, open files, iterators of data) within the function."
        raise InvalidTypeError(message(fact, operation="run", fix=fix)) from error
