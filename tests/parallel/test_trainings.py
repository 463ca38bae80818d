"""Random trainings against the model of one process with all the data: see `fuzz.trainings`."""

import os

import numpy as np
import pytest

import kvstore_hvd
from fuzz.trainings import draw, run_training

pytest.importorskip("mxnet")

pytestmark = pytest.mark.usefixtures("no_static_graphs")

FIRST = int(os.environ.get("KVHVD_TEST_FUZZ_SEED", "0"))


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=[pytest.mark.sizes] * (seed % 3 == 0)) for seed in range(FIRST, FIRST + 30)]
)
def test_random_training(world, rank, size, seed):
    """All parameters have the bits of the model's, after every step."""
    training = draw(seed, size)
    problem = ""
    try:
        run_training(training, rank, size)
    except AssertionError as error:
        problem = repr(error)
    failed = kvstore_hvd.allreduce(np.array([int(bool(problem))]), name=f"trainings/{seed}")[0]
    assert not failed, f"{training}\nfailed on {failed} workers. Here: {problem or 'as in the model'}"
