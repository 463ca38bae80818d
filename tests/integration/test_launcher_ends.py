"""How jobs of kvhvdrun end: exit codes, who is blamed, and that no process is left behind."""

from __future__ import annotations

import select
import signal

import pytest

from support.jobs import LIMIT_S, processes, run, start, wait_for

# Slow: the short choice of tests is for another MXNet and MPI, which nothing here has to do with.
pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

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


def test_the_cause_is_the_last_line_whatever_exit_handlers_raise(marker: str) -> None:
    program = """
if rank == 0:
    say('PeerLostError: rank 1 raised ValueError\\n', sys.stderr); sys.exit(1)
import atexit
class PeerLostError(Exception): pass
@atexit.register
def leave(): raise PeerLostError('rank 1 ended early\\n  Fix: restart')
threading.Event().wait(0.3)
raise ValueError('the cause')
"""
    code, _, err = run(marker, 2, program)
    summary = err.partition(b"kvhvdrun: ")[2]
    assert code == 1
    assert summary.startswith(b"rank 1 of 2")
    assert summary.endswith(b"\n    ValueError: the cause\n")
    assert err.count(b"PeerLostError: rank 1 ended early") == 1  # the worker's own words are whole


def test_the_time_of_the_survivors_runs_from_the_first_failure(marker: str) -> None:
    """However many fail after it. A launcher that is late by less than six seconds changes nothing."""
    program = "threading.Event().wait(rank); sys.exit(10 + rank)"
    code, _, err = run(marker, 9, program, "--verbose", variables={"KVHVD_SURVIVOR_TIME": "2"})
    assert code == 10
    assert b"rank 1 exited with code 11" in err
    assert b"rank 8 was killed by SIGTERM" in err


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
    process = start(marker, 2, GRANDCHILDREN + "forever()")
    wait_for(process, 2)
    assert len(processes(marker)) >= 2 + 2 * 4
    process.kill()
    # The streams close when the last process that holds them has ended.
    process.communicate(timeout=LIMIT_S)
    while processes(marker):
        threading_wait()


def threading_wait() -> None:
    """A short pause between two looks at /proc, which has no events."""
    select.select([], [], [], 0.02)
