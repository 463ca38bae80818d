"""Wrong calls and disagreeing ranks: who raises what, with which text, and that the store works on afterwards."""

import contextlib

import numpy as np
import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from kvstore_hvd.errors import InvalidRequestError, MismatchError, TransportError, UnsupportedDtypeError
from kvstore_hvd.world import process
from support.gluon import is_mxnet_2
from support.patience import until

mx = pytest.importorskip("mxnet")


@pytest.fixture
def kv(world, size):
    """Return a store, and check afterwards that it still works."""
    store = mx.kv.create("horovod")
    yield store
    x = mx.nd.ones(4)
    store.pushpull("afterwards", x)
    assert x.asnumpy().tolist() == [size] * 4


@pytest.mark.needs(2)
@pytest.mark.parametrize("way", ["pushpull", "step"])
def test_a_key_that_gets_another_name_is_called_by_that(kv, rank, size, way):
    """Names that the Trainer tells later, after operations under the former ones."""
    x = mx.nd.ones(4)
    step = kv._make_step([(3, x, 0)])
    for name in ("first", "second", "third"):
        kv._set_key_labels({3: name})
        if name == "third" and rank == size - 1:
            kv.pushpull(3, mx.nd.ones(5))
        elif way == "pushpull" or not kv._exchange(step):
            kv.pushpull(3, x)
        if name != "third":
            x.wait_to_read()
    with pytest.raises(MismatchError, match=r"'third' \(key 3\): ranks disagree on shape\.\n  \(.*\n.*Fix: build"):
        mx.nd.waitall()


@pytest.mark.needs(2)
def test_compression_differs(kv, rank, size):
    none, half = {"type": "none"}, {"type": "fp16"}
    others = "rank 0" if size == 2 else f"ranks 0-{size - 2}"
    for own, others_have, shown in (
        ({"threshold": 0.5001}, {}, f"2bit, threshold 0.5: {others}    2bit, threshold 0.500100017: rank {size - 1}"),
        ({"threshold": 0.1}, none, f"not 2bit: {others}    2bit, threshold 0.1"),
        (half, none, f"none: {others}    fp16: rank {size - 1}"),
    ):
        kv.set_gradient_compression({"type": "2bit", **(own if rank == size - 1 else others_have)})
        x = mx.nd.full(5, rank)
        kv.pushpull("w", x)
        with pytest.raises(MismatchError, match="'w': ranks disagree on gradient compression") as caught:
            x.asnumpy()
        assert shown in str(caught.value)
        assert "Fix: call set_gradient_compression with the same type" in str(caught.value)
        assert x.asnumpy().tolist() == [rank] * 5
    kv.set_gradient_compression({"type": "none"})


@pytest.mark.needs(2)
def test_unread_error_is_raised_by_a_later_call_once(kv, rank, size):
    """That call has done its work nevertheless."""
    x, y, raised = mx.nd.ones(3 if rank == size - 1 else 4), mx.nd.ones(1), 0
    kv.pushpull("w", x)
    for _ in range(100):
        y[:] = 1
        try:
            kv.pushpull("y", y)
        except MismatchError:
            raised += 1
        assert y.asscalar() == size  # the others have come, and this call was carried out whether it raised or not
    assert raised == 1


@pytest.mark.needs(2)
def test_a_failed_broadcast_leaves_the_outs(kv, rank, size):
    """The root's out, too, is as it was when the others do not agree."""
    shape = (3 if rank == 0 else 4,)
    x, out = mx.nd.ones(shape), mx.nd.zeros(shape)
    kv.broadcast("w", x, out=out)
    with pytest.raises(MismatchError, match="shape"):
        out.wait_to_read()
    assert out.asnumpy().tolist() == [0] * out.size
    assert x.asnumpy().tolist() == [1] * x.size


def test_wrong_calls(kv):
    x, csr = mx.nd.ones((2, 2)), mx.nd.ones((2, 2)).tostype("csr")
    others = [mx.np.ones(2, dtype=dtype) for dtype in (["int16", "uint16", "uint32"] if is_mxnet_2() else [])]
    for given, error, fix in (
        ((x.asnumpy(),), TypeError, r"kvstore_hvd.allreduce\(x, name"),
        ((csr,), TypeError, "sparse_grad=False"),
        ((x, csr), UnsupportedDtypeError, "tostype"),
        (([x, x.astype("int8")],), TypeError, "cast them to one dtype"),
        (([x, mx.nd.ones(7)],), InvalidRequestError, "one shape"),
        *(((each,), UnsupportedDtypeError, "astype") for each in others),
    ):
        with pytest.raises(error, match=rf"Fix: .*{fix}"):
            kv.pushpull(3, *given)
    for given, error, fix in (
        ({"type": "1bit"}, InvalidRequestError, "fp16.*2bit"),
        ({"type": "2bit", "treshold": 1}, InvalidRequestError, "'threshold': 0.5"),
        ({"type": "fp16", "x": 1}, InvalidRequestError, "fp16"),
        ("fp16", TypeError, "fp16"),
        *(
            ({"type": "2bit", "threshold": each}, InvalidRequestError, "positive number")
            for each in (0, -0.5, np.nan, np.inf, 1e-60, 1e60)
        ),
        *(({"type": "2bit", "threshold": each}, TypeError, "positive number") for each in ("0.5", None, True)),
    ):
        with pytest.raises(error, match=rf"Fix: .*{fix}"):
            kv.set_gradient_compression(given)


@pytest.mark.needs(2)
def test_a_lost_world(world, rank, size):
    """Every call of every store and of hvd raises the same error until the workers meet again; then all is well."""
    stores = [mx.kv.create("horovod") for _ in range(2)]
    x = mx.nd.ones((2, 2))
    kvstore_hvd.barrier("before the abort")
    if rank == 0:
        stores[0].pushpull("x", x)  # the others never join in
        process.current().abort("this is a test")
        with pytest.raises(TransportError, match="this is a test"):
            x.asnumpy()
    until(process.current().member.engine().health)
    for call in (
        *(lambda store=store: store.pushpull("x", x) for store in stores),
        lambda: stores[0].broadcast("x", x),
        lambda: stores[0].push("x", x),
        stores[0].barrier,
        lambda: kvstore_hvd.allreduce(np.ones(1), "x"),
        lambda: hvd.grouped_allreduce_([x]),
        lambda: hvd.broadcast_(x, 0),
        lambda: hvd.allgather(x),
        lambda: hvd.alltoall(x, splits=[2] + [0] * (size - 1)),
        lambda: hvd.reducescatter(x),
        lambda: hvd.broadcast_object(1),
        lambda: hvd.broadcast_parameters({"x": x}),
    ):
        with pytest.raises(hvd.HorovodInternalError, match=rf"(?s)\[rank {rank}/{size}.*this is a test"):
            call()
    assert hvd.is_initialized()
    stores[rank % 2].reset()
    x[:] = 1
    for store in stores:
        store.pushpull("x", x)
    assert x.asnumpy().tolist() == [[size * size] * 2] * 2


@pytest.mark.sizes
def test_shutdown_and_start_again(world, rank, size):
    """After `shutdown` operations raise ShutdownError; `init` meets the others in a fresh world. An operation that
    failed while `shutdown` waited is not lost: its array would look as if all were well."""
    kv = mx.kv.create("horovod")
    x, failing = mx.nd.ones(3), mx.nd.ones(3 if rank == 0 else 4)
    kv.pushpull("x", x)
    if size > 1:
        kv.pushpull("failing", failing)
    with pytest.raises(MismatchError, match="'failing': ranks") if size > 1 else contextlib.nullcontext():
        kvstore_hvd.shutdown()
    assert not kvstore_hvd.is_initialized()
    kvstore_hvd.shutdown()  # says it once
    assert x.asnumpy().tolist() == [size] * 3
    with pytest.raises(kvstore_hvd.ShutdownError, match="left the world"):
        kv.pushpull("x", x)
    kvstore_hvd.init()
    kv.pushpull("x", x)
    assert x.asnumpy().tolist() == [size * size] * 3
