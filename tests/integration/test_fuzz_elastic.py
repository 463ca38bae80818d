"""Random disturbances of elastic jobs, see `fuzz.disturbances`.

``KVHVD_TEST_FUZZ_ELASTIC`` says how many seeds ``make fuzz`` tries (default 200), from ``KVHVD_TEST_FUZZ_SEED``
(default 1000) on. With ``KVHVD_TEST_FUZZ_HOSTS=1`` hosts are namespaces, which are cut off and crash, too.
"""

import os
from collections import Counter

import pytest

from fuzz import disturbances

FIRST = int(os.environ.get("KVHVD_TEST_FUZZ_SEED", "1000"))
OVER_HOSTS = os.environ.get("KVHVD_TEST_FUZZ_HOSTS") == "1"
SEEDS = int(os.environ.get("KVHVD_TEST_FUZZ_ELASTIC", "200"))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [1, 2])
def test_disturbed_jobs(tmp_path, marker, seed):
    """A few."""
    disturbances.run(seed, tmp_path, marker)


@pytest.mark.fuzz
@pytest.mark.timeout(400 * SEEDS)
def test_many_disturbed_jobs(tmp_path, marker):
    """Many; nearly all of them finish."""
    outcomes = Counter()
    for seed in range(FIRST, FIRST + SEEDS):
        (tmp_path / str(seed)).mkdir()
        outcomes[disturbances.run(seed, tmp_path / str(seed), marker, over_hosts=OVER_HOSTS)] += 1
        print(f"seed {seed}: {dict(outcomes)}", flush=True)
    assert SEEDS < 20 or outcomes["finished"] >= 0.8 * SEEDS, outcomes
