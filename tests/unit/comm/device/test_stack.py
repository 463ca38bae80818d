"""From a request to the kernels and back: engines, the threads of devices and executors, on the stand-in."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvstore_hvd import errors, native
from kvstore_hvd.comm.base import Request
from kvstore_hvd.comm.device.devices import DeviceThread
from kvstore_hvd.comm.device.ring import RingExecutor
from kvstore_hvd.comm.shm import native_request
from kvstore_hvd.gpu.devices import Device
from support.fake_cuda import FakeCuda, fake_cuda
from support.gpu_ranks import Exchange, HostArray, combined, on_ranks, samples
from support.patience import patient


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with fake_cuda() as machine:
        yield machine


def on_device(array: HostArray, name: str, dtype: str, **fields: Any) -> Any:
    count = array.nbytes // np.dtype(dtype).itemsize
    place = [array.address]
    return native_request(
        Request("allreduce", name, f"'{name}'", place, place, (count,), dtype, on_device=True, **fields)
    )


@pytest.mark.parametrize("size", [2, 3])
def test_many_arrays_in_another_order_on_each_rank(cuda: FakeCuda, size: int) -> None:
    counts = (1, 100, 5000, 200_000, 3, 64)
    given = [[samples(rank, count, "float32", n) for n, count in enumerate(counts)] for rank in range(size)]
    segment, exchange = native.Segment.create(size), Exchange(size)

    def work(rank: int) -> list[Any]:
        engine = native.Engine(segment, rank, 20.0, False)
        devices = [Device.of(0, "here")] * size
        thread = DeviceThread(engine, lambda device: RingExecutor(rank, devices, 0, 2 << 20, 20.0, exchange.of(rank)))
        thread.start(0)
        arrays = [HostArray(raw) for raw in given[rank]]
        order = np.random.default_rng(rank).permutation(len(counts))
        for _ in range(20):
            works = {
                n: engine.submit(on_device(arrays[n], f"x{n}", "float32", op="max" if n == 2 else "sum")) for n in order
            }
            for n in reversed(order):
                engine.wait(works[n])
        contents = [array.content.copy() for array in arrays]
        engine.shutdown()
        thread.stop()
        return contents

    for result in on_ranks(size, work):
        for n, raw in enumerate(result):
            expected = [each[n] for each in given]
            for _ in range(20):
                total = combined(expected, "float32", "max" if n == 2 else "sum")
                expected = [total] * size
            np.testing.assert_array_equal(raw, total)
    assert not cuda.memory


def test_a_mismatch_changes_nothing_and_a_lost_kernel_ends_the_world(cuda: FakeCuda) -> None:
    segment, exchange, together = native.Segment.create(2), Exchange(2), threading.Barrier(2)

    def work(rank: int) -> None:
        engine = native.Engine(segment, rank, 20.0, False)
        devices = [Device.of(0, "here")] * 2
        thread = DeviceThread(engine, lambda device: RingExecutor(rank, devices, 0, 2 << 20, 20.0, exchange.of(rank)))
        thread.start(0)
        array = HostArray(samples(rank, 100, "float32"))
        before = array.content.copy()
        wrong = HostArray(samples(rank, 100 + rank, "float32"))
        with pytest.raises(errors.MismatchError):
            engine.wait(engine.submit(on_device(wrong, "wrong", "float32")))
        engine.wait(engine.submit(on_device(array, "x", "float32")))
        assert (array.content != before).any()
        together.wait(patient(20))
        if rank == 0:
            cuda.status_of_events = 700
        with pytest.raises(errors.HorovodInternalError):
            for n in range(1000):
                engine.wait(engine.submit(on_device(array, f"y{n}", "float32")))
        engine.shutdown()
        thread.stop()

    on_ranks(2, work)
