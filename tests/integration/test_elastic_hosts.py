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


def test_a_host_is_cut_off_and_comes_back_and_a_link_is_killed(marker, tmp_path):
    network_folder = tmp_path / "network"
    network_folder.mkdir()
    with Network(network_folder, 3) as network:
        network.serve(2222)
        options = ["--rsh-command", SHELL, "--hosts", ",".join(f"{name}:1" for name in network.names)]
        options += ["--blacklist-cooldown-range", "1", "2"]
        variables = {"KVHVD_TEST_SHELL_PORT": "2222", "KVHVD_LEASE": "3"}
        job = ElasticJob(tmp_path, marker, beside=network.beside, options=options, **variables)
        try:
            world = job.until_step(size=3)
            network.cut("node1")
            world = job.until_step(size=2, after=world)
            network.heal("node1")
            world = job.until_step(size=3, after=world)
            commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in network.processes("node0")}
            (worker,) = [pid for pid, words in commands.items() if b"elastic_trainee" in words]
            os.kill(worker, signal.SIGKILL)
            world = job.until_step(size=2, after=world)
            job.until_step(size=3, after=world)
            job.finish()
            job.end()
            assert_all_right(job, SAMPLES)
            assert [each["host"] for each in job.events("host_lost")] == ["node1"]
        finally:
            job.close()
