"""`pushpull`: what random programs (see `test_hvd_allreduce`) do not say."""

import gc

import numpy as np
import pytest

from kvstore_hvd.store import kvstore, operations, usage
from kvstore_hvd.store.operations import Operations
from kvstore_hvd.world.member import Member
from support.arrays import (
    assert_same_bits,
    contribution,
    make,
    sum_of_ranks,
)

mx = pytest.importorskip("mxnet")


def array_of(like, values):
    """An array of the class of `like`."""
    return make(mx.np if isinstance(like, mx.np.ndarray) else mx.nd, values)


def test_values_of_several_gpus_are_one_array_of_the_worker(kv, kind, rank, size, monkeypatch):
    """What takes place on a GPU takes one array of each worker; here the CPU stands in for the first GPU."""
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


def test_list_of_keys(kv, kind, rank, size):
    """Every key is reduced by itself; values that are outs of other keys are read before any is written."""
    x, y = make(kind, np.full(2, rank + 1.0, "float32")), make(kind, np.full(2, 10.0, "float32"))
    kv.pushpull(["a", "b"], [x, y], out=[y, x])
    assert x.asnumpy().tolist() == [10.0 * size] * 2
    assert y.asnumpy().tolist() == [size * (size + 1) / 2] * 2
    values = [[make(kind, np.ones(2, "float32"), mx.cpu(d)) for d in range(2)] for _ in range(3)]
    outs = [make(kind, np.zeros(2, "float32")) for _ in range(3)]
    kv.pushpull([0, 1, 2], values, out=outs, priority=5)
    assert [out.asnumpy().tolist() for out in outs] == [[2 * size] * 2] * 3


def test_arrays_shared_between_keys(kv, rank, size):
    """The same arrays, or views that overlap, in one key and across keys, in place: read before any is written."""
    x = mx.nd.full(2, 2.0)
    kv.pushpull(["a", "b", "c"], [[x] * 4] * 3)
    assert x.asnumpy().tolist() == [8 * size] * 2
    x = mx.nd.array([1, 2, 3, 4])
    kv.pushpull(["a", "b"], [x[0:2], x[2:4]])
    assert x.asnumpy().tolist() == [size, 2 * size, 3 * size, 4 * size]
    kv.pushpull("c", x[0:3], out=x[1:4])
    assert x.asnumpy().tolist() == [size, size * size, 2 * size * size, 3 * size * size]


def test_a_key_needs_no_initialisation(kv, size):
    """Un-broadcast key: fine, and so is any text."""
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


def test_one_key_for_several_arrays_keeps_the_order_of_calls(kv, rank, size):
    """Several operations under one key, on different arrays that become ready in another order on every rank."""
    slow = mx.nd.ones((700, 700))
    for _ in range(8):
        slow = mx.nd.dot(slow, slow) / 700
    late = slow[0, 0:3] * 0
    arrays = [mx.nd.full(3, 10.0**i) for i in range(4)]
    i = rank % 4  # ready last on this rank
    arrays[i] = arrays[i] + late
    for array in arrays:
        kv.pushpull("loss", array)
    assert [array.asnumpy().tolist() for array in arrays] == [[size * 10.0**i] * 3 for i in range(4)]


def test_keys_that_are_used_once(kv, rank, size, monkeypatch):
    """More keys than anything remembers, beside one that is always used: sums are right, memory is bounded."""
    limit = 100
    monkeypatch.setattr(kvstore, "MAX_KEYS", limit)
    monkeypatch.setattr(usage, "MAX_KEYS", limit)
    steps = 1100  # the native side keeps 1024 names
    arrays = mx.nd.array(np.arange(steps).reshape(11, 100, 1) + rank)
    for many in range(11):
        kv.pushpull("always", mx.nd.ones(2))
        of_step = list(arrays[many])
        kv.pushpull([f"once/{many}/{one}" for one in range(100)], of_step)
        total = sum(range(size)) + size * (100 * many + np.arange(100))
        assert [array.asscalar() for array in of_step] == total.tolist()
    assert len(kv._wire_names) <= limit
    report = kv.report()
    assert report["operations"] == {"pushpull": steps + 11}
    assert report["keys"]["always"]["operations"] == {"pushpull": 11}
    assert len(report["keys"]) == limit + 1  # and one for all the others


def test_weights_in_an_opaque_layout(kv, rank, size):
    """Values whose memory oneDNN has rearranged in an inference pass are reduced and broadcast by their elements."""
    net = mx.gluon.nn.HybridSequential()
    for channels in (64, 64):
        net.add(mx.gluon.nn.Conv2D(channels, 3, in_channels=64))
    net.initialize(mx.init.Uniform(0.1))
    data = mx.np.ones((8, 64, 32, 32)) if mx.__version__ >= "2" else mx.nd.ones((8, 64, 32, 32))
    net(data).wait_to_read()
    weights = [p.data() for p in net.collect_params().values()]
    for weight in weights:
        weight[:] = array_of(weight, contribution(rank, weight.shape, "float32"))
    for _ in range(3):
        net(data).wait_to_read()
    for i, weight in enumerate(weights):
        kv.broadcast(i, weight)
        assert_same_bits(weight.asnumpy(), contribution(0, weight.shape, "float32"))
    net(data).wait_to_read()
    for i, weight in enumerate(weights):
        kv.pushpull(i, weight)
    for weight in weights:
        parts = [contribution(0, weight.shape, "float32")] * size
        assert_same_bits(weight.asnumpy(), sum_of_ranks(parts))
