"""Calling a function in workers from within a program: `run`, as Horovod's ``horovod.run``.

The program starts the launcher as a process of its own, which starts the workers. The function and its results travel
in files without names, whose descriptors are handed on: nobody else can open them, and they are gone with the last
process that has one.
"""

from __future__ import annotations

import codecs
import contextlib
import ctypes
import fcntl
import functools
import io
import json
import mmap
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, NamedTuple

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

__all__ = ["call_function", "run", "run_job"]

_EXIT_FAILED = 1
_PR_SET_PDEATHSIG = 1
# The end of the launcher shows itself by the end of the reports and pipes; unless somebody else holds one open.
_LOOK_MS = 500
_CHUNK = 1 << 16
# The program of launcher and workers. `-m` would look for modules in the working folder first, where a user's
# json.py or queue.py may lie. The folder of this package comes last: it may hold anything too. Until the program has
# handlers of its own, Ctrl-C ends it without a traceback.
_PROGRAM = """import signal, sys
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
if sys.path[0] == "":
    del sys.path[0]
sys.path.append(sys.argv.pop(1))
from kvstore_hvd.launch.call import {} as main
sys.exit(main())"""


# -- In the program -----------------------------------------------------------------------------------------------


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
    count = _one_of("num_proc", num_proc, "np", np, default=1)
    least = _one_of("min_num_proc", min_num_proc, "min_np", min_np)
    most = _one_of("max_num_proc", max_num_proc, "max_np", max_np)
    if count == 1 and (least or most) is not None:
        count = None  # 1 is the default, and no wish where there are fewest or most workers
    named = {
        "--num-proc": count,
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
    if cooldown_range is not None:
        try:
            lower, upper = (f"{float(each):g}" for each in cooldown_range)
        except (TypeError, ValueError):
            fact = f"cooldown_range is {cooldown_range!r}, expected two numbers of seconds."
            raise _refused(fact, "for example cooldown_range=(10, 300)") from None
        options += ["--blacklist-cooldown-range", lower, upper]
    if verbose:
        options.append("--verbose")
    _check(func, args, kwargs)
    if hosts is not None and hostfile is not None:
        raise _refused("both hosts and hostfile name hosts.", "give one of them.")
    if use_mpi or mpi_args is not None:
        fact = "use_mpi and mpi_args cannot be honoured: run starts workers that find each other without MPI."
        raise _refused(fact, "omit them, or put the function into a script: mpirun -np N python script.py")
    if not (executable or sys.executable):
        raise LaunchError(message("this process does not know its Python.", operation="run", fix="pass executable."))
    reload()  # the program may have set variables; a wrong setting is an error here
    with tempfile.TemporaryFile(prefix="kvstore_hvd-") as file:
        try:
            _dump(file, (list(sys.path), _prefixes()), list(sys.argv), (func, tuple(args), dict(kwargs or {})))
        except OSError as error:
            fact = f"the function and its arguments cannot be written to a temporary file: {error}."
            fix = "set TMPDIR to a folder with more room."
            raise LaunchError(message(fact, operation="run", fix=fix)) from error
        except Exception as error:
            fact = f"the function or its arguments cannot be pickled: {type(error).__name__}: {error}."
            fix = "make what cannot be pickled (locks, open files, iterators of data) within the function."
            raise InvalidTypeError(message(fact, operation="run", fix=fix)) from error
        return _results(*_run_launcher(executable or sys.executable, file.fileno(), options))


def _refused(fact: str, fix: str) -> InvalidRequestError:
    return InvalidRequestError(message(fact, operation="run", fix=fix))


def _one_of(
    name: str, value: int | None, short: str, short_value: int | None, default: int | None = None
) -> int | None:
    """The value of an option that has two names."""
    if short_value is None or short_value == value:
        return value
    if value != default:
        fact = f"{name} is {value} and {short} is {short_value}, which are the same option."
        raise _refused(fact, "give one of them.")
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


# -- The launcher, seen from the program --------------------------------------------------------------------------


class _Sender(NamedTuple):
    """Who reports: a rank of a world, or (of size 0) a worker of an elastic job before its first world."""

    generation: int = -1
    place: int = 0
    size: int = 1
    is_elastic: bool = False

    def __str__(self) -> str:
        return f"{'rank' if self.size else 'worker'} {self.place}"


class _Report(NamedTuple):
    """`kind`: of a worker 'result' or 'failed'; of the launcher 'refused' (to start the job) or 'ended' (why)."""

    kind: str
    sender: _Sender
    pickled: bytes


def _run_launcher(python: str, call: int, options: Sequence[str]) -> tuple[int, list[_Report]]:
    """Run kvhvdrun as a child process to its end, and pass its output on; returns its exit code and all reports."""
    # Whatever interrupts the wait (Ctrl-C, a signal handler that raises, a stream that cannot be written) ends the job
    # first, and is raised when everything of it is gone. Another Ctrl-C meanwhile kills the workers.
    reports: list[_Report] = []
    readers: dict[int, Callable[[], object]] = {}  # of each descriptor; falsy at its end
    with ExitStack() as stack:
        with ExitStack() as theirs:
            ours, given = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.callback(ours.close)
            theirs.callback(given.close)
            readers[ours.fileno()] = lambda: _take_report(ours, reports)

            def inherited(stream: Any) -> int:
                if stream is None:
                    return subprocess.DEVNULL
                # Not whatever has a fileno(): that of a notebook's stream is the terminal in which it was started.
                if isinstance(stream, io.TextIOWrapper):
                    with contextlib.suppress(OSError, ValueError):
                        stream.flush()  # earlier output comes first
                        return stream.fileno()
                reader, writer = os.pipe()
                stack.callback(os.close, reader)
                theirs.callback(os.close, writer)
                readers[reader] = _passing_on(reader, stream)
                return writer

            # Not 0 to 2, which are free if this program has closed its streams, and the launcher's own.
            fds = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3) for fd in (call, given.fileno())]
            for fd in fds:
                theirs.callback(os.close, fd)
            worker = [*_program(python, "call_function"), *map(str, fds)]
            command = [*_program(sys.executable, "run_job"), str(os.getpid()), *map(str, fds), *options, "--", *worker]
            try:
                process = subprocess.Popen(
                    command,
                    # Through a pipe, Python would hold back lines for kilobytes.
                    env={"PYTHONUNBUFFERED": "1", **environment()},
                    stdin=subprocess.DEVNULL,
                    stdout=inherited(sys.stdout),
                    stderr=inherited(sys.stderr),
                    pass_fds=fds,
                    start_new_session=True,  # a terminal's Ctrl-C is for the program, which passes it on
                )
            except OSError as error:
                fix = "see ulimit -u, ulimit -n and free memory."
                raise LaunchError(message(f"the launcher cannot be started: {error}.", fix=fix)) from None
        try:
            return _wait(process, readers), reports
        except BaseException as error:
            process.send_signal(signal.SIGINT if isinstance(error, KeyboardInterrupt) else signal.SIGTERM)
            while True:
                try:
                    _wait(process, readers)
                    break
                except KeyboardInterrupt:
                    process.send_signal(signal.SIGINT)
                except Exception:  # noqa: BLE001 - most likely the same error, which is raised below
                    readers = {reader: functools.partial(os.read, reader, _CHUNK) for reader in readers}
            raise


def _program(python: str, main: str) -> list[str]:
    return [python, "-c", _PROGRAM.format(main), os.path.abspath(os.path.join(__file__, *[os.pardir] * 3))]


def _passing_on(reader: int, stream: Any) -> Callable[[], bool]:
    decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def read() -> bool:
        data = os.read(reader, _CHUNK)
        text = decoder.decode(data, final=not data)
        if text:
            stream.write(text)
            stream.flush()
        return bool(data)

    return read


def _take_report(ours: socket.socket, reports: list[_Report]) -> bool:
    """Receive a report, a message of the socket that comes with the file of what is reported."""
    head, fds, _, _ = socket.recv_fds(ours, _CHUNK, 1)
    if not head:
        return False
    kind, *sender = json.loads(head)
    if not fds:  # the kernel drops a descriptor that finds no number
        fact = f"a report of {_Sender(*sender)} ({kind}) is lost: this program has no descriptor left for it."
        raise RunError(message(fact, operation="run", fix="close files, or raise ulimit -n."))
    with open(fds[0], "rb") as file:
        file.seek(0)
        reports.append(_Report(kind, _Sender(*sender), file.read()))
    return True


def _wait(process: subprocess.Popen[bytes], readers: dict[int, Callable[[], object]]) -> int:
    """Read all until the launcher has ended; returns its exit code, or minus a signal."""
    poll = select.poll()
    for fd in readers:
        poll.register(fd, select.POLLIN)
    while readers:
        ready = poll.poll(_LOOK_MS)
        for fd, _ in ready:
            if not readers[fd]():
                poll.unregister(fd)
                del readers[fd]
        if not ready and process.poll() is not None:
            break  # somebody else holds a pipe
    return process.wait()


# -- Results ------------------------------------------------------------------------------------------------------


def _results(code: int, reports: list[_Report]) -> list[Any]:
    """What the function has returned on each rank of the last world, or an error that says why there is nothing."""
    told = {report.kind: pickle.loads(report.pickled) for report in reports if report.kind in ("refused", "ended")}
    if "refused" in told:
        raise LaunchError(told["refused"])
    reason = told.get("ended", "")
    results = {report.sender.place: report for report in _latest("result", reports)}
    missing = sorted(set(range(max((report.sender.size for report in results.values()), default=0))) - set(results))
    if code != 0 or reason or missing or not results:  # a program that ignores SIGCHLD does not learn the code
        raise _error(code, reason, _latest("failed", reports), missing)
    reports.clear()
    values = []
    for place in sorted(results):
        report = results.pop(place)
        try:
            values.append(pickle.loads(report.pickled))
        except Exception as error:
            fact = f"the result of {report.sender} cannot be read here: {type(error).__name__}: {error}."
            fix = "return objects whose modules can be imported in this program, too."
            raise RunError(message(fact, operation="run", fix=fix)) from error
    return values


def _latest(kind: str, reports: list[_Report]) -> list[_Report]:
    """The reports of one kind that come from the last world."""
    found = [report for report in reports if report.kind == kind]
    last = max((report.sender.generation for report in found), default=-1)
    return [report for report in found if report.sender.generation == last]


def _error(code: int, reason: str, failed: list[_Report], missing: list[int]) -> RunError:
    """Why there are no results. The first failure that was not another's consequence comes first."""
    if failed:
        told = [(report.sender, pickle.loads(report.pickled)) for report in failed]
        sender, failure = next((each for each in told if not each[1].is_secondary), told[0])
        trace = [f"on {sender}:", *failure.trace.splitlines()] if failure.trace else []
        error = RunError(
            message(
                failure.fact,
                rank=sender.place if sender.size else None,
                size=sender.size or None,
                operation="run",
                details=[*(reason.splitlines() if sender.is_elastic else []), *trace],
                fix=failure.fix,
            )
        )
        with contextlib.suppress(Exception):  # its class may need arguments that it has not kept
            error.__cause__ = pickle.loads(failure.pickled)
        return error
    fix = "see what it has written; somebody may have ended it."
    if reason:
        fact, fix = reason, "see what it has written."
    elif code == 0:
        fact = f"{rank_list(missing) if missing else 'the workers'} ended without a result, and without an error."
        fix = "let the function return; os._exit leaves no time to."
    else:
        fact = f"the launcher (kvhvdrun) ended {f'with code {code}' if code > 0 else f'by signal {-code}'}."
    return RunError(message(fact, operation="run", fix=fix))


# -- The launcher -------------------------------------------------------------------------------------------------


def run_job() -> int:
    """Run kvhvdrun, and tell the program why a job fails; returns its exit code."""
    from kvstore_hvd.launch import command
    from kvstore_hvd.launch.driver import Caller

    parent, call, reports = map(int, sys.argv[1:4])
    # When the thread that has started it ends, which waits for it as long as the program lives, the job ends as by
    # SIGTERM.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before the call
        return 128 + signal.SIGTERM
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # the thread may have held signals back
    for fd in (call, reports):
        os.set_inheritable(fd, False)  # only the workers get them

    def tell(kind: str, text: str) -> None:
        with contextlib.suppress(OSError):  # the program has ended, and so does this process
            _report(reports, kind, text, _Sender())

    caller = Caller((call, reports), functools.partial(tell, "refused"), functools.partial(tell, "ended"))
    return command.main(sys.argv[4:], caller)


# -- The workers --------------------------------------------------------------------------------------------------


class _Failure(NamedTuple):
    """Why a worker has no result."""

    fact: str
    fix: str
    trace: str = ""
    is_secondary: bool = False  # another worker's end was the cause
    pickled: bytes = b""  # the exception, where it can be pickled


def call_function() -> int:
    """Call the function; returns 0, or 1 when there is no result. What it raises passes through, once reported."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    call, reports = map(int, sys.argv[1:3])
    os.set_inheritable(reports, False)
    shown = sys.excepthook
    sys.excepthook = lambda kind, error, trace: shown(kind, error.with_traceback(_shown(trace)), _shown(trace))
    try:
        func, args, kwargs = _fetch(call)
    except Exception as error:
        fix = "modules that they need must be importable in the workers, too."
        _fail(reports, "the function or its arguments cannot be read:", fix, error, error.__traceback__)
        raise
    try:
        result = func(*args, **kwargs)
    except SystemExit as error:
        fact = f"the function called sys.exit({'' if error.code is None else repr(error.code)}), and has no result."
        _report(reports, "failed", _Failure(fact, "return from the function instead."))
        if config().worker is None and error.code in (None, 0):
            return _EXIT_FAILED  # the others need not go on; but one of an elastic job may have been told to leave
        raise
    except BaseException as error:
        fix = "correct what the traceback shows."
        _fail(reports, "the function raised", fix, error, _shown(error.__traceback__))
        raise
    try:
        _report(reports, "result", result)
    except BrokenPipeError:
        return _EXIT_FAILED  # the program has gone: nobody waits for it
    except Exception as error:  # noqa: BLE001 - pickling may raise anything; the program has to be told
        verb = "written" if isinstance(error, OSError) else "pickled"
        what = f"the result, a {type(result).__module__}.{type(result).__qualname__}, cannot be {verb}:"
        fix = "return what can be pickled, such as numbers, arrays and dictionaries of them."
        _fail(reports, what, fix, error, None)
        return _EXIT_FAILED
    return 0


def _fetch(call: int) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    with mmap.mmap(call, 0, access=mmap.ACCESS_READ) as memory:  # the workers share the offset of the file
        os.close(call)
        _take_path(*pickle.load(memory))  # modules are found where the program finds them
        sys.argv[:] = pickle.load(memory)
        return pickle.load(memory)  # type: ignore[no-any-return]


def _prefixes() -> list[str]:
    """Where this interpreter's own libraries lie."""
    return sorted({sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix})


def _take_path(path: Sequence[str], theirs: Sequence[str]) -> None:
    """Find modules where another process does; an interpreter of another kind keeps its own libraries."""
    if list(theirs) == _prefixes():
        sys.path[:] = path
    else:
        within = tuple(os.path.join(prefix, "") for prefix in theirs)
        sys.path[:0] = [each for each in path if each not in sys.path and not each.startswith(within)]


def _dump(file: Any, *values: Any) -> None:
    import cloudpickle

    for value in values:
        cloudpickle.dump(value, file)
    file.flush()


def _report(reports: int, kind: str, value: Any, sender: _Sender | None = None) -> None:
    """Send one message: it arrives as a whole or not at all, whatever happens to this process."""
    with tempfile.TemporaryFile(prefix="kvstore_hvd-") as file, socket.socket(fileno=os.dup(reports)) as line:
        _dump(file, value)
        socket.send_fds(line, [json.dumps([kind, *(sender or _sender())]).encode()], [file.fileno()])


def _sender() -> _Sender:
    from kvstore_hvd.process import process

    known = config()
    if known.worker is None:
        return _Sender(-1, known.rank or 0, known.size or 1)
    place = process.current().last_place
    if place is None:
        return _Sender(-1, known.worker, 0, is_elastic=True)
    return _Sender(place.generation, place.rank, place.size, is_elastic=True)


def _fail(reports: int, what: str, fix: str, error: BaseException, trace: TracebackType | None) -> None:
    import cloudpickle

    from kvstore_hvd.mxnet_compat.engine_errors import in_one_line

    last = in_one_line(error)
    pickled = b""
    with contextlib.suppress(Exception):
        pickled = cloudpickle.dumps(error)
    fact = f"{what} {last}{'' if last.endswith('.') else '.'}"
    text = "".join(traceback.format_exception(type(error), error, trace)).rstrip()
    failure = _Failure(fact, fix, text, isinstance(error, PeerLostError), pickled)
    _report(reports, "failed", failure)


def _shown(trace: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that begins in the function, if any does."""
    ours = (globals(), sys.modules["__main__"].__dict__)
    part = trace
    while part is not None and any(part.tb_frame.f_globals is each for each in ours):
        part = part.tb_next
    return part or trace
