"""How jobs of kvhvdrun end: exit codes, who is blamed, signals, and that nothing is left of them, whoever is killed."""

import fcntl
import os
import re
import signal
import struct
import subprocess
import termios
import time
from pathlib import Path

import pytest

from support.jobs import LIMIT_S, PACKAGES, processes, status_of, variables_of
from support.launchers import kvhvdrun

pytestmark = pytest.mark.alike

_GETPIPE_SZ = 1032  # which fcntl has since Python 3.10
# In its session and out of it, with its environment and without.
CHILDREN = """
mark = os.environ['KVHVD_TEST_MARK']
bare = ['env', '-i', '/bin/sh', '-c', 'sleep 1000; :', mark]
subprocess.Popen(['sleep', '1000'])
subprocess.Popen(['sleep', '1000'], start_new_session=True)
subprocess.Popen(bare)
subprocess.Popen(bare, start_new_session=True)
subprocess.Popen(['setsid', 'sh', '-c', 'setsid env -i /bin/sh -c "sleep 1000; :" $0 & exit', mark]).wait()
say('ready\\n')
"""
# Shared memory that Python's resource tracker removes once the processes of its program are gone, if they go when it
# ignores SIGTERM (bit 14), which it begins with.
SHARED = """
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
tracker, pid = resource_tracker._resource_tracker._fd, resource_tracker._resource_tracker._pid
while not int(open(f'/proc/{pid}/status').read().split('SigIgn:')[1].split()[0], 16) & 1 << 14:
    time.sleep(0.01)
subprocess.Popen([sys.executable, '-c', 'import threading; threading.Event().wait(1000)'], pass_fds=[tracker])
open(f'memory{rank}', 'w').write(memory.name)
say('ready\\n')
"""


def assert_shared_memory_is_removed(job):
    names = [(job.folder / f"memory{rank}").read_text() for rank in range(2)]
    assert [name for name in names if Path("/dev/shm", name).exists()] == []


def with_name(marker, name):
    """The processes that `pkill NAME` or `pkill -f NAME` would hit, of this job only."""
    files = [(pid, Path("/proc", str(pid), file)) for pid in processes(marker) for file in ("comm", "cmdline")]
    return sorted({pid for pid, file in files if file.exists() and name in file.read_bytes()})


@pytest.mark.parametrize(
    ("options", "words"), [("", " are above.\n"), ("--ranks 0", ":\n    early\n    ValueError: bad\n")]
)
def test_exit_code_and_last_words_of_the_first_failure(run, options, words):
    """Those that were not shown, or long before the end."""
    program = "if rank == 1: say('early\\n' 'ValueError: bad', sys.stderr); sys.exit(7)\nforever()"
    head, _, block = run(f"-np 3 {options}", program, code=7, KVHVD_SURVIVOR_TIME="0.1").err.partition("kvhvdrun: ")
    assert head.endswith("\n") or options
    assert block.startswith("rank 1 of 3 (pid ")
    assert block.endswith(f") exited with code 7. Its last lines on stderr{words}")


def test_of_a_worker_that_says_nothing_the_end_is_said(run):
    err = run("-np 1", "os.kill(os.getpid(), 9)", code=137).err
    assert re.fullmatch(r"kvhvdrun: rank 0 of 1 \(pid \d+\) was killed by SIGKILL\.\n", err)
    program = "say('x\\n')\nif rank == 0: open('said', 'w')\nelse: wait_for('said'); sys.exit(3)"
    job = run("-np 2 --no-prefix", program, code=3)
    assert (job.out, job.err.partition(") ")[2]) == ("x\nx\n", "exited with code 3. It wrote nothing to stderr.\n")


def test_a_killed_worker_gives_128_and_the_signal(run):
    """What it has started is ended, too, but for what removes shared memory."""
    program = CHILDREN + SHARED + "wait_for('memory0')\nif rank == 1: os.kill(os.getpid(), 9)\nforever()"
    job = run("-np 2", program, code=137, KVHVD_SURVIVOR_TIME="0.1")
    assert "was killed by SIGKILL" in job.err
    assert_shared_memory_is_removed(job)


def test_survivors_may_report_and_are_not_blamed(run):
    """Rank 0 ends first, but because of rank 1; and the cause is its last line, whatever exit handlers raise."""
    program = """
if rank == 0:
    say('PeerLostError: rank 1 raised ValueError\\n', sys.stderr); open('told', 'w'); sys.exit(1)
import atexit
class PeerLostError(Exception): pass
@atexit.register
def leave(): raise PeerLostError('rank 1 ended early\\n  Fix: restart')
wait_for('told')
raise ValueError('the cause')
"""
    err = run("-np 2", program, code=1).err
    summary = err.partition("kvhvdrun: ")[2]
    assert summary.startswith("rank 1 of 2")
    assert summary.endswith("\n    ValueError: the cause\n")
    assert "[0] PeerLostError" in err
    assert err.count("PeerLostError: rank 1 ended early") == 1  # the worker's own words are whole


def test_what_is_deaf_to_sigterm_is_killed_when_all_workers_have_ended_well(run):
    program = """
deaf = 'import signal, threading; signal.signal(15, signal.SIG_IGN); print(1, flush=True); threading.Event().wait()'
for own in (False, True):
    child = subprocess.Popen([sys.executable, '-c', deaf], stdout=subprocess.PIPE, start_new_session=own)
    child.stdout.readline()
"""
    assert run("-np 2", CHILDREN + program).err == ""


def test_a_script_without_an_interpreter_is_named(run, tmp_path):
    script = tmp_path / "train"
    script.write_text("echo\n")
    script.chmod(0o755)
    err = run("-np 2", [str(script)], code=126).err
    assert str(script) in err
    assert "#!" in err


def test_a_guard_that_is_killed_costs_the_job_nothing(start, marker):
    """A worker that ends well meanwhile is no reason to end the other one."""
    job = start("-np 2", CHILDREN + "wait_for('go' if rank else '/')\nsay('done\\n')", KVHVD_SURVIVOR_TIME="0.1")
    job.until_printed("[0] done")
    (guard,) = with_name(marker, b"job-guard")
    os.kill(guard, signal.SIGKILL)
    assert "[1] done" in job.go().end().out
    assert job.err == ""


@pytest.mark.parametrize("options", ["-np 2", "--min-np 2 --host-discovery-script"])
def test_whoever_kills_launchers_by_name_ends_all_of_the_job(start, marker, options):
    """Together with the daemon, and what a discovery script has started."""
    if "--min" in options:
        options += " \"setsid env -i sh -c 'sleep 1000; :' $KVHVD_TEST_MARK > /dev/null 2>&1 & echo localhost:2\""
    job = start(options, CHILDREN + SHARED + "forever()").until_printed("ready", 4)
    assert len(processes(marker)) >= 2 + 2 * 5
    by_name = with_name(marker, b"kvhvdrun")
    assert job.process.pid in by_name
    for pid in [*by_name, *with_name(marker, b"job-daemon")]:
        os.kill(pid, signal.SIGKILL)
    job.end(-signal.SIGKILL)
    assert_shared_memory_is_removed(job)


def test_what_was_started_before_kvhvdrun_goes_on():
    """As in the start script of a container: a shell starts a service, and becomes kvhvdrun."""
    script = 'sleep 1000 > /dev/null & echo $!; exec "$@"'
    command = ["sh", "-c", script, "sh", *kvhvdrun().prefix, "-np", "2", "true"]
    done = subprocess.run(command, env=variables_of(), stdout=subprocess.PIPE, timeout=LIMIT_S, check=True)
    assert status_of(int(done.stdout))[0] == "S"
    os.kill(int(done.stdout), signal.SIGKILL)


@pytest.mark.parametrize("options", ["-np 2", "--min-np 2"])
def test_a_launcher_that_is_stopped_and_continued_goes_on(start, options):
    """For longer than it may be silent. Ctrl-Z and fg stop the workers with it; else they go on without it."""
    is_elastic = "--min" in options
    job = start(options, "say(f'{os.getpid()}\\n'); wait_for('go')", KVHVD_LEASE="2").until_printed("\n", 2)
    pids = [job.process.pid, *(int(line.split()[-1]) for line in job.out.splitlines())]
    job.process.send_signal(signal.SIGTSTP if is_elastic else signal.SIGSTOP)
    job.until(lambda: [status_of(pid)[0] == "T" for pid in pids] == [True, is_elastic, is_elastic], "stopped processes")
    time.sleep(3.0)  # longer than the lease
    job.process.send_signal(signal.SIGCONT)
    assert job.go().end().err == ""


@pytest.mark.parametrize(
    ("options", "number"),
    [("-np 2", signal.SIGINT), ("-np 2", signal.SIGTERM), ("-np 2", signal.SIGHUP), ("--min-np 2", signal.SIGTERM)],
)
def test_signals_reach_every_worker_and_give_the_exit_code(start, options, number):
    """Whatever the workers say; the user's own signals are passed on and end nothing."""
    program = f"""
for own in (signal.SIGUSR1, signal.SIGUSR2): signal.signal(own, lambda *_: say('user\\n'))
signal.signal({int(number)}, lambda number, _: (say(f'got {{number}}\\n'), os._exit(77 * rank)))
if rank and not os.fork(): signal.signal({int(number)}, signal.SIG_DFL)
say('ready\\n')
while True: signal.pause()
"""
    job = start(options, program).until_printed("ready", 3)
    for times, own in enumerate((signal.SIGUSR1, signal.SIGUSR2), 1):
        job.process.send_signal(own)
        job.until_printed("user", 3 * times)
    job.end(128 + number, number)
    assert sorted(job.out.splitlines()[9:]) == [f"[{rank}] got {int(number)}" for rank in range(2)]
    assert job.err == ""
    if "--min-np" in options:
        assert job.events()[-1]["reason"] == "signal SIGTERM"
        assert len(job.events("worker_started")) == 2  # nobody took the place of those that the signal ended


def test_a_signal_after_a_failure_gives_the_exit_code(start):
    job = start("-np 2 -v", "if rank == 1: sys.exit(7)\nforever()", KVHVD_SURVIVOR_TIME="100")
    job.until_printed("worker 1 (localhost:1) exited with code 7").end(128 + signal.SIGINT, signal.SIGINT)


@pytest.mark.parametrize("options", ["-np 3 -v", "--min-np 3 -v"])
def test_ctrl_c_of_a_terminal_while_workers_start(start, options):
    """It reaches the workers, too."""
    job = start(options, "forever()", start_new_session=True).until_printed("kvhvdrun: worker started worker 0")
    os.killpg(job.process.pid, signal.SIGINT)
    job.end(128 + signal.SIGINT)


def test_ctrl_c_while_the_launcher_is_imported(start, tmp_path):
    if len(kvhvdrun().prefix) > 1:
        pytest.skip("the package is not installed, and with it the command")
    (tmp_path / "argparse.py").write_text("print('importing', flush=True)\nwhile True: pass\n")
    job = start("-np 2", "", PYTHONPATH=f"{tmp_path}{os.pathsep}{PACKAGES}").until_printed("importing")
    assert job.end(128 + signal.SIGINT, signal.SIGINT).err == ""


def test_an_ignored_hangup_stays_ignored(start):
    program = "say(f'{signal.getsignal(signal.SIGHUP) == signal.SIG_IGN}\\n'); wait_for('go')"
    job = start("-np 2", program, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    job.until_printed("True", 2).process.send_signal(signal.SIGHUP)
    job.go().end()


@pytest.mark.parametrize("options", ["-np 2", pytest.param("--min-np 2", marks=pytest.mark.slow)])
def test_the_ends_of_workers_are_seen_although_sigchld_is_inherited_ignored_and_blocked(run, options):
    def inherited():
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])

    program = "say(f'{signal.getsignal(17) == signal.SIG_DFL} {signal.pthread_sigmask(0, [])}\\n'); sys.exit(3)"
    job = run(options, program, code=3, preexec_fn=inherited)
    assert {line[4:] for line in job.out.splitlines()} == {"True set()"}


@pytest.mark.parametrize("options", ["-np 2", pytest.param("--min-np 2", marks=pytest.mark.slow)])
def test_a_signal_ends_the_job_although_nobody_reads_its_output(start, options):
    # The signal's own action: without a handler, Python would end with the write that it is in.
    program = "signal.signal(signal.SIGINT, signal.SIG_DFL)\nwhile True: say('x' * 1000 + '\\n')"
    job = start(options, program, stdout=subprocess.PIPE, KVHVD_KILL_GRACE="1")
    pipe = job.process.stdout.fileno()

    def is_full():
        (number,) = struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4))
        return bool(number > fcntl.fcntl(pipe, _GETPIPE_SZ) - 8192)

    job.until(is_full, "a full pipe")
    job.end(128 + signal.SIGTERM, signal.SIGTERM)


def test_a_signal_that_ends_the_daemon_is_not_the_workers_fault(start):
    job = start("-np 2", "say(f'{os.getppid()}\\n')\nforever()").until_printed("[", 2)
    daemon = int(job.out.split()[1])
    os.kill(daemon, signal.SIGTERM)
    last = f"kvhvdrun: the daemon on localhost (pid {daemon}) was ended by SIGTERM."
    assert job.end(143).err == f"{last}\n  Fix: to end a job, send the signal to kvhvdrun.\n"
