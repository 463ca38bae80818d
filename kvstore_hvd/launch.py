"""kvhvdrun: start the workers of a job on this host, without MPI."""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

from kvstore_hvd.config import Config, config, environment
from kvstore_hvd.errors import ConfigError, LaunchError, message
from kvstore_hvd.launcher.capacity import check_count
from kvstore_hvd.launcher.console import check_streams, say, write_all
from kvstore_hvd.launcher.plan import Limits, Plan, StartError, WorkerPlan
from kvstore_hvd.launcher.processes import usable_cores
from kvstore_hvd.launcher.supervisor import Supervisor

__all__ = ["main"]

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
    """argparse itself would take help that cannot be written for written."""

    def print_help(self, file: Any = None) -> None:
        if file is not None:
            super().print_help(file)
            return
        try:
            write_all(1, self.format_help().encode())
        except BrokenPipeError:
            raise SystemExit(128 + signal.SIGPIPE) from None
        except OSError as error:
            say(f"standard output cannot be written: {error.strerror}.")
            raise SystemExit(_EXIT_LOST_OUTPUT) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Run kvhvdrun with the arguments `argv` (default: ``sys.argv[1:]``) and return its exit code.

    0 when all workers returned 0, else the exit code of the one that failed first (128 + n when signal n killed it);
    130, 143, 129 or 131 after SIGINT, SIGTERM, SIGHUP or SIGQUIT to the launcher, however the workers ended; 141 when
    the reader of the output has gone, 1 when output could not be written; 2 for wrong options, 126 and 127 when the
    command cannot be executed or found.
    """
    try:
        check_streams()
        options = _parser().parse_args(argv)
        return Supervisor(_plan(options)).run()
    except KeyboardInterrupt:  # before the first worker
        return 128 + signal.SIGINT
    except StartError as error:
        say(str(error))
        return error.code
    except (LaunchError, ConfigError) as error:
        say(str(error))
        return _EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvhvdrun",
        usage="kvhvdrun -np N [options] command [arguments]",
        description="Start N workers on this host. Ends them all when one fails, and leaves no process behind.",
        epilog="Environment variables:\n" + Config.describe(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-np", "--num-proc", "-n", dest="count", metavar="N", help="number of workers")
    parser.add_argument("-H", "--hosts", metavar="HOST:N", help="where they run; only this host: localhost:N")
    parser.add_argument(
        "--hostfile", metavar="FILE", help="the same from a file, one 'host slots=N' or 'host:N' a line"
    )
    parser.add_argument("--start-timeout", metavar="S", help="seconds the workers may take to find each other [30]")
    parser.add_argument("--no-prefix", action="store_true", help="do not put '[rank] ' before lines of output")
    parser.add_argument("--bind-cores", action="store_true", help="pin each worker to its share of the cores")
    parser.add_argument("-v", "--verbose", action="store_true", help="say what is started, and how it ended")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the program of every worker, and its arguments")
    return parser


def _plan(options: argparse.Namespace) -> Plan:
    command = options.command[1:] if options.command[:1] == ["--"] else list(options.command)
    if not command:
        raise LaunchError(message("no command was given.", fix="kvhvdrun -np 2 python train.py"))
    count = _worker_count(options)
    check_count(count)
    cfg = config()
    inherited = {
        name: value
        for name, value in environment().items()
        if not _MPI_RANK_VARIABLES.match(name) and not _is_of_outer_job(name)
    }
    if options.start_timeout is not None:
        # Checked as the variable would be.
        inherited["KVHVD_START_TIMEOUT"] = options.start_timeout
        Config.from_environ({"KVHVD_START_TIMEOUT": options.start_timeout})
    command[0] = _executable(command, inherited)
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
    job, secret = secrets.token_hex(8), secrets.token_hex(32)
    if options.verbose:
        for note in (f"job {job}: {count} workers of {' '.join(command)}", *notes):
            say(note)
    workers = [
        WorkerPlan(
            command,
            {
                **inherited,
                "KVHVD_RANK": str(rank),
                "KVHVD_SIZE": str(count),
                "KVHVD_LOCAL_RANK": str(rank),
                "KVHVD_LOCAL_SIZE": str(count),
                "KVHVD_JOB": job,
                "KVHVD_SECRET": secret,
                "KVHVD_EPOCH": "0",
            },
            _share(cores, rank, count) if options.bind_cores else (),
        )
        for rank in range(count)
    ]
    return Plan(
        workers,
        f"KVHVD_JOB={job}".encode(),
        Limits(cfg.survivor_time_s, cfg.kill_grace_s),
        capture=count > 1,
        prefix=not options.no_prefix,
        verbose=options.verbose,
    )


def _is_of_outer_job(name: str) -> bool:
    """Whether a variable describes a worker of a kvhvdrun around us."""
    return name in ("KVHVD_RANK", "KVHVD_SIZE", "KVHVD_LOCAL_RANK", "KVHVD_LOCAL_SIZE", "KVHVD_SECRET", "KVHVD_EPOCH")


def _share(cores: Sequence[int], rank: int, count: int) -> tuple[int, ...]:
    """The cores of one worker: equal runs of neighbours; with more workers than cores, one core each, in turn."""
    if count >= len(cores):
        return (cores[rank % len(cores)],)
    return tuple(cores[rank * len(cores) // count : (rank + 1) * len(cores) // count])


def _worker_count(options: argparse.Namespace) -> int:
    slots = None
    if options.hosts is not None:
        slots = sum(_slots(entry) for entry in options.hosts.split(","))
    elif options.hostfile is not None:
        try:
            with open(options.hostfile, encoding="utf-8") as file:
                lines = [line.partition("#")[0].strip() for line in file]
        except (OSError, UnicodeDecodeError) as error:
            raise LaunchError(message(f"the host file cannot be read: {error}.")) from None
        slots = sum(_slots(line) for line in lines if line)
    if options.count is None:
        if not slots:
            raise LaunchError(message("the number of workers is missing.", fix="kvhvdrun -np 2 python train.py"))
        return slots
    try:
        count = int(options.count)
    except ValueError:
        count = 0
    if count < 1:
        raise LaunchError(message(f"-np {options.count}: expected a whole number of at least 1.", fix="kvhvdrun -np 2"))
    if slots is not None and count > slots:
        raise LaunchError(
            message(f"-np {count}, but the hosts have {slots} slots.", fix="give more slots, as in -H localhost:N.")
        )
    return count


def _slots(entry: str) -> int:
    """Slots of one entry, 'host', 'host:N' or 'host slots=N'; the host must be this one."""
    match = re.fullmatch(
        r"(?P<host>[^\s:]+|\[?::1\]?)(?:\s*:\s*(?P<n>\d+)|\s+slots\s*=\s*(?P<slots>\d+))?", entry.strip()
    )
    if match is None:
        raise LaunchError(message(f"'{entry}' is not HOST:N or 'HOST slots=N'.", fix="for example -H localhost:4"))
    host = match["host"].strip("[]")
    name = socket.gethostname()
    if host not in ("localhost", "127.0.0.1", "::1", name, name.partition(".")[0]):
        raise LaunchError(
            message(
                f"'{host}' is another host, and several hosts are not supported yet.",
                fix=f"start on this host: -H localhost:N, or leave -H away; this host is '{name}'.",
            )
        )
    return int(match["n"] or match["slots"] or 1)


def _executable(command: Sequence[str], variables: dict[str, str]) -> str:
    """The path of the program, found as the shell would."""
    program = command[0]
    found = shutil.which(program, path=variables.get("PATH", os.defpath))
    if found is not None:
        return found
    fix = f"kvhvdrun -np N {os.path.basename(sys.executable)} {' '.join(command)}" if program.endswith(".py") else ""
    if os.path.exists(program):
        what = "is a directory" if os.path.isdir(program) else "is not executable"
        raise StartError(message(f"'{program}' {what}.", fix=fix or f"chmod +x {program}"), _EXIT_NOT_EXECUTABLE)
    raise StartError(
        message(f"command '{program}' was not found.", fix=fix or "check its name and PATH."), _EXIT_NOT_FOUND
    )


if __name__ == "__main__":
    sys.exit(main())
