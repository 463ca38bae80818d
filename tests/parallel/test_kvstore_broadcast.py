"""`broadcast` and the older interface: table A of the contract."""

from __future__ import annotations

import time

import numpy as np
import pytest

import kvstore_hvd
from support.arrays import DTYPES, assert_same_bits, contribution, make

mx = pytest.importorskip("mxnet")


@pytest.mark.parametrize(("dtype", "shape"), zip(DTYPES, [(1,), (17, 5), (256, 257), (1_200_001,)] * 2), ids=str)
def test_everybody_gets_the_value_of_rank_0(kv, rank, dtype, shape):
    """`broadcast(key, value, out)`: rank 0's value into out; the value of the others is left alone."""
    mine = contribution(rank, shape, dtype)
    x, out = make(mx.nd, mine), make(mx.nd, np.zeros(shape, dtype))
    kv.broadcast("x", x, out=out, priority=3)
    assert_same_bits(out.asnumpy(), contribution(0, shape, dtype))
    assert_same_bits(x.asnumpy(), mine)


def test_outs_of_other_dtypes_and_devices(kv, kind, rank):
    """Out on different ctx and dtype: cast by a copy, from one operation on the wire."""
    x = make(kind, np.array([1.5, -2.25 * (rank + 1)], "float32"))
    outs = [make(kind, np.zeros(2, dtype), mx.cpu(1)) for dtype in ("float16", "float64", "int32")]
    kv.broadcast("x", x, out=outs)
    assert [out.asnumpy().tolist() for out in outs] == [[1.5, -2.25], [1.5, -2.25], [1, -2]]
    assert all(type(out) is type(x) for out in outs)
    assert kv.report()["operations"] == {"broadcast": 1}


def test_list_of_keys(kv, kind, rank):
    """List of keys with nested outs."""
    values = [make(kind, np.full(2, 10.0 * i + rank, "float32")) for i in range(3)]
    outs = [[make(kind, np.zeros(2, "float32"), mx.cpu(d)) for d in range(2)] for _ in range(3)]
    kv.broadcast(["a", "b", "c"], values, out=outs)
    for i, of_key in enumerate(outs):
        assert [out.asnumpy().tolist() for out in of_key] == [[10.0 * i] * 2] * 2


def test_values_that_are_the_outs_of_other_keys(kv, kind, rank):
    """Value of one key, out of another one: all are read before any is written, with one worker too."""
    x, y = make(kind, np.full(2, rank + 1.0, "float32")), make(kind, np.full(2, rank + 10.0, "float32"))
    kv.broadcast(["a", "b"], [x, y], out=[y, x])
    assert x.asnumpy().tolist() == [10] * 2
    assert y.asnumpy().tolist() == [1] * 2


@pytest.mark.parametrize("shape", [(), (0,), (2, 0)], ids=str)
def test_scalars_and_empty_arrays(kv, rank, shape):
    """0-d and zero-size."""
    with mx.util.np_shape(True):
        x, out = mx.np.full(shape, rank + 5.0), mx.np.zeros(shape)
        kv.broadcast("x", x, out=[x, out])
        assert out.shape == shape
        assert out.asnumpy().tolist() == np.full(shape, 5.0).tolist()


def test_shapes_must_be_equal(kv):
    """A shape mismatch raises instead of stretching the value; on every rank, before anything is submitted."""
    with pytest.raises(ValueError, match=r"out has shape \(2, 3\), but the first value has shape \(3,\)"):
        kv.broadcast("x", mx.nd.ones(3), out=mx.nd.ones((2, 3)))
    with pytest.raises(ValueError, match="there are 2 values for one key"):
        kv.broadcast("x", [mx.nd.ones(3)] * 2)


def test_init_then_pull(kv, kind, rank):
    """`init` is a broadcast in place; `pull` then hands the value out."""
    x, y = (make(kind, np.full(2, v + rank, "float32")) for v in (1.0, 2.0))
    kv.init(["a", "b"], [x, y])
    out = make(kind, np.zeros(2, "float64"))
    kv.pull("b", out)
    assert x.asnumpy().tolist() == [1, 1]
    assert y.asnumpy().tolist() == out.asnumpy().tolist() == [2, 2]


def test_push_then_pull(kv, kind, rank, size):
    """`push` + `pull` (buffered): the sum over devices and workers of the last push."""
    values = [make(kind, np.full(2, rank + 1.0, "float32"), mx.cpu(d)) for d in range(2)]
    outs = [make(kind, np.zeros(2, "float32"), mx.cpu(d)) for d in range(2)]
    kv.init(3, make(kind, np.zeros(2, "float32")))
    for _ in range(3):
        kv.push(3, values, priority=-3)
        kv.pull(3, out=outs, priority=-3, ignore_sparse=False)
    assert [out.asnumpy().tolist() for out in outs] == [[size * (size + 1.0)] * 2] * 2
    assert values[0].asnumpy().tolist() == [rank + 1.0] * 2


def summed_as_half(contributions, dtype):
    """Cast to float16 (float64 by way of float32), summed in float32 in this order, rounded once, cast back."""
    with np.errstate(over="ignore", invalid="ignore"):
        halves = [each.astype("float32").astype("float16").astype("float32") for each in contributions]
        total = sum(halves[1:], halves[0]).astype("float16").astype(dtype)
    total[np.isnan(total)] = np.nan  # infinities of both signs; NumPy's sign of it depends on the machine
    return total


def of_every_magnitude(rank, count, dtype, seed=0):
    """Values that are too small for float16, denormal, half-way between two, ordinary, and too large."""
    rng = np.random.default_rng([seed, rank])
    exponents = rng.integers(-28, 18, count)
    return (rng.integers(-4096, 4097, count) / 4096 * 2.0**exponents).astype(dtype)


@pytest.mark.parametrize("count", [1, 1000, 300_001])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sum_as_half(kv, kind, rank, size, dtype, count):
    """`set_gradient_compression({'type': 'fp16'})`: the bits of a sum of float16, in place, elsewhere and cast."""
    kv.set_gradient_compression({"type": "fp16"})
    mine = of_every_magnitude(rank, count, dtype)
    expected = summed_as_half([of_every_magnitude(r, count, dtype) for r in range(size)], dtype)
    if size == 1:
        expected = mine  # one worker rounds nothing
    x, out, cast = make(kind, mine), make(kind, np.zeros(count, dtype)), make(kind, np.zeros(count, "float16"))
    kv.pushpull("to outs", x, out=[out, cast])
    assert_same_bits(x.asnumpy(), mine)
    assert_same_bits(out.asnumpy(), expected)
    if size > 1:
        assert_same_bits(cast.asnumpy(), expected.astype("float16"))
    kv.pushpull("in place", x)
    assert_same_bits(x.asnumpy(), expected)


def test_push_and_pull_as_half(kv, kind, rank, size):
    """The compression holds for `push` as for `pushpull`; `pull` hands out that sum, and `init` rounds nothing."""
    kv.set_gradient_compression({"type": "fp16"})
    mine = of_every_magnitude(rank, 1000, "float32")
    expected = summed_as_half([of_every_magnitude(r, 1000, "float32") for r in range(size)], "float32")
    x, out = make(kind, mine), make(kind, np.zeros(1000, "float32"))
    kv.push("x", x)
    kv.pull("x", out=out)
    assert_same_bits(out.asnumpy(), expected if size > 1 else mine)
    kv.init("y", x)
    kv.pull("y", out=out)
    assert_same_bits(out.asnumpy(), of_every_magnitude(0, 1000, "float32"))


def test_devices_are_summed_as_half(kv, kind, rank, size):
    """The sum over a worker's devices is rounded too, before it meets the others'."""
    kv.set_gradient_compression({"type": "fp16"})
    if size == 1:
        pytest.skip("one worker rounds nothing")
    of_ranks = [
        summed_as_half([of_every_magnitude(r, 5000, "float32", seed=d) for d in range(2)], "float32")
        for r in range(size)
    ]
    values = [make(kind, of_every_magnitude(rank, 5000, "float32", seed=d), mx.cpu(d)) for d in range(2)]
    kv.pushpull("x", values)
    for value in values:
        assert_same_bits(value.asnumpy(), summed_as_half(of_ranks, "float32"))


def test_limits_of_half(kv, kind, size):
    """A sum beyond 65504 is infinite; other dtypes are left alone, and so is everything after `none`."""
    kv.set_gradient_compression({"type": "fp16"})
    big = make(kind, np.full(1, 60000.0, "float32"))
    kv.pushpull("big", big)
    assert big.asnumpy()[0] == (np.inf if size > 1 else np.float32(60000))
    exact = make(kind, np.full(1, 2**24 + 1, "int32"))
    kv.pushpull("exact", exact)
    assert exact.asnumpy()[0] == size * (2**24 + 1)
    kv.set_gradient_compression({"type": "none"})
    big = make(kind, np.full(1, 60000.0, "float32"))
    kv.pushpull("big", big)
    assert big.asnumpy()[0] == size * 60000


def test_who_takes_part(kv, world):
    """rank, local_rank, local_size, cross_rank, cross_size, num_workers, type."""
    assert (kv.rank, kv.num_workers) == (world.rank, world.size)
    assert (kv.local_rank, kv.local_size) == (world.rank, world.size)
    assert (kv.cross_rank, kv.cross_size) == (0, 1)
    assert kv.type == "horovod"
    x = mx.nd.ones(2, ctx=mx.cpu(kv.local_rank))
    kv.pushpull("x", x)
    assert x.ctx == mx.cpu(kv.local_rank)
    assert x.asnumpy().tolist() == [kv.num_workers] * 2


def test_what_a_store_without_servers_does_not_do(kv, tmp_path):
    """set_optimizer, save and load of optimizer states: no-ops; is_capable is False on class and instance."""
    kv.set_optimizer(mx.optimizer.create("sgd"))
    kv.save_optimizer_states(str(tmp_path / "states"), dump_optimizer=True)
    kv.load_optimizer_states(str(tmp_path / "states"))
    assert not (tmp_path / "states").exists()
    assert not kv.is_capable("optimizer")
    assert not type(kv).is_capable(mx.kv.KVStoreBase.OPTIMIZER)
    assert not kv.is_capable("anything")


def test_both_names_create_the_store(world):
    """Registration: ``horovod`` in any case, and ``dist_horovod``; every creation is a new instance."""
    stores = [mx.kv.create(name) for name in ("horovod", "Horovod", "dist_horovod")]
    assert len({id(store) for store in stores}) == 3
    assert {type(store).__module__ for store in stores} == {"kvstore_hvd.store.kvstore"}
    assert {store.type for store in stores} == {"horovod"}


def test_barrier(kv, rank, size):
    """`barrier` and `_barrier`: nobody goes on before the last one has come. Workers of a host have one clock."""
    for late, barrier in enumerate((kv.barrier, kv._barrier, kvstore_hvd.barrier)):
        time.sleep(0.1 * (rank == late % size))
        came = np.array([time.monotonic()])
        barrier()
        left = np.array([time.monotonic()])
        assert kvstore_hvd.allreduce(came, "came", op="max") <= kvstore_hvd.allreduce(left, "left", op="min")
