"""`KVHVD_LINK_COMPRESSION`: sums of float32 are rounded to 16 bits on their way to other hosts, here virtual ones."""

import importlib

import numpy as np
import pytest

import kvstore_hvd
from fuzz.model import rounded_to_bfloat16
from kvstore_hvd.errors import LaunchError
from kvstore_hvd.world import process
from support.arrays import assert_same_bits, by_host, contribution, ordered_sum, sum_of_ranks

pytestmark = pytest.mark.sizes

COUNTS = (300_001, 5000, 70_000, 3)
ROUND = {
    "none": lambda array: array,
    "fp16": lambda array: array.astype(np.float16).astype(np.float32),
    "bf16": rounded_to_bfloat16,
}


@pytest.fixture
def compressed(world, monkeypatch):
    """Join the world anew with a way of compression; fails where it cannot be joined."""
    if process.current().topology.host_count == 1:
        pytest.skip("needs several hosts")

    def join(how):
        kvstore_hvd.shutdown()
        monkeypatch.setenv("KVHVD_LINK_COMPRESSION", how)
        kvstore_hvd.init()

    yield join
    kvstore_hvd.shutdown()
    monkeypatch.delenv("KVHVD_LINK_COMPRESSION")
    kvstore_hvd.init()


@pytest.mark.parametrize("how", ROUND)
def test_sums(compressed, rank, size, how):
    """Each host's sum is rounded, and that of all hosts; what is small, or no sum of float32, travels as it is."""
    compressed(how)
    for dtype in ("float32", "float64", "int32"):
        mine = [contribution(rank, (count,), dtype) for count in COUNTS]
        got = [kvstore_hvd.allreduce(array, f"{dtype}/{place}") for place, array in enumerate(mine)]
        for count, result in zip(COUNTS, got):
            parts = [contribution(r, (count,), dtype) for r in range(size)]
            expected = sum_of_ranks(parts)
            if dtype == "float32" and count > 3:
                of_hosts = [ROUND[how](ordered_sum(of_host)) for of_host in by_host(parts)]
                expected = ROUND[how](ordered_sum(of_hosts))
            assert_same_bits(result, expected)
    largest = kvstore_hvd.allreduce(contribution(rank, (90_000,), "float32"), "max", "max")
    assert_same_bits(largest, np.max([contribution(r, (90_000,), "float32") for r in range(size)], axis=0))


@pytest.mark.parametrize("what", ["KVHVD_LINK_COMPRESSION", "KVHVD_THRESHOLDS"])
def test_another_way_on_one_host(compressed, monkeypatch, rank, size, what):
    place = process.current().topology
    with monkeypatch.context() as patch, pytest.raises(LaunchError, match=rf"{what}.* alike"):
        if what == "KVHVD_THRESHOLDS" and place.host == place.hosts[0]:
            patch.setenv(what, "one_shot=4096")
        compressed("fp16" if what == "KVHVD_LINK_COMPRESSION" and place.host == place.hosts[0] else "none")
    compressed("bf16")
    assert kvstore_hvd.allreduce(np.ones(3), "again")[0] == size


def test_averages_and_what_travels_together(compressed, rank, size):
    """Numbers that 16 bits hold exactly: sums are exact, whatever travels beside them, and averages are divided."""
    mx, hvd = pytest.importorskip("mxnet"), importlib.import_module("kvstore_hvd.mxnet")
    compressed("fp16")
    values = [(i, dtype) for i in range(6) for dtype in ("float32", "int32")]
    arrays = [mx.nd.full((20_000 + i,), (rank + 1) * i, dtype=dtype) for i, dtype in values]
    sums = [hvd.allreduce(each, op=hvd.Sum) for each in arrays]
    sums += hvd.grouped_allreduce(arrays[::2], op=hvd.Sum)
    means = [hvd.allreduce(each, op=hvd.Average) for each in arrays[::2]]
    got, total = [set(each.asnumpy().tolist()) for each in sums + means], size * (size + 1) // 2
    for i in range(6):
        assert got[2 * i] == got[2 * i + 1] == got[12 + i] == {i * total}
        assert got[18 + i] == {i * total / size}
