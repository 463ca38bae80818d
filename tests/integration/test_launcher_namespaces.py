"""Jobs of kvhvdrun on several hosts, which are namespaces of this machine, behind a remote shell over their network."""

import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from hosts.network import Network, unavailable

from support.launchers import kvhvdrun
from support.patience import patient

pytestmark = [pytest.mark.alike, pytest.mark.skipif(bool(unavailable()), reason=unavailable())]

PORT = "2222"
SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")
SHELL = f"--rsh-command {Path(__file__).parents[1] / 'support' / 'remote_shell.py'}"


@pytest.fixture
def network(tmp_path):
    """Two hosts that run commands; their interfaces have different names, which Horovod refuses (its issue 1724)."""
    with Network(tmp_path, 2) as made:
        made.rename("node1", "lan7")
        made.serve(int(PORT))
        yield made


@pytest.fixture
def begin(network, start):
    """Start a job beside these hosts."""

    def begin_one(options, *program, **more):
        words, shell = [*network.beside, *kvhvdrun().prefix], {"KVHVD_TEST_SHELL_PORT": PORT}
        return start(f"{SHELL} -H node0:1,node1:2 {options}", *program, launcher=words, **shell, **more)

    return begin_one


def until_nothing_is_left(network):
    """But for the servers of the shell, or of ssh."""

    def left(name):
        found = [Path(f"/proc/{pid}/cmdline") for pid in network.processes(name)]
        return any(path.exists() and not re.search(b"--serve|/sshd", path.read_bytes()) for path in found)

    limit = time.monotonic() + patient(15)
    while any(left(name) for name in network.names):
        assert time.monotonic() < limit, "something is left"
        time.sleep(0.01)


SUM = """
import numpy as np
import kvstore_hvd
topology = kvstore_hvd.init()
total = kvstore_hvd.allreduce(np.full(100_000, topology.rank + 1.0), 'x')
report(rank=topology.rank, place=[topology.local_rank, topology.cross_rank], total=total[[0, -1]].tolist())
"""


@pytest.mark.parametrize("options", ["", "--min-np 3"])
def test_places_and_sums(begin, options):
    reports = begin(options, SUM).end().reports()
    assert [(one["rank"], one["place"]) for one in reports] == [(0, [0, 0]), (1, [0, 1]), (2, [1, 0])]
    assert [one["total"] for one in reports] == [[6.0, 6.0]] * 3


@pytest.mark.slow
def test_a_host_behind_a_slow_link_that_drops_packets_is_not_silent(network, begin):
    """One message takes several times as long as a host may say nothing."""
    program = """
import numpy as np
import kvstore_hvd
kvstore_hvd.init()
say('met\\n')
wait_for('go')
begun = time.monotonic()
got = kvstore_hvd.broadcast(np.full(100_000, rank + 1.0), 0, 'x')
report(rank=rank, got=got[[0, -1]].tolist(), took=time.monotonic() - begun)
"""
    job = begin("", program, KVHVD_LINK_TIMEOUT="2").until_printed("met", 3)
    network.shape("1mbit", "node0", burst="16kb", latency="10ms")
    (job.folder / "go").touch()
    reports = job.end().reports()
    assert [one["got"] for one in reports] == [[1.0, 1.0]] * 3
    assert reports[2]["took"] > 4


@pytest.mark.skipif(SSHD is None, reason="there is no sshd")
@pytest.mark.parametrize("options", ["", "--min-np 3"])
def test_ssh(network, start, tmp_path, options):
    """As above, and nothing is left on any host when the launcher is killed."""
    Path("/run/sshd").mkdir(exist_ok=True)
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / key], check=True)
    (tmp_path / "server").write_text(
        f"HostKey {tmp_path}/host\nAuthorizedKeysFile {tmp_path}/user.pub\nStrictModes no\nPidFile none\n"
    )
    client = f"IdentityFile {tmp_path}/user\nStrictHostKeyChecking no\nUserKnownHostsFile /dev/null\nLogLevel ERROR\n"
    (tmp_path / "client").write_text(client)
    servers = [
        subprocess.Popen([network.folder / "agent", name, f"exec {SSHD} -D -f {tmp_path}/server"])
        for name in network.names
    ]

    def begin(program):
        words = [*network.beside, *kvhvdrun().prefix, "--rsh-command", f"ssh -F {tmp_path}/client"]
        return start(f"-H node0:1,node1:2 {options}", program, launcher=words)

    try:
        reports = begin(SUM).end().reports()
        assert [(one["rank"], one["total"]) for one in reports] == [(rank, [6.0, 6.0]) for rank in range(3)]
        begin("say('ready\\n')\nforever()").until_printed("ready", 3).end(-signal.SIGKILL, signal.SIGKILL)
        until_nothing_is_left(network)
    finally:
        for server in servers:
            server.terminate()
            server.wait()


def test_the_launcher_is_killed(begin, network):
    """No host has anything left of the job, whatever its workers have started."""
    program = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(['sleep', '1000'], start_new_session=True)
say('ready\\n')
forever()
"""
    job = begin("", program, KVHVD_KILL_GRACE="0.5").until_printed("ready", 3)
    job.end(-signal.SIGKILL, signal.SIGKILL)
    until_nothing_is_left(network)
