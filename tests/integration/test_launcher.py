"""kvhvdrun with real processes: output, signals, failures, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.launchers import environment, kvhvdrun

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60

pytestmark = pytest.mark.timeout(120)

# What every worker's program begins with.
PRELUDE = """
import os, signal, subprocess, sys, threading
rank = int(os.environ['KVHVD_RANK'])
def say(text, stream=sys.stdout):
    stream.write(text); stream.flush()
def forever():
    threading.Event().wait(100)
"""


@pytest.fixture
def marker() -> Iterator[str]:
    """A variable that all processes of a test carry; at its end no process may."""
    name = f"KVHVD_TEST_MARK={uuid.uuid4().hex}"
    yield name
    left = processes(name)
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    assert not left, "processes were left behind"


def processes(marker: str) -> list[int]:
    """Running processes that carry the marker in their environment, or its value among their arguments."""
    value = marker.partition("=")[2].encode()
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            proc = Path("/proc", entry)
            arguments = (proc / "cmdline").read_bytes().split(b"\0")
            if value in arguments or marker.encode() in (proc / "environ").read_bytes().split(b"\0"):
                found.append(int(entry))
    return found


def start(marker: str, ranks: int, program: str, *options: str, **more: object) -> subprocess.Popen[bytes]:
    """Start kvhvdrun with workers that run `program`."""
    name, _, value = marker.partition("=")
    variables = more.pop("variables", {})
    environ = {**environment(), "PYTHONPATH": str(ROOT), name: value, **variables}  # type: ignore[dict-item]
    command = [*kvhvdrun().prefix, "-np", str(ranks), *options, sys.executable, "-c", PRELUDE + program]
    given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **more}
    return subprocess.Popen(command, env=environ, **given)  # type: ignore[call-overload, no-any-return]


def run(marker: str, ranks: int, program: str, *options: str, **more: object) -> tuple[int, bytes, bytes]:
    """Run it to its end: exit code, stdout, stderr."""
    text = more.pop("input", None)
    if text is not None:
        more["stdin"] = subprocess.PIPE
    process = start(marker, ranks, program, *options, **more)
    try:
        out, err = process.communicate(text, timeout=LIMIT_S)  # type: ignore[arg-type]
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def wait_for(process: subprocess.Popen[bytes], lines: int) -> list[bytes]:
    """Read lines from stdout: workers say so when they are ready."""
    assert process.stdout is not None
    return [process.stdout.readline() for _ in range(lines)]


# -- Output -------------------------------------------------------------------------------------------------------


def test_lines_carry_the_rank_and_streams_stay_apart(marker: str) -> None:
    code, out, err = run(marker, 3, "say(f'out {rank}\\n'); say(f'err {rank}\\n', sys.stderr)")
    assert code == 0
    assert sorted(out.splitlines()) == [b"[0] out 0", b"[1] out 1", b"[2] out 2"]
    assert sorted(err.splitlines()) == [b"[0] err 0", b"[1] err 1", b"[2] err 2"]


def test_no_prefix(marker: str) -> None:
    code, out, _ = run(marker, 2, "say('x\\n')", "--no-prefix")
    assert (code, out) == (0, b"x\nx\n")


def test_one_worker_has_the_launchers_streams(marker: str) -> None:
    code, out, err = run(marker, 1, "say(sys.stdin.read()); say('e', sys.stderr)", input=b"in\n")
    assert (code, out, err) == (0, b"in\n", b"e")


def test_no_output_is_lost_or_torn(marker: str) -> None:
    program = "for i in range(3000): sys.stdout.write(f'{rank} {i} ' + 'x' * (i % 97) + '\\n')\nsay('last')"
    code, out, _ = run(marker, 3, program)
    assert code == 0
    for rank in range(3):
        mine = [line[4:] for line in out.split(b"\n") if line.startswith(b"[%d] " % rank)]
        assert mine == [b"%d %d " % (rank, i) + b"x" * (i % 97) for i in range(3000)] + [b"last"]


def test_long_lines_and_binary_junk(marker: str) -> None:
    program = "sys.stdout.buffer.write(bytes(range(256)).replace(b'\\r', b'') + b'y' * 3_000_000 + b'\\n')"
    code, out, _ = run(marker, 2, program)
    assert code == 0
    junk = bytes(range(256)).replace(b"\r", b"")
    head, tail = junk.split(b"\n")
    for rank in range(2):
        assert b"[%d] " % rank + head + b"\n" in out
    assert out.count(tail) == 2
    assert out.count(b"y") >= 6_000_000


def test_stdin_goes_to_rank_0(marker: str) -> None:
    code, out, _ = run(marker, 3, "say(f'{sys.stdin.read()!r}\\n')", input=b"hello")
    assert code == 0
    assert sorted(out.splitlines()) == [b"[0] 'hello'", b"[1] ''", b"[2] ''"]


def test_a_reader_that_leaves_ends_the_job(marker: str) -> None:
    process = start(marker, 2, "while True: say('y\\n')")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(LIMIT_S) == 128 + signal.SIGPIPE


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_leaves_is_no_failure_of_a_worker(marker: str, stream: str) -> None:
    program = f"signal.signal(signal.SIGTERM, lambda *_: os._exit(5))\nwhile True: say('y\\n', sys.{stream})"
    process = start(marker, 2, program)
    reader = getattr(process, stream)
    reader.readline()
    reader.close()
    if stream == "stdout":
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.wait(LIMIT_S) == 128 + signal.SIGPIPE


def test_lost_output_is_said_once_and_ends_no_work(marker: str) -> None:
    with open("/dev/full", "wb") as full:
        program = "for _ in range(50): say('x\\n')\nsay('done\\n', sys.stderr)"
        code, _, err = run(marker, 2, program, stdout=full)
    assert code == 1
    assert err.count(b"kvhvdrun: standard output cannot be written: No space left on device.") == 1
    assert err.count(b"done\n") == 2


def test_lost_output_on_stderr_too_gives_a_code(marker: str) -> None:
    with open("/dev/full", "wb") as full:
        assert run(marker, 2, "say('x\\n', sys.stderr)", stderr=full)[:2] == (1, b"")
        assert run(marker, 2, "say('x\\n')", stdout=full, stderr=subprocess.STDOUT)[0] == 1


def test_the_code_of_a_failed_worker_counts_more_than_lost_output(marker: str) -> None:
    with open("/dev/full", "wb") as full:
        assert run(marker, 2, "say('x\\n')\nif rank == 1: sys.exit(7)", stdout=full)[0] == 7


@pytest.mark.parametrize(("fd", "name"), [(1, "output"), (2, "error")])
def test_a_stream_closed_from_the_start_is_refused(marker: str, fd: int, name: str) -> None:
    code, out, err = run(marker, 2, "say('started\\n')", preexec_fn=lambda: os.close(fd))
    assert code == 2
    assert (out + err).startswith(b"kvhvdrun: standard %s is closed." % name.encode())
    assert b"Fix: " in out + err
    assert b"started" not in out + err


def test_stdin_closed_from_the_start_is_empty(marker: str) -> None:
    code, out, err = run(marker, 2, "say(f'{sys.stdin.read()!r}\\n')", preexec_fn=lambda: os.close(0))
    assert (code, sorted(out.splitlines()), err) == (0, [b"[0] ''", b"[1] ''"], b"")


@pytest.mark.parametrize("path", ["/dev/full", "pipe"])
def test_help_that_cannot_be_written(path: str) -> None:
    if path == "pipe":
        ours, theirs = os.pipe()
        os.close(ours)
    else:
        theirs = os.open(path, os.O_WRONLY)
    try:
        done = subprocess.run(
            [*kvhvdrun().prefix, "--help"],
            env={**environment(), "PYTHONPATH": str(ROOT)},
            stdout=theirs,
            stderr=subprocess.PIPE,
            timeout=LIMIT_S,
            check=False,
        )
    finally:
        os.close(theirs)
    expected = (
        (128 + signal.SIGPIPE, b"")
        if path == "pipe"
        else (1, b"kvhvdrun: standard output cannot be written: No space left on device.\n")
    )
    assert (done.returncode, done.stderr) == expected


def test_on_a_terminal_workers_have_one_too(marker: str) -> None:
    ours, theirs = pty.openpty()
    process = start(marker, 2, "say(f'{sys.stdout.isatty()} name? ')\nforever()", stdout=theirs, stderr=theirs)
    os.close(theirs)
    text = b""
    while text.count(b"name? ") < 2:  # unfinished lines are shown: they may be prompts
        assert select.select([ours], [], [], LIMIT_S)[0], text
        text += os.read(ours, 4096)
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == 128 + signal.SIGINT
    os.close(ours)
    assert b"[0] True name? " in text
    assert b"[1] True name? " in text


# -- Ends ---------------------------------------------------------------------------------------------------------


def test_exit_code_and_last_words_of_the_first_failure(marker: str) -> None:
    program = "if rank == 1: say('early\\n' 'ValueError: bad', sys.stderr); sys.exit(7)\nforever()"
    code, _, err = run(marker, 3, program, variables={"KVHVD_SURVIVOR_TIME": "0.1"})
    assert code == 7
    head, _, block = err.partition(b"kvhvdrun: ")
    assert head.endswith(b"\n")
    assert block.startswith(b"rank 1 of 3 (pid ")
    assert block.endswith(b") exited with code 7. Its last lines on stderr:\n    early\n    ValueError: bad\n")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT])
def test_a_killed_worker_gives_128_and_the_signal(marker: str, number: signal.Signals) -> None:
    program = f"if rank == 1: os.kill(os.getpid(), {int(number)})\nforever()"
    code, _, err = run(marker, 2, program, variables={"KVHVD_SURVIVOR_TIME": "0.1"})
    assert code == 128 + number
    assert f"was killed by {number.name}".encode() in err


def test_survivors_may_report_and_are_not_blamed(marker: str) -> None:
    # Rank 0 ends first, but because of rank 1: as when a peer is told of a failure before the failing process is gone.
    program = """
if rank == 0:
    say('PeerLostError: rank 1 raised ValueError\\n', sys.stderr); sys.exit(1)
threading.Event().wait(0.3)
say('ValueError: the cause\\n', sys.stderr); sys.exit(9)
"""
    code, _, err = run(marker, 2, program)
    assert code == 9
    assert b"rank 1 of 2" in err.partition(b"kvhvdrun: ")[2]
    assert b"[0] PeerLostError" in err


def test_a_worker_that_ignores_sigterm_is_killed(marker: str) -> None:
    program = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\nif rank == 0: sys.exit(3)\nforever()"
    code, _, _ = run(marker, 2, program, variables={"KVHVD_SURVIVOR_TIME": "0.1", "KVHVD_KILL_GRACE": "0.2"})
    assert code == 3


def test_a_stopped_worker_is_killed(marker: str) -> None:
    program = "if rank == 0: sys.exit(3)\nos.kill(os.getpid(), signal.SIGSTOP)"
    code, _, _ = run(marker, 2, program, variables={"KVHVD_SURVIVOR_TIME": "0.1", "KVHVD_KILL_GRACE": "0.2"})
    assert code == 3


def test_workers_that_end_well_are_waited_for(marker: str) -> None:
    program = "if rank == 0: sys.exit(0)\nthreading.Event().wait(0.5); say('done\\n')"
    code, out, _ = run(marker, 2, program, variables={"KVHVD_SURVIVOR_TIME": "0.1", "KVHVD_KILL_GRACE": "0.1"})
    assert (code, out) == (0, b"[1] done\n")


# -- Nothing is left ----------------------------------------------------------------------------------------------

GRANDCHILDREN = """
sleep = ['sleep', '1000']
subprocess.Popen(sleep)
subprocess.Popen(sleep, start_new_session=True)
subprocess.Popen(['sh', '-c', 'setsid sleep 1000 & exit'], start_new_session=True).wait()
mark = os.environ['KVHVD_TEST_MARK']
subprocess.Popen(['setsid', 'env', '-i', '/bin/sh', '-c', 'sleep 1000; :', mark])
say('ready\\n')
"""


def test_grandchildren_end_with_a_job_that_ends_well(marker: str) -> None:
    code, _, _ = run(marker, 2, GRANDCHILDREN)
    assert code == 0


def test_grandchildren_end_with_a_worker_that_is_killed(marker: str) -> None:
    program = GRANDCHILDREN + "if rank == 1: os.kill(os.getpid(), 9)\nforever()"
    code, _, _ = run(marker, 2, program, variables={"KVHVD_SURVIVOR_TIME": "0.1"})
    assert code == 137


def test_sigkill_of_the_launcher_ends_everything(marker: str) -> None:
    program = (
        GRANDCHILDREN.replace("subprocess.Popen(['setsid', 'env', '-i', '/bin/sh', '-c', 'sleep 1000; :', mark])\n", "")
        + "forever()"
    )
    process = start(marker, 2, program)
    wait_for(process, 2)
    assert len(processes(marker)) >= 2 + 2 * 3
    process.kill()
    # The streams close when the last process that holds them has ended.
    process.communicate(timeout=LIMIT_S)
    while processes(marker):
        threading_wait()


def threading_wait() -> None:
    """A short pause between two looks at /proc, which has no events."""
    select.select([], [], [], 0.02)


# -- Signals ------------------------------------------------------------------------------------------------------

HANDLER = """
def handler(number, frame):
    say(f'got {number}\\n')
    if number not in (signal.SIGUSR1, signal.SIGUSR2): sys.exit(0)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, handler)
say('ready\\n')
while True: signal.pause()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_signals_reach_every_worker(marker: str, number: signal.Signals) -> None:
    process = start(marker, 2, HANDLER)
    wait_for(process, 2)
    process.send_signal(number)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert sorted(out.splitlines()) == [b"[0] got %d" % number, b"[1] got %d" % number]
    assert process.returncode == 128 + number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_workers_that_die_of_the_signal(marker: str, number: signal.Signals) -> None:
    process = start(marker, 2, "say('ready\\n'); forever()")
    wait_for(process, 2)
    process.send_signal(number)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + number


@pytest.mark.parametrize("own", [0, 1, 77])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_signal_gives_the_exit_code_whatever_the_workers_say(marker: str, number: signal.Signals, own: int) -> None:
    program = f"signal.signal({int(number)}, lambda *_: os._exit({own})); say('ready\\n')\nwhile True: signal.pause()"
    process = start(marker, 2, program)
    wait_for(process, 2)
    process.send_signal(number)
    _, err = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, err) == (128 + number, b"")


def test_a_signal_after_a_failure_gives_the_exit_code(marker: str) -> None:
    program = "if rank == 1: sys.exit(7)\nsay('ready\\n'); forever()"
    process = start(marker, 2, program, "-v", variables={"KVHVD_SURVIVOR_TIME": "100"})
    assert process.stderr is not None
    while b"rank 1 exited with code 7" not in (line := process.stderr.readline()):
        assert line
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGINT


@pytest.mark.parametrize("progress", [b"kvhvdrun: job ", b"kvhvdrun: rank 0 is", b"kvhvdrun: rank 2 is"])
@pytest.mark.parametrize("group", [False, True])
def test_ctrl_c_while_workers_start(marker: str, progress: bytes, group: bool) -> None:
    process = start(marker, 3, "forever()", "-v", start_new_session=True)
    assert process.stderr is not None
    while progress not in (line := process.stderr.readline()):
        assert line
    if group:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGINT


# A launcher that gets a signal when it has started its first worker.
INTERRUPTED = """
import os, signal, sys
from kvstore_hvd import launch
from kvstore_hvd.launcher import processes
spawn = processes.spawn
def spawn_and_signal(*arguments):
    pid = spawn(*arguments)
    os.kill(os.getpid(), int(sys.argv[1]))
    return pid
processes.spawn = spawn_and_signal
sys.exit(launch.main(['-np', '50', '-v', 'sleep', '1000']))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_starting_of_more_workers(marker: str, number: signal.Signals) -> None:
    name, _, value = marker.partition("=")
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(int(number))],
        env={**environment(), "PYTHONPATH": str(ROOT), name: value},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 128 + number
    assert done.stderr.count(b" is process ") == 1


def test_a_script_without_an_interpreter_is_named(tmp_path: Path) -> None:
    script = tmp_path / "train"
    script.write_text("echo\n")
    script.chmod(0o755)
    done = subprocess.run(
        [*kvhvdrun().prefix, "-np", "2", str(script)],
        env={**environment(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 126
    assert str(script).encode() in done.stderr
    assert b"#!" in done.stderr


def test_workers_start_with_no_signal_blocked(marker: str) -> None:
    code, out, _ = run(marker, 2, "say(f'{signal.pthread_sigmask(signal.SIG_BLOCK, [])}\\n')")
    assert (code, sorted(out.splitlines())) == (0, [b"[0] set()", b"[1] set()"])


def test_user_signals_are_passed_on_and_end_nothing(marker: str) -> None:
    process = start(marker, 2, HANDLER)
    wait_for(process, 2)
    process.send_signal(signal.SIGUSR1)
    assert sorted(wait_for(process, 2)) == [b"[0] got 10\n", b"[1] got 10\n"]
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGTERM


def test_a_second_ctrl_c_kills(marker: str) -> None:
    program = "signal.signal(signal.SIGINT, lambda *_: say('no\\n')); say('ready\\n')\nwhile True: signal.pause()"
    process = start(marker, 2, program, variables={"KVHVD_KILL_GRACE": "100"})
    wait_for(process, 2)
    process.send_signal(signal.SIGINT)
    wait_for(process, 2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGINT


def test_workers_deaf_to_ctrl_c_are_killed_after_the_grace(marker: str) -> None:
    program = "signal.signal(signal.SIGINT, signal.SIG_IGN); say('ready\\n'); forever()"
    process = start(marker, 2, program, variables={"KVHVD_KILL_GRACE": "0.2"})
    wait_for(process, 2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 128 + signal.SIGINT


def test_an_ignored_hangup_stays_ignored(marker: str) -> None:
    program = "say(f'{signal.getsignal(signal.SIGHUP) == signal.SIG_IGN}\\n'); sys.stdin.read()"
    process = start(
        marker, 2, program, stdin=subprocess.PIPE, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    assert [line[4:] for line in wait_for(process, 2)] == [b"True\n", b"True\n"]
    process.send_signal(signal.SIGHUP)
    process.communicate(b"", timeout=LIMIT_S)
    assert process.returncode == 0


# -- The workers' world -------------------------------------------------------------------------------------------


def test_workers_share_memory(marker: str) -> None:
    program = """
from kvstore_hvd.bootstrap import discover
from kvstore_hvd.rendezvous import share_segment
fd = share_segment(discover(), lambda: os.memfd_create('x'))
os.pwrite(fd, b'x', rank)
say(f'{os.fstat(fd).st_ino}\\n')
"""
    code, out, err = run(marker, 4, program)
    assert code == 0, err
    assert len({line[4:] for line in out.splitlines()}) == 1


def test_a_worker_that_never_comes_is_named_by_all_others(marker: str) -> None:
    program = """
from kvstore_hvd.bootstrap import discover
from kvstore_hvd.rendezvous import share_segment
if rank == 1: forever()
share_segment(discover(), lambda: os.memfd_create('x'))
"""
    code, _, err = run(marker, 3, program, "--start-timeout", "2")
    assert code == 1
    assert b"[rank 0/3] rank 1 did not arrive within 2 s." in err
    assert b"[rank 2/3] the start failed" in err


def test_the_secret_is_on_no_command_line(marker: str) -> None:
    program = """
secret = os.environ['KVHVD_SECRET']
for pid in os.listdir('/proc'):
    if pid.isdigit():
        try:
            assert secret.encode() not in open(f'/proc/{pid}/cmdline', 'rb').read()
        except OSError: pass
"""
    assert run(marker, 2, program)[0] == 0


def test_bind_cores_pins(marker: str) -> None:
    cores = len(os.sched_getaffinity(0))
    code, out, _ = run(marker, 2, "say(f'{len(os.sched_getaffinity(0))}\\n')", "--bind-cores")
    assert code == 0
    assert all(int(line[4:]) in (max(1, cores // 2), (cores + 1) // 2) for line in out.splitlines())
