"""Workers that are killed or stopped in the middle of random programs, as real processes: see `fuzz.programs`.

``KVHVD_TEST_FUZZ_FAULTS`` says how many seeds ``make fuzz`` tries (default 100), from ``KVHVD_TEST_FUZZ_SEED`` (default
1000) on.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from support.patience import of_the_product, patient
from support.runs import Run

WORKER = Path(__file__).resolve().parents[1] / "support" / "fuzz_worker.py"
RANKS = 4
FIRST = int(os.environ.get("KVHVD_TEST_FUZZ_SEED", "1000"))
SEEDS = int(os.environ.get("KVHVD_TEST_FUZZ_FAULTS", "100"))
# Operations that wait for a stopped worker fail after these seconds, on an idle machine.
TIMEOUT_S = 4


def lose(seed: int, number: int, folder: Path, marker: str) -> None:
    """Run a job whose victim gets the signal; all others have to be told of it by name."""
    timeout_s = of_the_product(TIMEOUT_S if number == signal.SIGSTOP else 60)
    # However slow the machine is, kvhvdrun lets the survivors report what they were told.
    variables = {"KVHVD_TIMEOUT": str(timeout_s), "KVHVD_SURVIVOR_TIME": str(patient(10))}
    run = Run(WORKER, [str(seed), str(number)], RANKS, folder, marker, **variables)
    text = run.until(lambda text: "victim: " in text and text.endswith("\n"))
    victim, pid = re.findall(r"^\[(\d)\] victim: (\d+)$", text, re.MULTILINE)[0]
    if number == signal.SIGSTOP:
        run.until(lambda text: text.count("] caught: ") >= RANKS - 1)
        os.kill(int(pid), signal.SIGCONT)
    code, output = run.end()
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
    if number == signal.SIGKILL:
        assert code == 128 + signal.SIGKILL, output
    else:
        assert code == 0, output
        assert output.count("met again") == RANKS, output


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_workers(tmp_path: Path, marker: str, seed: int, number: int) -> None:
    """A few moments; after SIGSTOP and SIGCONT the same processes meet again."""
    lose(seed, number, tmp_path, marker)


@pytest.mark.fuzz
@pytest.mark.timeout(200 * SEEDS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_many_lost_workers(tmp_path: Path, marker: str, number: int) -> None:
    """Many moments."""
    for seed in range(FIRST, FIRST + SEEDS):
        (tmp_path / str(seed)).mkdir()
        lose(seed, number, tmp_path / str(seed), marker)
