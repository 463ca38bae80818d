"""Hosts that are lost and come back while a Gluon network is trained; they are namespaces of this machine.

As in test_elastic_faults, the workers have equal parameters in the end, those of one process that has done the same
steps, and each sample was counted once.
"""

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


def test_a_host_is_cut_off_and_comes_back_and_a_link_is_killed(marker, tmp_path):
    network_folder = tmp_path / "network"
    network_folder.mkdir()
    with Network(network_folder, 3) as network:
        hosts = ",".join(f"{name}:2" for name in network.names)
        job = HostsJob(tmp_path, marker, network, workers=6, options=["--hosts", hosts])
        try:
            world = job.until_step(size=6)
            network.cut("node1")
            world = job.until_step(size=4, after=world)
            network.heal("node1")
            world = job.until_step(size=6, after=world)
            os.kill(job.pid(job.of_host("node0")[0]), signal.SIGKILL)
            world = job.until_step(size=5, after=world)
            job.until_step(size=6, after=world)
            job.finish()
            job.end()
            assert_all_right(job, SAMPLES)
            assert [each["host"] for each in job.events("host_lost")] == ["node1"]
        finally:
            job.close()
