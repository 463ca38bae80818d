"""The GPU kernels as data, and how much they are launched with. The sources have their own tests."""

from __future__ import annotations

from kvstore_hvd.gpu import kernels, shapes


def test_sizes_are_those_that_the_sources_report() -> None:
    # tests/native/cuda/test_gpu_copies.cpp has the same numbers, as the C++ compiler sees them.
    assert kernels.STRUCTURES == {"Segment": 32, "World": 416, "Launch": 80, "Copy": 40, "Control": 27136}


def test_launches_fit_the_device() -> None:
    shared = shapes.Limits(132, 2, sharers=8)
    assert shared.resident == 33
    assert shapes.direct_blocks(1000, shared) == 33
    assert shapes.direct_blocks(0, shared) == 1
    assert shapes.ring_channels(1 << 30, 2048, shared) == 33
    assert shapes.ring_channels(1 << 30, 2048, shapes.Limits(132, 2)) == kernels.MAX_CHANNELS
    assert shapes.ring_channels(100, 2048, shared) == 1
    assert shapes.Limits(1, 1, sharers=4).resident == 1
