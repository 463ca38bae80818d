"""Random programs of collectives, checked against a model: see `fuzz.programs`. A short run belongs to the ordinary
tests. The long one (``pytest -m fuzz`` under a launcher, ``make fuzz``) runs ``KVHVD_TEST_FUZZ_PROGRAMS`` programs
(default 5000) from the seed ``KVHVD_TEST_FUZZ_SEED`` (default 1000) on; a failure says how to run its program again."""

import gc
import os

import psutil
import pytest

from fuzz.runner import run_programs
from support.launchers import launched

pytestmark = pytest.mark.sizes

FIRST = int(os.environ.get("KVHVD_TEST_FUZZ_SEED", "1000"))
PROGRAMS = int(os.environ.get("KVHVD_TEST_FUZZ_PROGRAMS", "5000"))
# Growth that the allocators of MXNet and the C library reach by themselves.
DRIFT_BYTES = 64 << 20


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("error::RuntimeWarning")  # as under `python -W error`: of overflows
def test_random_programs(dynamic, rank, size):
    """No wrong value, every mismatch reported on every rank, and the world works on."""
    run_programs(0, 30 if launched().launcher.startswith("mpirun") else 100 if size == 4 else 60, rank, size)


@pytest.mark.fuzz
@pytest.mark.timeout(600 + PROGRAMS)
def test_many_random_programs(dynamic, rank, size):
    """The same for a long time, in which memory does not grow."""
    used = []
    for part in range(10):
        run_programs(FIRST + PROGRAMS * part // 10, PROGRAMS * (part + 1) // 10 - PROGRAMS * part // 10, rank, size)
        gc.collect()
        used.append(psutil.Process().memory_full_info().uss)
    assert used[-1] < used[3] + DRIFT_BYTES, used
