"""The GPU kernels as data, and how much they are launched with. The sources have their own tests."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kvstore_hvd import native
from kvstore_hvd.gpu import kernels, shapes


def test_sizes_are_those_that_the_sources_report() -> None:
    # tests/native/cuda/test_gpu_copies.cpp has the same numbers, as the C++ compiler sees them.
    assert kernels.STRUCTURES == {"Segment": 32, "World": 416, "Launch": 80, "Copy": 40, "Control": 27136}


def test_source_is_one_text() -> None:
    text = kernels.source()
    assert not re.search(r'#include "\w+\.cuh"', text)
    assert "#pragma once" not in text
    for header in ("platform", "layout", "elements", "memory", "waiting", "copy", "direct", "ring"):
        assert text.count(f'#line 1 "{header}.cuh"') == 1
    assert text.index('#line 1 "platform.cuh"') < text.index('#line 1 "ring.cuh"') < text.index("kvhvd_sizes")


def test_names() -> None:
    assert kernels.allreduce_kernel("twoshot", "float32", "average", ranks=8) == "kvhvd_twoshot_float32_sum_8"
    assert kernels.allreduce_kernel("twoshot", "float32", "sum", ranks=3) == "kvhvd_twoshot_float32_sum"
    assert kernels.allreduce_kernel("oneshot", "bfloat16", "min", ranks=8) == "kvhvd_oneshot_bfloat16_other"
    assert kernels.allreduce_kernel("ring", "float64", "sum", as_half=True) == "kvhvd_ring_float64_as_half"
    assert kernels.allreduce_kernel("ring", "float64", "max", as_half=True) == "kvhvd_ring_float64"
    assert kernels.allreduce_kernel("ring", "int8", "sum", as_half=True) == "kvhvd_ring_int8"
    assert kernels.copy_kernel() == "kvhvd_copy"
    assert kernels.copy_kernel("float64", "float16") == "kvhvd_copy_float64_float16"
    with pytest.raises(ValueError, match="'float16' as 'int8'"):
        kernels.copy_kernel("float16", "int8")
    with pytest.raises(ValueError, match="tree"):
        kernels.allreduce_kernel("tree", "float32", "sum")


@pytest.mark.parametrize("dtype", native.DTYPES)
def test_names_of_a_type_are_among_all(dtype: str) -> None:
    names = kernels.kernel_names(dtype)
    assert len(set(names)) == len(names)
    assert set(names) <= set(kernels.kernel_names())


def test_tables_of_segments() -> None:
    table, tiles = shapes.segments([4096, 0, 8192], [0, 16, 16], [kernels.TILE_BYTES + 1, 0, 5], ranks=[1, 0, 2])
    assert table.dtype == kernels.SEGMENT
    assert tiles == 3
    np.testing.assert_array_equal(table["first_tile"], [0, 2, 2])
    np.testing.assert_array_equal(table["rank"], [1, 0, 2])
    assert shapes.segments([], [], [])[1] == 0


def test_stops() -> None:
    assert kernels.Stop.of(0) is None
    stop = kernels.Stop.of(1 | 3 << 8 | 2 << 16 | 1 << 24)
    assert stop == ("timeout", 3, 2, "the start of an operation")
    assert kernels.Stop.of(2 | 4 << 24) == ("abort", 0, 0, "a free slot")


def test_launches_fit_the_device() -> None:
    shared = shapes.Limits(132, 2, sharers=8)
    assert shared.resident == 33
    assert shapes.direct_blocks(1000, shared) == 33
    assert shapes.direct_blocks(0, shared) == 1
    assert shapes.ring_channels(1 << 30, 2048, shared) == 33
    assert shapes.ring_channels(1 << 30, 2048, shapes.Limits(132, 2)) == kernels.MAX_CHANNELS
    assert shapes.ring_channels(100, 2048, shared) == 1
    assert shapes.copy_blocks(1000, shared) == 264
    assert shapes.Limits(1, 1, sharers=4).resident == 1


def test_choice_of_algorithm() -> None:
    assert shapes.choose(2, 4096, 1 << 20) == "oneshot"
    assert shapes.choose(8, 1 << 20, 1 << 22) == "twoshot"
    assert shapes.choose(8, 1 << 23, 1 << 22) == "ring"
