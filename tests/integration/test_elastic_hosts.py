"""Hosts that are lost and come back while a Gluon network is trained; they are namespaces of this machine.

Each has one worker, so that sums have the bits of one host's. As in test_elastic_faults, the workers have equal
parameters in the end, those of one process that has done the same steps, and each sample was counted once.
"""

import os
import signal
from pathlib import Path

import pytest
from hosts.network import Network, unavailable

from support.elastic import ElasticJob
from support.elastic_schedule import assert_all_right

SAMPLES = 240
SHELL = str(Path(__file__).parents[1] / "support" / "remote_shell.py")
pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.timing,
    pytest.mark.skipif(bool(unavailable()), reason=unavailable()),
]


@pytest.fixture
def network(tmp_path):
    folder = tmp_path / "network"
    folder.mkdir()
    with Network(folder, 3) as network:
        network.serve(2222)
        yield network


@pytest.fixture
def start(marker, tmp_path, network):
    """Start a job on all hosts; what is left of it after a failure is ended."""
    started = []

    def start_one(**variables):
        options = ["--rsh-command", SHELL, "--hosts", ",".join(f"{name}:1" for name in network.names)]
        options += ["--blacklist-cooldown-range", "1", "2"]
        variables = {"KVHVD_TEST_SHELL_PORT": "2222", **variables}
        started.append(ElasticJob(tmp_path, marker, beside=network.beside, options=options, **variables))
        return started[-1]

    yield start_one
    for job in started:
        job.close()


def finish(job):
    job.finish()
    job.end()
    assert_all_right(job, SAMPLES)


def process(network, host, word):
    """The process of a host whose command has this word."""
    commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in network.processes(host)}
    (found,) = [pid for pid, words in commands.items() if word in words]
    return found


def test_a_host_is_cut_off_and_comes_back_and_a_link_is_killed(start, network):
    job = start(KVHVD_LEASE="3")
    world = job.until_step(size=3)
    network.cut("node1")
    world = job.until_step(size=2, after=world)
    network.heal("node1")
    world = job.until_step(size=3, after=world)
    os.kill(process(network, "node0", b"elastic_trainee"), signal.SIGKILL)
    world = job.until_step(size=2, after=world)
    job.until_step(size=3, after=world)
    finish(job)
    assert [each["host"] for each in job.events("host_lost")] == ["node1"]


def test_two_hosts_do_not_reach_each_other(start, network):
    """The launcher reaches both: one of them is left out, and comes back when they do."""
    job = start(KVHVD_START_TIMEOUT="4", KVHVD_LINK_TIMEOUT="2")
    world = job.until_step(size=3)
    network.part("node1", "node2")
    world = job.until_step(size=2, after=world)
    network.rejoin("node1", "node2")
    job.until_step(size=3, after=world)
    finish(job)
    note = job.events("host_left_out")[0]
    assert (note["host"], note["unreached"]) == ("node2", ["node1"])
    assert "host node2 is left out for " in job.err
    assert job.events("host_lost") == []
