"""A store: what random programs (`fuzz`) do not say."""

import gc
import time

import numpy as np
import pytest

import kvstore_hvd
from kvstore_hvd.store import arrays, kvstore, operations
from kvstore_hvd.store.operations import Operations
from kvstore_hvd.world.member import Member
from support.arrays import assert_same_bits, make
from support.gluon import mlp

mx = pytest.importorskip("mxnet")


def test_values_of_several_gpus_are_one_array_of_the_worker(kv, kind, rank, size, monkeypatch):
    """What takes place on a GPU takes one array of each worker; here the CPU stands in for the first GPU."""
    monkeypatch.setattr(arrays, "_is_on_cpu", lambda array: False)  # MXNet sums there, and rounds halves once
    halves = [make(kind, np.full(2, value, "float16")) for value in (2048, 1, 1)]
    total = arrays.local_sum(halves)
    assert (type(total), total.dtype, total.asnumpy().tolist()) == (type(halves[0]), np.float16, [2050] * 2)
    given, submit = [], Operations._submit
    monkeypatch.setattr(operations, "gpu_of", lambda world, context: mx.cpu(0))
    monkeypatch.setattr(Member, "start_device", lambda self, device: None)
    monkeypatch.setattr(
        Operations, "_submit", lambda self, call, one, *rest: given.append(one) or submit(self, call, one, *rest)
    )
    values = [make(kind, np.full(33, 10 * rank + d, "float32"), mx.cpu(d)) for d in range(2)]
    kv.pushpull("x", values)
    for value in values:
        assert_same_bits(value.asnumpy(), np.full(33, sum(20 * r + 1 for r in range(size)), "float32"))
    assert [len(one.inputs) for one in given] == [1] * (size > 1)


@pytest.mark.sizes
def test_arrays_shared_between_keys(kv, rank, size):
    """Outs of other keys, and views that overlap, in one key and across keys: all is read before any is written."""
    x, y = mx.nd.full(2, rank + 1), mx.nd.full(2, 10)
    kv.pushpull(["a", "b"], [x, y], out=[y, x])
    assert (x.asnumpy().tolist(), y.asnumpy().tolist()) == ([10 * size] * 2, [size * (size + 1) / 2] * 2)
    x = mx.nd.full(2, 2.0)
    kv.pushpull(["a", "b", "c"], [[x] * 4] * 3)
    assert x.asnumpy().tolist() == [8 * size] * 2
    x = mx.nd.array([1, 2, 3, 4])
    kv.pushpull(["a", "b"], [x[0:2], x[2:4]])
    assert x.asnumpy().tolist() == [size, 2 * size, 3 * size, 4 * size]
    kv.pushpull("c", x[0:3], out=x[1:4])
    assert x.asnumpy().tolist() == [size, size * size, 2 * size * size, 3 * size * size]


def test_a_key_needs_no_initialisation(kv, size):
    for key in ("never seen", "", "ü/…", "x" * 5000, -1, 2**40):
        x = mx.nd.ones(1)
        kv.pushpull(key, x)
        assert x.asscalar() == size


def test_dropped_inputs_stay_alive(kv, rank, size):
    """Asynchrony: inputs stay alive even if the caller drops them. What reads a result waits for it."""
    outs = [mx.nd.zeros(10_000) for _ in range(20)]
    for i, out in enumerate(outs):
        kv.pushpull(i, mx.nd.full(10_000, i + rank), out=out)
        gc.collect(0)  # of what is new: a collection of all of MXNet takes half a second
    for i, out in enumerate(outs):
        assert ((out + 1 - size * i).asnumpy() == 1 + size * (size - 1) / 2).all()


def test_keys_that_are_used_once(kv, rank, size, monkeypatch):
    """More keys than anything remembers, beside one that is always used: sums are right, memory is bounded."""
    limit = 100
    monkeypatch.setattr(kvstore, "MAX_KEYS", limit)
    steps = 1100  # the native side keeps 1024 names
    arrays = mx.nd.array(np.arange(steps).reshape(11, 100, 1) + rank)
    for many in range(11):
        kv.pushpull("always", mx.nd.ones(2))
        of_step = list(arrays[many])
        kv.pushpull([f"once/{many}/{one}" for one in range(100)], of_step)
        total = sum(range(size)) + size * (100 * many + np.arange(100))
        assert mx.nd.concat(*of_step, dim=0).asnumpy().tolist() == total.tolist()
    assert len(kv._wire_names) <= limit


def test_push_then_pull(kv, kind, rank, size):
    """`init` is a broadcast in place; `push` + `pull` (buffered): the sum over devices and workers of the last push."""
    values = [make(kind, np.full(2, rank + 1.0, "float32"), mx.cpu(d)) for d in range(2)]
    outs = [make(kind, np.zeros(2, "float32"), mx.cpu(d)) for d in range(2)]
    first = make(kind, np.full(2, rank + 7, "float32"))
    kv.init([3], [first])
    assert first.asnumpy().tolist() == [7, 7]
    first[:] = 0  # the store has a copy
    for out in outs:  # a pull takes nothing away
        kv.pull(3, out=out)
        assert out.asnumpy().tolist() == [7, 7]
    for _ in range(3):
        kv.push(3, values, priority=-3)
        kv.pull(3, out=outs, priority=-3, ignore_sparse=False)
    assert [out.asnumpy().tolist() for out in outs] == [[size * (size + 1.0)] * 2] * 2
    assert values[0].asnumpy().tolist() == [rank + 1.0] * 2
    with kv._without([5]):  # as gradients that are stale on all workers
        kv.push(5, values)
        kv.pull(5, out=outs)
    with pytest.raises(ValueError, match=r"nothing was pushed under this key\.\n  Fix: call push"):
        kv.pull(5, out=outs)


def test_who_takes_part(kv, world):
    assert (kv.rank, kv.num_workers) == (world.rank, world.size)
    for name in ("local_rank", "local_size", "cross_rank", "cross_size"):
        assert getattr(kv, name) == getattr(world, name)
    assert kv.type == "horovod"
    x = mx.nd.ones(2, ctx=mx.cpu(kv.local_rank))
    kv.pushpull("x", x)
    assert x.ctx == mx.cpu(kv.local_rank)
    assert x.asnumpy().tolist() == [kv.num_workers] * 2


def test_what_a_store_without_servers_does_not_do(kv, tmp_path, fresh_log, caplog):
    """set_optimizer, save and load of optimizer states: no-ops; is_capable is False on class and instance."""
    kv.set_optimizer(mx.optimizer.create("sgd"))
    kv.save_optimizer_states(str(tmp_path / "states"), dump_optimizer=True)
    kv.load_optimizer_states(str(tmp_path / "states"))
    assert not (tmp_path / "states").exists()
    told = [each.split("()")[0] for each in dict.fromkeys(caplog.messages)]
    assert told == ["set_optimizer", "save_optimizer_states", "load_optimizer_states"]
    with pytest.raises(NotImplementedError, match="their gradients may be row_sparse"):
        kv.row_sparse_pull(3, mx.nd.ones(2), row_ids=mx.nd.ones(1))
    assert not kv.is_capable("optimizer")
    assert not type(kv).is_capable(mx.kv.KVStoreBase.OPTIMIZER)
    assert not kv.is_capable("anything")
    with pytest.raises(ValueError, match="update_on_kvstore=False"):  # MXNet's own
        mx.gluon.Trainer(mlp().collect_params(), "sgd", kvstore=kv, update_on_kvstore=True).allreduce_grads()


def test_barrier(kv, rank, size):
    """`barrier` and `_barrier`: nobody goes on before the last one has come. Workers of a host have one clock."""
    for late, barrier in enumerate((kv.barrier, kv._barrier, kvstore_hvd.barrier)):
        time.sleep(0.1 * (rank == late % size))
        came = np.array([time.monotonic()])
        barrier()
        left = np.array([time.monotonic()])
        assert kvstore_hvd.allreduce(came, "came", op="max") <= kvstore_hvd.allreduce(left, "left", op="min")
