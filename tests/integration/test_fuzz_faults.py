"""Workers that are killed or stopped in the middle of random programs, as real processes: see `fuzz.programs`.

``KVHVD_TEST_FUZZ_FAULTS`` says how many seeds ``make fuzz`` tries (default 100), from ``KVHVD_TEST_FUZZ_SEED`` (default
1000) on.
"""

import os
import re
import signal
import sys

import pytest

from support.jobs import TESTS, start
from support.patience import patient

RANKS = 3
FIRST = int(os.environ.get("KVHVD_TEST_FUZZ_SEED", "1000"))
SEEDS = int(os.environ.get("KVHVD_TEST_FUZZ_FAULTS", "100"))


def lose(seed, number, folder, marker):
    """Run a job whose victim gets the signal; all others have to be told of it by name."""
    # However slow the machine is, kvhvdrun lets the survivors report what they were told.
    variables = {"KVHVD_TIMEOUT": "4" if number == signal.SIGSTOP else "60", "KVHVD_SURVIVOR_TIME": str(patient(10))}
    command = [sys.executable, str(TESTS / "support" / "fuzz_worker.py"), str(seed), str(number)]
    job = start(folder, marker, f"-np {RANKS}", command, **variables).until_printed("victim: ")
    victim, pid = job.until(lambda: re.findall(r"^\[(\d)\] victim: (\d+)\n", job.out, re.MULTILINE))[0]
    if number == signal.SIGSTOP:
        job.until_printed("] caught: ", RANKS - 1)
        os.kill(int(pid), signal.SIGCONT)
    output = job.end(128 + number if number == signal.SIGKILL else 0).out
    for rank in {str(rank) for rank in range(RANKS)} - {victim}:
        lines = [line[4:] for line in output.splitlines() if line.startswith(f"[{rank}] ")]
        caught = next((line for line in lines if line.startswith("caught: ")), None)
        assert caught is not None, f"rank {rank} was not told; output:\n{output}"
        if number == signal.SIGKILL:
            assert caught.startswith("caught: PeerLostError: "), output
            assert f"pid {pid}) died (SIGKILL)" in caught, output
        else:
            # It names who has not come to one operation: perhaps a rank that waits for the victim elsewhere; or one
            # that was told before, and has left for the next world.
            how = r"did not submit it|stopped inside the collective"
            late = rf"TimeoutError: .* waited \d+ s (in .* )?for ranks? .*, which ({how})"
            left = r"PeerLostError: .*rank \d \(.*, pid \d+\) (ended early|left)"
            assert re.match(f"caught: ({late}|{left})", caught), output
    if number == signal.SIGSTOP:
        assert "] caught: TimeoutError: " in output, output
    if number == signal.SIGSTOP:
        assert output.count("met again") == RANKS, output


@pytest.mark.timeout(200)
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_workers(tmp_path, marker, number):
    """After SIGSTOP and SIGCONT the same processes meet again."""
    lose(1, number, tmp_path, marker)


@pytest.mark.fuzz
@pytest.mark.timeout(200 * SEEDS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_many_lost_workers(tmp_path, marker, number):
    """Many moments."""
    for seed in range(FIRST, FIRST + SEEDS):
        (tmp_path / str(seed)).mkdir()
        lose(seed, number, tmp_path / str(seed), marker)
