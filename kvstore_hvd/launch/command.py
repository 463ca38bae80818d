"""The command kvhvdrun: its options, the errors in them, and ``--check-build``."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NoReturn

from kvstore_hvd import __version__
from kvstore_hvd.base import files
from kvstore_hvd.config import KNOBS, Config, config, environment
from kvstore_hvd.errors import ConfigError, KVHvdError, LaunchError, message, printable
from kvstore_hvd.launch import horovodrun
from kvstore_hvd.launch.daemons import HostDiscoveryScript
from kvstore_hvd.launch.driver import Driver, Plan
from kvstore_hvd.launch.hosts import (
    MAX_WORKERS,
    SRUN,
    check_count,
    hosts_of_allocation,
    hosts_of_file,
    is_here,
    look_up,
    remote_shell,
    slots_of,
)
from kvstore_hvd.launch.state import Settings, StartError

# Folder of the workers' sitecustomize.
_SITE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "mxnet_compat", "site")
_HOSTS = ("hosts", "hostfile", "host_discovery_script")
# Options that make a job elastic; options of elastic jobs only; options of other jobs only.
_DECISIVE = ("min_np", "max_np", "host_discovery_script")
_OF_ELASTIC = ("slots_per_host", "elastic_timeout", "reset_limit", "blacklist_cooldown_range", "event_log")
_OF_STATIC = ("output_filename", "ranks")
_COOLDOWN_S, _COOLDOWN_LIMITS_S = (10.0, 300.0), (1.0, 3600.0)
# Fields of both `Settings` and `Config`.
_TIMES = ("timeout_s", "survivor_time_s", "exit_timeout_s", "kill_grace_s", "lease_s")
_FLAGS = {**dict.fromkeys(("true", "yes", "on"), 1), **dict.fromkeys(("false", "no", "off"), 0)}
_EXIT_USAGE, _EXIT_NOT_FOUND = 2, 127
# Variables of one rank of an mpirun, horovodrun or kvhvdrun around this one. Workers must not inherit them.
_OF_ONE_RANK = re.compile(
    r"OMPI_(COMM_WORLD|UNIVERSE|WORLD|APP_CTX|FIRST_RANKS|NUM_APP_CTX|FILE_LOCATION|COMMAND|ARGV)"
    r"|OMPI_MCA_(orte_|ess|num_procs|pmix$)|PMI_|PMIX_(?!MCA_)|HYDI_|HYDRA_|MPI_LOCAL"
    r"|KVHVD_(LOCAL_|DAEMON|ARRIVALS|WORKER|(RANK|SIZE|HOSTS|SLOT|JOB|SECRET|GENERATION)$)"
    r"|HOROVOD_((LOCAL_|CROSS_)?(RANK|SIZE)|HOSTNAME)$"
)


_EXAMPLES = """examples:
  kvhvdrun -np 2 python train.py
  kvhvdrun -np 8 -H node1:4,node2:4 python train.py
  kvhvdrun -np 4 --min-np 2 python train.py     # elastic: see docs/elastic.md
  kvhvdrun status                               # what workers do now
  kvhvdrun stacks JOB                           # where their programs are
  kvhvdrun explain FILE                         # what they did before a failure
"""


class _Parser(argparse.ArgumentParser):
    where = ""  # the options come from

    def format_help(self) -> str:
        self.epilog = f"{_EXAMPLES}\nenvironment variables (docs/errors.md lists all):\n{Config.describe()}"
        return super().format_help()

    def error(self, text: str) -> NoReturn:
        raise LaunchError(message(f"{self.where}{text}.", fix="see kvhvdrun --help."))


def main(argv: Sequence[str] | None = None, tell: Callable[[str, str], None] | None = None) -> int:
    """Run kvhvdrun with the arguments `argv` (default: ``sys.argv[1:]``) and return its exit code."""
    # `tell` replaces stderr for a program that calls a function: why options are 'refused', or why the job has 'ended'.
    # docs/errors.md lists the exit codes.
    for fd in range(3):  # a pipe to a worker could get the number of a closed stream
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest free number, which is `fd`
    try:
        given = sys.argv[1:] if argv is None else argv
        if given[:1] and given[0] in ("explain", "status", "stacks"):
            from kvstore_hvd.launch import explain  # here, for a quick start

            return explain.main(given)
        options = _options(argv)
        if options.version:
            print(f"kvstore_hvd {__version__}")
            return 0
        if options.check_build:
            print(_build_report(), end="")
            return 0
        return Driver(_plan(options, tell)).run()
    except KeyboardInterrupt:  # before the first worker
        return 128 + signal.SIGINT
    except (LaunchError, ConfigError) as error:
        if tell is not None:
            tell("refused", str(error))
        else:
            with contextlib.suppress(OSError):
                os.write(2, f"kvhvdrun: {printable(str(error))}\n".encode(errors="surrogateescape"))
        return error.code if isinstance(error, StartError) else _EXIT_USAGE


def _whole(least: int) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least {least}")
        return int(text)

    return count


def _seconds(text: str) -> float:
    try:
        return float(KNOBS["timeout_s"].parse(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"'{text}' is not {error}") from None


def _parser() -> _Parser:
    parser = _Parser(
        prog="kvhvdrun",
        usage="kvhvdrun -np N [options] command [arguments]",
        description="Start N workers, on one or several hosts.\nAll end when one fails, and no process is left behind.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    # Groups: `parser.add_argument` would import shutil.
    add = parser.add_argument_group("options").add_argument
    count = _whole(1)
    ranks: Callable[[str], list[int]] = lambda text: [_whole(0)(rank.strip()) for rank in text.split(",")]  # noqa: E731
    add("-h", "--help", action="help", help="show this text and exit")
    add("-np", "--num-proc", "-n", metavar="N", type=count, help="number of workers")
    add("-H", "--hosts", metavar="HOST:N,...", help="where they run [localhost:N]")
    add("--hostfile", "-hostfile", metavar="FILE", help="the same from a file, one 'host slots=N' or 'host:N' a line")
    add("--rsh-command", metavar="CMD", help="runs a command on another host: CMD HOST COMMAND [ssh]")
    add("-p", "--ssh-port", metavar="PORT", type=count, help="of the other hosts' ssh")
    add("-i", "--ssh-identity-file", metavar="FILE", help="for ssh")
    names = "--network-interfaces", "--network-interface"
    add(*names, metavar="NAME,...", help="those between hosts: eth0 or 10.0.0.0/8")
    add("-x", metavar="NAME[=VALUE]", action="append", default=[], help="set a variable of all workers, or send it")
    add("-m", "--module", action="store_true", help="the command is a module: as `python -m command`")
    add("--as-horovod", action="store_true", help="let `import horovod.mxnet` find kvstore_hvd")
    add("--config-file", metavar="FILE", help="read options from a YAML file; those given here win")
    add("--start-timeout", metavar="S", type=_seconds, help="seconds the workers may take to find each other [30]")
    add("--timeline-filename", metavar="FILE", help="record a timeline: HOROVOD_TIMELINE of the workers")
    add("--checkpoint", metavar="FILE", help="keep the state of elastic training there, and begin from it")
    add("--checkpoint-every", metavar="S", type=_seconds, help="seconds between checkpoints [600]")
    add("--output-filename", metavar="DIR", help="also keep all output: DIR/rank.N/stdout and DIR/rank.N/stderr")
    add("--ranks", metavar="RANK,...", type=ranks, help="show what these ranks write only")
    add("--no-prefix", action="store_true", help="do not put '[rank] ' before lines of output")
    prefix = "-prefix-timestamp", "--prefix-output-with-timestamp"  # of horovodrun
    add("--timestamps", *prefix, action="store_true", help="put the time before lines of output")
    add("--bind-cores", action="store_true", help="pin each worker to its share of the cores")
    add("-v", "--verbose", action="store_true", help="say what is started, and how it ended")
    add("-cb", "--check-build", action="store_true", help="show installed components and exit")
    add("--version", action="store_true", help="show the version and exit")
    elastic = "Workers may leave or join: with --min-np, --max-np or --host-discovery-script."
    add = parser.add_argument_group("elastic jobs", elastic).add_argument
    add("--min-np", "--min-num-proc", metavar="N", type=count, help="minimum world size [-np, or 1]")
    add("--max-np", "--max-num-proc", metavar="N", type=count, help="maximum world size [number of slots]")
    add("--host-discovery-script", metavar="CMD", help="prints the hosts, one HOST or HOST:N a line; run every second")
    add("--slots-per-host", "--slots", metavar="N", type=count, help="slots of a host listed without a number [1]")
    add("--elastic-timeout", metavar="S", type=_seconds, help="seconds to wait for enough workers [600]")
    add("--reset-limit", metavar="N", type=_whole(0), help="end the job when it has been reset more often than this")
    cooldown = "seconds, 1 to 3600, that a slot stays empty after repeated crashes [10 300]"
    pair = {"metavar": ("LOWER", "UPPER"), "nargs": 2, "type": _seconds}
    add("--blacklist-cooldown-range", help=cooldown, **pair)  # type: ignore[arg-type]
    add("--event-log", metavar="FILE", help="write what happens to a file, one JSON object a line")
    horovodrun.add_options(add)
    add = parser.add_argument_group("program").add_argument
    add("command", nargs=argparse.REMAINDER, help="the program of every worker, and its arguments")
    return parser


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options of the command line, and of the file of ``--config-file`` where the command line has none."""
    parser, arguments = _parser(), list(sys.argv[1:] if argv is None else argv)
    if "_ARGCOMPLETE" in environment():  # a shell asks for completions
        import argcomplete

        argcomplete.autocomplete(parser)
    options = _parsed(parser, arguments)
    if options.config_file is None:
        return options
    are_named = any(getattr(options, name) is not None for name in _HOSTS)  # each replaces the others
    words = []
    for name, values in _lines_of_file(options.config_file):
        option, text = f"--{name.replace('_', '-')}", ",".join(values)
        action = parser._option_string_actions.get(option)
        if are_named and action is not None and action.dest in _HOSTS:
            continue
        if action is not None and action.nargs == 0 and text.lower() in _FLAGS:
            no = f"--no-{option[2:]}"
            words += [option] * _FLAGS[text.lower()] or [no] * (no in parser._option_string_actions)
        elif name == "x":
            words += [word for value in values for word in ("-x", value)]
        else:
            is_pair = action is not None and action.nargs == 2
            words += [option, *text.replace(",", " ").split()] if is_pair else [f"{option}={text}"]
    _parsed(parser, words, f"{options.config_file}: ")
    return _parsed(parser, [*words, *arguments])


def _parsed(parser: _Parser, arguments: Sequence[str], where: str = "") -> argparse.Namespace:
    parser.where = where
    options, unknown = parser.parse_known_args(arguments)
    unknown += options.command if where else []  # a file names no command
    options.given = arguments[: len(arguments) - len(options.command)]
    if unknown:
        import difflib

        word = unknown[0].partition("=")[0]
        close = [horovodrun.OTHERS[word]] if word in horovodrun.OTHERS and not where else []
        close = close or difflib.get_close_matches(word, parser._option_string_actions, n=1)
        fact = f"{where}{word} does not exist{f'; did you mean {close[0]}?' if close else '.'}"
        raise LaunchError(message(fact, fix="kvhvdrun --help lists the options."))
    return options


def _lines_of_file(path: str) -> list[tuple[str, list[str]]]:
    """The names and values of a YAML file, as texts."""
    try:
        import yaml
    except ModuleNotFoundError:
        fix = "python -m pip install 'kvstore-hvd[yaml]'"
        raise LaunchError(message("--config-file needs PyYAML, which is not installed.", fix=fix)) from None
    try:
        with open(path, encoding="utf-8") as file:
            given = yaml.load(file, Loader=yaml.BaseLoader) or {}  # leaves texts as they are
        if not isinstance(given, dict) or not isinstance(given.get("controller", ""), str):
            raise TypeError("it has no names with values")
        for group in horovodrun.GROUPS:
            if isinstance(given.get(group), dict):  # as in a file for horovodrun
                given.update(horovodrun.flat(group, given.pop(group)))
        if "controller" in given:
            given[given.pop("controller").lower()] = "true"
        lists = {key: value if isinstance(value, list) else [value] for key, value in given.items()}
        return [(str(key), list(map(str, values))) for key, values in lists.items()]
    except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError, TypeError) as error:
        fact = f"the configuration file '{path}' cannot be read: {error}."
        fix = (
            "name a file that is there." if isinstance(error, OSError) else "a YAML file has lines such as num-proc: 4"
        )
        raise LaunchError(message(fact, fix=fix)) from None


def _program(options: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """The command and the variables of all workers."""
    command = options.command[1:] if options.command[:1] == ["--"] else list(options.command)
    if not command:
        raise LaunchError(message("no command was given.", fix=_corrected(options, "python", "train.py")))
    if options.module:
        command = [sys.executable, "-m", *command]
    inherited = {name: value for name, value in environment().items() if not _OF_ONE_RANK.match(name)}
    lines = horovodrun.apply(options.of_horovodrun or (), inherited)
    with contextlib.suppress(OSError):
        os.write(2, "".join(f"kvhvdrun: {line}\n" for line in lines).encode())
    inherited.update(_variables(options.x))
    file = (inherited.get("KVHVD_CHECKPOINT") or None) if options.checkpoint is None else options.checkpoint
    if file is None and options.checkpoint_every is not None:
        raise LaunchError(message("--checkpoint-every: there is no file.", fix="name it with --checkpoint."))
    given = {
        "KVHVD_AS_HOROVOD": "1" if options.as_horovod else None,
        "KVHVD_NETWORK_INTERFACES": options.network_interfaces,
        "KVHVD_START_TIMEOUT": options.start_timeout,
        "KVHVD_CHECKPOINT": None if file is None else _absolute("--checkpoint", file),
        "KVHVD_CHECKPOINT_EVERY": options.checkpoint_every,
    }
    for name, value in given.items():
        if value is not None:
            inherited[name] = f"{value:g}" if isinstance(value, float) else value
    if options.timeline_filename is not None:
        path = options.timeline_filename  # DYNAMIC: the program starts timelines
        inherited["HOROVOD_TIMELINE"] = path if path == "DYNAMIC" else _absolute("--timeline-filename", path)
        inherited.pop("KVHVD_TIMELINE", None)  # has precedence
    inherited["PYTHONPATH"] = os.pathsep.join(filter(None, (_SITE, inherited.get("PYTHONPATH"))))
    command[0] = _executable(options, command, inherited)
    return command, inherited


def _variables(given: Sequence[str]) -> dict[str, str]:
    """The variables of ``-x NAME=VALUE``, and of ``-x NAME`` with their values here."""
    found = {}
    for name, equals, value in (text.partition("=") for text in given):
        fact, fix = "", "give -x NAME or -x NAME=VALUE."
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            fact = f"'{name}' is not the name of a variable"
        elif _OF_ONE_RANK.match(name):
            fact, fix = f"{name} differs between workers", "omit it: kvhvdrun sets what they need."
        elif not equals and name not in environment():
            fact, fix = f"{name} is not set here, and what is set all workers have", f"-x {name}=VALUE sets it."
        if fact:
            raise LaunchError(message(f"-x {name}{equals}{value}: {fact}.", fix=fix))
        found[name] = value if equals else environment()[name]
    return found


def _plan(options: argparse.Namespace, tell: Callable[[str, str], None] | None = None) -> Plan:
    given = {name for name, value in vars(options).items() if value is not None}
    is_static = given.isdisjoint(_DECISIVE)
    for name in _OF_ELASTIC if is_static else _OF_STATIC:
        if name in given:
            fact = f"--{name.replace('_', '-')} is {'' if is_static else 'not '}for elastic jobs."
            fix = "give --min-np, or omit it." if is_static else "omit it: workers of elastic jobs change their ranks."
            raise LaunchError(message(fact, fix=fix))
    command, inherited = _program(options)
    hosts, first, most, of_slurm = _hosts(options), options.num_proc, options.max_np, None
    if hosts is None and options.host_discovery_script is None and tell is None:
        hosts = of_slurm = hosts_of_allocation(environment())
    if is_static:
        first = most = first or (None if hosts is None else sum(hosts.values()))
        if first is None:
            fact = f"the number of workers is missing{'; -p is the port of ssh' if options.ssh_port else ''}."
            raise LaunchError(message(fact, fix=_corrected(options, *options.command)))
    least = options.min_np or first or 1
    named = (("--min-np", least), ("-np", first), ("--max-np", most))
    counts = [(name, count) for name, count in named if count is not None]
    for (name, count), (other, limit) in zip(counts, counts[1:]):
        if count > limit:
            fix = f"{other} {count}, or {name} {limit}."
            raise LaunchError(message(f"{name} {count} is more than {other} {limit}.", fix=fix))
    needed = max(least, first or 0)
    hosts = hosts or {"localhost": most or needed}
    look_up(hosts)
    others = [host for host in hosts if not is_here(host)]
    if others and tell is not None:  # functions and results travel in a folder of this host
        fact = f"'{others[0]}' is another host, and run() starts workers on this one only."
        fix = f"omit hosts; for several, put the function into a script: kvhvdrun -H {others[0]}:2 python it.py"
        raise LaunchError(message(fact, fix=fix))
    way = SRUN if of_slurm and options.rsh_command is None else options.rsh_command
    if options.ssh_port is not None or options.ssh_identity_file is not None:
        if options.rsh_command is not None:
            raise LaunchError(message("-p and -i are for ssh.", fix="give them to the command of --rsh-command."))
        import shlex  # not needed on one host

        given_to_ssh = (("-p", options.ssh_port), ("-i", options.ssh_identity_file))
        way = shlex.join(["ssh", *(word for name, value in given_to_ssh if value for word in (name, str(value)))])
    shell = remote_shell(way) if others or options.host_discovery_script is not None else []
    if others and not shell:
        name = "ssh" if way is None else "srun"
        fact = f"{', '.join(others)}: other hosts than this one, and there is no {name} that could start workers there."
        raise LaunchError(message(fact, fix="install it, or name another command with --rsh-command."))
    script, slots, shown = None, sum(hosts.values()), options.ranks
    if options.host_discovery_script is not None:
        script, slots = HostDiscoveryScript(options.host_discovery_script, inherited, options.slots_per_host or 1), 0
    elif slots < needed:
        fact = f"{needed} workers are needed, but the hosts have {slots} slots."
        fix = "sbatch --ntasks-per-node=N" if of_slurm else "-H localhost:N"
        raise LaunchError(message(fact, fix=f"give more slots, as in {fix}."))
    if shown is not None and max(shown) >= most:
        raise LaunchError(message(f"--ranks: there is no rank {max(shown)}.", fix=f"the ranks are 0 to {most - 1}."))
    capture = not is_static or most > 1 or any((options.output_filename, shown, options.timestamps, others))
    count = most or max(needed, min(slots, MAX_WORKERS))
    check_count(count)
    if is_static:  # each slot has a worker
        hosts = Counter(itertools.islice((host for host, slots in hosts.items() for _ in range(slots)), most))
    if capture:
        # Through a pipe, Python would hold back lines for kilobytes, and a killed worker would lose them.
        inherited.setdefault("PYTHONUNBUFFERED", "1")
    (lower, upper), (low, high) = options.blacklist_cooldown_range or _COOLDOWN_S, _COOLDOWN_LIMITS_S
    if not low <= lower <= upper <= high:
        fact = f"--blacklist-cooldown-range {lower:g} {upper:g}: expected {low:g} to {high:g} s, the lower one first."
        raise LaunchError(message(fact, fix="for example --blacklist-cooldown-range 10 300"))
    cfg, job = config(), os.urandom(8).hex()
    path = files.failure_path(cfg.failure_file, job, options.output_filename or "") if cfg.failure_file else "0"
    inherited["KVHVD_FAILURE_FILE"] = path
    settings = Settings(
        job=job,
        min_np=least,
        max_np=most or MAX_WORKERS,
        first_np=first,
        reset_limit=options.reset_limit,
        elastic_timeout_s=options.elastic_timeout or cfg.elastic_timeout_s,
        start_timeout_s=options.start_timeout or cfg.start_timeout_s,
        **{name: getattr(cfg, name) for name in _TIMES},
        cooldown=(lower, upper),
        replaces=not is_static,
    )
    return Plan(settings, options, command, inherited, hosts, script, capture, shell, tell)


def _absolute(option: str, path: str) -> str:
    with contextlib.suppress(FileNotFoundError):  # the working folder has been deleted
        path = os.path.abspath(path)  # workers may change their folder
    if os.path.isdir(path):
        raise LaunchError(message(f"{option}: '{path}' is a folder.", fix="name a file."))
    if os.path.isdir(os.path.dirname(path)):
        return path
    raise LaunchError(message(f"{option}: there is no folder '{os.path.dirname(path) or '.'}'.", fix="make it first."))


def _hosts(options: argparse.Namespace) -> dict[str, int] | None:
    """The hosts of ``-H`` or a host file, with their slots; None without both."""
    named = [f"--{name.replace('_', '-')}" for name in _HOSTS if getattr(options, name) is not None]
    if len(named) > 1:
        raise LaunchError(message(f"both {named[0]} and {named[1]} name hosts.", fix="give one of them."))
    if options.hosts is None and options.hostfile is None:
        return None
    entries = hosts_of_file(options.hostfile) if options.hosts is None else map(str.strip, options.hosts.split(","))
    return slots_of(entries, options.slots_per_host or 1)


def _corrected(options: argparse.Namespace, *words: str) -> str:
    """The user's command with these words from the program on, and with a number of workers."""
    import shlex

    has_number = any(getattr(options, name) for name in ("num_proc", *_DECISIVE, *_HOSTS))
    return shlex.join(["kvhvdrun", *([] if has_number else ["-np", "2"]), *options.given, *words])


def _executable(options: argparse.Namespace, command: Sequence[str], variables: dict[str, str]) -> str:
    """The path of the program, as the shell would find it."""
    program = command[0]
    folders = [""] if os.path.dirname(program) else variables.get("PATH", os.defpath).split(os.pathsep)
    for path in (os.path.join(folder, program) for folder in folders):
        if os.path.isfile(path) and os.access(path, os.X_OK):
            return path
    if os.path.isdir(program):
        raise StartError(message(f"'{program}' is a directory.", fix="name a program."))
    if os.path.exists(program):
        python = _corrected(options, os.path.basename(sys.executable), *command)
        fix = python if program.endswith(".py") else f"chmod +x {program}"
        raise StartError(message(f"'{program}' is not executable.", fix=fix))
    fix = "check its name and the working folder." if program.endswith(".py") else "check its name and PATH."
    if " " in program:
        fix = f"omit the quotes around the whole command; or {fix}"
    raise StartError(message(f"command '{program}' was not found.", fix=fix), _EXIT_NOT_FOUND)


# -- --check-build ------------------------------------------------------------------------------------------------


def _build_report() -> str:
    """What is installed here, a line each, with the reason if it cannot be used."""
    import importlib
    import platform
    from importlib.metadata import distributions

    from kvstore_hvd import mxnet_compat, native
    from kvstore_hvd.gpu import runtime
    from kvstore_hvd.gpu.nccl import library as nccl_library
    from kvstore_hvd.horovod.alias import installed_horovod
    from kvstore_hvd.world.discover import mpi_library

    def gpus() -> str:
        cupy, version = runtime.cupy(), runtime.version_text(runtime.driver_version() or 0)
        return f"{cupy.cuda.runtime.getDeviceCount()}, CuPy {cupy.__version__}, driver for CUDA up to {version}"

    starts = "for starting with"
    mpi = _found(lambda: f"{mpi_library()}, {starts} its mpirun", f" ({starts} mpirun only; kvhvdrun needs none)")
    horovod, nccl = installed_horovod(), "{0.version_text} ({0.path})".format
    stand_in = "" if any(distributions(name="kvstore-hvd-horovod")) else "with --as-horovod "
    rows = {
        "MXNet": _found(lambda: mxnet_compat.require_mxnet().__version__),
        "native engine": _found(lambda: f"sums with {native.simd_target()}"),
        "one host": "yes: workers meet in shared memory; needs no MPI",
        "several hosts": "yes: by ssh and TCP" + (", under mpirun by its MPI" if mpi.startswith("yes") else ""),
        "MPI": mpi,
        "GPUs": "no: there is no driver (libcuda.so.1)" if runtime.driver_version() is None else _found(gpus),
        "NCCL": _found(lambda: nccl(nccl_library()), " (for workers that each have a GPU; others need none)"),
        "horovod": f"not installed: {stand_in}kvstore_hvd answers for it"
        if horovod is None
        else f"installed ({horovod.origin}): --as-horovod leaves `import horovod` to it",
        "--config-file": _found(lambda: f"PyYAML {importlib.import_module('yaml').__version__}"),
    }
    head = f"kvstore_hvd {__version__}, Python {platform.python_version()}, {platform.machine()}"
    return "\n".join([head, *(f"  {name + ':':<15} {text}" for name, text in rows.items())]) + "\n"


def _found(tell: Callable[[], str], if_not: str = "") -> str:
    try:
        return f"yes: {tell()}"
    except (KVHvdError, ImportError) as error:
        return "no: " + str(error).split("\n", 1)[0] + if_not
