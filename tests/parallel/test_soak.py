"""What takes too much memory for ordinary runs: ``pytest -m soak`` under a launcher."""

import numpy as np
import pytest

import kvstore_hvd
from support.launched import launched

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.mark.skipif(launched().size > 2, reason="the memory of this many copies is not there")
def test_more_than_two_gigabytes(rank, size):
    """An array whose bytes do not fit into 31 bits; needs memory for two of them on every rank."""
    count = 2**31 + 17
    array = np.full(count, rank + 1, np.int8)
    array[-1] = 5
    kvstore_hvd.allreduce(array, "large", out=array)
    assert array[-1] == 5 * size
    total = sum(range(1, size + 1))
    for begin in range(0, count - 1, 1 << 28):
        assert (array[begin : min(begin + (1 << 28), count - 1)] == total).all()
