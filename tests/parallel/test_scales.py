"""Factors of reductions: the same arithmetic with one worker and with several, over all interfaces.

What is expected comes from one model, in the order of ranks; with one worker it is that of a single array.
"""

import itertools
import warnings

import numpy as np
import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from fuzz.arrays import read
from fuzz.model import fold_of_ranks, rounded_to_bfloat16
from kvstore_hvd.mxnet_compat import bfloat16
from kvstore_hvd.native import OPS
from support.arrays import by_host, make

mx = pytest.importorskip("mxnet")

#: Prescale and postscale: none, small, fractions that round, signs, far out of range, and what is no number.
INF, NAN = float("inf"), float("nan")
FACTORS = [(1.0, 1.0), (1 / 3, 3.0), (-1.5, 1.0), (1e300, 1e-300), (INF, 1.0), (1.0, NAN)]
FLOATS = ("float16", "bfloat16", "float32", "float64")


@pytest.fixture(autouse=True)
def no_warnings():
    """Fail on overflows that NumPy would warn of, as ``python -W error`` does."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


def contribution(rank, dtype):
    """What a rank brings: the ends of the dtype's range, and others; bfloat16 as float32."""
    generator = np.random.default_rng([rank, *dtype.encode()])
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


def expected(ranks, dtype, op, prescale, postscale):
    parts = [contribution(rank, dtype) for rank in ranks]
    if len(parts) == 1 and prescale == postscale == 1.0:
        return parts[0]
    if op == "average":
        op, postscale = "sum", postscale / len(parts)
    return fold_of_ranks(dtype, op, by_host(parts, ranks), prescale, postscale)


def assert_equal(got, want, what):
    """Fail unless the bits are equal; the NaN of a single array that is copied may be any."""
    assert got.dtype == want.dtype, what
    same = (got.view(f"u{got.itemsize}") == want.view(f"u{want.itemsize}")) | (np.isnan(got) & np.isnan(want))
    assert same.all(), f"{what}: {got[~same][:5]} instead of {want[~same][:5]}"


def array_of(values, dtype):
    if dtype != "bfloat16":
        return make(mx.nd, values)
    array = mx.nd.empty(values.shape, dtype=bfloat16())
    return mx.nd._internal._copyto(mx.nd.array(values), out=array)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "uint8", "int64"])
def test_arrays(rank, size, dtype, dynamic):
    """New array and in place, of NumPy as well; of all workers, and of each one in a process set of its own."""
    alone = [hvd.add_process_set([each]) if size > 1 else hvd.global_process_set for each in range(size)][rank]
    checks = []
    for (number, op), factors in itertools.product(enumerate(OPS), FACTORS):
        kind = getattr(hvd, op.capitalize())
        if dtype != "bfloat16":
            mine = contribution(rank, dtype)
            for out in (None, mine):
                got = kvstore_hvd.allreduce(mine, "x", op, out, *factors)
                assert_equal(got, expected(range(size), dtype, op, *factors), (dtype, op, factors))
        array = array_of(contribution(rank, dtype), dtype)
        made = hvd.allreduce(array, None, f"x{number}", 0, *factors, op=kind)
        in_place = hvd.allreduce_(array.copy(), None, f"y{number}", 0, *factors, op=kind)
        lone = hvd.allreduce(array, None, f"z{number}", 0, *factors, alone, op=kind)
        ranks = range(size)
        checks += [(made, ranks, op, factors), (in_place, ranks, op, factors), (lone, [rank], op, factors)]
    for got, ranks, op, factors in checks:
        assert_equal(read(got), expected(ranks, dtype, op, *factors), (dtype, ranks, op, factors))
