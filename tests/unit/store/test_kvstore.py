"""What the store asks of the engine, seen by a recording fake: which arrays take part, how often, in which order."""

from __future__ import annotations

import numpy as np
import pytest

import kvstore_hvd
from kvstore_hvd import errors
from support.fake_native import fake_world

mx = pytest.importorskip("mxnet")

SIZE = 3


@pytest.fixture
def fake():
    with fake_world(rank=0, size=SIZE) as communicator:
        yield communicator


@pytest.fixture
def kv(fake):
    return mx.kv.create("horovod")


@pytest.fixture(params=["nd", "np"])
def array(request):
    """Return a function that makes arrays of one of the two classes."""

    def make(values, dtype="float32", ctx=None):
        return getattr(mx, request.param).array(np.asarray(values, dtype), dtype=dtype, ctx=ctx or mx.cpu())

    return make


def handles(*arrays):
    return [a.handle.value for a in arrays]


def test_device_list_is_one_operation(fake, kv, array):
    a, b, c = (array([v], ctx=mx.cpu(i)) for i, v in enumerate([1, 10, 100]))
    kv.pushpull("w", [a, b, c])
    (op,) = fake.adapter.operations
    assert (op.inputs, op.outputs) == (handles(a, b, c), handles(a, b, c))
    assert [v.asnumpy()[0] for v in (a, b, c)] == [111 * SIZE] * 3


def test_all_outs_are_written(fake, kv, array):
    x, same, half = array([1, 2]), array([0, 0]), array([0, 0], "float16")
    kv.pushpull("w", x, out=[same, half])
    (op,) = fake.adapter.operations
    assert op.outputs == handles(same)
    assert half.asnumpy().tolist() == same.asnumpy().tolist() == [SIZE, 2 * SIZE]
    assert half.dtype == np.float16


def test_unreachable_memory_goes_through_copies(fake, kv, array):
    x = array([1, 2])
    fake.adapter.unreachable.add(fake.adapter.chunk_id(x.handle.value))
    kv.pushpull("w", x)
    (op,) = fake.adapter.operations
    assert x.handle.value not in op.inputs + op.outputs
    assert x.asnumpy().tolist() == [SIZE, 2 * SIZE]


def test_views_of_one_array_are_read_before_any_is_written(kv):
    x = mx.nd.array([1, 2, 3])
    head, tail = x[0:2], x[1:3]
    kv.pushpull(["a", "b"], [head, tail], out=[tail, head])
    # Both sums are formed from the old values; where the outs overlap, the second key wins.
    assert x.asnumpy().tolist() == [2 * SIZE, 3 * SIZE, 2 * SIZE]


def test_names_are_distinct_between_stores_and_equal_for_3_and_text_3(fake, kv, array):
    other = mx.kv.create("horovod")
    for store in (kv, other):
        store.pushpull(3, array([1]))
        store.pushpull("3", array([1]))
    names = [op.name for op in fake.adapter.operations]
    assert names[0] == names[1] != names[2] == names[3]


def test_labels(fake, kv, array):
    kv._set_key_labels({3: "dense0_weight"})
    for key in (3, 4, "loss"):
        kv.pushpull(key, array([1]))
    assert [op.label for op in fake.adapter.operations] == ["'dense0_weight' (key 3)", "(key 4)", "'loss'"]


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda kv, x: kv.pushpull([1, 2], [x, x.asnumpy()]), TypeError),
        (lambda kv, x: kv.pushpull(["a", 2.0], [x, x]), TypeError),
        (lambda kv, x: kv.pushpull(["a", 2], [x, x]), TypeError),
        (lambda kv, x: kv.pushpull([1, 2], [x, x], out=[x, mx.nd.ones((7,))]), errors.InvalidRequestError),
        (lambda kv, x: kv.pushpull([1, 2], [x, x.astype(bool)]), errors.UnsupportedDtypeError),
        (lambda kv, x: kv.pushpull([1, 2], [x, [x, x.astype("int32")]]), TypeError),
        (lambda kv, x: kv.broadcast([1, 2], [x, [x, x]]), errors.InvalidRequestError),
        (lambda kv, x: kv.pushpull([1, 2], [x, mx.nd.ones((2, 2)).tostype("csr")]), TypeError),
        (lambda kv, x: kv.pull(1, x), errors.InvalidRequestError),
        (lambda kv, x: kv.row_sparse_pull(1, x), NotImplementedError),
    ],
)
def test_everything_is_checked_before_anything_is_submitted(fake, kv, array, call, error):
    with pytest.raises(error):
        call(kv, array([1, 2]))
    assert fake.adapter.operations == []


def test_text_of_an_unsupported_dtype(kv, array):
    kv._set_key_labels({7: "mask"})
    with pytest.raises(errors.UnsupportedDtypeError) as caught:
        kv.pushpull(7, array([1, 0], "bool"))
    assert str(caught.value) == (
        "[rank 0/3] pushpull 'mask' (key 7): cannot sum dtype bool.\n"
        "  Supported: float16 bfloat16 float32 float64 int8 uint8 int32 int64\n"
        "  Fix: cast with .astype('int32'), or set grad_req='null'."
    )


def test_a_latched_failure_is_raised_by_every_call(fake, kv, array):
    fake.failure = errors.PeerLostError("rank 2 died")
    x = array([1])
    for call in (
        lambda: kv.pushpull(1, x),
        lambda: kv.broadcast(1, x),
        lambda: kv.push(1, x),
        lambda: kv.pull(1, x),
        lambda: kv.init(1, x),
        kv.barrier,
    ):
        for _ in range(2):
            with pytest.raises(errors.PeerLostError, match="rank 2 died"):
                call()
    assert fake.adapter.operations == []


def test_an_unread_error_is_raised_once_and_after_submitting(fake, kv, array):
    for call in (
        lambda: kv.pushpull(1, array([1])),
        lambda: kv.broadcast(1, array([1])),
        lambda: kv.push(1, array([1])),
        lambda: kv.pull(1, array([1])),
        lambda: kv.init(1, array([1])),
    ):
        call()
        submitted = len(fake.adapter.operations)
        call()
        each = len(fake.adapter.operations) - submitted
        fake.adapter.unread.append(errors.MismatchError("earlier"))
        with pytest.raises(errors.MismatchError, match="earlier"):
            call()
        call()
        assert len(fake.adapter.operations) == submitted + 3 * each


def test_push_is_started_at_once_and_pull_hands_it_out(fake, kv, array):
    x, out = array([1, 2]), [array([0, 0]), array([0, 0], "float16")]
    kv.push("w", x)
    assert len(fake.adapter.operations) == 1
    x[:] = 5
    kv.pull("w", out=out)
    assert [o.asnumpy().tolist() for o in out] == [[SIZE, 2 * SIZE]] * 2
    kv.push("w", [x, x])
    kv.pull("w", out=out)
    assert out[0].asnumpy().tolist() == [10 * SIZE] * 2


def test_report(kv, array):
    kv._set_key_labels({0: "weight"})
    kv.broadcast(0, array([1, 2]))
    kv.pushpull(0, array([1, 2]))
    kv.pushpull("loss", array([1], "float64"))
    report = kv.report()
    assert report["operations"] == {"broadcast": 1, "pushpull": 2}
    assert report["bytes"] == 24
    weight = report["keys"]["weight"]
    assert (weight["operations"], weight["bytes"]) == ({"broadcast": 1, "pushpull": 1}, 16)
    assert report["keys"]["loss"]["bytes"] == 8


def test_bad_names_of_attributes():
    with pytest.raises(AttributeError, match="no attribute 'HOROVOD'"):
        _ = kvstore_hvd.HOROVOD
    assert kvstore_hvd.Horovod is mx.kvstore.KVStoreBase.kv_registry["horovod"]
