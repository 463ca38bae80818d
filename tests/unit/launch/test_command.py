"""kvhvdrun without its processes: options, shares of cores, and how output is cut into lines."""

import os
import random
import re
import resource
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kvstore_hvd.errors import ConfigError, LaunchError
from kvstore_hvd.horovod.variables import Ranks
from kvstore_hvd.launch import command, hosts
from kvstore_hvd.launch.daemons import hosts_of_script
from kvstore_hvd.launch.driver import environment_of
from kvstore_hvd.launch.hosts import Slot, hosts_of_allocation, is_here, machine_of, shell_command, slots_of, travelling
from kvstore_hvd.launch.output import LineStream, Sink, Tail
from kvstore_hvd.launch.processes import share_of_cores
from support.patience import patient

pytestmark = pytest.mark.alike


def sink_of():
    """It is not flushed here."""
    return Sink(2, "")


def streams(count):
    sink = sink_of()
    return sink, [LineStream(sink, f"[{rank}] ".encode()) for rank in range(count)]


@pytest.mark.parametrize(
    ("fed", "written"),
    [
        ([(0, b"one "), (1, b"uno\ndos "), (0, b"line\n"), (1, b"tres\n")], b"[1] uno\n[0] one line\n[1] dos tres\n"),
        # An unfinished line that was interrupted gets its prefix again.
        ([(0, b"name? "), (0, b""), (1, b"hello\n"), (0, b"thanks\n")], b"[0] name? \n[1] hello\n[0] thanks\n"),
        ([(0, b"10%\r20%\r"), (0, b"30%\r\n")], b"[0] 10%\r[0] 20%\r[0] 30%\r\n"),
        ([(0, b"50%\r60%"), (1, b"done\n")], b"[0] 50%\r\n[1] done\n"),
    ],
)
def test_lines_of_workers_do_not_tear(fed, written):
    sink, both = streams(2)
    for rank, data in fed:
        both[rank].feed(data) if data else both[rank].flush()
    assert bytes(sink.pending) == written


def test_times_stand_before_lines():
    sink = sink_of()
    stream = LineStream(sink, b"[0] ", timestamps=True)
    stream.feed(b"one\ntwo\nth")
    stream.feed(b"ree\n")
    time = rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} "
    assert re.fullmatch(time + rb"\[0\] one\n" + time + rb"\[0\] two\n" + time + rb"\[0\] three\n", sink.pending)


def test_binary_junk_passes_whatever_the_cuts():
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    data = bytes(rng.choice(b"\r\n\0\xff\x80ab") for _ in range(3000))
    (whole, (a,)), (cut, (b,)) = streams(1), streams(1)
    without = LineStream(plain := sink_of(), b"")
    for stream in (a, without):
        stream.feed(data)
    rest = data
    while rest:
        size = rng.randrange(1, 20)
        b.feed(rest[:size])
        rest = rest[size:]
    for stream in (a, b, without):
        stream.flush()
    assert whole.pending == cut.pending, f"seed {seed}"
    assert bytes(plain.pending) == data, f"seed {seed}"


def test_the_tail_is_bounded_and_knows_progress_bars():
    tail = Tail()
    stream = LineStream(sink_of(), b"", tail.add)
    for number in range(100):
        stream.feed(b"line %d\n" % number)
    stream.feed(b"10%\r20%\r\nlast")
    stream.flush()
    assert tail.lines()[-3:] == ["line 99", "20%", "last"]
    assert len(tail.lines()) <= 21
    stream.feed(b"y" * 100_000 + b"\n")
    assert len("".join(tail.lines())) <= 8192


def test_the_tail_leaves_out_what_python_ignores():
    cause = [b"Traceback (most recent call last):", b'  File "train.py", line 3', b"ValueError: mine"]
    ignored = [b"Exception ignored in atexit callback: <function f>", *cause[:2]]
    ours = [b"kvstore_hvd.errors.PeerLostError: [rank 1/2] lost.", b"  Fix: restart the job."]
    theirs = [b"mxnet.base.MXNetError: Traceback (most recent call last):", b"  File x.cc", b"MXNetError: Check failed"]
    for text, shown in (
        ([*cause, *ignored, *ours], cause),
        ([*cause, *ignored, *theirs, *ignored, *ours], cause),
        ([*ignored, *ours, *cause], cause),
        ([*ignored, *theirs, b"last"], [b"last"]),
    ):
        tail = Tail()
        stream = LineStream(sink_of(), b"", tail.add)
        stream.feed(b"\n".join([*text, b""]))
        assert tail.lines() == [line.decode() for line in shown]


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["true"], 2, "the number of workers is missing"),
        (["-np", "0", "true"], 2, "argument -np/--num-proc/-n: '0' is not a whole number of at least 1."),
        (["--ouput-filename", "x", "-np", "2", "true"], 2, "--ouput-filename does not exist; did you mean --output-"),
        (["--np", "2", "true"], 2, "--np does not exist; did you mean -np?\n  Fix: "),
        (["-np", "2", "/"], 126, "'/' is a directory"),
        (["-np", "3", "-H", "localhost:2", "true"], 2, "3 workers are needed, but the hosts have 2 slots"),
        (["-H", "localhost:0", "true"], 2, "'localhost:0': a host takes at least 1 worker"),
        (["-H", "localhost:2,LOCALHOST:1", "true"], 2, "the host 'localhost' is named twice"),
        (["-H", "localhost:2", "--hostfile", "x", "true"], 2, "both --hosts and --hostfile name hosts"),
        (["-np", "2", "-x", "A B=1", "true"], 2, "-x A B=1: 'A B' is not the name of a variable.\n  Fix: "),
        (["-np", "2", "-x", "KVHVD_RANK=1", "true"], 2, "-x KVHVD_RANK=1: KVHVD_RANK differs between workers."),
        (["-np", "2", "-x", "HOROVOD_RANK=1", "true"], 2, "-x HOROVOD_RANK=1: HOROVOD_RANK differs between workers."),
        (["-np", "2", "-x", "NOT_SET", "true"], 2, "-x NOT_SET: NOT_SET is not set here, and what is set all"),
        (["-np", "2", "--ranks", "0,2", "true"], 2, "--ranks: there is no rank 2.\n  Fix: the ranks are 0 to 1."),
        (["-np", "2", "--ranks", "0-1", "true"], 2, "argument --ranks: '0-1' is not a whole number of at least 0"),
        (["-np", "2", "--output-filename", "/dev/null", "true"], 2, "'/dev/null/rank.0' cannot be made"),
    ],
)
def test_what_cannot_work_is_said(capfd, arguments, code, text):
    assert command.main(arguments) == code
    out, err = capfd.readouterr()
    assert (out, err.startswith("kvhvdrun: "), "Traceback" in err) == ("", True, False)
    assert text in err


def test_help_has_few_variables(capfd):
    with pytest.raises(SystemExit) as end:
        command.main(["--help"])
    out = capfd.readouterr().out
    assert (end.value.code, out.count("\nKVHVD_") + out.count("\nHOROVOD_")) == (0, 8)
    assert ("docs/errors.md" in out, "KVHVD_SECRET" in out) == (True, False)


def test_as_many_workers_as_the_engine_and_open_files_allow(monkeypatch):
    header = (Path(__file__).resolve().parents[3] / "native/shm/wait.hpp").read_text()
    assert f"kMaxRanks = {hosts.MAX_WORKERS};" in header
    given = resource.getrlimit

    def limit(which, soft):
        monkeypatch.setattr(resource, "getrlimit", lambda asked: (soft, soft) if asked == which else given(asked))

    monkeypatch.setattr(hosts, "open_below", lambda limit: 3)
    limit(resource.RLIMIT_NOFILE, 99)
    hosts.check_count(25)
    with pytest.raises(LaunchError, match=r"needs 102 open files, and only 99 are allowed[^\n]*\n  Fix: ulimit -n 102"):
        hosts.check_count(26)
    monkeypatch.setattr(hosts, "open_below", lambda limit: 5)  # a script has opened some
    with pytest.raises(LaunchError, match="needs 101 open files"):
        hosts.check_count(25)
    limit(resource.RLIMIT_NOFILE, resource.RLIM_INFINITY)
    hosts.check_count(256)
    with pytest.raises(LaunchError, match=r"^257 workers: a job has at most 256 workers on one host"):
        hosts.check_count(257)


def plan(*arguments):
    return command._plan(command._options(arguments))


def test_options_of_the_program_are_its_own():
    command = plan("-np", "2", "-v", "true", "-np", "7", "--no-prefix", "--", "-v").command
    assert command[1:] == ["-np", "7", "--no-prefix", "--", "-v"]


def test_a_module(monkeypatch):
    """Run by the Python of the launcher, with arguments of its own."""
    assert plan("-np", "2", "-m", "train", "-m", "x").command == [sys.executable, "-m", "train", "-m", "x"]


def test_a_shell_completes_options():
    """The launcher loads the library for it only when a shell asks."""
    pytest.importorskip("argcomplete")
    program = "from kvstore_hvd.launch import command; command.main()"
    told = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_SHELL": "bash", "COMP_LINE": "kvhvdrun --hostf", "COMP_POINT": "16"}
    command = ["bash", "-c", '"$@" 8>&1 9>&2', "bash", sys.executable, "-c", program]
    done = subprocess.run(command, env={**os.environ, **told}, capture_output=True, text=True, timeout=patient(60))
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "--hostfile", "")


def test_hosts_that_are_this_one(tmp_path):
    for host in ("localhost", "127.0.0.1", socket.gethostname()):
        assert plan("-H", f"{host}:3", "true").settings.max_np == 3
        assert plan("-np", "1", "-H", f"{host}:3", "true").settings.max_np == 1
    path = tmp_path / "hosts"
    path.write_text("# all of them\n\nlocalhost slots=2  # here\n127.0.0.1:3\n")
    assert plan("--hostfile", str(path), "true").settings.max_np == 5
    for text, fact in (("", "names no host"), ("localhost slots=2\nlocalhost:1\n", "named twice")):
        path.write_text(text)
        with pytest.raises(LaunchError, match=fact):
            plan("--hostfile", str(path), "true")


def test_names_with_an_address_of_this_host(monkeypatch):
    """They need no remote shell. A resolver that does not answer is not waited for."""
    answered = threading.Event()

    def resolve(host, port, **_):
        if host == b"late":
            answered.wait()
        if host == b"unknown":
            raise socket.gaierror
        address = "198.51.100.7" if host == b"elsewhere" else "127.0.0.1"
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (each, port)) for each in ("198.51.100.8", address)]

    monkeypatch.setattr(hosts, "_own", {})
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    try:
        made = plan("-H", "node1.example:2,late,elsewhere,unknown,node1:3", "--rsh-command", "env", "true")
        names = list(made.hosts)
        assert list(map(is_here, names)) == [True, False, False, False, True]
        assert list(map(machine_of, names)) == ["", "late", "elsewhere", "unknown", ""]
        assert plan("-H", "node1.example:2", "true").shell == []
    finally:
        answered.set()


@pytest.fixture
def config_file(tmp_path):
    """Write a configuration file; returns its path."""

    def write(text):
        path = tmp_path / "kvhvdrun.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_options_of_a_file(config_file, monkeypatch, tmp_path):
    monkeypatch.setenv("KVHVD_START_TIMEOUT", "5")
    path = config_file(
        f"# a job\nnum_proc: 3\nstart-timeout: 9.5\nverbose: yes\nno-prefix: true\nbind-cores: off\n"
        f"timeline-filename: {tmp_path}/t.json\noutput-filename: out\n"
    )
    made = plan("--config-file", path, "true")
    assert made.settings.max_np == 3
    given = made.options
    assert (given.verbose, given.no_prefix, given.bind_cores, given.output_filename) == (True, True, False, "out")
    environ = made.environment
    assert environ["KVHVD_START_TIMEOUT"] == "9.5"  # the file comes before the environment
    assert environ["HOROVOD_TIMELINE"] == f"{tmp_path}/t.json"
    path = config_file("num-proc: 3\nstart-timeout: 9\nhosts: elsewhere:4\n")
    made = plan("--config-file", path, "-np", "2", "--start-timeout", "7", "-H", "localhost:2", "true")
    assert made.settings.max_np == 2
    assert made.environment["KVHVD_START_TIMEOUT"] == "7"  # the command line comes before the file


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("num-procs: 2\n", r"yaml: --num-procs does not exist; did you mean --num-proc\?\n  Fix: "),
        ("- 2\n", "cannot be read: 'list' object has no attribute"),
        ("verbose: 2\n", "argument -v/--verbose: ignored explicit argument '2'"),
        ("num-proc: [\n", "yaml' cannot be read: while parsing a flow node"),
    ],
)
def test_a_file_that_cannot_be(config_file, text, fact):
    path = config_file(text)
    with pytest.raises((LaunchError, ConfigError), match=fact):
        plan("--config-file", path, "-np", "2", "true")


def test_without_pyyaml(config_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(LaunchError, match=r"--config-file needs PyYAML, .*\n  Fix: .*kvstore-hvd\[yaml\]"):
        plan("--config-file", config_file("num-proc: 2\n"), "true")
    assert plan("-np", "2", "true").settings.max_np == 2


def test_the_timeline_is_a_full_path(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOROVOD_TIMELINE", "other.json")
    environ = plan("-np", "1", "--timeline-filename", "t.json", "true").environment
    assert environ["HOROVOD_TIMELINE"] == str(tmp_path / "t.json")
    assert plan("-np", "1", "true").environment["HOROVOD_TIMELINE"] == "other.json"
    made = plan("-np", "1", "--timeline-filename", "DYNAMIC", "true")
    assert made.environment["HOROVOD_TIMELINE"] == "DYNAMIC"


def test_variables_of_the_workers(monkeypatch):
    # As inside a worker of mpirun; none of it is true for our workers.
    for name in ("PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "OMPI_MCA_orte_hnp_uri"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OMPI_MCA_btl", "^ofi")  # a choice of the user's
    made = plan("-np", "3", "--start-timeout", "7", "true")
    environs = [
        environment_of(made, rank, Slot("localhost", rank), Ranks(rank, 3, rank, 3), "f" * 64) for rank in range(3)
    ]
    assert [environ["KVHVD_RANK"] for environ in environs] == ["0", "1", "2"]
    for environ in environs:
        assert environ["KVHVD_SIZE"] == environ["KVHVD_LOCAL_SIZE"] == "3"
        assert environ["KVHVD_RANK"] == environ["KVHVD_LOCAL_RANK"]
        assert environ["KVHVD_SLOT"] == f"localhost:{environ['KVHVD_RANK']}"
        assert environ["KVHVD_START_TIMEOUT"] == "7"
        assert environ["OMPI_MCA_btl"] == "^ofi"
        assert not [n for n in environ if n.startswith(("PMI_", "PMIX_", "OMPI_COMM_WORLD", "OMPI_MCA_orte"))]
        assert len(environ["KVHVD_SECRET"]) == 64
        assert environ["KVHVD_SECRET"] not in " ".join(made.command)
    assert len({(environ["KVHVD_JOB"], environ["KVHVD_SECRET"]) for environ in environs}) == 1


def test_the_way_to_other_hosts(capfd, monkeypatch):
    where = ["true", "/path with space/x"]
    ssh = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15"]
    assert shell_command(["env", *ssh], "node1", where) == ["env", *ssh, "node1", "true", "'/path with space/x'"]
    assert shell_command(["/bin/ssh", "-v"], "node1", ["true"]) == ["/bin/ssh", "-v", "--", "node1", "true"]
    assert shell_command(["srun", "-w", "{host}"], "node1", ["true"]) == ["srun", "-w", "node1", "true"]
    given = dict.fromkeys(("PATH", "KVHVD_RANK", "USERS", "HOME", "SSH_AUTH_SOCK", "TMPDIR", "XDG_RUNTIME_DIR"), "")
    assert list(travelling(given, ["TMPDIR"])) == ["PATH", "KVHVD_RANK", "USERS", "TMPDIR"]
    for text, fault in [("no-such-shell -x", "is not there"), ("", "is not there"), ("ssh 'x", "No closing quotation")]:
        assert command.main(["-np", "1", "-H", "node1", "--rsh-command", text, "true"]) == 2
        assert fault in capfd.readouterr().err
    made = plan("-np", "3", "-H", "node1:2,localhost:2", "--rsh-command", "env", "true")
    assert (made.shell, made.hosts) == (["env"], {"node1": 2, "localhost": 1})
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert plan("-H", "node1:2", "true").shell == ["ssh", *ssh]
    assert plan("-H", "localhost:2", "true").shell == []
    assert plan("-H", "node1:2", "--network-interfaces", "e0", "true").environment["KVHVD_NETWORK_INTERFACES"] == "e0"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert command.main(["-H", "node1:2", "true"]) == 2
    assert "node1: other hosts than this one, and there is no ssh" in capfd.readouterr().err


def test_hosts_of_slurm(capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for nodes, tasks, expected in [
        ("a[1-2,08-10]b,C[1-2]d[3-4]", "2(x4),1,3(x4)", "a1b:2 a2b:2 a08b:2 a09b:2 a10b:1 C1d3:3 C1d4:3 C2d3:3 C2d4:3"),
        ("n1,n2.x-y", "1(x2)", "n1:1 n2.x-y:1"),
    ]:
        found = hosts_of_allocation({"SLURM_JOB_NODELIST": nodes, "SLURM_TASKS_PER_NODE": tasks})
        assert " ".join(f"{host}:{count}" for host, count in found.items()) == expected
    assert hosts_of_allocation({"SLURM_JOB_NODELIST": "a1", "SLURM_TASKS_PER_NODE": "1"}) is None
    monkeypatch.setenv("SLURM_JOB_NODELIST", "a[1-2]")
    assert command.main(["/bin/true"]) == 2
    assert "SLURM_TASKS_PER_NODE= does not tell the tasks of each host in SLURM" in capfd.readouterr().err
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "2(x2)")
    assert command.main(["/bin/true"]) == 2
    assert "a1, a2: other hosts than this one, and there is no srun that" in capfd.readouterr().err
    (tmp_path / "srun").symlink_to("/bin/true")
    made = plan("/bin/true")
    assert (made.settings.max_np, made.shell[0]) == (4, "srun")
    words = shell_command(made.shell, "a1", ["python", "/a folder"])
    assert words[-3:] == ["--nodelist=a1", "python", "/a folder"]  # there is no shell at the other end
    assert plan("-np", "7", "-H", "localhost:8", "/bin/true").shell == []
    assert command.main(["-np", "5", "/bin/true"]) == 2
    assert "hosts have 4 slots.\n  Fix: give more slots, as in sbatch --ntasks-per-node=N." in capfd.readouterr().err
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")  # each of them starts a job of its own
    assert plan("-np", "5", "/bin/true").settings.max_np == 5


@pytest.mark.parametrize(
    ("nodes", "tasks", "fact"),
    [
        ("n[1-99999999]", "1(x99999999)", "has more than 65536 hosts"),
        ("n[2-1],", "", "is not a list of hosts"),
        ("n[2-1]", "", "is not a list of hosts"),
        ("n1,,n2", "1(x2)", "is not a list of hosts"),
        ("n1,n1", "1(x2)", "names the host 'n1' twice"),
        ("N[1-2],n1", "1(x3)", "names the host 'n1' twice"),
        ("n" + "[1-2]" * 1500, "1(x2)", "is not a list of hosts"),
        ("-oproxycommand,n1", "1(x2)", "is not a list of hosts"),
        ("n1\x1b[2J,n2", "1(x2)", "n1\\x1b[2J,n2 is not a list of hosts"),
        ("n[1-2]", "1(x99999999999)", "does not tell the tasks of each host"),
        ("n[1-2]", "1(x999999999)", "does not tell the tasks of each host"),
        ("n[1-2]", "0(x2)", "does not tell the tasks of each host"),
        ("n[1-2]", "0,1", "does not tell the tasks of each host"),
        ("n[1-2]", "1(x0),1(x2)", "does not tell the tasks of each host"),
    ],
)
def test_lists_of_slurm_that_are_none(capfd, monkeypatch, nodes, tasks, fact):
    monkeypatch.setenv("SLURM_JOB_NODELIST", nodes)
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", tasks)
    assert command.main(["/bin/true"]) == 2
    err = capfd.readouterr().err
    assert (fact in err, "\n  Fix: name the hosts: " in err) == (True, True)


# A name, as a user or a script writes it, and the host that it is; None: it is refused.
NAMES = {
    "Node-1.x_y": "node-1.x_y",
    "user@node1": "user@node1",
    "User@Node1": "User@node1",
    "[fe80::1%eth0]": "fe80::1%eth0",
    "me@[FE80::1%Eth0]": "me@fe80::1%Eth0",
    "::1": "::1",
    '-o"proxycommand"id>/tmp/x': None,
    "-f": None,
    "user@-f": None,
    "-l@node1": None,
    "[-o::]": None,
    "[::1": None,
    "[:]": None,
    "[1:2]": None,
    "[]": None,
    ".": None,
    "..": None,
    "me@.": None,
    "node1\x1b[2J": None,
    "a;b": None,
    "$(id)": None,
    "a'b": None,
    "é": None,
}


@pytest.mark.parametrize("given", NAMES)
@pytest.mark.parametrize("form", ["{}", "{}:2", "{} slots=2"])
def test_names_of_hosts(capfd, tmp_path, form, given):
    """A name that ssh could take for an option is refused in each place that names hosts."""
    entry, host = form.format(given), NAMES[given]
    (tmp_path / "hosts").write_text(f"# hosts\n{entry}\n")
    if host is not None:
        assert list(hosts_of_script(entry)) == list(slots_of([entry])) == [host]
        assert list(plan("--hostfile", str(tmp_path / "hosts"), "--rsh-command", "env", "true").hosts) == [host]
        return
    with pytest.raises(LaunchError, match="is not HOST:N"):
        hosts_of_script(f"localhost\n{entry}\n")
    for option in ([f"-H={entry}"], ["--hostfile", str(tmp_path / "hosts")]):
        assert command.main(["-np", "1", *option, "true"]) == 2
        err = capfd.readouterr().err
        assert ("is not HOST:N or 'HOST slots=N'.\n  Fix: " in err, "\x1b" in err) == (True, False)


def test_shares_of_cores():
    for cores, shares in [([0, 1, 2, 3, 4], [(0, 1), (2, 3, 4)]), ([4, 9], [(4,), (9,), (4,)])]:
        assert [share_of_cores(cores, rank, len(shares)) for rank in range(len(shares))] == shares
