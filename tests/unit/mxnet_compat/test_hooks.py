"""What is changed in MXNet: the store is registered, its names create it, flags of graphs, and classes of errors."""

import pickle
import warnings

import pytest

from kvstore_hvd import errors
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


@pytest.mark.parametrize("name", ["horvod", "Hrovod", "horovood", "horod", "dist_horvod"])
def test_a_misspelt_name_is_refused(world, name):
    for create in (mx.kv.create, lambda name: trainer_of(network(), name)._init_kvstore()):
        with pytest.raises(errors.InvalidRequestError, match=f"^there is no store '{name}'; did you mean"):
            create(name)


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


def test_every_class_of_errors_is_one_of_mxnets_too(world):
    for cls in vars(errors).values():
        if isinstance(cls, type) and issubclass(cls, errors.KVHvdError):
            error = mx.base.error_types[cls.__name__]("a text\n  Fix: none")
            again = pickle.loads(pickle.dumps(error))
            assert (issubclass(type(error), mx.base.MXNetError), type(again)) == (True, cls)
            assert str(error) == str(again) == "a text\n  Fix: none"
