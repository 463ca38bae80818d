"""The GPU kernels as data, and how much they are launched with. The sources have their own tests."""

from __future__ import annotations

import numpy as np

from kvstore_hvd.gpu import kernels, shapes


def test_sizes_are_those_that_the_sources_report() -> None:
    # tests/native/cuda/test_gpu_copies.cpp has the same numbers, as the C++ compiler sees them.
    assert kernels.STRUCTURES == {"Segment": 32, "World": 416, "Launch": 80, "Copy": 40, "Control": 27136}


def test_names() -> None:
    assert kernels.allreduce_kernel("twoshot", "float32", "average", ranks=8) == "kvhvd_twoshot_float32_sum_8"
    assert kernels.allreduce_kernel("oneshot", "bfloat16", "min", ranks=8) == "kvhvd_oneshot_bfloat16_other"
    assert kernels.allreduce_kernel("ring", "float64", "sum", as_half=True) == "kvhvd_ring_float64_as_half"
    assert kernels.copy_kernel("float64", "float16") == "kvhvd_copy_float64_float16"


def test_tables_of_segments() -> None:
    table, tiles = shapes.segments([4096, 0, 8192], [0, 16, 16], [kernels.TILE_BYTES + 1, 0, 5], ranks=[1, 0, 2])
    assert table.dtype == kernels.SEGMENT
    assert tiles == 3
    np.testing.assert_array_equal(table["first_tile"], [0, 2, 2])
    np.testing.assert_array_equal(table["rank"], [1, 0, 2])
    assert shapes.segments([], [], [])[1] == 0


def test_launches_fit_the_device() -> None:
    shared = shapes.Limits(132, 2, sharers=8)
    assert shared.resident == 33
    assert shapes.direct_blocks(1000, shared) == 33
    assert shapes.direct_blocks(0, shared) == 1
    assert shapes.ring_channels(1 << 30, 2048, shared) == 33
    assert shapes.ring_channels(1 << 30, 2048, shapes.Limits(132, 2)) == kernels.MAX_CHANNELS
    assert shapes.ring_channels(100, 2048, shared) == 1
    assert shapes.Limits(1, 1, sharers=4).resident == 1
