"""Signals that kvhvdrun gets: while workers start, while they run, and while they end; and what it starts them with."""

import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios

import pytest

from kvstore_hvd.base.cores import describe, suffice
from support.jobs import PACKAGES
from support.launchers import kvhvdrun

pytestmark = pytest.mark.alike


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_reach_every_worker_and_give_the_exit_code(start, number):
    """Whatever the workers say; the user's own signals are passed on and end nothing."""
    program = f"""
signal.signal(signal.SIGUSR1, lambda *_: say('user\\n'))
signal.signal({int(number)}, lambda number, _: (say(f'got {{number}}\\n'), os._exit(77 * rank)))
say('ready\\n')
while True: signal.pause()
"""
    job = start("-np 2", program).until_printed("ready", 2)
    job.process.send_signal(signal.SIGUSR1)
    job.until_printed("user", 2)
    job.end(128 + number, number)
    assert sorted(job.out.splitlines()[4:]) == [f"[{rank}] got {int(number)}" for rank in range(2)]
    assert job.err == ""


def test_a_signal_after_a_failure_gives_the_exit_code(start):
    job = start("-np 2 -v", "if rank == 1: sys.exit(7)\nforever()", KVHVD_SURVIVOR_TIME="100")
    job.until_printed("worker 1 (localhost:1) exited with code 7").end(128 + signal.SIGINT, signal.SIGINT)


def test_ctrl_c_of_a_terminal_while_workers_start(start):
    """It reaches the workers, too."""
    job = start("-np 3 -v", "forever()", start_new_session=True).until_printed("kvhvdrun: worker started worker 0")
    os.killpg(job.process.pid, signal.SIGINT)
    job.end(128 + signal.SIGINT)


def test_ctrl_c_while_the_launcher_is_imported(start, tmp_path):
    if len(kvhvdrun().prefix) > 1:
        pytest.skip("the package is not installed, and with it the command")
    (tmp_path / "argparse.py").write_text("print('importing', flush=True)\nwhile True: pass\n")
    job = start("-np 2", "", PYTHONPATH=f"{tmp_path}{os.pathsep}{PACKAGES}").until_printed("importing")
    assert job.end(128 + signal.SIGINT, signal.SIGINT).err == ""


# A launcher that gets a signal when its first worker has been started.
INTERRUPTED = """
import os, signal, sys
from kvstore_hvd.launch import command, processes
spawn, launcher = processes.spawn, os.getpid()
def spawn_and_signal(*arguments, **keywords):
    pid = spawn(*arguments, **keywords)
    os.kill(launcher, signal.SIGTERM)
    return pid
processes.spawn = spawn_and_signal
sys.exit(command.main(sys.argv[1:]))
"""


def test_a_signal_stops_the_starting_of_more_workers(run):
    job = run("-np 50 -v", ["sleep", "1000"], code=143, launcher=[sys.executable, "-c", INTERRUPTED])
    assert job.err.count("worker started ") == 1


def test_a_second_ctrl_c_kills(start):
    program = "signal.signal(signal.SIGINT, lambda *_: say('no\\n')); say('ready\\n')\nwhile True: signal.pause()"
    job = start("-np 2", program, KVHVD_KILL_GRACE="100").until_printed("ready", 2)
    job.process.send_signal(signal.SIGINT)
    job.until_printed("no", 2).end(128 + signal.SIGINT, signal.SIGINT)


def test_workers_deaf_to_ctrl_c_are_killed_after_the_grace(start):
    program = "signal.signal(signal.SIGINT, signal.SIG_IGN); say('ready\\n'); forever()"
    job = start("-np 2", program, KVHVD_KILL_GRACE="0.2").until_printed("ready", 2)
    job.end(128 + signal.SIGINT, signal.SIGINT)


def test_an_ignored_hangup_stays_ignored(start):
    program = "say(f'{signal.getsignal(signal.SIGHUP) == signal.SIG_IGN}\\n'); wait_for('go')"
    job = start("-np 2", program, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
    job.until_printed("True", 2).process.send_signal(signal.SIGHUP)
    (job.folder / "go").touch()
    job.end()


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
        return bool(number > fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ) - 8192)

    job.until(is_full, "a full pipe")
    job.end(128 + signal.SIGTERM, signal.SIGTERM)


# -- The start ----------------------------------------------------------------------------------------------------


def test_workers_share_memory_and_the_secret_is_on_no_command_line(run):
    program = """
from kvstore_hvd.world.discover import discover
from kvstore_hvd.world.meeting import share_segment
fd = share_segment(discover(), lambda told: os.memfd_create('x'))
os.pwrite(fd, b'x', rank)
say(f'{os.fstat(fd).st_ino} {len(os.sched_getaffinity(0))}\\n')
for pid in filter(str.isdigit, os.listdir('/proc')):
    try:
        assert os.environ['KVHVD_SECRET'].encode() not in open(f'/proc/{pid}/cmdline', 'rb').read()
    except OSError: pass
"""
    lines = [line[4:].split() for line in run("-np 4 --bind-cores", program).out.splitlines()]
    assert len({inode for inode, _ in lines}) == 1
    cores = len(os.sched_getaffinity(0))
    assert {int(pinned) for _, pinned in lines} <= {max(1, cores // 4), (cores + 3) // 4}


def test_a_worker_that_never_comes_is_named_by_all_others(run):
    program = """
if rank == 1: forever()
from kvstore_hvd.world.discover import discover
from kvstore_hvd.world.meeting import share_segment
share_segment(discover(), lambda told: os.memfd_create('x'))
"""
    err = run("-np 3 --start-timeout 2", program, code=1).err
    assert "[rank 0/3] rank 1 did not arrive within 2 s." in err
    assert "[rank 2/3] the start failed" in err


def test_a_script_without_an_interpreter_is_named(run, tmp_path):
    script = tmp_path / "train"
    script.write_text("echo\n")
    script.chmod(0o755)
    err = run("-np 2", [str(script)], code=126).err
    assert str(script) in err
    assert "#!" in err


@pytest.mark.parametrize("together", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_who_waits_spins_only_if_there_is_a_core_for_each(run, together):
    """Those that the workers may use count, not those of the machine; pinned to one each they have one each."""
    cores = sorted(os.sched_getaffinity(0))
    if not together and len(cores) < 2:
        pytest.skip("needs two cores")
    program = f"""
import kvstore_hvd
os.sched_setaffinity(0, {{{cores[:1] * 2 if together else cores[:2]}[rank]}})
kvstore_hvd.init()
kvstore_hvd.barrier()
"""
    err = run("-np 2", program, KVHVD_LOG_LEVEL="info").err
    # A control group may allow less than that, too.
    allowed = suffice([describe()] * 2)
    assert err.count("a worker that waits does not spin") == (0 if allowed and not together else 2), err


def test_a_signal_that_ends_the_daemon_is_not_the_workers_fault(start):
    job = start("-np 2", "say(f'{os.getppid()}\\n')\nforever()").until_printed("[", 2)
    daemon = int(job.out.split()[1])
    os.kill(daemon, signal.SIGTERM)
    last = f"kvhvdrun: the daemon on localhost (pid {daemon}) was ended by SIGTERM."
    assert job.end(143).err == f"{last}\n  Fix: to end a job, send the signal to kvhvdrun.\n"
