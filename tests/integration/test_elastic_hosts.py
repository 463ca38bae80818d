"""Hosts that are lost and come back while a Gluon network is trained; they are namespaces of this machine.

As in test_elastic_faults, the workers have equal parameters in the end, those of one process that has done the same
steps, and each sample was counted once.
"""

import contextlib
import os
import signal

import pytest
from hosts.job import HostsJob
from hosts.network import Network, unavailable

from support.elastic_schedule import assert_all_right

SAMPLES = 240
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.timing,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
]


@pytest.fixture
def start(marker, tmp_path):
    """Start a job on three hosts; what is left of it after a failure is ended."""
    folder = tmp_path / "network"
    folder.mkdir()
    with Network(folder, 3) as network, contextlib.ExitStack() as stack:

        def start_one(slots, **variables):
            hosts = ",".join(f"{name}:{slots}" for name in network.names)
            job = HostsJob(tmp_path, marker, network, workers=3 * slots, options=["--hosts", hosts], **variables)
            stack.callback(job.close)
            return job

        yield start_one


def finish(job):
    job.finish()
    job.end()
    assert_all_right(job, SAMPLES)


def test_a_host_is_cut_off_and_comes_back_and_a_link_is_killed(start):
    job = start(2)
    world = job.until_step(size=6)
    job.network.cut("node1")
    world = job.until_step(size=4, after=world)
    job.network.heal("node1")
    world = job.until_step(size=6, after=world)
    os.kill(job.pid(job.of_host("node0")[0]), signal.SIGKILL)
    world = job.until_step(size=5, after=world)
    job.until_step(size=6, after=world)
    finish(job)
    assert [each["host"] for each in job.events("host_lost")] == ["node1"]


def test_two_hosts_do_not_reach_each_other(start):
    """The launcher reaches both: one of them is left out, and comes back when they do."""
    job = start(1, KVHVD_START_TIMEOUT="4", KVHVD_LINK_TIMEOUT="2")
    world = job.until_step(size=3)
    job.network.part("node1", "node2")
    world = job.until_step(size=2, after=world)
    job.network.rejoin("node1", "node2")
    job.until_step(size=3, after=world)
    finish(job)
    note = job.events("host_left_out")[0]
    assert (note["host"], note["unreached"]) == ("node2", ["node1"])
    assert "host node2 is left out for " in job.err
    assert job.events("host_lost") == []
