"""`broadcast` and the older interface: table A of the contract."""

import time

import numpy as np
import pytest

import kvstore_hvd
from support.arrays import assert_same_bits, by_host, contribution, make, sum_of_ranks

mx = pytest.importorskip("mxnet")


def test_outs_of_other_dtypes_and_devices(kv, kind, rank):
    """Rank 0's value; out on different ctx and dtype: cast by a copy, from one operation on the wire."""
    x = make(kind, np.array([1.5, -2.25 * (rank + 1)], "float32"))
    outs = [make(kind, np.zeros(2, dtype), mx.cpu(1)) for dtype in ("float16", "float64", "int32")]
    kv.broadcast("x", x, out=outs, priority=3)
    assert [out.asnumpy().tolist() for out in outs] == [[1.5, -2.25], [1.5, -2.25], [1, -2]]
    assert all(type(out) is type(x) for out in outs)
    assert kv.report()["operations"] == {"broadcast": 1}
    assert x.asnumpy().tolist() == [1.5, -2.25 * (rank + 1)]


def test_push_then_pull(kv, kind, rank, size):
    """`init` is a broadcast in place; `push` + `pull` (buffered): the sum over devices and workers of the last push."""
    values = [make(kind, np.full(2, rank + 1.0, "float32"), mx.cpu(d)) for d in range(2)]
    outs = [make(kind, np.zeros(2, "float32"), mx.cpu(d)) for d in range(2)]
    first = make(kind, np.full(2, rank + 7, "float32"))
    kv.init([3], [first])
    assert first.asnumpy().tolist() == [7, 7]
    first[:] = 0  # the store has a copy
    kv.pull(3, out=outs[0])
    assert outs[0].asnumpy().tolist() == [7, 7]
    for _ in range(3):
        kv.push(3, values, priority=-3)
        kv.pull(3, out=outs, priority=-3, ignore_sparse=False)
    assert [out.asnumpy().tolist() for out in outs] == [[size * (size + 1.0)] * 2] * 2
    assert values[0].asnumpy().tolist() == [rank + 1.0] * 2


def test_sum_as_half(kv, kind, rank, size):
    """`set_gradient_compression({'type': 'fp16'})`: the bits of a sum of float16, in place and elsewhere."""
    kv.set_gradient_compression({"type": "fp16"})
    mine, first = (contribution(r, (1000,), "float32") for r in (rank, 0))
    halves = [contribution(r, (1000,), "float32").astype("float16") for r in range(size)]
    total = sum_of_ranks(halves).astype("float32")
    x, out = make(kind, mine), make(kind, np.zeros(1000, "float32"))
    for call in (lambda: kv.pushpull("to out", x, out=out), lambda: (kv.push("x", x), kv.pull("x", out=out))):
        call()
        assert_same_bits(x.asnumpy(), mine)
        assert_same_bits(out.asnumpy(), total if size > 1 else mine)  # a worker alone rounds nothing
    kv.init("y", x)  # nor does this
    assert_same_bits(x.asnumpy(), first)
    for how, expected in (("fp16", np.inf), ("none", 60000 * size)):
        kv.set_gradient_compression({"type": how})
        big = make(kind, np.full(1, 60000.0, "float32"))
        kv.pushpull("big", big)
        assert big.asnumpy()[0] == (expected if size > 1 else 60000)


def test_who_takes_part(kv, world):
    """rank, local_rank, local_size, cross_rank, cross_size, num_workers, type."""
    assert (kv.rank, kv.num_workers) == (world.rank, world.size)
    hosts = by_host(list(range(world.size)))
    (here,) = (ranks for ranks in hosts if world.rank in ranks)
    place = here.index(world.rank)
    assert (kv.local_rank, kv.local_size) == (place, len(here))
    across = [ranks[place] for ranks in hosts if place < len(ranks)]
    assert (kv.cross_rank, kv.cross_size) == (across.index(world.rank), len(across))
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
