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


def test_one_array_in_place_is_handed_over_as_it_is(fake, kv, array):
    x = array([1, 2])
    kv.pushpull(3, x, priority=-3)
    (op,) = fake.adapter.operations
    assert (op.collective, op.inputs, op.outputs, op.priority) == ("allreduce", handles(x), handles(x), -3)
    assert x.asnumpy().tolist() == [SIZE, 2 * SIZE]


def test_out_receives_the_result_directly(fake, kv, array):
    x, y = array([1, 2]), array([0, 0])
    kv.pushpull(3, x, out=y)
    (op,) = fake.adapter.operations
    assert (op.inputs, op.outputs) == (handles(x), handles(y))
    assert x.asnumpy().tolist() == [1, 2]


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


def test_out_of_another_dtype_only(fake, kv, array):
    x, half = array([1, 2]), array([0, 0], "float16")
    kv.pushpull("w", x, out=half)
    (op,) = fake.adapter.operations
    assert (op.inputs, op.dtype) == (handles(x), "float32")
    assert x.asnumpy().tolist() == [1, 2]
    assert half.asnumpy().tolist() == [SIZE, 2 * SIZE]


def test_unreachable_memory_goes_through_copies(fake, kv, array):
    x = array([1, 2])
    fake.adapter.unreachable.add(fake.adapter.chunk_id(x.handle.value))
    kv.pushpull("w", x)
    (op,) = fake.adapter.operations
    assert x.handle.value not in op.inputs + op.outputs
    assert x.asnumpy().tolist() == [SIZE, 2 * SIZE]


def test_list_of_keys_is_one_operation_each(fake, kv, array):
    x, y = array([1]), array([2, 3])
    kv.pushpull(["a", "b"], [x, y], priority=7)
    assert [op.name.rpartition("/")[2] for op in fake.adapter.operations] == ["a", "b"]
    assert [op.inputs for op in fake.adapter.operations] == [handles(x), handles(y)]
    assert {op.priority for op in fake.adapter.operations} == {7}


def test_aliased_arrays_are_read_before_any_is_written(kv, array):
    x = array([2, 2])
    kv.pushpull(["a", "b", "c"], [[x] * 4] * 3)
    assert x.asnumpy().tolist() == [8 * SIZE] * 2


def test_views_of_one_array_are_read_before_any_is_written(kv):
    x = mx.nd.array([1, 2, 3])
    head, tail = x[0:2], x[1:3]
    kv.pushpull(["a", "b"], [head, tail], out=[tail, head])
    # Both sums are formed from the old values; where the outs overlap, the second key wins.
    assert x.asnumpy().tolist() == [2 * SIZE, 3 * SIZE, 2 * SIZE]


def test_the_same_array_several_times_counts_several_times(fake, kv, array):
    x = array([1])
    kv.pushpull("a", [x, x])
    (op,) = fake.adapter.operations
    assert (op.inputs, op.outputs) == (handles(x, x), handles(x))
    assert x.asnumpy()[0] == 2 * SIZE


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


def test_broadcast_of_a_parameter_needs_no_copy(fake, kv, array):
    replicas = [array([1, 2], ctx=mx.cpu(i)) for i in range(2)]
    kv.broadcast(0, replicas[0], out=replicas)
    (op,) = fake.adapter.operations
    assert (op.collective, op.inputs) == ("broadcast", handles(replicas[0]))


def test_broadcast_of_one_value_to_many_is_one_operation(fake, kv, array):
    x = array([1, 2])
    outs = [array([0, 0], dtype, mx.cpu(1)) for dtype in ("float32", "float16", "int32")]
    kv.broadcast("w", [x], out=tuple(outs))
    assert len(fake.adapter.operations) == 1
    assert [out.asnumpy().tolist() for out in outs] == [[1, 2]] * 3
    assert [str(out.asnumpy().dtype) for out in outs] == ["float32", "float16", "int32"]


def test_broadcast_leaves_the_value_of_another_rank_alone(array):
    with fake_world(rank=1, size=2) as fake:
        x, out = array([1, 2]), array([0, 0])
        mx.kv.create("horovod").broadcast("w", x, out=out)
        (op,) = fake.adapter.operations
        assert op.inputs == handles(out)
        assert x.asnumpy().tolist() == [1, 2]


def test_fp16_is_left_to_the_engine(fake, kv, array):
    kv.set_gradient_compression({"type": "fp16"})
    for dtype in ("float32", "float64", "int32", "float16"):
        x = array([1, 2], dtype)
        kv.pushpull(dtype, x)
        op = fake.adapter.operations[-1]
        assert (op.dtype, op.inputs, op.outputs, op.as_half) == (dtype, handles(x), handles(x), True)
        assert str(x.asnumpy().dtype) == dtype
        assert x.asnumpy().tolist() == [SIZE, 2 * SIZE]
    kv.broadcast("w", array([1.0001]))
    assert not fake.adapter.operations[-1].as_half
    kv.set_gradient_compression({"type": "none"})
    kv.pushpull("float32", array([1, 2]))
    assert not fake.adapter.operations[-1].as_half


def test_fp16_holds_for_push_too(fake, kv, array):
    kv.set_gradient_compression({"type": "fp16"})
    out = array([0])
    kv.push("w", array([1]))
    kv.pull("w", out)
    assert [op.as_half for op in fake.adapter.operations] == [True]
    assert out.asnumpy().tolist() == [SIZE]


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


def test_init_keeps_the_value_for_pull(fake, kv, array):
    x, out = array([1, 2]), array([0, 0])
    kv.init(["v", "w"], [array([5]), x])
    x[:] = 0
    kv.pull("w", out)
    assert out.asnumpy().tolist() == [1, 2]
    assert [op.collective for op in fake.adapter.operations] == ["broadcast"] * 2


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


def test_class_of_results_is_kept(kv, array):
    x, y = array([1]), array([1])
    kv.pushpull("a", x, out=y)
    assert type(y) is type(x)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
def test_scalars_and_empty_arrays_take_part(fake, kv, shape):
    with mx.util.np_shape(True):
        x, y = mx.np.ones(shape), mx.np.ones(shape, dtype="float16")
        kv.pushpull("a", [x, mx.np.ones(shape)], out=[x, y])
        kv.broadcast("b", x, out=[x, y])
        assert [op.collective for op in fake.adapter.operations] == ["allreduce", "broadcast"]
        assert y.shape == shape
        assert y.asnumpy().tolist() == (np.ones(shape) * 2 * SIZE).tolist()


def test_bad_names_of_attributes():
    with pytest.raises(AttributeError, match="no attribute 'HOROVOD'"):
        _ = kvstore_hvd.HOROVOD
    assert kvstore_hvd.Horovod is mx.kvstore.KVStoreBase.kv_registry["horovod"]
