"""Which cores processes may use, by affinity and control groups; and clocks that stand still while a process does."""

import json
import os
import subprocess
import sys

import pytest

from kvstore_hvd.base.cores import LOOK_S, Deadline, RunningClock, describe, suffice, usable_cores

CORES = list(range(8))
V2 = "41 31 0:38 {root} {point} rw,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
OTHERS = (
    "23 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n30 31 0:33 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
)


class Machine:
    def __init__(self, root):
        self.root, self.mounts = root, OTHERS

    def mount(self, point, root="/"):
        """Mount the groups, of which `root` is the highest that can be seen."""
        self.mounts += V2.format(root=root, point=point.replace(" ", r"\040"))

    def group(self, folder, quota):
        self._write(f"{folder}/cpu.max", f"{quota} 100000\n")

    def place(self, line):
        self._write("/proc/self/mountinfo", self.mounts)
        self._write("/proc/self/cgroup", f"9:name=systemd:/\n3:cpuset:/elsewhere\n{line}\n")
        return self.root

    def _write(self, path, text):
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(os.fsencode(text))


@pytest.fixture
def machine(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(CORES))
    return Machine(tmp_path)


@pytest.mark.parametrize(
    ("quota", "usable", "enough"),
    [("max", 8, 8), ("300000", 3, 3), ("250000", 3, 2), ("50000", 1, 0), ("nonsense", 8, 8), ("-1", 8, 8)],
)
def test_a_quota_of_version_2(machine, quota, usable, enough):
    """A launcher's share is rounded up; every worker needs a whole core to spin."""
    machine.mount("/sys/fs/cgroup")
    machine.group("/sys/fs/cgroup/job", quota)
    root = machine.place("0::/job")
    assert usable_cores(root) == CORES[:usable]
    for ranks in range(1, 10):
        assert suffice([describe(root)] * ranks) == (ranks <= enough)


def test_groups_above_limit_as_well(machine):
    machine.mount("/sys/fs/cgroup")
    machine.group("/sys/fs/cgroup/a/b/c", "max")
    machine.group("/sys/fs/cgroup/a/b", "600000")
    machine.group("/sys/fs/cgroup/a", "200000")
    assert usable_cores(machine.place("0::/a/b/c")) == CORES[:2]


@pytest.mark.parametrize(("top", "path"), [("/docker/1f", "/docker/1f"), ("/docker/1f", "/"), ("/", "/../x")])
def test_a_container_that_sees_its_own_group_only(machine, top, path):
    machine.mount("/sys/fs/control groups", top)
    machine.group("/sys/fs/control groups", "150000")
    assert usable_cores(machine.place(f"0::{path}")) == CORES[:2]


def test_without_proc_or_groups_the_affinity_counts(machine):
    assert usable_cores(machine.root) == CORES
    assert usable_cores(machine.place("0::/nowhere")) == CORES
    (machine.root / "proc/self/cgroup").write_text("")
    assert usable_cores(machine.root) == CORES
    assert suffice([describe(machine.root)] * 8)


def test_the_workers_affinities_and_groups_count_together():
    def affinity(*cores, **limits):
        return json.dumps({"cores": f"{sum(1 << core for core in cores):x}", "limits": limits})

    assert suffice([affinity(0), affinity(1)])
    assert not suffice([affinity(1), affinity(1)])
    assert suffice([affinity(200), affinity(0, 1), affinity(0, 1)])
    assert not suffice([affinity(3, 4)] * 3)
    cores = range(8)
    assert suffice([affinity(*cores, one=1.0), affinity(*cores, other=1.0)])
    assert not suffice([affinity(*cores, one=1.5), affinity(*cores, one=1.5)])
    assert not suffice([affinity(*cores, one=1.0, both=1.9), affinity(*cores, other=1.0, both=1.9)])


def test_the_affinity_is_that_of_this_process():
    core = min(os.sched_getaffinity(0))
    program = (
        f"import os; os.sched_setaffinity(0, {{{core}}})\n"
        "from kvstore_hvd.base import cores; from kvstore_hvd import native\n"
        "print(cores.usable_cores(), cores.suffice([cores.describe()] * 2), native.Segment.create(2).has_core_for_each)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.stdout == f"[{core}] False False\n", done.stderr


class Time:
    now = 100.0

    def __call__(self):
        return self.now

    def pass_by(self, seconds):
        self.now += seconds


@pytest.fixture
def time(monkeypatch):
    time = Time()
    monkeypatch.setattr("kvstore_hvd.base.cores.time.monotonic", time)
    return time


def test_time_passes_while_it_is_looked_at(time):
    """What this process was stopped does not count."""
    clock = RunningClock()
    for _ in range(10):
        time.pass_by(LOOK_S)
        clock.now()
    assert clock.now() == pytest.approx(100.0 + 10 * LOOK_S)
    clock = RunningClock()
    for seconds, elapsed in ((0.1, 0.1), (1000.0, 0.2), (0.3, 0.5)):
        time.pass_by(seconds)
        assert clock.elapsed() == pytest.approx(elapsed)


def test_a_machine_under_load_does_not_stop_the_clock(time):
    """A process that always comes late to its looks still comes to an end."""
    deadline = Deadline(10.0)
    for _ in range(101):
        time.pass_by(5.0)
        left = deadline.left()
    assert left <= 0
    assert deadline.wait_s() == 0


def test_an_earlier_deadline_counts_for_the_later_one(time):
    """Somebody who waits for it looks at no other."""
    later = Deadline(10.0)
    for _ in range(2):
        earlier = later.within(4.0)
        while earlier.left() > 0:
            time.pass_by(0.5)
    assert later.left() == later.within(4.0).left() == pytest.approx(2.0)
