"""The plan of a job, and the options of kvhvdrun for elastic jobs."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from kvstore_hvd.config import config, option_value
from kvstore_hvd.errors import LaunchError, message
from kvstore_hvd.launch.capacity import ELASTIC_FILES, MAX_WORKERS, check_count
from kvstore_hvd.launch.discovery import FixedHosts, HostDiscovery, HostDiscoveryScript
from kvstore_hvd.launch.hosts import hosts_of_file, hosts_of_option, refuse_others, remote_shell, slots_of
from kvstore_hvd.launch.state import Cooldown, Settings

__all__ = ["Caller", "Plan", "add_elastic_options", "elastic_plan", "is_elastic"]

_EXAMPLE = "kvhvdrun --min-np 2 --max-np 4 python train.py"
# Those that alone make a job elastic.
_DECISIVE = ("min_np", "max_np", "host_discovery_script")
_OTHERS = ("slots_per_host", "elastic_timeout", "reset_limit", "blacklist_cooldown_range", "event_log")
_COOLDOWN_LIMITS_S = (1.0, 3600.0)


class Caller(NamedTuple):
    """A program that has started the launcher to call one of its functions in the workers, see launch/call.py.

    Every worker inherits the `descriptors`. `refuse` is called with why the job cannot be started, `tell` with why it
    has failed; the launcher writes neither then: the program raises it.
    """

    descriptors: tuple[int, ...]
    refuse: Callable[[str], None]
    tell: Callable[[str], None]


class Plan(NamedTuple):
    """How to run a job. `environment` is that of the workers, but for what differs between them."""

    settings: Settings
    discovery: HostDiscovery
    command: Sequence[str]
    environment: dict[str, str]
    event_log: str | None = None
    output_folder: str | None = None  # where what the workers write is kept too
    bind_cores: bool = False
    capture: bool = True  # False: the worker writes straight to the launcher's streams
    prefix: bool = True
    verbose: bool = False
    caller: Caller | None = None
    shell: Sequence[str] = ()  # the words that run a command on another host; empty: there is only this one


def add_elastic_options(parser: argparse.ArgumentParser) -> None:
    """Add them to the parser of kvhvdrun."""
    group = parser.add_argument_group(
        "elastic jobs",
        "Workers may leave or join at run time. `--min-np`, `--max-np` or `--host-discovery-script` enables this.",
    )
    group.add_argument("--min-np", "--min-num-proc", metavar="N", help="minimum world size [-np, or 1]")
    group.add_argument("--max-np", "--max-num-proc", metavar="N", help="maximum world size [number of slots]")
    group.add_argument(
        "--host-discovery-script", metavar="CMD", help="prints the hosts, one HOST or HOST:N a line; run every second"
    )
    group.add_argument(
        "--slots-per-host", "--slots", metavar="N", help="slots of a host that is listed without a number [1]"
    )
    group.add_argument("--elastic-timeout", metavar="S", help="seconds to wait for enough workers [600]")
    group.add_argument("--reset-limit", metavar="N", help="end the job when it has been reset more often than this")
    group.add_argument(
        "--blacklist-cooldown-range",
        metavar=("LOWER", "UPPER"),
        nargs=2,
        help="seconds, 1 to 3600, that a slot stays empty after repeated crashes [10 300]",
    )
    group.add_argument("--event-log", metavar="FILE", help="write what happens to a file, one JSON object a line")


def is_elastic(options: argparse.Namespace) -> bool:
    """Whether these options ask for an elastic job."""
    if any(getattr(options, name) is not None for name in _DECISIVE):
        return True
    for name in _OTHERS:
        if getattr(options, name) is not None:
            raise LaunchError(message(f"--{name.replace('_', '-')} is for elastic jobs.", fix=_EXAMPLE))
    return False


def elastic_plan(
    options: argparse.Namespace, command: Sequence[str], environment: dict[str, str], caller: Caller | None = None
) -> Plan:
    """Make the plan."""
    if options.output_filename is not None:
        raise LaunchError(
            message(
                "--output-filename keeps what each rank writes, and the workers of elastic jobs change their ranks.",
                fix="omit it; lines begin with the number of the worker.",
            )
        )
    first = _whole(options.num_proc, "-np", 1)
    least = _whole(options.min_np, "--min-np", 1) or first or 1
    most = _whole(options.max_np, "--max-np", 1)
    _check_order(least, first, most)
    shell = remote_shell(options.rsh_command)
    discovery = _discovery(options, (least, first, most), are_others_used=bool(shell))
    check_count(most or max(least, first or 0, min(discovery.slots, MAX_WORKERS)), *ELASTIC_FILES)
    cfg = config()
    seconds = {
        knob: getattr(cfg, knob) if text is None else option_value(option, text, knob)
        for option, text, knob in (
            ("--elastic-timeout", options.elastic_timeout, "elastic_timeout_s"),
            ("--start-timeout", options.start_timeout, "start_timeout_s"),
        )
    }
    settings = Settings(
        job=os.urandom(8).hex(),
        min_np=least,
        max_np=most or MAX_WORKERS,
        first_np=first,
        reset_limit=_whole(options.reset_limit, "--reset-limit", 0),
        timeout_s=cfg.timeout_s,
        survivor_time_s=cfg.survivor_time_s,
        exit_timeout_s=cfg.exit_timeout_s,
        kill_grace_s=cfg.kill_grace_s,
        lease_s=cfg.lease_s,
        cooldown=_cooldown(options.blacklist_cooldown_range),
        **seconds,
    )
    # Through a pipe, Python would hold back lines for kilobytes, and lose them when the worker is killed.
    environment.setdefault("PYTHONUNBUFFERED", "1")
    return Plan(
        settings,
        discovery,
        command,
        environment,
        event_log=None if options.event_log is None else os.path.abspath(options.event_log),
        bind_cores=options.bind_cores,
        prefix=not options.no_prefix,
        verbose=options.verbose,
        caller=caller,
        shell=shell,
    )


def _whole(text: str | None, name: str, least: int) -> int | None:
    if text is None:
        return None
    try:
        count = int(text)
    except ValueError:
        count = least - 1
    if count < least:
        raise LaunchError(message(f"{name} {text}: expected a whole number of at least {least}.", fix=_EXAMPLE))
    return count


def _check_order(least: int, first: int | None, most: int | None) -> None:
    named = [("--min-np", least), ("-np", first), ("--max-np", most)]
    given = [(name, count) for name, count in named if count is not None]
    for (name, count), (other, limit) in zip(given, given[1:]):
        if count > limit:
            fix = f"{other} {count}, or {name} {limit}."
            raise LaunchError(message(f"{name} {count} is more than {other} {limit}.", fix=fix))


def _cooldown(given: Any) -> Cooldown:
    if given is None:
        return Cooldown()
    words = given.split() if isinstance(given, str) else given  # one text from a configuration file
    low, high = _COOLDOWN_LIMITS_S
    try:
        lower, upper = (float(word) for word in words)
        if not low <= lower <= upper <= high:
            raise ValueError
    except ValueError:
        raise LaunchError(
            message(
                f"--blacklist-cooldown-range {' '.join(words)}: expected two numbers of seconds, {low:g} to {high:g}, "
                "the lower one first.",
                fix="for example --blacklist-cooldown-range 10 300",
            )
        ) from None
    return Cooldown(lower, upper)


def _discovery(
    options: argparse.Namespace, counts: tuple[int, int | None, int | None], *, are_others_used: bool
) -> HostDiscovery:
    least, first, most = counts
    named = [
        name
        for name, value in (
            ("--host-discovery-script", options.host_discovery_script),
            ("-H", options.hosts),
            ("--hostfile", options.hostfile),
        )
        if value is not None
    ]
    if len(named) > 1:
        raise LaunchError(message(f"both {named[0]} and {named[1]} name hosts.", fix="give one of them."))
    default = _whole(options.slots_per_host, "--slots-per-host", 1) or 1
    if options.host_discovery_script is not None:
        return HostDiscoveryScript(options.host_discovery_script, default)
    if options.hosts is not None:
        hosts = slots_of(hosts_of_option(options.hosts), default)
    elif options.hostfile is not None:
        hosts = slots_of(hosts_of_file(options.hostfile), default)
    else:
        hosts = {"localhost": most or first or least}
    if not are_others_used:
        refuse_others(hosts)
    count = max(least, first or 0)
    if sum(hosts.values()) < count:
        raise LaunchError(
            message(
                f"{count} workers are needed, but the hosts have {sum(hosts.values())} slots.",
                fix="give more slots, as in -H localhost:N.",
            )
        )
    return FixedHosts(hosts)
