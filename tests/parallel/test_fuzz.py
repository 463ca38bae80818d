"""Random programs of collectives, checked against a model: see `fuzz.programs`.

A short run belongs to the ordinary tests. The long one (``pytest -m fuzz`` under a launcher, ``make fuzz``) runs
``KVHVD_TEST_FUZZ_PROGRAMS`` programs (default 5000) from the seed ``KVHVD_TEST_FUZZ_SEED`` (default 1000) on; a failure
says how to run its program again.
"""

import os

import pytest

from fuzz.runner import run_programs
from kvstore_hvd.mxnet_compat import engine_is_naive
from support.launched import launched

pytestmark = [pytest.mark.skipif(engine_is_naive(), reason="NaiveEngine is not asynchronous"), pytest.mark.sizes]

FIRST = int(os.environ.get("KVHVD_TEST_FUZZ_SEED", "1000"))
PROGRAMS = int(os.environ.get("KVHVD_TEST_FUZZ_PROGRAMS", "5000"))


@pytest.mark.timeout(300)
@pytest.mark.mpi
def test_random_programs(dynamic, rank, size):
    """No wrong value, every mismatch reported on every rank, and the world works on."""
    run_programs(0, 30 if launched().launcher == "mpirun" else 200 if size == 4 else 60, rank, size)


@pytest.mark.fuzz
@pytest.mark.timeout(600 + PROGRAMS)
def test_many_random_programs(dynamic, rank, size):
    """The same, for a long time."""
    run_programs(FIRST, PROGRAMS, rank, size)
