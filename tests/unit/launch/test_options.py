"""The options of kvhvdrun, of one job and of elastic ones: what is made of them, and what is refused."""

import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from kvstore_hvd import __version__
from kvstore_hvd.base import files
from kvstore_hvd.errors import LaunchError
from kvstore_hvd.launch import command, horovodrun, hosts
from kvstore_hvd.launch.daemons import hosts_of_script
from kvstore_hvd.launch.hosts import hosts_of_allocation, is_here, machine_of, shell_command, slots_of, travelling
from kvstore_hvd.launch.processes import share_of_cores
from support.patience import patient

pytestmark = pytest.mark.alike


def plan(*arguments):
    return command._plan(command._options(arguments))


@pytest.fixture
def config_file(tmp_path):
    def write(text):
        (tmp_path / "kvhvdrun.yaml").write_text(text)
        return str(tmp_path / "kvhvdrun.yaml")

    return write


REFUSED = [
    (["-p", "2", "true"], "is missing; -p is the port of ssh.\n  Fix: kvhvdrun -np 2 -p 2 true"),
    (["-np", "2"], "no command was given"),
    (["-np", "2", "-x", "PATH=/nowhere", "ls"], "command 'ls' was not found.\n  Fix: check its name and PATH."),
    (["-np", "2", __file__], f"is not executable.\n  Fix: kvhvdrun -np 2 {Path(sys.executable).name} {__file__}"),
    (["--hostfile", "/no/hosts", "true"], "the host file cannot be read: [Errno 2] No such file or directory"),
    (["-np", "1", "--checkpoint-every", "5", "true"], "--checkpoint-every: there is no file."),
    (["-np", "1", "--checkpoint", "/", "true"], "--checkpoint: '/' is a folder."),
    (["-np", "1", "--timeline-filename", "/no/t.json", "true"], "--timeline-filename: there is no folder '/no'."),
    (["-np", "0", "true"], "argument -np/--num-proc/-n: '0' is not a whole number of at least 1."),
    (["--ouput-filename", "x", "-np", "2", "true"], "--ouput-filename does not exist; did you mean --output-"),
    (["--np", "2", "true"], "--np does not exist; did you mean -np N?\n  Fix: "),
    (["--stall-check-warning-time-seconds", "x", "-np", "2", "true"], "-seconds: 'x' is not a number of seconds"),
    (["-H", "node1", "-p", "22", "--rsh-command", "env", "true"], "-p and -i are for ssh.\n  Fix: "),
    (["-np", "3", "-H", "localhost:2", "true"], "3 workers are needed, but the hosts have 2 slots"),
    (["-H", "localhost:0", "true"], "'localhost:0': a host takes at least 1 worker"),
    (["-H", "localhost:2,LOCALHOST:1", "true"], "the host 'localhost' is named twice"),
    (["-H", "localhost:2", "--hostfile", "x", "true"], "both --hosts and --hostfile name hosts"),
    (["-np", "2", "-x", "A B=1", "true"], "-x A B=1: 'A B' is not the name of a variable.\n  Fix: "),
    (["-np", "2", "-x", "KVHVD_RANK=1", "true"], "-x KVHVD_RANK=1: KVHVD_RANK differs between workers."),
    (["-np", "2", "-x", "NOT_SET", "true"], "-x NOT_SET: NOT_SET is not set here, and what is set all"),
    (["-np", "2", "--ranks", "0,2", "true"], "--ranks: there is no rank 2.\n  Fix: the ranks are 0 to 1."),
    (["-np", "2", "/"], "'/' is a directory"),
    (["-np", "2", "--output-filename", "/dev/null", "true"], "'/dev/null/rank.0' cannot be made"),
    (["--min-np", "3", "--max-np", "2", "true"], "--min-np 3 is more than --max-np 2."),
    (["--max-np", "257", "true"], "a job has at most 256 workers"),
    (["--min-np", "1", "--elastic-timeout", "0", "true"], "--elastic-timeout: '0' is not a number of seconds"),
    (["--min-np", "1", "--blacklist-cooldown-range", "9", "8", "true"], "the lower one first"),
    (["--min-np", "1", "--blacklist-cooldown-range", "0.5", "8", "true"], "0.5 8: expected 1 to 3600 s"),
    (["--min-np", "1", "--output-filename", "o", "true"], "--output-filename is not for elastic jobs.\n  Fix: omit"),
    (["--reset-limit", "1", "-np", "2", "true"], "--reset-limit is for elastic jobs.\n  Fix: "),
]


@pytest.mark.parametrize(("arguments", "text"), REFUSED)
def test_what_cannot_be_is_said(capfd, arguments, text):
    assert command.main(arguments) == {"/": 126, __file__: 126, "ls": 127}.get(arguments[-1], 2)
    out, err = capfd.readouterr()
    assert (out, err.startswith("kvhvdrun: "), "\n  Fix: " in err) == ("", True, True)
    assert text in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("num-procs: 2", "--num-procs does not exist; did you mean --num-proc?\n  Fix: "),
        ("- 2", "cannot be read: it has no names with values.\n  Fix: a YAML file"),
        ("verbose: 2", "argument -v/--verbose: ignored explicit argument '2'"),
        ("num-proc: [", "cannot be read: while parsing a flow node"),
        # No word of a file becomes a part of the command.
        ("min-np: 1\nblacklist-cooldown-range: 5", "argument --blacklist-cooldown-range: expected 2 arguments."),
        ("min-np: 1\nblacklist-cooldown-range: [5, 50, echo]", "echo does not exist."),
    ],
)
def test_a_file_that_cannot_be(capfd, config_file, text, fact):
    path = config_file(f"{text}\n")
    assert command.main(["--config-file", path, "-np", "2", "true"]) == 2
    err = capfd.readouterr().err
    assert (path in err, fact in err) == (True, True), err


def test_as_many_workers_as_the_engine_and_open_files_allow(monkeypatch):
    header = (Path(__file__).resolve().parents[3] / "native/shm/wait.hpp").read_text()
    assert f"kMaxRanks = {hosts.MAX_WORKERS};" in header
    given = resource.getrlimit

    def limit(which, soft):
        monkeypatch.setattr(resource, "getrlimit", lambda asked: (soft, soft) if asked == which else given(asked))

    assert hosts.open_below(1 << 20) == len(os.listdir("/proc/self/fd")) - 1  # without that of the listing
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


def test_help_has_few_variables(capfd):
    with pytest.raises(SystemExit) as end:
        command.main(["--help"])
    out = capfd.readouterr().out
    assert (end.value.code, out.count("\n  KVHVD_") + out.count("\n  HOROVOD_")) == (0, 8)
    assert max(map(len, out.splitlines())) <= 80
    assert ("docs/errors.md" in out, "KVHVD_SECRET" in out) == (True, False)
    assert all(each in out for each in ("KVHVD_TIMEOUT [600]\n", "HOROVOD_STALL_CHECK_DISABLE [0]\n"))
    assert (command.main(["--version"]), capfd.readouterr().out) == (0, f"kvstore_hvd {__version__}\n")


def test_the_program_and_its_own_options():
    made = plan("-np", "2", "-v", "true", "-np", "7", "--no-prefix", "--", "-v")
    assert made.command[1:] == ["-np", "7", "--no-prefix", "--", "-v"]
    # A module is run by the Python of the launcher.
    assert plan("-np", "2", "-m", "train", "-m", "x").command == [sys.executable, "-m", "train", "-m", "x"]


def test_a_shell_completes_options():
    """The launcher loads the library for it only when a shell asks."""
    pytest.importorskip("argcomplete")
    program = "from kvstore_hvd.launch import command; command.main()"
    told = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_SHELL": "bash", "COMP_LINE": "kvhvdrun --hostf", "COMP_POINT": "16"}
    command = ["bash", "-c", '"$@" 8>&1 9>&2', "bash", sys.executable, "-c", program]
    done = subprocess.run(command, env={**os.environ, **told}, capture_output=True, text=True, timeout=patient(60))
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "--hostfile", "")


@pytest.mark.parametrize(
    ("arguments", "numbers", "slots"),
    [
        ("--min-num-proc 2", (2, None, 256), {"localhost": 2}),
        ("--max-num-proc 3", (1, None, 3), {"localhost": 3}),
        ("--max-np 3 -n 2", (2, 2, 3), {"localhost": 3}),
        ("--min-np 1 -H localhost,127.0.0.2:1 --slots 3", (1, None, 256), {"localhost": 3, "127.0.0.2": 1}),
        ("--min-np 1 --hostfile hosts", (1, None, 256), {"localhost": 2}),
    ],
)
def test_an_elastic_job_has_numbers_of_workers_and_hosts(monkeypatch, tmp_path, arguments, numbers, slots):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    made = plan(*arguments.split(), "true")
    assert (made.settings.min_np, made.settings.first_np, made.settings.max_np) == numbers
    assert (made.hosts, made.script, made.settings.replaces) == (slots, None, True)


def test_all_other_options_of_an_elastic_job(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    options = ["--reset-limit", "0", "--elastic-timeout", "5", "--blacklist-cooldown-range", "1", "3600"]
    more = ["--slots", "3", "--event-log", "log", "--no-prefix", "-v", "--bind-cores", "--start-timeout", "8"]
    made = plan("--host-discovery-script", "./hosts --all", *options, *more, "true", "--min-np", "3")
    settings = made.settings
    script = made.script
    assert (script.command[-1], script._default, script._environment) == ("./hosts --all", 3, made.environment)
    assert (settings.min_np, settings.reset_limit, settings.elastic_timeout_s, settings.start_timeout_s) == (1, 0, 5, 8)
    assert settings.cooldown == (1.0, 3600.0)
    given = made.options
    assert (given.event_log, given.no_prefix, given.verbose, given.bind_cores) == ("log", True, True, True)
    assert list(made.command[1:]) == ["--min-np", "3"]
    assert made.environment["PYTHONUNBUFFERED"] == "1"
    assert not [name for name in made.environment if name.startswith(("KVHVD_RANK", "KVHVD_SIZE", "KVHVD_LOCAL"))]
    defaults = plan("--min-np", "1", "true").settings
    assert (defaults.reset_limit, defaults.elastic_timeout_s, defaults.start_timeout_s) == (None, 600.0, 30.0)
    assert (defaults.cooldown, defaults.job == settings.job) == ((10.0, 300.0), False)


def test_times_of_the_environment(setting):
    """Those of the options come before them."""
    names = ("ELASTIC_TIMEOUT", "START_TIMEOUT", "TIMEOUT", "SURVIVOR_TIME", "EXIT_TIMEOUT", "KILL_GRACE", "LEASE")
    setting(**{f"{'KVHVD' if at > 12 else 'HOROVOD'}_{name}": str(at) for at, name in enumerate(names, 11)})
    for options, first in (([], 11), (["--elastic-timeout", "3"], 3)):
        settings = plan("--min-np", "1", *options, "true").settings
        assert [getattr(settings, f"{name.lower()}_s") for name in names] == [first, *range(12, 18)]


def test_options_of_a_file(config_file, monkeypatch, tmp_path):
    """It comes before the environment, and after the command line."""
    monkeypatch.setenv("KVHVD_START_TIMEOUT", "5")
    path = config_file(
        "# a job\nnum_proc: 3\nstart-timeout: 9.5\nverbose: Yes\nno-prefix: true\nbind-cores: off\nranks: [0, 1]\n"
        f"timeline-filename: {tmp_path}/t.json\noutput-filename: out\nx: [A=1, 'B=1,2', HOME=]\n"
    )
    made = plan("--config-file", path, "-x", "A=3=4", "true")
    given, environ = made.options, made.environment
    assert (made.settings.max_np, set(given.ranks)) == (3, {0, 1})
    assert (given.verbose, given.no_prefix, given.bind_cores, given.output_filename) == (True, True, False, "out")
    assert (environ["KVHVD_START_TIMEOUT"], environ["HOROVOD_TIMELINE"]) == ("9.5", f"{tmp_path}/t.json")
    assert (environ["A"], environ["B"], environ["HOME"]) == ("3=4", "1,2", "")
    path = config_file("num-proc: 3\nstart-timeout: 9\nhosts: elsewhere:4\n")
    (tmp_path / "hosts").write_text("localhost:2\n")
    for named in (["-H", "localhost:2"], ["--hostfile", f"{tmp_path}/hosts"]):
        made = plan("--config-file", path, "-np", "2", "--start-timeout", "7", *named, "true")
        assert (made.settings.max_np, made.environment["KVHVD_START_TIMEOUT"]) == (2, "7")
    path = config_file("min-np: 1\nmax_num_proc: 3\nblacklist-cooldown-range: 5 5\nslots: 2\nreset-limit: 4\n")
    settings = plan("--config-file", path, "--reset-limit", "9", "true").settings
    assert (settings.min_np, settings.max_np, settings.reset_limit, settings.cooldown) == (1, 3, 9, (5.0, 5.0))


HOROVODS_FILE = """
verbose: true
controller: mpi
params: {fusion_threshold_mb: 32, cycle_time_ms: 5, hierarchical_allreduce: false}
autotune: {enabled: true, log_file: horovod_autotune_log.txt}
timeline: {filename: DYNAMIC, mark_cycles: true}
stall_check: {enabled: false, warning_time_seconds: 120}
library_options: {mpi_threads_disable: false, num_nccl_streams: 2}
logging: {level: INFO, with_timestamp: false}
"""


def test_a_file_of_horovodrun(config_file, capfd):
    made = plan("--config-file", config_file(HOROVODS_FILE), "-np", "2", "--stall-check", "true")
    names = "TIMELINE", "TIMELINE_MARK_CYCLES", "STALL_CHECK_DISABLE", "STALL_CHECK_TIME_SECONDS", "LOG_LEVEL"
    assert [made.environment[f"HOROVOD_{name}"] for name in names] == ["DYNAMIC", "1", "0", "120", "INFO"]
    unused = "--mpi", "--fusion-threshold-mb", "--cycle-time-ms", "--no-hierarchical-allreduce", "--autotune"
    unused += "--autotune-log-file", "--no-mpi-threads-disable", "--num-nccl-streams"
    told = [line.split(" has no effect: ")[0] for line in capfd.readouterr().err.splitlines()]
    assert sorted(told) == sorted(f"kvhvdrun: {name}" for name in unused)


def test_every_option_of_horovodrun(capfd, monkeypatch):
    page = (Path(__file__).resolve().parents[3] / "docs/migrating-from-horovod.md").read_text()
    monkeypatch.setenv("KVHVD_LOG_LEVEL", "error")  # which has precedence over Horovod's
    for option in horovodrun.OPTIONS:
        given = [] if option.is_flag or option.value is not None else ["info" if "level" in option.name else "7"]
        arguments = [option.name, *given, "-np", "1", "true"]
        row = next((line for line in page.splitlines() if line.startswith("| ") and f"`{option.name}`" in line), "")
        if option.instead:
            assert f"| refused: {option.instead.rstrip('.')} |" in row
            with pytest.raises(LaunchError, match=f"{option.name} is for horovodrun with MPI.(\n|.)*{option.instead}"):
                plan(*arguments)
            continue
        variables, told = plan(*arguments).environment, capfd.readouterr().err
        is_set = variables.get(option.variable) == (option.value or "".join(given))
        begin = f"kvhvdrun: {option.name} has no effect: "
        assert is_set != told.startswith(begin)
        what = f"sets `{option.variable}={option.value or '...'}`" if is_set else f"no effect: {told[len(begin) : -2]}"
        assert f"| {what} |" in row
        assert (told.count("\n"), "KVHVD_LOG_LEVEL" in variables) == (not is_set, option.name != "--log-level")
    for names in (["--network-interface", "lo"], ["-prefix-timestamp"], ["-hostfile", "/dev/null"]):
        assert command._options([*names, "true"]).command == ["true"]


def test_without_pyyaml(config_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(LaunchError, match=r"--config-file needs PyYAML, .*\n  Fix: .*kvstore-hvd\[yaml\]"):
        plan("--config-file", config_file("num-proc: 2\n"), "true")
    assert plan("-np", "2", "true").settings.max_np == 2


def test_whose_output_passes_through_the_launcher():
    """That of one worker does only where it must."""
    for words, passes in (
        ("-np 1", 0),
        ("-np 2", 1),
        ("-np 1 --timestamps", 1),
        ("-np 1 --ranks 0", 1),
        ("-np 1 --output-filename o", 1),
        ("-np 1 -H elsewhere --rsh-command env", 1),
        ("--min-np 1", 1),
    ):
        assert plan(*words.split(), "true").capture is bool(passes), words


def test_a_deleted_folder_has_jobs(monkeypatch, tmp_path):
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    (tmp_path / "folder").rmdir()
    assert files.failure_path("default", "job", "") == f"{tempfile.gettempdir()}/kvhvd-failure-job.json"


def test_the_timeline_is_a_full_path(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOROVOD_TIMELINE", "other.json")
    monkeypatch.setenv("KVHVD_TIMELINE", "other.json")  # workers look at this one first
    environ = plan("-np", "1", "--timeline-filename", "t.json", "true").environment
    assert (environ["HOROVOD_TIMELINE"], "KVHVD_TIMELINE" in environ) == (str(tmp_path / "t.json"), False)
    assert plan("-np", "1", "true").environment["HOROVOD_TIMELINE"] == "other.json"
    made = plan("-np", "1", "--timeline-filename", "DYNAMIC", "true")
    assert made.environment["HOROVOD_TIMELINE"] == "DYNAMIC"
    monkeypatch.setenv("KVHVD_CHECKPOINT", "other")  # so is this one
    environ = plan("-np", "1", "-x", "KVHVD_CHECKPOINT=mine", "--checkpoint-every", "5", "true").environment
    assert environ["KVHVD_CHECKPOINT"] == str(tmp_path / "mine")
    environ = plan("-np", "1", "--checkpoint", "c", "--checkpoint-every", "5", "true").environment
    assert (environ["KVHVD_CHECKPOINT"], environ["KVHVD_CHECKPOINT_EVERY"]) == (str(tmp_path / "c"), "5")


def test_variables_of_the_workers(monkeypatch):
    # As inside a worker of mpirun; none of it is true for our workers.
    foreign = ["PMI_RANK", "PMI_SIZE", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "OMPI_MCA_orte_hnp_uri", "MPI_LOCALRANKID"]
    foreign += ["HYDI_CONTROL_FD", *(f"KVHVD_{name}" for name in ("DAEMON", "WORKER", "HOSTS", "GENERATION", "RANK"))]
    for name in foreign:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PYTHONUNBUFFERED", "")  # a choice of the user's, too
    monkeypatch.setenv("OMPI_MCA_btl", "^ofi")  # a choice of the user's
    monkeypatch.setenv("PYTHONPATH", "/mine:/other")
    made = plan("-np", "3", "--start-timeout", "7", "true")
    kept = {"KVHVD_START_TIMEOUT": "7", "OMPI_MCA_btl": "^ofi", "PYTHONUNBUFFERED": ""}
    assert {**kept, "PYTHONPATH": f"{command._SITE}:/mine:/other"}.items() <= made.environment.items()
    assert [name for name in foreign if name in made.environment] == []


def test_shares_of_cores():
    for cores, shares in [([0, 1, 2, 3, 4], [(0, 1), (2, 3, 4)]), ([4, 9], [(4,), (9,), (4,)])]:
        assert [share_of_cores(cores, rank, len(shares)) for rank in range(len(shares))] == shares


def test_hosts_that_are_this_one(config_file, monkeypatch):
    for host in ("localhost", "127.0.0.1", socket.gethostname()):
        assert plan("-H", f"{host}:3", "true").settings.max_np == 3
        assert plan("-np", "1", "-H", f"{host}:3", "true").settings.max_np == 1
    path = config_file("\ufeff# all of them\n\nlocalhost slots=2  # here\n127.0.0.1:3\n")
    assert plan("--hostfile", path, "true").settings.max_np == 5
    for text, fact in (("", "names no host"), ("localhost slots=2\nlocalhost:1\n", "named twice")):
        with pytest.raises(LaunchError, match=fact):
            plan("--hostfile", config_file(text), "true")
    monkeypatch.setattr(socket, "gethostname", lambda: "Box7.example")
    names = ("box7", "BOX7.Example", "127.8.9.1", "::1", "box7.other", "example", "198.51.100.9")
    assert list(map(is_here, names)) == [True] * 4 + [False] * 3


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


def test_the_way_to_other_hosts(capfd, monkeypatch):
    where = ["true", "/path with space/x"]
    ssh = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=15"]
    assert shell_command(["env", *ssh], "node1", where) == ["env", *ssh, "node1", "true", "'/path with space/x'"]
    assert shell_command(["/bin/ssh", "-v"], "node1", ["true"]) == ["/bin/ssh", "-v", "--", "node1", "true"]
    assert shell_command(["srun", "-w", "{host}"], "node1", ["true"]) == ["srun", "-w", "node1", "true"]
    given = dict.fromkeys(("PATH", "CUDA_HOME", "USERS", "HOME", "SSH_AUTH_SOCK", "TMPDIR", "XDG_RUNTIME_DIR"), "")
    given |= dict.fromkeys(("SLURM_STEP_NUM_TASKS", "PWD", "HOSTNAME", "BASH_FUNC_x%%"), "")
    assert list(travelling(given, ["TMPDIR"])) == ["PATH", "CUDA_HOME", "USERS", "TMPDIR"]
    for text, fault in [("no-such-shell -x", "is not there"), ("", "is not there"), ("ssh 'x", "No closing quotation")]:
        assert command.main(["-np", "1", "-H", "node1", "--rsh-command", text, "true"]) == 2
        assert fault in capfd.readouterr().err
    made = plan("-np", "3", "-H", "node1:2,localhost:2", "--rsh-command", "env", "true")
    assert (made.shell, made.hosts) == (["env"], {"node1": 2, "localhost": 1})
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert plan("-H", "node1:2", "true").shell == ["ssh", *ssh]
    assert plan("-H", "node1:2", "-p", "22", "-i", "a key", "true").shell == ["ssh", "-p", "22", "-i", "a key", *ssh]
    assert plan("-H", "node1:2", "--rsh-command", "/bin/ssh -v", "true").shell == ["/bin/ssh", "-v", *ssh]
    assert plan("-H", "localhost:2", "true").shell == []
    assert plan("-H", "node1:2", "--network-interfaces", "e0", "true").environment["KVHVD_NETWORK_INTERFACES"] == "e0"
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert command.main(["-H", "node1:2", "true"]) == 2
    assert "node1: other hosts than this one, and there is no ssh" in capfd.readouterr().err
    told = []
    assert command.main(["-H", "node1:2", "--rsh-command", "env", "true"], lambda *words: told.extend(words)) == 2
    assert (told[0], "'node1' is another host, and run() starts workers on this" in told[1]) == ("refused", True)


def test_hosts_of_slurm(capfd, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    for nodes, tasks, expected in [
        ("a[1-2,08-10]b,C[1-2]d[3-4]", "2(x4),1,3(x4)", "a1b:2 a2b:2 a08b:2 a09b:2 a10b:1 C1d3:3 C1d4:3 C2d3:3 C2d4:3"),
        ("n1,n[02,3].x-y,n[8-10]", "1(x6)", "n1:1 n02.x-y:1 n3.x-y:1 n8:1 n9:1 n10:1"),
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
    assert plan("--rsh-command", "/usr/bin/env", "/bin/true").shell == ["/usr/bin/env"]
    assert command._plan(command._options(["-np", "2", "/bin/true"]), print).hosts == {"localhost": 2}  # of run()
    assert command.main(["-np", "5", "/bin/true"]) == 2
    assert "hosts have 4 slots.\n  Fix: give more slots, as in sbatch --ntasks-per-node=N." in capfd.readouterr().err
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "3")  # each of them starts a job of its own
    assert plan("-np", "5", "/bin/true").settings.max_np == 5


@pytest.mark.parametrize(
    ("nodes", "tasks", "fact"),
    [
        ("n[1-99999999]", "1(x99999999)", "has more than 65536 hosts"),
        ("N[1-2],n1", "1(x3)", "names the host 'n1' twice"),
        ("n" + "[1-2]" * 1500, "1(x2)", "is not a list of hosts"),
        ("-oproxycommand,n1", "1(x2)", "is not a list of hosts"),
        ("n1\x1b[2J,n2", "1(x2)", "n1\\x1b[2J,n2 is not a list of hosts"),
        ("n[1-2]", "1(x999999999)", "does not tell the tasks of each host"),
        ("n[1-2]", "0,1", "does not tell the tasks of each host"),
    ],
)
def test_lists_of_slurm_that_are_none(capfd, monkeypatch, nodes, tasks, fact):
    monkeypatch.setenv("SLURM_JOB_NODELIST", nodes)
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", tasks)
    assert command.main(["/bin/true"]) == 2
    err = capfd.readouterr().err
    assert (fact in err, "\n  Fix: name the hosts: " in err) == (True, True)


# A name, as a user or a script writes it, and the host that it is.
NAMES = {
    "Node-1.x_y": "node-1.x_y",
    "User@Node1": "User@node1",
    "[fe80::1%eth0]": "fe80::1%eth0",
    "me@[FE80::1%Eth0]": "me@fe80::1%Eth0",
    "::1": "::1",
}
NO_NAMES = (
    """-o"proxycommand"id>/tmp/x -f user@-f -l@node1 [-o::] [::1 [:] [1:2] [] . .. me@. a;b $(id) a'b é n\x1b[2J"""
)


@pytest.mark.parametrize("form", ["{}", "{}:2", "{} slots=2"])
def test_names_of_hosts(capfd, config_file, form):
    """A name that ssh could take for an option is refused in each place that names hosts."""
    for given, host in NAMES.items():
        entry = form.format(given)
        assert list(hosts_of_script(entry)) == list(slots_of([entry])) == [host]
        made = plan("--hostfile", config_file(f"# hosts\n{entry}\n"), "--rsh-command", "env", "true")
        assert list(made.hosts) == [host]
    for given in NO_NAMES.split():
        entry = form.format(given)
        with pytest.raises(LaunchError, match="is not HOST:N"):
            hosts_of_script(f"localhost\n{entry}\n")
        for option in ([f"-H={entry}"], ["--hostfile", config_file(f"{entry}\n")]):
            assert command.main(["-np", "1", *option, "true"]) == 2
            err = capfd.readouterr().err
            assert ("is not HOST:N or 'HOST slots=N'.\n  Fix: " in err, "\x1b" in err) == (True, False), given
