"""Which cores processes may use, by affinity and control groups."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore_hvd.base.cores import describe, suffice, usable_cores

CORES = list(range(8))
V1 = "31 23 0:29 {root} {point} rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"
V2 = "41 31 0:38 {root} {point} rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
OTHERS = (
    "23 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n30 31 0:33 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
)


class Machine:
    """A root folder with control groups."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.mounts, self.places = OTHERS, "9:name=systemd:/\n3:cpuset:/elsewhere\n"

    def mount(self, version: int, point: str, root: str = "/") -> None:
        """Mount the groups of a version, of which `root` is the highest that can be seen."""
        self.mounts += (V1 if version == 1 else V2).format(root=root, point=point.replace(" ", r"\040"))

    def group(self, folder: str, quota: str, period: int = 100_000) -> None:
        """Make a group of version 2."""
        self._write(f"{folder}/cpu.max", f"{quota} {period}\n")

    def group_v1(self, folder: str, quota: int, period: int = 100_000) -> None:
        """Make a group of version 1."""
        self._write(f"{folder}/cpu.cfs_quota_us", f"{quota}\n")
        self._write(f"{folder}/cpu.cfs_period_us", f"{period}\n")

    def place(self, line: str) -> Path:
        """Put the process there; returns the root."""
        self._write("/proc/self/mountinfo", self.mounts)
        self._write("/proc/self/cgroup", self.places + line + "\n")
        return self.root

    def _write(self, path: str, text: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(os.fsencode(text))


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(CORES))
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("quota", "usable", "enough"),
    [("max", 8, 8), ("300000", 3, 3), ("250000", 3, 2), ("50000", 1, 0), ("nonsense", 8, 8), ("-1", 8, 8)],
)
def test_a_quota_of_version_2(machine: Machine, quota: str, usable: int, enough: int) -> None:
    """A launcher's share is rounded up; every worker needs a whole core to spin."""
    machine.mount(2, "/sys/fs/cgroup")
    machine.group("/sys/fs/cgroup/job", quota)
    root = machine.place("0::/job")
    assert usable_cores(root) == CORES[:usable]
    for ranks in range(1, 10):
        assert suffice([describe(root)] * ranks) == (ranks <= enough)


def test_groups_above_limit_as_well(machine: Machine) -> None:
    machine.mount(2, "/sys/fs/cgroup")
    machine.group("/sys/fs/cgroup/a/b/c", "max")
    machine.group("/sys/fs/cgroup/a/b", "600000")
    machine.group("/sys/fs/cgroup/a", "200000")
    assert usable_cores(machine.place("0::/a/b/c")) == CORES[:2]


@pytest.mark.parametrize(
    ("top", "path"), [("/", "/"), ("/docker/1f", "/docker/1f"), ("/docker/1f", "/"), ("/", "/../x")]
)
def test_a_container_that_sees_its_own_group_only(machine: Machine, top: str, path: str) -> None:
    machine.mount(2, "/sys/fs/control groups", top)
    machine.group("/sys/fs/control groups", "150000")
    assert usable_cores(machine.place(f"0::{path}")) == CORES[:2]


def test_without_proc_or_groups_the_affinity_counts(machine: Machine) -> None:
    assert usable_cores(machine.root) == CORES
    assert usable_cores(machine.place("0::/nowhere")) == CORES
    (machine.root / "proc/self/cgroup").write_text("")
    assert usable_cores(machine.root) == CORES
    assert suffice([describe(machine.root)] * 8)


def affinity(*cores: int, **limits: float) -> str:
    return json.dumps({"cores": f"{sum(1 << core for core in cores):x}", "limits": limits})


def test_the_workers_affinities_count_together() -> None:
    assert suffice([affinity(0), affinity(1)])
    assert not suffice([affinity(1), affinity(1)])
    assert suffice([affinity(0, 1), affinity(0, 1)])
    assert suffice([affinity(200), affinity(0, 1), affinity(0, 1)])
    assert not suffice([affinity(3, 4)] * 3)


def test_each_group_has_to_have_enough_for_its_workers() -> None:
    cores = range(8)
    assert suffice([affinity(*cores, one=1.0), affinity(*cores, other=1.0)])
    assert not suffice([affinity(*cores, one=1.5), affinity(*cores, one=1.5)])
    assert not suffice([affinity(*cores, one=1.0, both=1.9), affinity(*cores, other=1.0, both=1.9)])
    assert suffice([affinity(*cores, one=1.0), affinity(*cores)])


def test_the_affinity_is_that_of_this_process() -> None:
    core = min(os.sched_getaffinity(0))
    program = (
        f"import os; os.sched_setaffinity(0, {{{core}}})\n"
        "from kvstore_hvd.base import cores; from kvstore_hvd import native\n"
        "print(cores.usable_cores(), cores.suffice([cores.describe()] * 2), native.Segment.create(2).has_core_for_each)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.stdout == f"[{core}] False False\n", done.stderr
