"""Which cores processes and threads may use; clocks that stand still while a process does; texts of all workers."""

import errno
import json
import os
import threading
from types import SimpleNamespace

import pytest

from kvstore_hvd.base.cores import Deadline, RunningClock, chosen_cores, describe, suffice, threads_on, usable_cores
from kvstore_hvd.errors import ConfigError
from kvstore_hvd.world import process
from kvstore_hvd.world.topology import exchange
from support.fake_native import fake_world

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


@pytest.mark.parametrize(("quota", "usable"), [("-1", 8), ("250000", 3)])
def test_a_quota_of_version_1(machine, quota, usable):
    machine.mounts += "31 30 0:34 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
    for name, text in (("quota", quota), ("period", "100000")):
        machine._write(f"/sys/fs/cgroup/cpu/job/cpu.cfs_{name}_us", f"{text}\n")
        machine._write(f"/sys/fs/cgroup/cpuset/job/cpu.cfs_{name}_us", "100000\n")  # not of this hierarchy
    assert usable_cores(machine.place("4:cpu,cpuacct:/job")) == CORES[:usable]


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


@pytest.fixture
def cores(monkeypatch):
    """The cores of a machine some of which are offline, and one of which the container may not use; all others are."""
    usable, current = {0, 2, 4, 6, 11}, [0]

    def pin(pid, wanted):
        if not wanted & usable:
            if max(wanted) > 1 << 31:
                raise OverflowError("CPU number too large")
            raise OSError(errno.EINVAL, "Invalid argument")
        current[:] = wanted & usable

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(current))
    monkeypatch.setattr(os, "sched_setaffinity", pin)
    return usable


def test_each_worker_of_the_host_has_its_core(cores):
    """Any core that may be used, whatever it is called, and wherever the process runs now."""
    assert [chosen_cores((6, 0, 11), rank, 3) for rank in range(3)] == [(6,), (0,), (11,)]
    assert chosen_cores((6, 0, 11), 1, 2) == (0,)
    assert chosen_cores((), 1, 2) == ()
    assert os.sched_getaffinity(0) == {0}


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        ((0,), r"for 2 workers on this host\."),
        ((0, 3), r"on this host, of which it may not use 3\."),
        ((0, 2, 1 << 40), "use 1099511627776"),
    ],
)
def test_what_cannot_be_raises_on_every_worker(cores, chosen, text):
    for rank in (0, 1):
        with pytest.raises(ConfigError, match=text):
            chosen_cores(chosen, rank, 2)
    assert os.sched_getaffinity(0) == {0}


def test_threads_started_inside_run_there_and_the_caller_where_it_did():
    before = os.sched_getaffinity(0)
    core, seen = max(before), []
    with threads_on([core]):
        thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
    assert seen == [{core}]
    assert os.sched_getaffinity(0) == before
    for unusable in ([], [100_000]):
        with threads_on(unusable):
            assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    "text", ["", "/tmp/\udcff", "\ud800", "x" * 16385], ids=["nothing", "bytes", "surrogate", "long"]
)
def test_workers_tell_each_other_texts(text):
    """Each in its place, of any length; a file name that is no UTF-8 as Python shows it."""
    with fake_world(rank=2, size=3) as connection:
        assert exchange(connection, process.current().topology, "test", text) == ["", "", text]
        assert len(connection.requests) == 2  # their lengths, and themselves


@pytest.fixture
def time(monkeypatch):
    passed = [100.0]
    monkeypatch.setattr("kvstore_hvd.base.cores.time.monotonic", lambda: sum(passed))
    return SimpleNamespace(pass_by=passed.append)


def test_time_passes_while_it_is_looked_at(time):
    """What this process was stopped does not count."""
    clock = RunningClock()
    for _ in range(10):
        time.pass_by(0.5)
        clock.now()
    assert clock.now() == pytest.approx(105.0)
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
    waits = [Deadline(limit_s).wait_s(longest_s) for limit_s, longest_s in ((0.1, 0.3), (9.0, 0.3), (9.0, 2.0))]
    assert waits == pytest.approx([0.1, 0.3, 0.5])  # it looks at least that often


def test_an_earlier_deadline_counts_for_the_later_one(time):
    """Somebody who waits for it looks at no other."""
    later = Deadline(10.0)
    for _ in range(2):
        earlier = later.within(4.0)
        while earlier.left() > 0:
            time.pass_by(0.5)
    assert later.left() == later.within(4.0).left() == pytest.approx(2.0)
