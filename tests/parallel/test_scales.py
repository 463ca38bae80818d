"""Factors of reductions: the same arithmetic with one worker and with several, over all interfaces.

What is expected comes from one model, in the order of ranks; with one worker it is that of a single array.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from fuzz.arrays import read
from fuzz.model import fold, rounded_to_bfloat16
from kvstore_hvd.mxnet_compat import bfloat16
from kvstore_hvd.native import OPS
from support.arrays import assert_same_bits, make

mx = pytest.importorskip("mxnet")

#: Prescale and postscale: none, small, fractions that round, signs, far out of range, and what is no number.
FACTORS = [
    (1.0, 1.0),
    (2.0, 1.0),
    (1.0, 0.5),
    (1 / 3, 3.0),
    (-1.5, 1.0),
    (100.0, 0.01),
    (1e300, 1e-300),
    (float("inf"), 1.0),
    (1.0, float("nan")),
]
FLOATS = ("float16", "bfloat16", "float32", "float64")


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """Fail on overflows that NumPy would warn of, as ``python -W error`` does."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def contribution(rank: int, dtype: str, seed: int = 0) -> Any:
    """What a rank brings: the ends of the dtype's range, and others; bfloat16 as float32."""
    generator = np.random.default_rng([rank, seed, *dtype.encode()])
    if dtype not in FLOATS:
        info = np.iinfo(dtype)
        ends = [info.min, info.max, info.max // 2 + 1, 0, 1]
        many = generator.integers(info.min, info.max, 40, np.dtype(dtype), endpoint=True)
        few = generator.integers(max(info.min, -9), 9, 40, np.dtype(dtype), endpoint=True)
        return np.concatenate([np.roll(np.array(ends, dtype), rank), many, few])
    with np.errstate(over="ignore"):
        many = generator.standard_normal(80) * 10.0 ** generator.integers(-9, 9, 80)
        array = np.concatenate([np.roll([np.inf, np.nan, -0.0, 0.0, 1.0, -1.0], rank), many])
        if dtype == "bfloat16":
            return rounded_to_bfloat16(array.astype(np.float32))
        return array.astype(dtype)


def expected(size: int, dtype: str, op: str, prescale: float, postscale: float) -> Any:
    parts = [contribution(rank, dtype) for rank in range(size)]
    if size == 1 and prescale == postscale == 1.0:
        return parts[0]
    if op == "average":
        op, postscale = "sum", postscale / size
    return fold(dtype, op, parts, prescale, postscale, False)


def assert_equal(got: Any, want: Any, what: object) -> None:
    """Fail unless the bits are equal; the NaN of a single array that is copied may be any."""
    assert got.dtype == want.dtype, what
    same = (got.view(f"u{got.itemsize}") == want.view(f"u{want.itemsize}")) | (np.isnan(got) & np.isnan(want))
    assert same.all(), f"{what}: {got[~same][:5]} instead of {want[~same][:5]}"


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "int64"])
def test_numpy(rank: int, size: int, dtype: str) -> None:
    """New array, in place, and prepared."""
    for op, factors in itertools.product(OPS, FACTORS):
        mine, want, what = contribution(rank, dtype), expected(size, dtype, op, *factors), (dtype, op, factors)
        assert_equal(kvstore_hvd.allreduce(mine, "x", op, None, *factors), want, what)
        run = kvstore_hvd.allreduce_init(mine.copy(), "x", op, None, *factors)
        assert_equal(run(), want, what)
        kvstore_hvd.allreduce(mine, "x", op, mine, *factors)
        assert_equal(mine, want, what)


def test_numpy_bfloat16(rank: int, size: int) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for op, factors in itertools.product(OPS, FACTORS):
        mine = contribution(rank, "bfloat16").astype(ml_dtypes.bfloat16)
        got = kvstore_hvd.allreduce(mine, "x", op, None, *factors).astype(np.float32)
        assert_equal(got, expected(size, "bfloat16", op, *factors), (op, factors))


def array_of(values: Any, dtype: str) -> Any:
    """An array of MXNet; bfloat16 is given as float32."""
    if dtype != "bfloat16":
        return make(mx.nd, values)
    array = mx.nd.empty(values.shape, dtype=bfloat16())
    return mx.nd._internal._copyto(mx.nd.array(values), out=array)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "uint8", "int32"])
def test_mxnet_arrays(rank: int, size: int, dtype: str) -> None:
    """New array and in place."""
    checks = []
    for (number, op), factors in itertools.product(enumerate(OPS), FACTORS):
        kind = getattr(hvd, op.capitalize())
        array = array_of(contribution(rank, dtype), dtype)
        made = hvd.allreduce(array, None, f"x{number}", 0, *factors, op=kind)
        in_place = hvd.allreduce_(array.copy(), None, f"y{number}", 0, *factors, op=kind)
        checks += [(made, op, factors), (in_place, op, factors)]
    for got, op, factors in checks:
        assert_equal(read(got), expected(size, dtype, op, *factors), (dtype, op, factors))


@pytest.mark.parametrize(("op", "dtype"), [("sum", "float16"), ("average", "int32"), ("average", "bfloat16")])
def test_reducescatter(rank: int, size: int, op: str, dtype: str) -> None:
    """Of the scaled result each worker has its share, the only worker all of it."""
    for factors in FACTORS:
        array = array_of(contribution(rank, dtype), dtype)
        got = read(hvd.reducescatter(array, getattr(hvd, op.capitalize()), None, 0, *factors))
        each, rest = divmod(array.shape[0], size)
        first = each * rank + min(rank, rest)
        want = expected(size, dtype, op, *factors)[first : first + each + (rank < rest)]
        assert_equal(got, want, (dtype, op, factors))


@pytest.mark.parametrize("dtype", ["float16", "float32", "int8"])
def test_several_values_of_a_store(rank: int, size: int, kv: Any, dtype: str) -> None:
    """The arrays of a worker are summed as those of workers are: first each worker's own, then the sums."""
    parts = [[contribution(3 * each + place, dtype) for place in range(3)] for each in range(size)]
    arrays = [array_of(part, dtype) for part in parts[rank]]
    out = array_of(parts[rank][0], dtype)
    kv.pushpull("x", arrays, out=out)
    sums = [fold(dtype, "sum", part, 1.0, 1.0, False) for part in parts]
    want = sums[0] if size == 1 else fold(dtype, "sum", sums, 1.0, 1.0, False)
    assert_equal(read(out), want, dtype)


def test_a_lone_worker_of_a_set_scales_as_all_do(rank: int, size: int, dynamic: None) -> None:
    """A process set of one, within a larger world: as in a set of all where the others bring zeros."""
    if size == 1:
        pytest.skip("the set is the world")
    sets = [hvd.add_process_set([each]) for each in range(size)]
    for dtype, factors in itertools.product(("int8", "uint8", "int32", "int64"), FACTORS):
        for root in range(size):
            mine = contribution(root, dtype)
            together = hvd.allreduce(
                make(mx.nd, mine if rank == root else np.zeros_like(mine)), None, "together", 0, *factors, op=hvd.Sum
            ).asnumpy()
            if rank == root:
                alone = hvd.allreduce(make(mx.nd, mine), None, "alone", 0, *factors, sets[rank], op=hvd.Sum)
                assert_same_bits(alone.asnumpy(), together)
