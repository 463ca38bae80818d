"""Cores: those that processes may use, as their affinity and control groups say; and pinning threads to them."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence

from kvstore_hvd.errors import ConfigError, message


def usable_cores(root: str = "/") -> list[int]:
    """The cores that this process may run on, not more than its control groups' share of CPU time."""
    # `root` is the folder in which ``/proc`` and the control groups are looked for.
    cores = sorted(os.sched_getaffinity(0))
    shares = _limits(root).values()
    return cores[: max(1, -int(-min(shares) // 1))] if shares else cores


def describe(root: str = "/") -> str:
    """What `suffice` needs to know of this process."""
    mask = sum(1 << core for core in os.sched_getaffinity(0))
    return json.dumps({"cores": f"{mask:x}", "limits": _limits(root)})


def suffice(descriptions: Sequence[str]) -> bool:
    """Whether there is a core for each of these processes of one host."""
    # All their affinities together have one for each, and so has every control group for those that are in it. So two
    # workers that are pinned to one core each have one each, and four in a container with two and a half do not.
    told = [json.loads(text) for text in descriptions]
    cores, sizes, limits = 0, dict[str, int](), dict[str, float]()
    for one in told:
        cores |= int(one["cores"], 16)
        for group, limit in one["limits"].items():
            sizes[group] = sizes.get(group, 0) + 1
            limits[group] = limit
    return len(told) <= bin(cores).count("1") and all(sizes[group] <= limit for group, limit in limits.items())


def together(descriptions: Sequence[str]) -> set[int]:
    """The cores that any of these processes may run on."""
    return {core for text in descriptions for core in _numbers(int(json.loads(text)["cores"], 16))}


def _numbers(mask: int) -> Iterator[int]:
    return (core for core in range(mask.bit_length()) if mask >> core & 1)


def _limits(root: str) -> dict[str, float]:
    """The cores' worth of time of each control group that limits this process, by what tells groups apart."""
    found = {}
    for folder in _groups(root):
        limit = _limit(folder)
        if limit is not None:
            status = os.stat(folder)
            found[f"{status.st_dev}:{status.st_ino}"] = limit
    return found


def _limit(folder: str) -> float | None:
    """That of one group; None when it has none."""
    try:
        if os.path.exists(f"{folder}/cpu.max"):  # version 2
            quota, period = _lines(f"{folder}/cpu.max")[0].split()
        else:
            quota, period = (_lines(f"{folder}/cpu.cfs_{name}_us")[0] for name in ("quota", "period"))
        return None if quota == "max" or int(quota) <= 0 else int(quota) / int(period)
    except (OSError, IndexError, ValueError, ZeroDivisionError):
        return None  # the root of all groups, or one that another namespace hides


def _groups(root: str) -> Iterator[str]:
    """The folders of the groups that may limit this process's time: its own and all above."""
    try:
        mounts, places = (_lines(os.path.join(root, "proc/self", name)) for name in ("mountinfo", "cgroup"))
    except OSError:
        return
    paths = dict[str, str]()  # by version
    for line in places:
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
        _, _, _, top, point, *_ = map(_decoded, before.split())
        # A path that does not begin with the mount's root is seen from another namespace: only that root can be seen.
        path, top = paths[kind].rstrip("/") + "/", top.rstrip("/") + "/"
        inside = path[len(top) :].rstrip("/") if path.startswith(top) and ".." not in path.split("/") else ""
        mount = os.path.join(root, point.lstrip("/"))
        yield mount
        while inside:
            yield os.path.join(mount, inside)
            inside = os.path.dirname(inside)


def _lines(path: str) -> list[str]:
    """The lines of a file in which names may be any bytes."""
    with open(path, "rb") as file:
        return [line for line in os.fsdecode(file.read()).split("\n") if line]


def _decoded(field: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


# -- Pinning threads ----------------------------------------------------------------------------------------------


def chosen_core(cores: Sequence[int], local_rank: int, local_size: int) -> int | None:
    """The core for a worker's communication threads; None when the user has chosen none."""
    # All that can be wrong is looked for on every worker, whomever it concerns.
    if not cores:
        return None
    refused = [core for core in cores if not _may_use(core)]
    if len(cores) < local_size or refused:
        why = f", of which it may not use {', '.join(map(str, refused))}" if refused else ""
        raise ConfigError(
            message(
                f"KVHVD_THREAD_AFFINITY (or HOROVOD_THREAD_AFFINITY) names the cores {', '.join(map(str, cores))} for "
                f"{local_size} workers on this host{why}.",
                fix="name one core for each worker of the host, which it may use, with commas between them.",
            )
        )
    return cores[local_rank]


def _may_use(core: int) -> bool:
    # Tried, on this thread: numbers of cores may have gaps, and neither how many there are nor the affinity that this
    # process happens to have says which ones its control group allows.
    try:
        with _pinned({core}):
            return True
    except (OSError, OverflowError):  # the latter: no system has so many
        return False


@contextlib.contextmanager
def threads_on(core: int | None) -> Iterator[None]:
    """Threads that are started inside run on this core and no other; None changes nothing."""
    if core is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(_pinned({core}))
        except OSError as error:
            fact = f"KVHVD_THREAD_AFFINITY (or HOROVOD_THREAD_AFFINITY): core {core} cannot be used: {error.strerror}."
            fix = "name cores that this container may use, or unset it."
            raise ConfigError(message(fact, fix=fix)) from None
        yield


@contextlib.contextmanager
def threads_on_any(cores: set[int]) -> Iterator[None]:
    """Threads that are started inside run on these cores, as far as this process may use them."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            stack.enter_context(_pinned(cores))
        yield


@contextlib.contextmanager
def _pinned(cores: set[int]) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
