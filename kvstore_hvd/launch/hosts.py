"""The hosts of workers: their slots; ``-H``, host files and Slurm; names of this host; commands on others."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import resource
import socket
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from kvstore_hvd.base.cores import limit_of, open_below
from kvstore_hvd.errors import LaunchError, message

# Names begin without a hyphen: ssh would take them for options.
_NAME = r"\w[\w.-]*"
_ENTRY = re.compile(
    rf"(?P<user>{_NAME}@)?(?:(?P<name>{_NAME}|::1)|\[(?P<address>[0-9a-f:.]+)(?P<zone>%[\w.-]+)?\])"
    r"(?:\s*:\s*(?P<n>-?\d{1,9})|\s+slots\s*=\s*(?P<slots>-?\d{1,9}))?(?:\s+max_slots\s*=\s*\d+)?",
    re.ASCII | re.IGNORECASE,
)
# Slurm: ``a1,rack[1-2]node[01-16,20]``, with up to five brackets, and ``2(x3),1`` for the tasks of four hosts.
_RANGE = r"\d{1,18}(?:-\d{1,18})?"
_PART = rf"(?=[\w.\[])[\w.-]*(?:\[{_RANGE}(?:,{_RANGE})*\][\w.-]*){{0,5}}"
_NODES = re.compile(rf"{_PART}(?:,{_PART})*", re.ASCII)
_COUNT = r"[1-9]\d{0,8}"
_TASKS = re.compile(rf"{_COUNT}(?:\(x{_COUNT}\))?(?:,{_COUNT}(?:\(x{_COUNT}\))?)*", re.ASCII)
_MOST_HOSTS = 1 << 16
# A name without an answer in this time is none of this host.
_LOOK_UP_S, _LOOK_UP_THREADS = 2.0, 32
_DISCARD = 9  # a port
_own: dict[str, bool] = {}  # by host that has been looked up: whether it is this one

# For ssh, after the user's words: ssh takes the first of two options alike. No password is asked for, and ssh ends 45
# seconds after the last answer of a host.
_SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15")
# Variables that belong to a host or a session on it.
_OF_HOST = re.compile(
    r"(HOME|HOSTNAME|LOGNAME|MAIL|OLDPWD|PWD|SHELL|SHLVL|TMPDIR|USER|_)$|SSH_|XDG_|DBUS_|DISPLAY$|BASH_FUNC_|SLURM_"
)
# Ranks that can share memory on one host: kMaxRanks of the native engine.
MAX_WORKERS = 256

# Open files of the launcher or a daemon: two streams and a connection for each worker, and besides a listener, an event
# log, the pipes of one start, connections that are refused.
_EACH, _OWN, _STANDARD_STREAMS = 3, 24, 3
#: Runs a daemon on a host beside other steps, with all cores and all memory of the job, and without variables of MPI.
SRUN = "srun --nodes=1 --ntasks=1 --overlap --mem=0 --cpu-bind=none --mpi=none --nodelist={host}"


class Slot(NamedTuple):
    """Room for one worker: the `index`-th slot of a host."""

    host: str
    index: int  # type: ignore[assignment]  # a method of tuples has this name, too

    def __str__(self) -> str:
        return f"{self.host}:{self.index}"


class Slots:
    """The slots of all hosts, oldest host first."""

    def __init__(self, cooldown: tuple[float, float]) -> None:
        self._cooldown = cooldown  # least and most seconds without a worker after a crash
        self._hosts: dict[str, int] = {}
        # By slot or host; kept when a host goes, as it may come back.
        self._crashes: Counter[Slot | str] = Counter()
        self._usable_from: dict[Slot | str, float] = {}

    def __contains__(self, slot: Slot) -> bool:
        return slot.index < self._hosts.get(slot.host, 0)

    def __iter__(self) -> Iterator[Slot]:
        return (Slot(host, index) for host, count in self._hosts.items() for index in range(count))

    def __len__(self) -> int:
        return sum(self._hosts.values())

    def update(self, hosts: Mapping[str, int]) -> list[tuple[str, str, int]]:
        """Set the hosts and their numbers of slots; returns event, host and number of each change."""
        before = self._hosts
        # Each decision goes over all slots.
        counts = {host: min(hosts.get(host, 0), MAX_WORKERS) for host in {**before, **hosts}}
        self._hosts = {host: count for host, count in counts.items() if count}
        more = {host: count - before.get(host, 0) for host, count in counts.items()}
        return [("host_added" if more[host] > 0 else "host_removed", host, counts[host]) for host in more if more[host]]

    def crashed(self, where: Slot | str, now: float, *, had_begun: bool = True, lived_long: bool = False) -> float:
        """Count a crash in a slot, or the loss of a host; returns the seconds until it gets another worker."""
        if lived_long:  # earlier crashes count no more
            del self._crashes[where]
            self._usable_from.pop(where, None)
        earlier, (lower, upper) = self._crashes[where], self._cooldown
        self._crashes[where] += 1
        if earlier == 0 and had_begun:
            return 0.0
        seconds = min(upper, lower * 2.0 ** min(earlier - had_begun, 60))  # 2.0 ** 1024 is no float any more
        self._usable_from[where] = now + seconds
        return seconds

    def order(self, slot: Slot) -> tuple[int, str, int]:
        """A key that sorts slots; removed hosts come last."""
        hosts = list(self._hosts)
        return (hosts.index(slot.host) if slot.host in self._hosts else len(hosts), slot.host, slot.index)

    def usable_from(self, slot: Slot) -> float:
        return max(self._usable_from.get(where, 0.0) for where in (slot, slot.host))


def check_count(count: int) -> None:
    """Refuse a number of workers that a host cannot have."""
    if count > MAX_WORKERS:
        fact = f"{count} workers: a job has at most {MAX_WORKERS} workers on one host."
        raise LaunchError(message(fact, fix="start fewer workers."))
    files = limit_of(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return
    needed = _EACH * count + _OWN + max(0, open_below(files) - _STANDARD_STREAMS)
    if needed > files:
        fact = f"a job of up to {count} workers needs {needed} open files, and only {files} are allowed (ulimit -n)."
        raise LaunchError(message(fact, fix=f"ulimit -n {needed}"))


def hosts_of_file(path: str) -> list[str]:
    """The entries of a host file: ``host``, ``host slots=N`` or ``host:N`` in each line, ``#`` before comments."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            lines = [line.partition("#")[0].strip() for line in file]
    except (OSError, UnicodeDecodeError) as error:
        fact = f"the host file cannot be read: {error}."
        raise LaunchError(message(fact, fix="give the path of a text file.")) from None
    if not (entries := [line for line in lines if line]):
        raise LaunchError(message(f"the host file '{path}' names no host.", fix="one line: localhost slots=4"))
    return entries


def slots_of(entries: Iterable[str], default: int = 1, least: int = 1) -> dict[str, int]:
    """The hosts of these entries in order, with their numbers of slots; `default` where none is given."""
    slots: dict[str, int] = {}
    for entry in entries:
        match = _ENTRY.fullmatch(entry)
        if match is None or not _is_address(match["address"] or "::1"):
            fix = "for example -H localhost:4, user@node1:4 or [fd00::1]:4; letters, digits, '.', '_' and '-' make a "
            fix += "name, which begins with no '-' or '.'."
            raise LaunchError(message(f"'{entry}' is not HOST:N or 'HOST slots=N'.", fix=fix))
        # Names of users and interfaces are case-sensitive.
        host = (match["user"] or "") + (match["name"] or match["address"]).lower() + (match["zone"] or "")
        count = int(match["n"] or match["slots"] or default)
        if count < least:
            fact = f"'{entry}': a host takes at least 1 worker."
            raise LaunchError(message(fact, fix="give it a slot, or omit the host."))
        if host in slots:
            raise LaunchError(message(f"the host '{host}' is named twice.", fix="add its slots up in one entry."))
        slots[host] = count
    return slots


def _is_address(text: str) -> bool:
    try:
        return bool(socket.inet_pton(socket.AF_INET6, text))
    except OSError:
        return False


def hosts_of_allocation(variables: Mapping[str, str]) -> dict[str, int] | None:
    """The hosts of an allocation of Slurm with their numbers of tasks; None without one, or if it has one host."""
    nodes, tasks = variables.get("SLURM_JOB_NODELIST", ""), variables.get("SLURM_TASKS_PER_NODE", "")
    if not nodes or variables.get("SLURM_STEP_NUM_TASKS", "1") != "1":  # srun has started several launchers
        return None
    fix = "name the hosts: kvhvdrun -H node1:2,node2:2 ..."
    parts = re.findall(_PART, nodes, re.ASCII) if _NODES.fullmatch(nodes) else []
    hosts = list(itertools.islice((host for part in parts for host in _each(part)), _MOST_HOSTS + 1))
    if len(hosts) > _MOST_HOSTS:
        raise LaunchError(message(f"SLURM_JOB_NODELIST={nodes} has more than {_MOST_HOSTS} hosts.", fix=fix))
    if not hosts:
        raise LaunchError(message(f"SLURM_JOB_NODELIST={nodes} is not a list of hosts such as node[1-4].", fix=fix))
    host, times = Counter(host.lower() for host in hosts).most_common(1)[0]
    if times > 1:
        raise LaunchError(message(f"SLURM_JOB_NODELIST={nodes} names the host '{host}' twice.", fix=fix))
    if len(hosts) == 1:
        return None
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks) if _TASKS.fullmatch(tasks) else []
    every = (int(count) for count, times in found for _ in range(int(times or 1)))
    counts = list(itertools.islice(every, len(hosts) + 1))
    if len(hosts) != len(counts):
        fact = f"SLURM_TASKS_PER_NODE={tasks} does not tell the tasks of each host in SLURM_JOB_NODELIST={nodes}"
        fact += ", one or more."
        raise LaunchError(message(fact, fix=fix))
    return dict(zip(hosts, counts))


def _each(part: str) -> Iterator[str]:
    """The hosts of one part of a list, such as ``node[1,08-10]``."""
    before, bracket, rest = part.partition("[")
    inside, _, after = rest.partition("]")
    if not bracket:
        yield part
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", inside):
        for number in range(int(first), int(last or first) + 1):
            for end in _each(after):
                yield before + str(number).zfill(len(first)) + end


def look_up(hosts: Iterable[str]) -> None:
    """Find out which of these hosts have an address of this one, for `is_here`; once for each name."""
    unknown = [host for host in hosts if not is_here(host) and host not in _own]
    if not unknown:
        return
    import threading

    names = iter(unknown)

    def work() -> None:
        for name in names:
            _own.setdefault(name, _has_own_address(name))

    threads = [threading.Thread(target=work, daemon=True) for _ in unknown[:_LOOK_UP_THREADS]]
    for thread in threads:
        thread.start()
    until = time.monotonic() + _LOOK_UP_S
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    for name in unknown:
        _own.setdefault(name, False)  # a later answer changes no decision


def _has_own_address(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host.encode(), _DISCARD, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    for family, _, _, _, address in found:
        # With `ip_nonlocal_bind`, bind() takes any address, but connect() only own ones. Nothing is sent.
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address[0], 0, *address[2:]))
            probe.connect(address)
            if probe.getsockname()[0] == address[0]:
                return True
    return False


def is_here(host: str) -> bool:
    """Whether a name is one of this host: its own, localhost, a loopback address, or looked up to be one."""
    return _own.get(host, False) or _is_own_name(host)


@functools.cache
def _is_own_name(host: str) -> bool:
    host = host.lower()
    if host == "localhost":
        return True
    import ipaddress

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        name = socket.gethostname().lower()
        return host in (name, name.partition(".")[0])


def machine_of(host: str) -> str:
    """The name of a host; empty for all names of this one."""
    return "" if is_here(host) else host


def remote_shell(text: str | None) -> list[str]:
    """The words of ``--rsh-command``, by default ssh, with the options that a job needs; empty without ssh or srun."""
    import shlex  # not needed on one host
    import shutil

    if text in (None, SRUN) and shutil.which("ssh" if text is None else "srun") is None:
        return []
    try:
        words = shlex.split("ssh" if text is None else text)
    except ValueError as error:
        words, why = [], f": {error}"
    else:
        why = " is not there"
    if not words or shutil.which(words[0]) is None:
        raise LaunchError(message(f"--rsh-command: '{text}'{why}.", fix="name a command such as ssh."))
    return [*words, *_SSH_OPTIONS] if os.path.basename(words[0]) == "ssh" else words


def shell_command(shell: Sequence[str], host: str, command: Sequence[str]) -> list[str]:
    """The words that run a command on another host, which replaces ``{host}`` or follows the words of the shell."""
    there, name = [word.replace("{host}", host) for word in shell], os.path.basename(shell[0])
    if there == list(shell):
        there += ["--", host] if name == "ssh" else [host]  # other shells may know no end of options
    if name != "srun":  # which has no shell at its other end
        import shlex

        command = list(map(shlex.quote, command))
    return [*there, *command]


def travelling(variables: Mapping[str, str], sent: Collection[str]) -> dict[str, str]:
    """The variables of a worker for another host: without the variables that belong to a host, except `sent`."""
    return {name: value for name, value in variables.items() if name in sent or not _OF_HOST.match(name)}
