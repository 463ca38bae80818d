"""Calling a function in workers from within a program: `run`, as Horovod's ``horovod.run``.

The program starts the launcher as a child process, which starts the workers. The function and its results travel in
files of a temporary folder. The program removes the folder at the end; the launcher does if the program was killed.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import functools
import os
import pickle
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstore_hvd.config import config, environment, reload
from kvstore_hvd.errors import (
    InvalidRequestError,
    InvalidTypeError,
    LaunchError,
    PeerLostError,
    RunError,
    message,
    rank_list,
)

__all__ = ["run"]

_PR_SET_PDEATHSIG = 1
# The end of the launcher closes its output, unless another process holds a pipe open: then it is polled.
_LOOK_S = 0.5
_CHUNK = 1 << 16
# The program of launcher and workers. `-m` would look for modules in the working folder first, where a user's
# json.py or queue.py may lie. The folder of this package comes last: it may hold anything too.
_PROGRAM = """import sys
if sys.path[0] == "":
    del sys.path[0]
sys.path.append(sys.argv.pop(1))
from kvstore_hvd.launch.call import {} as main
sys.exit(main())"""
_text = functools.partial(message, operation="run")


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

    For notebooks and programs without a launcher. The workers are those of kvhvdrun, with the environment,
    ``sys.path``, ``sys.argv`` and working folder of this process. Their output appears here, with the rank before each
    line. None of them is left when this returns or raises, Ctrl-C included.

    Parameters
    ----------
    func, args, kwargs : callable, sequence and mapping
        The function, which calls ``hvd.init()`` itself, and its arguments, the same in all workers. All are pickled by
        cloudpickle: lambdas, closures and definitions of a notebook or script by value, imports from modules by name.
    num_proc, np : int, optional
        Number of workers.
    min_num_proc, min_np, max_num_proc, max_np : int, optional
        Minimum and maximum world size; either makes the job elastic. Training that is to survive changes of the
        workers belongs in a function that `elastic.run` wraps.
    slots, reset_limit, cooldown_range : int, int and pair of float, optional
        For elastic jobs: slots of a host that is listed without a number; maximum number of resets; seconds that a slot
        stays empty after repeated crashes.
    hosts, hostfile : str, optional
        This host and the most workers on it: ``'localhost:4'``, or a file with such lines.
    start_timeout : float, optional
        Seconds that the workers may take to find each other.
    output_filename : str, optional
        Folder for a copy of each rank's output; not for elastic jobs.
    verbose, executable : bool or int, and str, optional
        Whether to say what is started, and how it ended; the Python of the workers, by default that of this process.
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
    LaunchError, InvalidRequestError, InvalidTypeError, ConfigError
        The workers cannot be started; or an argument or the environment is wrong, and nothing has been started.
    """
    count = _one_of("num_proc", num_proc, "np", np, default=1)
    least = _one_of("min_num_proc", min_num_proc, "min_np", min_np)
    most = _one_of("max_num_proc", max_num_proc, "max_np", max_np)
    named = {
        "--num-proc": None if count == 1 and (least or most) is not None else count,  # 1 may be the default only
        "--min-np": least,
        "--max-np": most,
        "--slots-per-host": slots,
        "--reset-limit": reset_limit,
        "--hosts": hosts,
        "--hostfile": hostfile,
        "--start-timeout": start_timeout,
        "--output-filename": output_filename,
    }
    options = [f"{name}={value}" for name, value in named.items() if value is not None]
    options += ["--verbose"] * bool(verbose)
    if cooldown_range is not None:
        try:
            lower, upper = (f"{float(each):g}" for each in cooldown_range)
        except (TypeError, ValueError):
            fact = f"cooldown_range is {cooldown_range!r}, expected two numbers of seconds."
            raise InvalidRequestError(_text(fact, fix="for example cooldown_range=(10, 300)")) from None
        options += ["--blacklist-cooldown-range", lower, upper]
    if not callable(func) or not isinstance(args, (tuple, list)) or not isinstance(kwargs or {}, Mapping):
        fact = f"func is {func!r}, args a {type(args).__name__}, kwargs a {type(kwargs).__name__}."
        raise InvalidTypeError(
            _text(fact, fix="pass a function, a tuple and a dict: run(func, (1, 2), {'name': 3}, np=2)")
        )
    if use_mpi or mpi_args is not None:
        fact = "use_mpi and mpi_args cannot be honoured: run starts workers that find each other without MPI."
        raise InvalidRequestError(_text(fact, fix="omit them, or have mpirun start a script."))
    reload()  # the program may have set variables; a wrong setting is an error here
    with contextlib.ExitStack() as stack:
        try:
            folder = tempfile.mkdtemp(prefix="kvstore_hvd-")
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            call = (func, tuple(args), dict(kwargs or {}))
            _dump(os.path.join(folder, "call"), sys.path, executable is None, sys.argv, call)
        except OSError as error:
            fact = f"the function and its arguments cannot be written to a temporary folder: {error}."
            raise LaunchError(_text(fact, fix="set TMPDIR to a folder with more room.")) from error
        except Exception as error:
            fact = f"the function or its arguments cannot be pickled: {type(error).__name__}: {error}."
            fix = "make what cannot be pickled (locks, open files, iterators of data) within the function."
            raise InvalidTypeError(_text(fact, fix=fix)) from error
        return _results(_run_launcher(executable or sys.executable, folder, options), folder)


def _one_of(name: str, value: int | None, short: str, other: int | None, default: int | None = None) -> int | None:
    """The value of an option that has two names."""
    if other is None or other == value:
        return value
    if value != default:
        fact = f"{name} is {value} and {short} is {other}, which are the same option."
        raise InvalidRequestError(_text(fact, fix="give one of them."))
    return other


def _run_launcher(python: str, folder: str, options: Sequence[str]) -> int:
    """Run kvhvdrun as a child process to its end, and pass its output on; returns its exit code, or -signal."""
    # An interrupted wait (Ctrl-C, a signal handler that raises, a stream that cannot be written) ends the job. The
    # exception is raised when all processes are gone. Another Ctrl-C meanwhile kills the workers.
    package = os.path.abspath(os.path.join(__file__, *[os.pardir] * 3))
    worker = [python, "-c", _PROGRAM.format("call_function"), package, folder]
    launcher = [sys.executable, "-c", _PROGRAM.format("run_job"), package, str(os.getpid()), folder]
    command = [*launcher, *options, "--", *worker]
    # PYTHONUNBUFFERED: through a pipe, Python would hold back lines for kilobytes. A session of its own: Ctrl-C of the
    # terminal is for the program, which passes it on. Pipes: the descriptors of a notebook are those of the terminal
    # that started it.
    variables, pipe, null = {"PYTHONUNBUFFERED": "1", **environment()}, subprocess.PIPE, subprocess.DEVNULL
    try:
        process = subprocess.Popen(command, env=variables, stdin=null, stdout=pipe, stderr=pipe, start_new_session=True)
    except OSError as error:
        fix = "see ulimit -u, ulimit -n and free memory."
        raise LaunchError(message(f"the launcher cannot be started: {error}.", fix=fix)) from None
    assert process.stdout is not None
    assert process.stderr is not None
    with process.stdout, process.stderr, selectors.DefaultSelector() as pipes:
        for each, stream in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            pipes.register(each, selectors.EVENT_READ, functools.partial(_pass_on, stream, decoder))
        try:
            return _wait(process, pipes)
        except BaseException as error:
            process.send_signal(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            while True:
                try:
                    _wait(process, pipes)
                    break
                except KeyboardInterrupt:
                    process.send_signal(signal.SIGINT)
                except Exception:  # noqa: BLE001 - most likely the same error, which is raised below
                    for key in list(pipes.get_map().values()):
                        pipes.modify(key.fileobj, selectors.EVENT_READ, len)
            raise


def _pass_on(stream: Any, decoder: codecs.IncrementalDecoder, data: bytes) -> None:
    text = decoder.decode(data, final=not data)
    if text and stream is not None:
        stream.write(text)
        stream.flush()


def _wait(process: subprocess.Popen[bytes], pipes: selectors.BaseSelector) -> int:
    """Read all output until the launcher has ended; returns its exit code, or -signal."""
    while pipes.get_map():
        ready = pipes.select(_LOOK_S)
        for key, _ in ready:
            data = os.read(key.fd, _CHUNK)
            key.data(data)
            if not data:
                pipes.unregister(key.fileobj)
        if not ready and process.poll() is not None:
            break  # another process holds a pipe
    return process.wait()


def _dump(path: str, *values: Any) -> None:
    import cloudpickle

    with open(path, "wb") as file:
        for value in values:
            cloudpickle.dump(value, file)


# -- Reports: files that workers ('result', 'failure') and the launcher ('refused', 'ended') leave in the folder ------


def _report(folder: str, kind: str, value: Any, place: tuple[int, int, int] = (-1, 0, 1)) -> None:
    # `place` of a worker: generation of its world (-1: none), rank and size. In an elastic job, before its first
    # world: -1, its number, 0.
    name = f"{kind} {' '.join(map(str, place))}"
    part = os.path.join(folder, f"part of {name}")
    _dump(part, value)
    os.rename(part, os.path.join(folder, name))  # as a whole or not at all


def _reports(folder: str, kind: str) -> list[tuple[int, int, str]]:
    """Rank, size and file of each report of one kind that comes from the last world, oldest first."""
    found = []
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.stat().st_mtime_ns):
        of_kind, *place = entry.name.split()
        if of_kind == kind:
            generation, rank, size = map(int, place)
            found.append((generation, rank, size, entry.path))
    last = max((generation for generation, *_ in found), default=-1)
    return [(rank, size, path) for generation, rank, size, path in found if generation == last]


def _value(path: str) -> Any:
    with open(path, "rb") as file:
        return pickle.load(file)


def _results(code: int, folder: str) -> list[Any]:
    """The result of each rank of the last world; raises an error if one has none."""
    for *_, path in _reports(folder, "refused"):
        raise LaunchError(_value(path))
    reason = "".join(_value(path) for *_, path in _reports(folder, "ended"))
    results = _reports(folder, "result")
    ranks = {rank for rank, _, _ in results}
    missing = sorted(set(range(max((size for _, size, _ in results), default=0))) - ranks)
    if code != 0 or reason or missing or not results:  # a program that ignores SIGCHLD does not learn the code
        raise _error(code, reason, [_value(path) for *_, path in _reports(folder, "failure")], missing)
    values = []
    for rank, _, path in sorted(results):
        try:
            values.append(_value(path))
        except Exception as error:
            fact = f"the result of rank {rank} cannot be read here: {type(error).__name__}: {error}."
            raise RunError(
                _text(fact, fix="return objects whose modules can be imported in this program, too.")
            ) from error
    return values


def _error(code: int, reason: str, failed: list[tuple[str, bool, bytes]], missing: list[int]) -> RunError:
    """Why there are no results: the first failure that is no consequence of another, if there is one."""
    if failed:
        text, _, pickled = next((each for each in failed if not each[1]), failed[0])
        error = RunError(text)
        with contextlib.suppress(Exception):  # its class may need arguments that it has not kept
            error.__cause__ = pickle.loads(pickled)
        return error
    fix = "see what it has written; somebody may have ended it."
    if reason:
        fact, fix = reason, "see what it has written."
    elif code == 0:
        fact = f"{rank_list(missing) if missing else 'the workers'} ended without a result, and without an error."
        fix = "let the function return; os._exit leaves no time to."
    else:
        fact = f"the launcher (kvhvdrun) ended {f'with code {code}' if code > 0 else f'by signal {-code}'}."
    return RunError(_text(fact, fix=fix))


# -- The child processes ----------------------------------------------------------------------------------------------


def run_job() -> int:
    """Run kvhvdrun in a child process of the program, and report why a job fails; returns its exit code."""
    from kvstore_hvd.launch import command

    parent, folder = int(sys.argv[1]), sys.argv[2]
    # The thread that has started this process waits for it. With the end of the thread, the job ends as by SIGTERM.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the thread may have blocked signals

    def tell(kind: str, text: str) -> None:
        with contextlib.suppress(OSError):  # the program has ended, and so does this process
            _report(folder, kind, text)

    try:
        return command.main(sys.argv[3:], tell) if os.getppid() == parent else 1
    finally:
        if os.getppid() != parent:
            shutil.rmtree(folder, ignore_errors=True)


def call_function() -> int:
    """Call the function in a worker; returns 0, or 1 without a result. Its exceptions pass through, once reported."""
    from kvstore_hvd.mxnet_compat.hooks import in_one_line

    folder = sys.argv[1]
    try:
        with open(os.path.join(folder, "call"), "rb") as file:
            # Modules are found where the program finds them; a Python of another kind has libraries of its own.
            path, is_same = pickle.load(file), pickle.load(file)
            sys.path[:] = path if is_same else [*sys.path, *(each for each in path if each not in sys.path)]
            sys.argv[:] = pickle.load(file)
            func, args, kwargs = pickle.load(file)
    except Exception as error:
        fix = "modules that they need must be importable in the workers, too."
        _fail(folder, f"the function or its arguments cannot be read: {in_one_line(error)}", fix, error)
        raise
    try:
        result = func(*args, **kwargs)
    except SystemExit as error:
        fact = f"the function called sys.exit({'' if error.code is None else repr(error.code)}), and has no result."
        _fail(folder, fact, "return from the function instead.", error)
        if config().worker is None and error.code in (None, 0):
            return 1  # ends the others; a worker of an elastic job may have been asked to leave
        raise
    except BaseException as error:
        fix = "correct what the traceback shows."
        _fail(folder, f"the function raised {in_one_line(error)}", fix, error, of_function=True)
        raise
    try:
        _report(folder, "result", result, _place())
    except FileNotFoundError:
        return 1  # the program has ended
    except Exception as error:  # noqa: BLE001 - pickling may raise anything
        verb = "written" if isinstance(error, OSError) else "pickled"
        name = f"{type(result).__module__}.{type(result).__qualname__}"
        fix = "return what can be pickled, such as numbers, arrays and dictionaries of them."
        _fail(folder, f"the result, of type {name}, cannot be {verb}: {in_one_line(error)}", fix, error)
        return 1
    return 0


def _place() -> tuple[int, int, int]:
    """Generation, rank and size of this worker's last world, see `_report`."""
    from kvstore_hvd.world import process

    known = config()
    if known.worker is None:
        return -1, known.rank or 0, known.size or 1
    place = process.current().last_topology
    return (-1, known.worker, 0) if place is None else (place.generation, place.rank, place.size)


def _fail(folder: str, fact: str, fix: str, error: BaseException, *, of_function: bool = False) -> None:
    """Report why there is no result; the traceback of an error of the function begins there."""
    import cloudpickle

    place, trace, pickled = _place(), error.__traceback__, b""
    rank, size = (place[1], place[2]) if place[2] else (None, None)
    with contextlib.suppress(Exception):
        pickled = cloudpickle.dumps(error)
    lines = traceback.format_exception(type(error), error, trace and trace.tb_next)
    head = f"on {'worker' if rank is None else 'rank'} {place[1]}:"
    details = [head, *"".join(lines).splitlines()] if of_function else []
    text = message(f"{fact.rstrip('.')}.", rank=rank, size=size, operation="run", details=details, fix=fix)
    _report(folder, "failure", (text, isinstance(error, PeerLostError), pickled), place)
