"""Long runs, left out of ordinary ones: ``pytest -m soak`` under a launcher.

``KVHVD_TEST_SOAK_S`` says how many seconds the soak lasts (default 600).
"""

import os
import random
import threading
import time

import numpy as np
import psutil
import pytest

import kvstore_hvd
from support.arrays import DTYPES, assert_same_bits, contribution, expected_sum

import mxnet as mx  # isort: skip

SECONDS = float(os.environ.get("KVHVD_TEST_SOAK_S", "600"))
# Growth that the allocators of MXNet and the C library reach by themselves; a leak of one array per round is far more.
DRIFT_BYTES = 64 << 20

pytestmark = [pytest.mark.soak, pytest.mark.timeout(SECONDS + 600)]


def _compute_until(stop):
    """Keep a core busy, outside of the GIL for most of the time, as a training does."""
    matrix = np.ones((256, 256), np.float32)
    while not stop.is_set():
        matrix @ matrix


def _arrays(seed, rank, size):
    """Return name, this rank's contribution, the expected sum and a priority, for each tensor of a round."""
    draw = random.Random(seed)
    arrays = []
    for index in range(draw.randint(1, 30)):
        dtype = draw.choice(DTYPES)
        shape = (int(2 ** draw.uniform(0, 19)) - 1,)
        parts = (contribution(rank, shape, dtype, seed), expected_sum(size, shape, dtype, seed))
        arrays.append((f"t{index}", *parts, draw.randint(-3, 3)))
    return arrays


def test_random_tensors_for_a_long_time(rank, size):
    """Random tensors in random orders with random priorities, beside a busy compute thread: no error, no drift."""
    store = mx.kv.create("horovod")
    stop = threading.Event()
    threading.Thread(target=_compute_until, args=(stop,), daemon=True).start()
    begin = time.monotonic()
    process, baseline, rounds = psutil.Process(), None, 0
    try:
        # All ranks have to make the same number of rounds: rank 0 decides after each.
        while kvstore_hvd.broadcast(np.array([time.monotonic() - begin < SECONDS], np.int32), 0, "more")[0]:
            arrays = _arrays(rounds, rank, size)
            results = {}
            for name, mine, _, priority in random.sample(arrays, len(arrays)):
                results[name] = mx.nd.array(mine, dtype=mine.dtype)
                store.pushpull(name, results[name], priority=priority)
                if random.random() < 0.1:
                    time.sleep(random.random() * 0.002)  # a rank that is late
            for name, _, expected, _ in random.sample(arrays, len(arrays)):
                assert_same_bits(results[name].asnumpy(), expected)
            rounds += 1
            if rounds % 50 == 0:
                mx.nd.waitall()
                memory = process.memory_full_info().uss
                if baseline is None and time.monotonic() - begin > SECONDS / 4:
                    baseline = memory
                if baseline is not None:
                    assert memory < baseline + DRIFT_BYTES, f"round {rounds}: {baseline} bytes became {memory}"
                if rank == 0:
                    print(f"{time.monotonic() - begin:.0f} s: {rounds} rounds, {memory >> 20} MiB", flush=True)
    finally:
        stop.set()
    assert rounds > 0


def test_more_than_two_gigabytes(rank, size):
    """An array whose bytes do not fit into 31 bits; needs memory for two of them on every rank."""
    if size > 2:
        pytest.skip("the memory of this many copies is not there")
    count = 2**31 + 17
    array = np.full(count, rank + 1, np.int8)
    array[-1] = 5
    kvstore_hvd.allreduce(array, "large", out=array)
    assert array[-1] == 5 * size
    total = sum(range(1, size + 1))
    for begin in range(0, count - 1, 1 << 28):
        assert (array[begin : min(begin + (1 << 28), count - 1)] == total).all()
