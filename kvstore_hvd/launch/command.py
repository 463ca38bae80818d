"""kvhvdrun: start the workers of a job on this host, without MPI."""

from __future__ import annotations

import argparse
import errno
import os
import re
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from kvstore_hvd import __version__
from kvstore_hvd.base.cores import usable_cores
from kvstore_hvd.config import Config, config, environment, option_value
from kvstore_hvd.errors import ConfigError, LaunchError, message
from kvstore_hvd.launch.capacity import check_count
from kvstore_hvd.launch.discovery import FixedHosts
from kvstore_hvd.launch.driver import Driver, StartError
from kvstore_hvd.launch.hosts import hosts_of_file, hosts_of_option, refuse_others, slots_of
from kvstore_hvd.launch.options import Caller, Plan, add_elastic_options, elastic_plan, is_elastic
from kvstore_hvd.launch.state import Settings

__all__ = ["main"]

# Folder of the workers' sitecustomize.
_SITE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "site")
_HOSTS = ("hosts", "hostfile", "host-discovery-script")
_EXIT_LOST_OUTPUT = 1
_EXIT_USAGE = 2
_EXIT_NOT_EXECUTABLE = 126
_EXIT_NOT_FOUND = 127

# The variables of an mpirun around us name one rank; workers that inherited them would all take themselves for it.
_MPI_RANK_VARIABLES = re.compile(
    r"OMPI_(COMM_WORLD|UNIVERSE|WORLD|APP_CTX|FIRST_RANKS|NUM_APP_CTX|FILE_LOCATION|COMMAND|ARGV)"
    r"|OMPI_MCA_(orte_|ess|num_procs|pmix$)|PMI_|PMIX_(?!MCA_)|HYDI_|HYDRA_|MPI_LOCAL"
)


class _Parser(argparse.ArgumentParser):
    """argparse itself would take help that cannot be written for written, and has errors of another form."""

    def error(self, text: str) -> NoReturn:
        raise LaunchError(message(f"{text}.", fix="see kvhvdrun --help."))

    def print_help(self, file: Any = None) -> None:
        if file is not None:
            super().print_help(file)
        else:
            _print(self.format_help())


def _print(text: str) -> None:
    try:
        _write_all(1, text.encode())
    except BrokenPipeError:
        raise SystemExit(128 + signal.SIGPIPE) from None
    except OSError as error:
        _say(f"standard output cannot be written: {error.strerror}.")
        raise SystemExit(_EXIT_LOST_OUTPUT) from None


def main(argv: Sequence[str] | None = None, caller: Caller | None = None) -> int:
    """Run kvhvdrun with the arguments `argv` (default: ``sys.argv[1:]``) and return its exit code."""
    # A `caller` is told what otherwise is written: why options are refused, or why the job has failed.
    # 0 when all workers returned 0, else the exit code of the one that failed first (128 + n when signal n killed it);
    # 130, 143, 129 or 131 after SIGINT, SIGTERM, SIGHUP or SIGQUIT to the launcher, however the workers ended; 141 when
    # the reader of the output has gone, 1 when output could not be written; 2 for wrong options, 126 and 127 when the
    # command cannot be executed or found.
    try:
        _check_streams()
        options = _options(argv)
        if options.version:
            _print(f"kvstore_hvd {__version__}\n")
            return 0
        if options.check_build:
            from kvstore_hvd.launch.check_build import build_report  # imports the libraries that it reports

            _print(build_report())
            return 0
        plan = elastic_plan(options, *_program(options), caller) if is_elastic(options) else _plan(options, caller)
        return Driver(plan).run()
    except KeyboardInterrupt:  # before the first worker
        return 128 + signal.SIGINT
    except (LaunchError, ConfigError) as error:
        (_say if caller is None else caller.refuse)(str(error))
        return error.code if isinstance(error, StartError) else _EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    whole = _Parser(
        prog="kvhvdrun",
        usage="kvhvdrun -np N [options] command [arguments]",
        description="Start N workers on this host. Ends them all when one fails, and leaves no process behind.",
        epilog=f"Environment variables (docs/errors.md lists all):\n{Config.describe()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser = whole.add_argument_group("options")  # not `parser.add_argument`, which imports shutil
    parser.add_argument("-h", "--help", action="help", help="show this help message and exit")
    parser.add_argument("-np", "--num-proc", "-n", metavar="N", help="number of workers")
    parser.add_argument("-H", "--hosts", metavar="HOST:N,...", help="where they run; only this host: localhost:N")
    parser.add_argument(
        "--hostfile", metavar="FILE", help="the same from a file, one 'host slots=N' or 'host:N' a line"
    )
    parser.add_argument(
        "--as-horovod", action="store_true", help="for `python script.py`: let `import horovod.mxnet` find kvstore_hvd"
    )
    parser.add_argument("--config-file", metavar="FILE", help="read options from a YAML file; those given here win")
    parser.add_argument("--start-timeout", metavar="S", help="seconds the workers may take to find each other [30]")
    parser.add_argument(
        "--timeline-filename", metavar="FILE", help="record a timeline: HOROVOD_TIMELINE of the workers"
    )
    parser.add_argument(
        "--output-filename", metavar="DIR", help="also keep what workers write: DIR/rank.N/stdout and DIR/rank.N/stderr"
    )
    parser.add_argument("--no-prefix", action="store_true", help="do not put '[rank] ' before lines of output")
    parser.add_argument("--bind-cores", action="store_true", help="pin each worker to its share of the cores")
    parser.add_argument("-v", "--verbose", action="store_true", help="say what is started, and how it ended")
    parser.add_argument("-cb", "--check-build", action="store_true", help="Show installed components and exit.")
    parser.add_argument("--version", action="store_true", help="Show the version and exit.")
    add_elastic_options(whole)
    program = whole.add_argument_group("program")
    program.add_argument("command", nargs=argparse.REMAINDER, help="the program of every worker, and its arguments")
    return whole


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line; what is not given there comes from the file of ``--config-file``."""
    parser = _parser()
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        word = unknown[0].partition("=")[0]
        import difflib

        close = difflib.get_close_matches(word, parser._option_string_actions, n=1)
        fact = f"{word} does not exist{f'; did you mean {close[0]}?' if close else '.'}"
        raise LaunchError(message(fact, fix="kvhvdrun --help lists the options."))
    if options.config_file is None:
        return options
    from kvstore_hvd.launch.config_file import read_options

    names = {
        text[2:]: action
        for action in parser._actions
        for text in action.option_strings
        if text.startswith("--") and action.dest not in ("help", "config_file", "check_build", "version")
    }
    flags = [name for name, action in names.items() if action.nargs == 0]
    lists = [name for name, action in names.items() if isinstance(action.nargs, int) and action.nargs > 1]
    of_file = read_options(options.config_file, [name for name in names if name not in flags], flags, lists)
    if any(getattr(options, names[name].dest) is not None for name in _HOSTS):  # one takes the place of the others
        of_file = {name: value for name, value in of_file.items() if name not in _HOSTS}
    for name, value in of_file.items():
        same = [other for other in of_file if names[other] is names[name]]
        if len(same) > 1:
            fact = f"{options.config_file}: {' and '.join(same)} are the same option."
            raise LaunchError(message(fact, fix="leave one of them."))
        if getattr(options, names[name].dest) in (None, False):  # not given on the command line
            setattr(options, names[name].dest, value)
    return options


def _program(options: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The command of every worker, and the variables that all of them have."""
    command = options.command[1:] if options.command[:1] == ["--"] else list(options.command)
    if not command:
        raise LaunchError(message("no command was given.", fix="kvhvdrun -np 2 python train.py"))
    if options.as_horovod:
        from kvstore_hvd.launch.as_horovod import through_this_package

        command = through_this_package(command)
    inherited = {
        name: value
        for name, value in environment().items()
        if not _MPI_RANK_VARIABLES.match(name) and not _is_of_outer_job(name)
    }
    if options.start_timeout is not None:
        option_value("--start-timeout", options.start_timeout, "start_timeout_s")
        inherited["KVHVD_START_TIMEOUT"] = options.start_timeout
    if options.timeline_filename is not None:
        _set_timeline(inherited, options.timeline_filename)
    paths = (_SITE, inherited.get("PYTHONPATH", ""))
    inherited["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    command[0] = _executable(command, inherited)
    return command, inherited


def _plan(options: argparse.Namespace, caller: Caller | None = None) -> Plan:
    command, inherited = _program(options)
    hosts = _hosts(options)
    count = _worker_count(options, hosts)
    is_captured = count > 1 or options.output_filename is not None
    check_count(count, 2 if is_captured else 0)
    cfg = config()
    cores = usable_cores()
    notes = []
    if count > 1:
        # Each worker's OpenMP would start a thread per core; N workers would share each core N-fold and all slow down.
        if not inherited.get("OMP_NUM_THREADS"):
            threads = max(1, len(cores) // count)
            inherited["OMP_NUM_THREADS"] = str(threads)
            notes.append(f"OMP_NUM_THREADS={threads}: {len(cores)} cores for {count} workers; set it to override")
        # Through a pipe, Python would hold back lines for kilobytes, and lose them when the worker is killed.
        inherited.setdefault("PYTHONUNBUFFERED", "1")
    job = os.urandom(8).hex()
    if options.verbose:
        for note in (f"job {job}: {count} workers of {' '.join(command)}", *notes):
            _say(note)
    settings = Settings(
        job, count, count, survivor_time_s=cfg.survivor_time_s, kill_grace_s=cfg.kill_grace_s, is_static=True
    )
    return Plan(
        settings,
        FixedHosts(hosts or {"localhost": count}),
        command,
        inherited,
        output_folder=options.output_filename,
        bind_cores=options.bind_cores,
        capture=is_captured,
        prefix=count > 1 and not options.no_prefix,
        verbose=options.verbose,
        caller=caller,
    )


def _is_of_outer_job(name: str) -> bool:
    """Whether a variable describes a worker of a kvhvdrun around us."""
    return name.startswith(("KVHVD_LOCAL_", "KVHVD_DAEMON", "KVHVD_WORKER")) or name in (
        "KVHVD_RANK",
        "KVHVD_SIZE",
        "KVHVD_SLOT",
        "KVHVD_SECRET",
        "KVHVD_GENERATION",
    )


def _set_timeline(variables: dict[str, str], path: str) -> None:
    if path != "DYNAMIC":  # the program says when, and where
        path = os.path.abspath(path)  # the workers may change their folder first
        if not os.path.isdir(os.path.dirname(path)):
            raise LaunchError(
                message(f"--timeline-filename: there is no folder '{os.path.dirname(path)}'.", fix="make it first.")
            )
    variables["HOROVOD_TIMELINE"] = path
    variables.pop("KVHVD_TIMELINE", None)  # would come first


def _hosts(options: argparse.Namespace) -> dict[str, int] | None:
    """The hosts that are named, which must be this one, with their slots; None if none is."""
    if options.hosts is not None and options.hostfile is not None:
        raise LaunchError(message("both -H and --hostfile name hosts.", fix="give one of them."))
    if options.hosts is None and options.hostfile is None:
        return None
    entries = hosts_of_file(options.hostfile) if options.hosts is None else hosts_of_option(options.hosts)
    hosts = slots_of(entries)
    refuse_others(hosts)
    return hosts


def _worker_count(options: argparse.Namespace, hosts: dict[str, int] | None) -> int:
    slots = None if hosts is None else sum(hosts.values())
    if options.num_proc is None:
        if slots is None:
            raise LaunchError(message("the number of workers is missing.", fix="kvhvdrun -np 2 python train.py"))
        return slots
    try:
        count = int(options.num_proc)
    except ValueError:
        count = 0
    if count < 1:
        raise LaunchError(
            message(f"-np {options.num_proc}: expected a whole number of at least 1.", fix="kvhvdrun -np 2")
        )
    if slots is not None and count > slots:
        raise LaunchError(
            message(f"-np {count}, but the hosts have {slots} slots.", fix="give more slots, as in -H localhost:N.")
        )
    return count


def _executable(command: Sequence[str], variables: dict[str, str]) -> str:
    """The path of the program, found as the shell would."""
    program = command[0]
    folders = [""] if os.path.dirname(program) else variables.get("PATH", os.defpath).split(os.pathsep)
    for path in (os.path.join(folder, program) for folder in folders):
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    fix = f"kvhvdrun -np N {os.path.basename(sys.executable)} {' '.join(command)}" if program.endswith(".py") else ""
    if os.path.exists(program):
        if os.path.isdir(program):
            what, fix = "is a directory", "name a program."
        else:
            what, fix = "is not executable", fix or f"chmod +x {program}"
        raise StartError(message(f"'{program}' {what}.", fix=fix), _EXIT_NOT_EXECUTABLE)
    raise StartError(
        message(f"command '{program}' was not found.", fix=fix or "check its name and PATH."), _EXIT_NOT_FOUND
    )


# -- The launcher's own standard streams --------------------------------------------------------------------------


def _check_streams() -> None:
    """Make sure that descriptors 0, 1 and 2 are open, lest a pipe to a worker take the place of one of them."""
    # A closed standard input becomes an empty one.
    for fd, name in ((0, "input"), (1, "output"), (2, "error")):
        try:
            os.fstat(fd)
        except OSError:
            if fd > 0:
                raise LaunchError(
                    message(
                        f"standard {name} is closed.",
                        fix=f"to drop what is written there, use {fd if fd > 1 else ''}> /dev/null.",
                    )
                ) from None
            os.set_inheritable(os.open(os.devnull, os.O_RDONLY), True)  # the lowest free number, which is this one


def _say(text: str) -> None:
    """Write a line of the launcher's own to stderr, or to stdout if stderr is closed; what fails is left unsaid."""
    line = f"kvhvdrun: {text}\n".encode()
    for fd in (2, 1):
        try:
            _write_all(fd, line)
        except OSError as error:
            if error.errno == errno.EBADF:
                continue
        return


def _write_all(fd: int, data: bytes) -> None:
    """Write all of `data`."""
    while data:
        data = data[os.write(fd, data) :]
