"""Jobs of kvhvdrun on several hosts, which are this one or namespaces: a program stands for ssh."""

import contextlib
import os
import re
import signal
from pathlib import Path

import pytest

from hosts.network import Network, unavailable
from kvstore_hvd.world.links import own_addresses
from support.jobs import processes, status_of, stopped
from support.launchers import kvhvdrun
from support.patience import until

pytestmark = pytest.mark.alike

SHELL = f"--rsh-command {Path(__file__).parents[1] / 'support' / 'remote_shell.py'}"
PLACE = """
names = ('RANK', 'SIZE', 'LOCAL_RANK', 'LOCAL_SIZE', 'CROSS_RANK', 'CROSS_SIZE')
place, cores = [int(os.environ['HOROVOD_' + name]) for name in names], sorted(os.sched_getaffinity(0))
mine = [os.environ[name] for name in ('KVHVD_SLOT', 'MINE', 'DISPLAY', 'OMP_NUM_THREADS')]
report(rank=rank, place=place, mine=mine, cores=cores, hosts=os.environ.get('KVHVD_HOSTS', '').split(',')[1:],
       is_there=os.environ['HOME'] == '/there', folder=os.getcwd(), stdin=sys.stdin.read())
"""


def shells(job):
    """The processes that stand for ssh, by the names of their hosts."""
    found = {}
    for pid in processes(job.marker):
        with contextlib.suppress(OSError):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            if len(words) > 2 and words[1].endswith(b"remote_shell.py"):
                found[words[2].decode()] = pid
    return found


@pytest.mark.parametrize(
    ("options", "is_there"), [("--bind-cores", [True, False, False, True]), ("--min-np 4 -x HOME", [False] * 4)]
)
def test_workers_get_their_places(run, tmp_path, options, is_there):
    """Variables of the job come along, those of the host stay unless sent; what a login shell prints is passed over."""
    (tmp_path / "input").write_text("given")
    hosts = "node1:1,localhost:2,node2:1"
    with (tmp_path / "input").open() as file:
        job = run(
            f"-np 4 {SHELL} -H {hosts} {options} -x MINE=ä= -x DISPLAY=",
            PLACE,
            stdin=file,
            MINE="another",
            DISPLAY=":1",
            OMP_NUM_THREADS="77",
        )
    assert job.err == ""
    reports = job.reports()
    assert [one["place"] for one in reports] == [
        [0, 4, 0, 1, 0, 3],
        [1, 4, 0, 2, 1, 3],
        [2, 4, 1, 2, 0, 1],
        [3, 4, 0, 1, 2, 3],
    ]
    slots = ["node1:0", "localhost:0", "localhost:1", "node2:0"]
    assert [one["mine"] for one in reports] == [[slot, "ä=", "", "77"] for slot in slots]
    assert [one["is_there"] for one in reports] == is_there
    assert {(one["folder"], one["stdin"]) for one in reports} == {(str(tmp_path), "")}
    me = os.uname().nodename
    cores, is_elastic = sorted(os.sched_getaffinity(0)), "--min-np" in options
    half = len(cores) // 2
    shares = [cores] * 4 if is_elastic else [cores, cores[:half] or cores, cores[half:], cores]
    assert [one["cores"] for one in reports] == shares
    assert [one["hosts"] for one in reports] == [[] if is_elastic else [me, me, "node2"]] * 4


@pytest.mark.parametrize("options", ["", "--min-np 2"])
def test_an_allocation_of_slurm(run, tmp_path, monkeypatch, options):
    """Its hosts are used, as many of their tasks as are wanted, and srun is the way to them."""
    (tmp_path / "srun").symlink_to(Path(SHELL.split()[1]).with_name("fake_srun.py"))
    program = """
report(rank=rank, slot=os.environ['KVHVD_SLOT'], node=os.environ.get('SLURMD_NODENAME'), folder=os.getcwd())
say('a' * 10_000 + '\\n' * 3)  # srun cuts long lines
"""
    slurm = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_TASKS_PER_NODE": "2,3"}
    job = run(f"-np 3 --start-timeout 10 {options}", program, **slurm, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert job.err == ""
    slots = ["node1:0", "node1:1", "node2:0", "node2:1", "node2:2"][: 5 if options else 3]
    places = [{"rank": rank, "slot": slot, "node": slot.partition(":")[0]} for rank, slot in enumerate(slots)]
    assert job.reports() == [{**place, "folder": str(tmp_path)} for place in places]
    assert job.out.count("a" * 10_000) == len(slots)


@pytest.mark.parametrize("options", ["-H {}:2", "--min-np 2 -H {}:2", "--min-np 2 --host-discovery-script 'echo {}:2'"])
def test_an_address_of_this_host_needs_no_shell(run, options):
    address = own_addresses()[0].partition(":")[0]
    assert run(f"--rsh-command false {options.format(address)}", "say(f'{rank}')").err == ""


def test_hosts_that_are_one_share_memory(run):
    program = """
import numpy as np
import kvstore_hvd
topology = kvstore_hvd.init()
report(rank=topology.rank, size=topology.local_size, total=float(kvstore_hvd.allreduce(np.ones(1), 'x')[0]))
"""
    reports = run(f"{SHELL} -H node1:2,node2:1", program).reports()
    assert reports == [{"rank": rank, "size": 3, "total": 3.0} for rank in range(3)]


def test_all_hosts_that_do_not_come_are_told_with_the_last_words_of_the_shell(run):
    """No worker is started anywhere."""
    job = run(f"{SHELL} -H localhost:1,refused:1,node1:1,babbling:1,bare:2,old:1,homeless:1", "say('begun')", code=126)
    assert job.out == ""
    head, *hosts, fix = job.err.partition("kvhvdrun: the job ")[2].splitlines()
    assert head == "cannot start on 5 of its hosts."
    told = {name: text for name, _, text in (line.strip().partition(": ") for line in hosts)}
    expected = {
        "refused": "its daemon did not come: 'remote_shell.py' exited with code 1. "
        "'remote_shell.py' says: ssh: connect to host refused port 22: Connection refused",
        "babbling": "the other side says something else than messages",
        "bare": "/nowhere/python: not found",
        "old": "kvstore_hvd has version 99 there, and ",
        "homeless": "homeless cannot use /nowhere (No such file or directory): start kvhvdrun in a folder that all ",
    }
    assert told.keys() == expected.keys()
    assert [text for host, text in expected.items() if text not in told[host]] == []
    assert "says: no daemon at all" in told["babbling"]
    assert fix.startswith("  Fix: try ")


def test_a_host_that_comes_late(start, tmp_path):
    """As under Kubernetes, where names come late. Nothing is started before it is there."""
    (tmp_path / "ssh").symlink_to(SHELL.split()[1])
    job = start(f"--rsh-command {tmp_path}/ssh -H localhost:1,late:1,refused:1 -np 2", "say('begun')")
    job.until_printed("host late is not there yet, and is tried again for 30 s (--start-timeout): ")
    assert job.out == ""
    err = job.go("late").end().err
    assert job.out.count("begun") == 2
    assert (err.count("\n"), "Could not resolve hostname late: Name or service not known." in err) == (1, True)


def test_hosts_that_come_too_late(run):
    """One of them hangs at the end: what the last shell that has ended said is told."""
    err = run(f"{SHELL} -H silent:1,localhost:1,late:1,refused:1 --start-timeout 4", "say('begun')", code=126).err
    assert err.count("is tried again for 4 s (--start-timeout)") == 1
    head, *hosts, fix = err.partition("kvhvdrun: the job ")[2].splitlines()
    assert head == "cannot start on 3 of its hosts."
    assert "silent: its daemon did not come within 4 s" in hosts[0]
    assert hosts[0].endswith(" says: Password:")
    assert "exited with code 255. 'remote_shell.py' says: ssh: Could not resolve hostname late" in hosts[1]
    assert "exited with code 1. 'remote_shell.py' says: ssh: connect to host refused" in hosts[2]
    assert fix.endswith("--start-timeout (seconds) gives hosts more time to come up.")


def test_ctrl_c_while_a_host_is_awaited(start):
    job = start(f"{SHELL} -H silent:1", "forever()")
    job.until(lambda: "silent" in shells(job), "the shell")
    job.end(130, signal.SIGINT)


def test_a_shell_is_killed(start):
    """The workers behind it end, and a static job with them."""
    job = start(f"{SHELL} -H localhost:1,node1:2", "say('ready\\n')\nforever()", KVHVD_SURVIVOR_TIME="0.1")
    job.until_printed("ready", 3)
    os.kill(shells(job)["node1"], signal.SIGKILL)
    err = job.end(137).err
    assert "was lost with its host node1: the connection to its daemon was lost: 'remote_shell.py' " in err
    assert "was killed by SIGKILL" in err


def test_survivors_go_on_without_a_host_and_take_it_back(start, tmp_path):
    """The script prints bare names, as that of the MPI Operator. A host that cannot be reached costs one start."""
    script = tmp_path / "discover_hosts.sh"
    script.write_text("#!/bin/sh\necho localhost\necho node1\necho refused\n")
    script.chmod(0o755)
    job = start(f"--min-np 1 --slots 2 {SHELL} --host-discovery-script {script}")
    job.until_joined(0, 1, 2, 3)
    os.kill(int(status_of(job.pid(2))[1]), signal.SIGKILL)
    assert job.until_joined(count=4, after=0)[:2] == [0, 1]
    err = job.go("finish").end().err
    assert err.count("host node1 is lost: the connection to its daemon was lost: ") == 1
    assert re.search(r"host refused is lost: its daemon did not come: .* refused\. It gets no worker for ", err)
    assert len(job.events("host_lost", host="refused")) == 1
    assert job.events("slot_blacklisted") == []


def test_a_line_is_silent(start):
    """Both sides find out by the lease: the workers there end while nobody can tell them to."""
    job = start(f"--min-np 1 {SHELL} -H localhost:1,node1:1", KVHVD_LEASE="2")
    job.until_joined(0, 1)
    lost = job.pid(1)
    with stopped(shells(job)["node1"]):
        job.until(lambda: status_of(lost)[0] in "XZ", "the end of the worker there")
        assert job.until_event("host_lost")["text"].startswith("its daemon has said nothing for 2.4 s (KVHVD_LEASE)")
        job.until_joined(count=2, after=0)
    job.go("finish").end()


def test_a_second_ctrl_c_waits_for_no_silent_host(start):
    """Nor for its lease; its workers end because the line has ended."""
    program = "signal.signal(signal.SIGINT, lambda *_: say('no\\n')); say('ready\\n')\nwhile True: signal.pause()"
    job = start(f"{SHELL} -H localhost:1,node1:1", program, KVHVD_KILL_GRACE="100", KVHVD_LEASE="100")
    job.until_printed("ready", 2)
    with stopped(shells(job)["node1"]):
        job.process.send_signal(signal.SIGINT)
        job.until_printed("no")
        job.end(128 + signal.SIGINT, signal.SIGINT, leaves=True)


@pytest.fixture
def network(tmp_path):
    """Two hosts that run commands; their interfaces have different names, which Horovod refuses (its issue 1724)."""
    if unavailable():
        pytest.skip(unavailable())
    with Network(tmp_path, 2) as made:
        made.rename("node1", "lan7")
        made.serve(2222)
        yield made


def beside(network, options):
    how = {"launcher": [*network.beside, *kvhvdrun().prefix], "KVHVD_TEST_SHELL_PORT": "2222"}
    return f"{SHELL} -H node0:1,node1:2 {options}", how


@pytest.mark.parametrize("elastic", ["", "--min-np 3"])
def test_places_and_sums(run, network, elastic):
    program = """
import numpy as np
import kvstore_hvd
topology = kvstore_hvd.init()
total = kvstore_hvd.allreduce(np.full(100_000, topology.rank + 1.0), 'x')
report(rank=topology.rank, place=[topology.local_rank, topology.cross_rank], total=total[[0, -1]].tolist())
"""
    options, how = beside(network, elastic)
    reports = run(options, program, **how).reports()
    assert [(one["rank"], one["place"]) for one in reports] == [(0, [0, 0]), (1, [0, 1]), (2, [1, 0])]
    assert [one["total"] for one in reports] == [[6.0, 6.0]] * 3


def test_the_launcher_is_killed(start, network):
    """No host has anything left of the job, whatever its workers have started."""
    program = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(['sleep', '1000'], start_new_session=True)
say('ready\\n')
forever()
"""
    options, how = beside(network, "")
    job = start(options, program, KVHVD_KILL_GRACE="0.5", **how).until_printed("ready", 3)
    job.end(-signal.SIGKILL, signal.SIGKILL)
    until(lambda: not any(network.processes(name) for name in network.names))
