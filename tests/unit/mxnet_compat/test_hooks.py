"""What is changed in MXNet: the store is registered, and its names create it; and what others ask about MXNet."""

import pickle
import re
import warnings
from pathlib import Path

import numpy as np
import pytest

from kvstore_hvd import errors, mxnet_compat
from kvstore_hvd.mxnet_compat import graph, hooks
from support.fake_store import V2, Fake, mx, network, store_class, trainer_of


def test_registration_is_silent_unless_it_replaces_somebody_elses(world):
    registry = mx.kvstore.KVStoreBase.kv_registry
    if V2:
        from mxnet.kvstore.horovod import Horovod as Stock

        registry["horovod"] = Stock
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hooks.register_store(mx, store_class(), lambda: None, lambda: None)
        hooks.register_store(mx, store_class(), lambda: None, lambda: None)
    assert registry["horovod"] is Fake
    registry["horovod"] = type("Horovod", (Fake,), {"__module__": "somebody.else"})
    with pytest.warns(UserWarning, match="overriding existing kvstore"):
        hooks.register_store(mx, store_class(), lambda: None, lambda: None)


@pytest.mark.parametrize(("name", "devices"), [("Horovod", 1), ("dist_horovod", 2)])
def test_a_string_creates_the_store(world, name, devices):
    world.size = 2
    net = network(devices)
    trainer = trainer_of(net, name)
    trainer._init_kvstore()
    assert type(trainer._kvstore) is Fake
    assert not trainer._update_on_kvstore
    assert not trainer._distributed
    (made,) = Fake.made
    params = net.collect_params()
    assert made.labels == dict(enumerate(sorted(params)))
    if V2:
        assert "0.weight" in params  # where every parameter calls itself 'weight' or 'bias'


@pytest.mark.filterwarnings("error::DeprecationWarning:mxnet")
def test_questions_about_arrays_and_the_library():
    plain, sparse, new = mx.nd.ones((2, 3)), mx.nd.sparse.zeros("row_sparse", (2, 3)), mx.np.ones((2,), dtype="int8")
    arrays = (plain, sparse, new, plain.asnumpy())
    assert [mxnet_compat.is_ndarray(x) for x in arrays] == [True, True, True, False]
    assert [mxnet_compat.is_np_ndarray(x) for x in arrays] == [False, False, True, False]
    assert [mxnet_compat.context_of(x) for x in (mx.nd.ones((1,), mx.cpu(1)), new)] == [mx.cpu(1), mx.cpu(0)]
    for name in ("float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"):
        assert mxnet_compat.dtype_name(mx.nd.zeros((1,), dtype=name)) == name
    bfloat16 = np.dtype([("bfloat16", np.uint16)])  # how MXNet tells NumPy
    assert mxnet_compat.dtype_name(mx.nd.empty((1,), dtype=bfloat16)) == "bfloat16"
    assert Path(mxnet_compat.libmxnet_path()).is_file()


@pytest.mark.parametrize("value", [True, 0, "1", "True", "TRUE", "false"])
def test_flags_of_graphs_are_read_as_mxnet_does(monkeypatch, value):
    monkeypatch.setattr(graph, "_static_graphs", False)  # what follows does not count for later tests
    flags = [("static_alloc", True), ("static_shape", value)]
    data = mx.sym.var("data")
    mx.nd.CachedOp(data + 1, flags)  # which refuses what it does not know
    mx.nd.CachedOp(data + 2, flags[:1])
    is_static = str(value).lower() in ("1", "true")
    assert graph.may_keep_gradients(True) == is_static
    assert graph.has_static_shape(flags) == is_static
    assert graph.checked_flags(data, flags) == flags
    assert graph.checked_flags(mx.sym.var(graph.SYNC_BATCH_NORM), flags) == (flags[:1] if is_static else flags)


def test_an_error_of_mxnet_in_one_line():
    """MXNet puts a stack trace before its text."""
    with pytest.raises(mx.base.MXNetError) as caught:
        mx.nd.random.normal(0, -1, (2,)).wait_to_read()
    assert str(caught.value).startswith("Traceback")
    assert re.match("MXNetError: .*scale", hooks.in_one_line(caught.value))


def test_every_class_of_errors_is_one_of_mxnets_too(world):
    for cls in vars(errors).values():
        if isinstance(cls, type) and issubclass(cls, errors.KVHvdError):
            error = mx.base.error_types[cls.__name__]("a text\n  Fix: none")
            again = pickle.loads(pickle.dumps(error))
            assert (issubclass(type(error), mx.base.MXNetError), type(again)) == (True, cls)
            assert str(error) == str(again) == "a text\n  Fix: none"
