"""The cores and the time that processes get, and other limits of the system."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from kvstore_hvd.errors import ConfigError, message


def usable_cores(root: str = "/") -> list[int]:
    """The cores that this process may run on, at most as many as its control groups' share of CPU time."""
    cores = sorted(os.sched_getaffinity(0))
    shares = _limits(root).values()
    return cores[: max(1, -int(-min(shares) // 1))] if shares else cores


def describe(root: str = "/") -> str:
    """This process, for `suffice`; `root` is the folder of ``/proc`` and of the control groups."""
    mask = sum(1 << core for core in os.sched_getaffinity(0))
    return json.dumps({"cores": f"{mask:x}", "limits": _limits(root)})


def suffice(descriptions: Sequence[str]) -> bool:
    """Whether there is a core for each of these processes of one host."""
    # The union of all affinities, and every control group, must have a core for each of their processes: two workers
    # that are pinned to one core each suffice, four workers in a container with two and a half cores do not.
    limits = [json.loads(text)["limits"] for text in descriptions]
    sizes = Counter(group for each in limits for group in each)
    has_room = all(sizes[group] <= limit for each in limits for group, limit in each.items())
    return has_room and len(descriptions) <= len(together(descriptions))


def together(descriptions: Sequence[str]) -> set[int]:
    """The cores that any of these processes may run on."""
    masks = [int(json.loads(text)["cores"], 16) for text in descriptions]
    return {core for mask in masks for core in range(mask.bit_length()) if mask >> core & 1}


def _limits(root: str) -> dict[str, float]:
    """The CPU time in cores of each control group that limits this process, by the device and inode of its folder."""
    found = {}
    for folder in _groups(root):
        if (limit := _limit(folder)) is not None:
            status = os.stat(folder)
            found[f"{status.st_dev}:{status.st_ino}"] = limit
    return found


def _limit(folder: str) -> float | None:
    """The limit of one group, if any."""
    try:
        if os.path.exists(f"{folder}/cpu.max"):  # version 2
            quota, period = _lines(f"{folder}/cpu.max")[0].split()
        else:
            quota, period = (_lines(f"{folder}/cpu.cfs_{name}_us")[0] for name in ("quota", "period"))
        return None if quota == "max" or int(quota) <= 0 else int(quota) / int(period)
    except (OSError, IndexError, ValueError, ZeroDivisionError):
        return None  # the root of all groups, or a group that another namespace hides


def _groups(root: str) -> Iterator[str]:
    """The folders of this process's groups and of all groups above."""
    try:
        mounts, groups = (_lines(os.path.join(root, "proc/self", name)) for name in ("mountinfo", "cgroup"))
    except OSError:
        return
    paths = dict[str, str]()  # by version
    for line in groups:
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0":
            paths["cgroup2"] = path
        elif "cpu" in controllers.split(","):
            paths["cgroup"] = path
    for line in mounts:
        # proc(5): ... root, mount point, options ... - type, source, options
        before, _, behind = line.partition(" - ")
        kind, _, options = behind.split(" ", 2)
        if kind not in paths or (kind == "cgroup" and "cpu" not in options.split(",")):
            continue
        fields = (re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field) for field in before.split())
        _, _, _, top, point, *_ = fields
        # A path outside of the mount's root belongs to another namespace: only the root itself can be seen.
        path, top = paths[kind].rstrip("/") + "/", top.rstrip("/") + "/"
        is_within = path.startswith(top) and ".." not in path.split("/")
        mount, below = os.path.join(root, point.lstrip("/")), path[len(top) :].rstrip("/") if is_within else ""
        yield mount
        while below:
            yield os.path.join(mount, below)
            below = os.path.dirname(below)


def _lines(path: str) -> list[str]:
    """The lines of a file whose names may have any bytes."""
    with open(path, "rb") as file:
        return [line for line in os.fsdecode(file.read()).split("\n") if line]


# -- Pinning threads ----------------------------------------------------------------------------------------------


def chosen_cores(cores: Sequence[int], local_rank: int, local_size: int) -> Sequence[int]:
    """The core for a worker's communication threads; none if the user has chosen none. Checks those of all workers."""

    def may_use(core: int) -> bool:
        # An attempt shows it: numbers of cores may have gaps, and the affinity may have fewer cores than the control
        # group allows.
        with threads_on({core}):
            return os.sched_getaffinity(0) == {core}

    refused = [core for core in cores if not may_use(core)]
    if cores and (refused or len(cores) < local_size):
        why = f", of which it may not use {', '.join(map(str, refused))}" if refused else ""
        named = f"KVHVD_THREAD_AFFINITY (or HOROVOD_THREAD_AFFINITY) names the cores {', '.join(map(str, cores))}"
        fix = "name one core for each worker of the host, which it may use, with commas between them."
        raise ConfigError(message(f"{named} for {local_size} workers on this host{why}.", fix=fix))
    return cores[local_rank : local_rank + 1]


@contextlib.contextmanager
def threads_on(cores: Collection[int]) -> Iterator[None]:
    """Pin threads that are started inside the context to these cores, as far as this process may use them."""
    before = os.sched_getaffinity(0)
    try:
        with contextlib.suppress(OSError, OverflowError):  # OverflowError: no system has so many cores
            os.sched_setaffinity(0, cores)
        yield
    finally:
        os.sched_setaffinity(0, before)


# -- Other limits of this process --------------------------------------------------------------------------------------


def open_below(limit: int) -> int:
    """The number of open descriptors below the limit."""
    try:
        entries = os.listdir("/proc/self/fd")
    except OSError as error:
        return limit if error.errno in (errno.EMFILE, errno.ENFILE) else 0
    return sum(int(entry) < limit for entry in entries) - 1  # that of the listing itself


def limit_of(kind: int) -> int:
    """The soft limit of this process, see `resource.getrlimit`; unlimited if it is unknown."""
    # If the limit is unknown, the later system call fails and is reported.
    try:
        return resource.getrlimit(kind)[0]
    except OSError:
        return resource.RLIM_INFINITY


# -- Clocks for limits on waits ----------------------------------------------------------------------------------------
#
# A process may be stopped (SIGSTOP, a frozen container, a suspended machine) or get no core for seconds, often together
# with the processes that it waits for. That time does not count as a wait.

# Longest time in seconds between two readings of a clock during a wait.
LOOK_S = 0.5
# Seconds between two readings from which on the process counts as stopped in between.
_LONGEST_S = 2 * LOOK_S
# Seconds that the clock advances by for such a pair of readings.
_MOMENT_S = 0.1


class RunningClock:
    """``time.monotonic()`` without the time in which the process was stopped.

    For one thread, which reads the clock at least every `LOOK_S`.
    """

    def __init__(self) -> None:
        self._read_at = self._now = self._begun_at = time.monotonic()

    def elapsed(self) -> float:
        """Seconds since the clock was made."""
        return self.now() - self._begun_at

    def now(self) -> float:
        read_at = time.monotonic()
        gap_s = read_at - self._read_at
        self._now += gap_s if gap_s <= _LONGEST_S else _MOMENT_S
        self._read_at = read_at
        return self._now


class Deadline:
    """A limit in seconds of a `RunningClock`, from now on. For one thread, which looks at least every `LOOK_S`."""

    # A wait for an earlier limit reads that limit only, and the clock of the later one would count the process as
    # stopped. Therefore `within` makes the earlier limit, with the same clock.

    def __init__(self, limit_s: float, clock: RunningClock | None = None) -> None:
        self._clock = clock or RunningClock()
        self._end = self._clock.now() + limit_s

    def within(self, limit_s: float) -> Deadline:
        """A deadline in `limit_s` seconds, or that of this one if it is sooner."""
        return Deadline(min(limit_s, self.left()), self._clock)

    def left(self) -> float:
        """Seconds until the deadline; 0 or less after it."""
        return self._end - self._clock.now()

    def wait_s(self, longest_s: float = LOOK_S) -> float:
        """Seconds to wait before the next reading; 0 after the deadline."""
        return max(0.0, min(self.left(), longest_s, LOOK_S))
