"""Signals that kvhvdrun gets: while workers start, while they run, and while they end."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from support.jobs import LIMIT_S, end_by, run, start, variables_of, wait_for
from support.launchers import kvhvdrun

# Slow: the short choice of tests is for another MXNet and MPI, which nothing here has to do with.
pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

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
    code, out, _ = end_by(process, number)
    assert sorted(out.splitlines()) == [b"[0] got %d" % number, b"[1] got %d" % number]
    assert code == 128 + number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_workers_that_die_of_the_signal(marker: str, number: signal.Signals) -> None:
    process = start(marker, 2, "say('ready\\n'); forever()")
    wait_for(process, 2)
    assert end_by(process, number)[0] == 128 + number


@pytest.mark.parametrize("own", [0, 1, 77])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_signal_gives_the_exit_code_whatever_the_workers_say(marker: str, number: signal.Signals, own: int) -> None:
    program = f"signal.signal({int(number)}, lambda *_: os._exit({own})); say('ready\\n')\nwhile True: signal.pause()"
    process = start(marker, 2, program)
    wait_for(process, 2)
    code, _, err = end_by(process, number)
    assert (code, err) == (128 + number, b"")


def test_a_signal_after_a_failure_gives_the_exit_code(marker: str) -> None:
    program = "if rank == 1: sys.exit(7)\nsay('ready\\n'); forever()"
    process = start(marker, 2, program, "-v", variables={"KVHVD_SURVIVOR_TIME": "100"})
    assert process.stderr is not None
    while b"rank 1 exited with code 7" not in (line := process.stderr.readline()):
        assert line
    assert end_by(process, signal.SIGINT)[0] == 128 + signal.SIGINT


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


def test_ctrl_c_while_the_launcher_is_imported(marker: str, tmp_path: Path) -> None:
    if len(kvhvdrun().prefix) > 1:
        pytest.skip("the package is not installed, and with it the command")
    (tmp_path / "difflib.py").write_text("print('importing', flush=True)\nwhile True: pass\n")
    variables = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{variables_of()['PYTHONPATH']}"}
    process = start(marker, 2, "", variables=variables)
    assert wait_for(process, 1) == [b"importing\n"]
    assert end_by(process, signal.SIGINT) == (128 + signal.SIGINT, b"", b"")


# A launcher that gets a signal when it has started its first worker.
INTERRUPTED = """
import os, signal, sys
from kvstore_hvd import launch
from kvstore_hvd.launcher import processes
spawn = processes.spawn
def spawn_and_signal(*arguments, **keywords):
    pid = spawn(*arguments, **keywords)
    os.kill(os.getpid(), int(sys.argv[1]))
    return pid
processes.spawn = spawn_and_signal
sys.exit(launch.main(['-np', '50', '-v', 'sleep', '1000']))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_starting_of_more_workers(marker: str, number: signal.Signals) -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(int(number))],
        env=variables_of(marker),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 128 + number
    assert done.stderr.count(b" is process ") == 1


def test_workers_start_with_no_signal_blocked(marker: str) -> None:
    code, out, _ = run(marker, 2, "say(f'{signal.pthread_sigmask(signal.SIG_BLOCK, [])}\\n')")
    assert (code, sorted(out.splitlines())) == (0, [b"[0] set()", b"[1] set()"])


def test_user_signals_are_passed_on_and_end_nothing(marker: str) -> None:
    process = start(marker, 2, HANDLER)
    wait_for(process, 2)
    process.send_signal(signal.SIGUSR1)
    assert sorted(wait_for(process, 2)) == [b"[0] got 10\n", b"[1] got 10\n"]
    assert end_by(process, signal.SIGTERM)[0] == 128 + signal.SIGTERM


def test_a_second_ctrl_c_kills(marker: str) -> None:
    program = "signal.signal(signal.SIGINT, lambda *_: say('no\\n')); say('ready\\n')\nwhile True: signal.pause()"
    process = start(marker, 2, program, variables={"KVHVD_KILL_GRACE": "100"})
    wait_for(process, 2)
    process.send_signal(signal.SIGINT)
    wait_for(process, 2)
    assert end_by(process, signal.SIGINT)[0] == 128 + signal.SIGINT


def test_workers_deaf_to_ctrl_c_are_killed_after_the_grace(marker: str) -> None:
    program = "signal.signal(signal.SIGINT, signal.SIG_IGN); say('ready\\n'); forever()"
    process = start(marker, 2, program, variables={"KVHVD_KILL_GRACE": "0.2"})
    wait_for(process, 2)
    assert end_by(process, signal.SIGINT)[0] == 128 + signal.SIGINT


def test_an_ignored_hangup_stays_ignored(marker: str) -> None:
    program = "say(f'{signal.getsignal(signal.SIGHUP) == signal.SIG_IGN}\\n'); sys.stdin.read()"
    process = start(
        marker, 2, program, stdin=subprocess.PIPE, preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    assert [line[4:] for line in wait_for(process, 2)] == [b"True\n", b"True\n"]
    process.send_signal(signal.SIGHUP)
    process.communicate(b"", timeout=LIMIT_S)
    assert process.returncode == 0


def _ignored() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def _blocked() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])


@pytest.mark.parametrize("inherited", [_ignored, _blocked])
@pytest.mark.parametrize("options", [["-np", "1"], ["-np", "2"], ["--min-np", "1"]])
def test_the_ends_of_workers_are_seen_although_sigchld_is_inherited_ignored_or_blocked(
    marker: str, options: list[str], inherited: Callable[[], None]
) -> None:
    def started(program: str) -> subprocess.Popen[bytes]:
        command = [*kvhvdrun().prefix, *options, sys.executable, "-c", "import signal\n" + program]
        return subprocess.Popen(
            command,
            env=variables_of(marker),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=inherited,  # noqa: PLW1509 - no other thread is there
        )

    process = started("print(signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL, signal.pthread_sigmask(0, []))")
    out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, err
    assert all(line.endswith(b"True set()") for line in out.splitlines())
    process = started("raise SystemExit(3)")
    process.communicate(timeout=LIMIT_S)
    assert process.returncode == 3
    process = started("print('ready', flush=True); signal.pause()")
    wait_for(process, 1)
    assert end_by(process, signal.SIGTERM)[0] == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("elastic", [False, True])
def test_a_signal_ends_the_job_although_nobody_reads_its_output(
    marker: str, number: signal.Signals, elastic: bool
) -> None:
    options = ["--min-np", "2"] if elastic else ["-np", "2"]
    # The signal's own action: without a handler, Python would end with the write that it is in.
    program = "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL)\nwhile True: print('x' * 1000, flush=True)"
    process = subprocess.Popen(
        [*kvhvdrun().prefix, *options, sys.executable, "-c", program],
        env={**variables_of(marker), "KVHVD_KILL_GRACE": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert process.stdout is not None
        process.stdout.read(1)
        select.select([], [], [], 2)  # until what lies between is full: nothing tells of that
        process.send_signal(number)
        assert process.wait(LIMIT_S) == 128 + number
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def test_a_reader_that_is_slow_gets_all_that_is_written_within_the_grace(marker: str) -> None:
    program = r"""
def handler(*_):
    say('last words ' * 20000 + '\n'); sys.exit(0)
signal.signal(signal.SIGTERM, handler)
say('ready\n')
while True: signal.pause()
"""
    process = start(marker, 2, program, variables={"KVHVD_KILL_GRACE": "100"})
    wait_for(process, 2)
    process.send_signal(signal.SIGTERM)
    select.select([], [], [], 3)
    out, _ = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out.count(b"last words ")) == (128 + signal.SIGTERM, 40000)
