"""The launcher of elastic jobs, with its daemons, real processes and real signals; the workers learn nothing. See
test_elastic_training for faults of trainings, and unit/launch for the decisions of the launcher."""

import os
import shutil
import signal
import sys

import pytest

from support.jobs import status_of

pytestmark = pytest.mark.alike


def test_a_job_without_faults(start):
    job = start("--min-np 2 --max-np 3 -H localhost:2,127.0.0.2:1").go("finish").end()
    assert job.err == ""
    assert sorted(job.out.splitlines()) == [f"[{n}] generation 0 rank {n} of 3" for n in range(3)]
    kinds = [entry["event"] for entry in job.events()]
    assert kinds[:2] == ["job_start", "host_added"]
    assert kinds.count("worker_started") == kinds.count("worker_entered") == kinds.count("worker_finished") == 3
    assert kinds.index("generation_ready") < kinds.index("generation_joined")
    assert job.members(0) == [0, 1, 2]
    end = job.events()[-1]
    assert (end["event"], end["code"], end["reason"]) == ("job_end", 0, "")
    slots = {entry["worker"]: entry["slot"] for entry in job.events("worker_started")}
    assert slots == {0: "localhost:0", 1: "localhost:1", 2: "127.0.0.2:0"}


@pytest.mark.parametrize("options", ["-np 2 -H localhost:1,127.0.0.2:1", "--min-np 1 --max-np 1"])
def test_two_programs_of_a_worker_one_after_the_other(run, options):
    """An elastic job has one: who comes again has lost the state."""
    program = f"{sys.executable} -c 'import kvstore_hvd; kvstore_hvd.init()'"
    is_elastic = options.startswith("--")
    err = run(options, ["sh", "-c", f"{program} && {program}"], code=int(is_elastic), KVHVD_SURVIVOR_TIME="0.1").err
    assert ("the job ends: its workers run one program each, and worker 0 has run one before." in err) == is_elastic


def test_what_workers_get(run):
    """The secret is on no command line and not with the daemon; Horovod's variables are those of the first world."""
    program = """
names = [n for n in sorted(os.environ) if n.startswith(('KVHVD_', 'OMP')) and not n.startswith('KVHVD_TEST')]
words = ('RANK', 'SIZE', 'LOCAL', 'CROSS', 'HOSTNAME', 'CPU', 'CONTROLLER')
theirs = [f'{n[8:]}={v}' for n, v in sorted(os.environ.items()) if n[:8] == 'HOROVOD_' and n.split('_')[1] in words]
report(slot=os.environ['KVHVD_SLOT'], names=names, theirs=' '.join(theirs), cores=sorted(os.sched_getaffinity(0)),
       threads=os.environ['OMP_NUM_THREADS'])
secret = os.environ['KVHVD_SECRET'].encode()
for pid in filter(str.isdigit, os.listdir('/proc')):
    try:
        assert secret not in open(f'/proc/{pid}/cmdline', 'rb').read()
    except OSError: pass
assert secret not in open(f'/proc/{os.getppid()}/environ', 'rb').read()
assert os.stat(f'/proc/{os.getpid()}/environ').st_mode & 0o077 == 0
"""
    reports = run("--min-np 3 -H 127.0.0.2:1,localhost:2 --bind-cores", program, OMP_NUM_THREADS="").reports()
    own = {name for name in os.environ if name.startswith("KVHVD_") and not name.startswith("KVHVD_TEST")}
    given = {"KVHVD_DAEMON", "KVHVD_JOB", "KVHVD_SECRET", "KVHVD_SLOT", "KVHVD_WORKER", "OMP_NUM_THREADS"}
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2
    shares = [cores, cores[:half] or cores, cores[half:]]  # of each host for its workers
    for rank, (slot, share, told) in enumerate(zip(["127.0.0.2:0", "localhost:0", "localhost:1"], shares, reports)):
        theirs = (
            f"CONTROLLER=gloo CPU_OPERATIONS=gloo CROSS_RANK=0 CROSS_SIZE=1 HOSTNAME={slot[:-2]} "
            f"LOCAL_RANK={rank} LOCAL_SIZE=3 RANK={rank} SIZE=3"
        )
        assert (told["slot"], told["names"], told["theirs"]) == (slot, sorted(own | given), theirs)
        assert (told["cores"], told["threads"]) == (share, str(max(1, len(cores) // 3)))


def test_modules_in_the_users_folder_are_not_taken_for_the_launchers(run, tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    for name in ("json", "signal", "select", "secrets"):
        (folder / f"{name}.py").write_text("raise RuntimeError('a module of the user')\n")
    # As installed: its own folder is the first one in Python's path.
    (tmp_path / "kvhvdrun").write_text("import sys; from kvstore_hvd.launch.command import main; sys.exit(main())\n")
    run("--min-np 1", ["true"], launcher=[sys.executable, str(tmp_path / "kvhvdrun")], cwd=folder)


def test_killed_workers_and_daemons_are_replaced(start):
    """Rank 0; two at once; a daemon of two."""
    job = start("--min-np 1 --max-np 3 -H localhost:1,127.0.0.2:2")
    job.until_joined(0, 1, 2)
    job.kill(0)
    job.until_joined(1, 2, 3)
    job.until_printed("[3] generation")  # it has got the state
    job.kill(1, 2)
    job.until_joined(3, 4, 5)
    assert len(job.daemons()) == 2
    world = job.events("generation_joined")[-1]["generation"]
    os.kill(int(status_of(job.pid(5))[1]), signal.SIGKILL)
    assert job.until_joined(count=3, after=world)[0] == 3
    job.go("finish").end()
    assert "kvhvdrun: worker 0 (localhost:0) was killed by SIGKILL.\n" in job.err
    assert job.err.count("host 127.0.0.2 is lost: its daemon") == 1


def test_hosts_come_and_go(start, tmp_path):
    """However many workers a change brings, it is one reset; a script that fails in between changes nothing."""
    hosts = tmp_path / "hosts"
    hosts.write_text("localhost:2\n")
    job = start(f"--min-np 1 --reset-limit 2 --host-discovery-script 'cat {hosts}'")
    job.until_joined(0, 1)
    for number, text in enumerate(("localhost:2\n127.0.0.2:2\n", "127.0.0.2:2\n"), 1):
        hosts.unlink()
        job.until(lambda times=number: job.err.count("the host discovery script") == times, "the news of a failure")
        hosts.write_text(text)
        job.until_joined(after=number - 1)
    assert [entry["result"] for entry in job.events("updated")] == [2, 1]
    job.until(lambda: len(job.events("worker_exited")) == 2, "the end of those that leave")
    assert {entry["worker"]: entry["code"] for entry in job.events("worker_exited")} == {0: 0, 1: 0}
    job.kill(2)
    text = "Horovod was shutdown because number of resets during elastic job exceeded limit: 2"
    assert f"kvhvdrun: {text}\n" in job.end(1).err
    assert text in job.of(3)


def test_without_ssh_other_hosts_are_not_used(run, tmp_path):
    """And what a script leaves behind is not waited for."""
    for name in ("sh", "setsid", "sleep", "true"):
        (tmp_path / name).symlink_to(shutil.which(name))
    script = "setsid sleep 1000 & echo localhost; echo elsewhere:4"
    err = run(f"--min-np 1 --host-discovery-script '{script}'", ["true"], PATH=str(tmp_path)).err
    text = "its daemon could not be started: [Errno 2] No such file or directory: 'ssh'. It gets no worker for 10 s."
    assert err == f"kvhvdrun: host elsewhere is lost: {text}\n"
