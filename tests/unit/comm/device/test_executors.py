"""Which executor a world gets, told by the workers over the real engine; the way by the host; and rounds of batches."""

# ruff: noqa: B023 - on_ranks returns before the next turn of the loop
from __future__ import annotations

import contextlib
import importlib
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstore_hvd import log, native
from kvstore_hvd.comm.device import executors
from kvstore_hvd.comm.device.executor import Executor
from kvstore_hvd.comm.device.executors import create_executor
from kvstore_hvd.comm.device.ring import RingExecutor
from kvstore_hvd.comm.device.rounds import ALIGNMENT, buffer_bytes, rounds
from kvstore_hvd.comm.device.staged import StagedExecutor
from kvstore_hvd.comm.shm import native_request
from kvstore_hvd.errors import LaunchError
from kvstore_hvd.worlds.topology import Host, Topology
from support.fake_cuda import FakeCuda, FakeDevice, fake_cuda
from support.gpu_ranks import combined, device_operation, finish, on_ranks, samples

config = importlib.import_module("kvstore_hvd.config")


class Engines:
    """Engines of ranks that are threads, with what executors need of a communicator."""

    def __init__(self, size: int) -> None:
        self.size, self._segment = size, native.Segment.create(size)
        self._engines = on_ranks(size, lambda rank: native.Engine(self._segment, rank, 20.0, False))

    def of(self, rank: int) -> Any:
        engine = self._engines[rank]
        return SimpleNamespace(
            run=lambda request: engine.run(native_request(request)),
            submit=lambda request: engine.submit(native_request(request)),
        )

    def topology(self, rank: int) -> Topology:
        return Topology.of(rank, [Host("here", "here")] * self.size, source="launcher")

    def close(self) -> None:
        on_ranks(self.size, lambda rank: self._engines[rank].shutdown())


@pytest.fixture
def engines() -> Iterator[Callable[[int], Engines]]:
    with contextlib.ExitStack() as stack:
        yield lambda size: stack.enter_context(contextlib.closing(Engines(size)))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setattr(executors, "library", refuse)
    with fake_cuda() as machine:
        yield machine


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    def set_them(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        config.reload()

    set_them(KVHVD_GPU_STAGING_MIB="2", KVHVD_START_TIMEOUT="20")
    yield set_them
    monkeypatch.undo()
    config.reload()


def refuse() -> Any:
    raise LaunchError("NCCL (libnccl.so.2) is not found.")


def make_all(engines: Engines) -> list[Executor]:
    return on_ranks(engines.size, lambda rank: create_executor(engines.of(rank), engines.topology(rank), rank))


def close_all(made: list[Executor]) -> None:
    on_ranks(len(made), lambda rank: made[rank].close())


def test_without_nccl_our_kernels_and_without_both_by_the_host_which_is_said_once(
    engines: Any, cuda: FakeCuda, settings: Any, caplog: pytest.LogCaptureFixture
) -> None:
    made = make_all(engines(2))
    assert {type(one) for one in made} == {RingExecutor}
    close_all(made)
    log._said.clear()
    cuda.peers = lambda own, other: False
    made = make_all(engines(2))
    assert {type(one) for one in made} == {StagedExecutor}
    (text,) = (each for each in caplog.messages if "copied to the host" in each)
    assert "no NCCL 2.18" in text
    assert "not all GPUs reach each other's memory" in text
    close_all(made)


def test_a_worker_without_a_gpu_fails_all_alike(engines: Any, cuda: FakeCuda, settings: Any) -> None:
    cuda.devices[1] = FakeDevice(b"x" * 16, "Old GPU", (5, 2))
    world = engines(3)

    def make(rank: int) -> str:
        with pytest.raises(LaunchError) as error:
            create_executor(world.of(rank), world.topology(rank), rank)
        return str(error.value)

    for rank, text in enumerate(on_ranks(3, make)):
        assert text.startswith(f"[rank {rank}/3] rank 1 cannot use the GPU.\n  rank 1:\n  Old GPU")


def test_staged(engines: Any, cuda: FakeCuda, settings: Any) -> None:
    """By way of the host: the bits of the CPU engine, and nothing is left behind."""
    settings(KVHVD_GPU_PATH="staged")
    counts = (1, 0, 1000)
    made = make_all(engines(2))
    for dtype, op, scales in [("bfloat16", "average", (1.0, 0.5)), ("float32", "max", (2.0, 0.5))]:
        given = [[samples(rank, count, dtype, n) for n, count in enumerate(counts)] for rank in range(2)]

        def reduce(rank: int) -> Any:
            arrays = [raw.copy() for raw in given[rank]]
            others = [np.zeros_like(raw) for raw in arrays]
            for _ in range(2):  # the second time in memory of the first
                for array, raw in zip(arrays, given[rank]):
                    array[:] = raw
                batch = [
                    device_operation([a.ctypes.data], [a.ctypes.data, b.ctypes.data], count, dtype, op, *scales)
                    for a, b, count in zip(arrays, others, counts)
                ]
                finish(made[rank].allreduce(batch))
            for a, b in zip(arrays, others):
                np.testing.assert_array_equal(a, b)
            return arrays

        for result in on_ranks(2, reduce):
            for n, raw in enumerate(result):
                np.testing.assert_array_equal(raw, combined([each[n] for each in given], dtype, op, *scales))

    sent = [samples(rank, 64, "float32") for rank in range(2)]
    total = combined(sent, "float32", "sum")

    def move(rank: int) -> None:
        array, result = sent[rank].copy(), np.full(512, 0xCC, np.uint8)
        place = [array.ctypes.data], [result.ctypes.data]
        finish(made[rank].broadcast([device_operation(*place, 64, root=1)]))
        np.testing.assert_array_equal(result[:256], sent[1])
        # Each takes a part of either, with a gap between, which stays as it is.
        result[:] = 0xCC
        parts = [(0, 4 * rank, 8, 0), (1, 16, 12, 20)]
        finish(made[rank].exchange([device_operation(*place, 64, parts=parts, contributed=64)]))
        np.testing.assert_array_equal(result[:8], sent[0][4 * rank :][:8])
        np.testing.assert_array_equal(result[20:32], sent[1][16:28])
        assert (result[8:20] == 0xCC).all()
        assert (result[32:] == 0xCC).all()
        start, nbytes = (0, 100) if rank == 0 else (100, 156)
        finish(made[rank].reducescatter([device_operation(*place, 64, parts=[(rank, start, nbytes, 0)])]))
        np.testing.assert_array_equal(result[:nbytes], total[start : start + nbytes])

    on_ranks(2, move)
    close_all(made)
    assert not cuda.memory
    assert not cuda.events


@pytest.mark.parametrize("seed", range(20))
def test_every_element_is_in_one_place(seed: int) -> None:
    generator = random.Random(seed)
    item = generator.choice([1, 2, 4, 8])
    capacity, most = generator.choice([16, 100, 1000]), generator.choice([1, 2, 50])
    counts = [generator.choice([0, 1, 7, generator.randrange(2000)]) for _ in range(generator.randrange(1, 12))]
    seen = [0] * len(counts)
    for pieces in rounds(counts, item, capacity, most):
        assert 0 < len(pieces) <= most
        assert buffer_bytes(pieces, item) <= capacity
        end = 0
        for piece in pieces:
            assert piece.start == seen[piece.request]
            assert piece.length > 0
            assert piece.offset >= end
            assert piece.offset % ALIGNMENT == 0
            seen[piece.request] += piece.length
            end = piece.offset + piece.length * item
    assert seen == counts
