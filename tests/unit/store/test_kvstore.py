"""What the store asks of the engine, seen by a recording fake: nothing, where a call is wrong in any of its parts."""

from __future__ import annotations

import numpy as np
import pytest

import kvstore_hvd
from kvstore_hvd import errors
from support.fake_native import fake_world

mx = pytest.importorskip("mxnet")


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda kv, x: kv.pushpull([1, 2], [x, x.asnumpy()]), TypeError),
        (lambda kv, x: kv.pushpull(["a", 2], [x, x]), TypeError),
        (lambda kv, x: kv.pushpull([1, 2], [x, x], out=[x, mx.nd.ones((7,))]), errors.InvalidRequestError),
        (lambda kv, x: kv.pushpull([1, 2], [x, x.astype(bool)]), errors.UnsupportedDtypeError),
        (lambda kv, x: kv.pushpull([1, 2], [x, [x, x.astype("int32")]]), TypeError),
        (lambda kv, x: kv.broadcast([1, 2], [x, [x, x]]), errors.InvalidRequestError),
        (lambda kv, x: kv.pushpull([1, 2], [x, mx.nd.ones((2, 2)).tostype("csr")]), TypeError),
    ],
)
def test_everything_is_checked_before_anything_is_submitted(call, error):
    with fake_world(rank=0, size=3) as fake:
        kv = mx.kv.create("horovod")
        with pytest.raises(error):
            call(kv, mx.nd.array([1, 2]))
        assert fake.adapter.operations == []
        kv.pushpull([1, 2], [mx.nd.array([1]), mx.nd.array([1])])
        assert [name.rpartition("/")[2] for name in fake.adapter.operations] == ["1", "2"]


def test_text_of_an_unsupported_dtype():
    with fake_world(rank=0, size=3):
        kv = mx.kv.create("horovod")
        kv._set_key_labels({7: "mask"})
        with pytest.raises(errors.UnsupportedDtypeError) as caught:
            kv.pushpull(7, mx.nd.array(np.array([1, 0], bool), dtype="bool"))
    assert str(caught.value) == (
        "[rank 0/3] pushpull 'mask' (key 7): cannot sum dtype bool.\n"
        "  Supported: float16 bfloat16 float32 float64 int8 uint8 int32 int64\n"
        "  Fix: cast with .astype('int32'), or set grad_req='null'."
    )


def test_bad_names_of_attributes():
    with pytest.raises(AttributeError, match="no attribute 'HOROVOD'"):
        _ = kvstore_hvd.HOROVOD
    assert kvstore_hvd.Horovod is mx.kvstore.KVStoreBase.kv_registry["horovod"]
