"""Random faults of jobs, as real processes: lost workers in random programs, disturbances of elastic trainings.

``KVHVD_TEST_FUZZ_FAULTS`` says how many seeds ``make fuzz`` tries of the former (default 100), and
``KVHVD_TEST_FUZZ_ELASTIC`` of the latter (default 200), both from ``KVHVD_TEST_FUZZ_SEED`` (default 1000) on. With
``KVHVD_TEST_FUZZ_HOSTS=1`` hosts are namespaces, which are cut off and crash, too. See `fuzz.programs` and
`fuzz.disturbances`.
"""

import os
import re
import signal
import sys
from collections import Counter

import pytest

from fuzz import disturbances
from support.jobs import TESTS, start
from support.patience import patient

RANKS = 3
FIRST = int(os.environ.get("KVHVD_TEST_FUZZ_SEED", "1000"))
SEEDS = int(os.environ.get("KVHVD_TEST_FUZZ_FAULTS", "100"))
ELASTIC_SEEDS = int(os.environ.get("KVHVD_TEST_FUZZ_ELASTIC", "200"))


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
        assert output.count("met again") == RANKS, output


def few_or_many(few, limit_s, count):
    """The seeds of the slow tests, and of `make fuzz`; the latter take as many times as long."""
    many = [pytest.mark.fuzz, pytest.mark.timeout(limit_s * count)]
    slow = [pytest.mark.slow, pytest.mark.timeout(limit_s * len(few))]
    seeds = pytest.param(few, marks=slow, id="few"), pytest.param(range(FIRST, FIRST + count), marks=many, id="many")
    return pytest.mark.parametrize("seeds", seeds)


@few_or_many([1], 200, SEEDS)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_lost_workers(tmp_path, marker, number, seeds):
    """After SIGSTOP and SIGCONT the same processes meet again."""
    for seed in seeds:
        (tmp_path / str(seed)).mkdir()
        lose(seed, number, tmp_path / str(seed), marker)


@few_or_many([1, 2], 400, ELASTIC_SEEDS)
def test_disturbed_elastic_jobs(tmp_path, marker, seeds):
    """Nearly all of them finish."""
    outcomes = Counter()
    over_hosts = os.environ.get("KVHVD_TEST_FUZZ_HOSTS") == "1"
    for seed in seeds:
        (tmp_path / str(seed)).mkdir()
        outcomes[disturbances.run(seed, tmp_path / str(seed), marker, over_hosts=over_hosts)] += 1
        print(f"seed {seed}: {dict(outcomes)}", flush=True)
    assert len(seeds) < 20 or outcomes["finished"] >= 0.8 * len(seeds), outcomes
