"""The kernels on a GPU: all ranks in one launch, bit by bit against what the CPU engine gives."""

import time

import numpy as np
import pytest

from kvstore_hvd import native
from kvstore_hvd.gpu import kernels
from kvstore_hvd.gpu.executor import buffer_bytes, rounds
from kvstore_hvd.gpu.kernels import Segment
from kvstore_hvd.gpu.launcher import Kernels, Launcher
from kvstore_hvd.gpu.streams import Event, Stream
from kvstore_hvd.native import ITEM_BYTES
from support.gpu_ranks import PATIENCE_S, combined, samples
from support.virtual_ranks import Reduction, VirtualRanks

STAGING = 1 << 20
SIZES = (1, 2, 4, 8)
COUNTS = (0, 1, 3, 257, 4099, 100_003)


@pytest.fixture(scope="module", params=SIZES)
def _ranks(request, device):
    made = VirtualRanks(request.param, device, STAGING, slot_vectors=64, timeout_s=PATIENCE_S)
    yield made
    made.close()


@pytest.fixture
def ranks(_ranks):
    """Ranks that a test before, which failed, has not left waiting for each other."""
    yield _ranks
    if any(_ranks.statuses()):
        _ranks.reset()


def finish(stream):
    event = Event().record(stream)
    while not event.done():
        time.sleep(0.0001)
    event.close()


def reduced(ranks, new, way, reduction, given, shift=0, blocks=0):
    if way == "ring" and ranks.size == 1:
        pytest.skip("there is no ring of one")
    arrays = [new(raw, shift) for raw in given]
    results = [new(np.full(len(raw), 0xDD, np.uint8), shift) for raw in given]
    segments = [[Segment(array.address, 0, array.nbytes)] for array in arrays]
    targets = [[Segment(array.address, 0, array.nbytes)] for array in results]
    name = kernels.allreduce_kernel(
        way, reduction.dtype, reduction.op, as_half=reduction.as_half, ranks=ranks.size if way == "twoshot" else 0
    )
    ranks.launch(name, reduction, ranks.prepare(segments, targets), segments, targets, len(given[0]), blocks)
    finish(ranks.stream)
    assert ranks.statuses() == [None] * ranks.size
    for array, raw in zip(arrays, given):
        np.testing.assert_array_equal(array.content, raw)
    return [array.content for array in results]


@pytest.mark.parametrize("way", ["oneshot", "twoshot"])
@pytest.mark.parametrize("dtype", sorted(native.DTYPES))
@pytest.mark.parametrize("op", ["sum", "max", "product"])
def test_direct_reductions_have_the_bits_of_the_engine(ranks, new, way, dtype, op):
    for count in COUNTS:
        given = [samples(rank, count, dtype, count) for rank in range(ranks.size)]
        expected = combined(given, dtype, op)
        for result in reduced(ranks, new, way, Reduction(dtype, op), given):
            np.testing.assert_array_equal(result, expected, f"{count} elements")


@pytest.mark.parametrize("way", ["oneshot", "twoshot", "ring"])
@pytest.mark.parametrize("shift", [4, 12])
def test_arrays_that_begin_anywhere(ranks, new, way, shift):
    given = [(np.arange(4099, dtype=np.float32) % 64 + rank).view(np.uint8) for rank in range(ranks.size)]
    expected = combined(given, "float32", "sum")
    for result in reduced(ranks, new, way, Reduction("float32", "sum"), given, shift):
        np.testing.assert_array_equal(result, expected)


@pytest.mark.parametrize("dtype", sorted(native.DTYPES))
@pytest.mark.parametrize("blocks", [1, 0])
def test_a_ring_gives_all_ranks_the_same(ranks, new, dtype, blocks):
    for count in COUNTS[1:]:
        given = [samples(rank, count, dtype, count) for rank in range(ranks.size)]
        results = reduced(ranks, new, "ring", Reduction(dtype, "sum"), given, blocks=blocks)
        for result in results[1:]:
            np.testing.assert_array_equal(result, results[0], f"{count} elements")
        if dtype.startswith(("int", "uint")):
            np.testing.assert_array_equal(results[0], combined(given, dtype, "sum"))
        elif dtype in ("float32", "float64"):
            expected = sum(raw.view(dtype).astype(np.float64) for raw in given)
            np.testing.assert_allclose(results[0].view(dtype), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", ["oneshot", "twoshot"])
def test_special_values(ranks, new, way):
    values = np.array([1e-40, -1e-40, 0.0, -0.0, np.inf, -np.inf, np.nan, 3e38], np.float32)
    given = [values.view(np.uint8) for _ in range(ranks.size)]
    with np.errstate(over="ignore"):
        expected = combined(given, "float32", "sum").view(np.float32)
    for result in reduced(ranks, new, way, Reduction("float32", "sum"), given):
        np.testing.assert_array_equal(result.view(np.float32), expected)
        assert result.view(np.float32)[0] != 0, "denormals are kept"


def test_as_half(ranks, new):
    given = [samples(rank, 777, "float32") for rank in range(ranks.size)]
    halves = [raw.view(np.float32).astype(np.float16).view(np.uint8) for raw in given]
    expected = combined(halves, "float16", "sum").view(np.float16).astype(np.float32)
    for result in reduced(ranks, new, "oneshot", Reduction("float32", "sum", as_half=True), given):
        np.testing.assert_array_equal(result.view(np.float32), expected)


def test_exchange(ranks, new):
    given = [samples(rank, 999, "uint8") for rank in range(ranks.size)]
    arrays = [new(raw, 3) for raw in given]
    results = [new(np.zeros(999, np.uint8), 1) for _ in given]
    inputs = [[Segment(array.address, 0, 999)] for array in arrays]
    outputs = [[Segment(array.address, 0, 999, (rank + 1) % ranks.size)] for rank, array in enumerate(results)]
    ranks.launch(
        kernels.EXCHANGE_KERNEL, Reduction("uint8", "sum"), ranks.prepare(inputs, outputs), inputs, outputs, 999
    )
    finish(ranks.stream)
    for rank, array in enumerate(results):
        np.testing.assert_array_equal(array.content, given[(rank + 1) % ranks.size])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int8"])
def test_pack_and_unpack(device, new, dtype):
    stream = Stream()
    launcher = Launcher(Kernels(device.capability, device.multiprocessors), stream, 20.0)
    counts = [1, 7, 4099, 30_000]
    (pieces,) = rounds(counts, 8, 1 << 20, len(counts))
    offsets, total = [piece.offset for piece in pieces], buffer_bytes(pieces, 8)
    for packed in kernels.casts(dtype):
        given = [samples(0, count, dtype, n) for n, count in enumerate(counts)]
        arrays = [new(raw) for raw in given]
        results = [new(np.zeros_like(raw)) for raw in given]
        buffer = new(np.zeros(total, np.uint8))
        scale = 1.0 if dtype == "int8" else 0.5
        segments = [Segment(a.address, offset, count) for a, offset, count in zip(arrays, offsets, counts)]
        launcher.copy(segments, buffer.address, True, dtype, packed, scale)
        targets = [Segment(a.address, offset, count) for a, offset, count in zip(results, offsets, counts)]
        launcher.copy(targets, buffer.address, False, dtype, packed, 1 / scale)
        finish(stream)
        if packed == dtype:
            for raw, offset in zip(given, offsets):
                expected = combined([raw], dtype, "sum", scale) if scale != 1.0 else raw
                np.testing.assert_array_equal(buffer.content[offset : offset + len(raw)], expected)
        for array, raw in zip(results, given):
            if ITEM_BYTES[packed] >= ITEM_BYTES[dtype]:
                np.testing.assert_array_equal(array.content, raw)
            else:
                found, expected = (each.view(dtype).astype(np.float64) for each in (array.content, raw))
                np.testing.assert_allclose(found, expected, rtol=1e-2, atol=1e-5)
    launcher.close()
    stream.close()
