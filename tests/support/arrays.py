"""Values for parallel tests: every rank knows what every other rank contributes, so results can be computed locally."""

import zlib
from collections.abc import Sequence
from functools import reduce
from typing import Any, Optional

import numpy as np

import kvstore_hvd
from kvstore_hvd import native
from kvstore_hvd.world import process

DTYPES = ("float16", "float32", "float64", "int8", "uint8", "int32", "int64")

Array = Any  # numpy.ndarray of any dtype


def contribution(rank: int, shape: tuple[int, ...], dtype: str, seed: object = 0) -> Array:
    """Return what a rank contributes: another value for each rank and element; negative ones and fractions too."""
    generator = np.random.default_rng([zlib.crc32(repr((seed, shape, dtype)).encode()), rank])
    if dtype.startswith("float"):
        return generator.standard_normal(shape).astype(dtype)
    info = np.iinfo(dtype)
    # Sums wrap around for the small integers: two's complement, as in NumPy.
    return generator.integers(info.min, info.max, shape, dtype=np.dtype(dtype), endpoint=True)


def request_of(array: Array, name: str, collective: str = "allreduce", **more: Any) -> native.Request:
    """Return an operation on this array, in place; for tests that ask the engine itself."""
    place = [array.ctypes.data]
    return native.Request(collective, name, repr(name), place, place, array.shape, array.dtype.name, **more)


def make(kind: Any, values: Array, ctx: Any = None) -> Any:
    """Return an MXNet array of these values and their dtype; `kind` is ``mx.nd`` or ``mx.np``."""
    import mxnet as mx

    return kind.array(values, dtype=values.dtype, ctx=ctx or mx.cpu())


def ordered_sum(parts: list[Array]) -> Array:
    """Return the sum in the order given, as the engine promises it: halves are summed in float32 and rounded once."""
    dtype = parts[0].dtype
    if dtype == np.float16:
        return reduce(np.add, [part.astype(np.float32) for part in parts]).astype(dtype)
    return reduce(lambda a, b: (a + b).astype(dtype), parts)


def by_host(parts: list[Array], ranks: Optional[Sequence[int]] = None) -> list[list[Array]]:
    """Return what these ranks of the present world (all, if not given) contribute, in a list for each host."""
    place = process.current().last_topology
    ranks = range(len(parts)) if ranks is None else ranks
    if place is None or place.size <= max(ranks):  # the parts are of no world of this process
        return [parts]
    hosts: dict[str, list[Array]] = {}
    for part, rank in zip(parts, ranks):
        hosts.setdefault(place.hosts[rank], []).append(part)
    return list(hosts.values())


def sum_of_ranks(parts: list[Array], ranks: Optional[Sequence[int]] = None) -> Array:
    """Return the sum of what ranks contribute, see `by_host`: each host's ranks are summed first, then the hosts."""
    return ordered_sum([ordered_sum(of_host) for of_host in by_host(parts, ranks)])


def expected_sum(size: int, shape: tuple[int, ...], dtype: str, seed: object = 0) -> Array:
    return sum_of_ranks([contribution(rank, shape, dtype, seed) for rank in range(size)])


def assert_same_bits(actual: Array, expected: Array) -> None:
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.tobytes() == expected.tobytes(), f"{actual.ravel()[:8]} instead of {expected.ravel()[:8]}"


def assert_equal_on_all_ranks(array: Array, name: str) -> None:
    """Fail unless every rank has the bits of rank 0. Collective: every rank calls it with the same name."""
    mine = np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)
    of_rank_0 = kvstore_hvd.broadcast(mine, 0, f"equal/{name}")
    differing = np.flatnonzero(mine != of_rank_0)
    assert differing.size == 0, f"{differing.size} of {mine.size} bytes differ from rank 0's"
