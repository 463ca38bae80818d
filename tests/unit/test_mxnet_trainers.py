"""Trainers, Modules and FeedForward: they train through the store, and those that would train alone raise."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from kvstore_hvd import errors
from kvstore_hvd.config import reload
from support.fake_store import V2, Fake, World, mx, network, step, trainer_of

# -- Trainers that would train alone ------------------------------------------------------------------------------


@pytest.mark.parametrize(("kvstore", "devices"), [(None, 1), ("device", 1), ("local", 1), ("device", 2), ("local", 2)])
def test_a_trainer_that_would_train_alone_raises(world: type[World], kvstore: str | None, devices: int) -> None:
    world.size = 4
    trainer = trainer_of(network(devices), kvstore)
    # What was asked for: with one device MXNet creates no store for either name.
    what = "no kvstore" if kvstore is None else f"kvstore '{kvstore}'"
    for _ in range(2):  # catching it does not help
        with pytest.raises(errors.UnsynchronisedTrainerError) as caught:
            trainer.step(1)
        assert str(caught.value) == (
            f"Trainer has {what}, but there are 4 workers: each of them would train a model of its own.\n"
            "  A subclass that exchanges its gradients itself says so: _kvstore_hvd_synchronised = True.\n"
            "  Independent trainings on purpose: KVHVD_ALLOW_LOCAL_TRAINER=1.\n"
            "  Fix: pass kvstore='horovod', or the store that mx.kv.create('horovod') returned."
        )


@pytest.mark.parametrize("size", [None, 1])
def test_alone_is_fine_when_there_is_nobody_else(world: type[World], size: int | None) -> None:
    world.size = size
    net = network()
    step(net, trainer_of(net, "device"))


def test_alone_is_fine_on_request(world: type[World], monkeypatch: pytest.MonkeyPatch) -> None:
    world.size = 4
    monkeypatch.setenv("KVHVD_ALLOW_LOCAL_TRAINER", "1")
    reload()
    net = network()
    step(net, trainer_of(net, "device"))


def test_subclasses_are_checked_unless_they_synchronise(world: type[World]) -> None:
    class Mine(mx.gluon.Trainer):
        pass

    class Synchronised(Mine):
        _kvstore_hvd_synchronised = True

    world.size = 4
    net = network()
    with pytest.raises(errors.UnsynchronisedTrainerError, match=r"^Mine has no kvstore"):
        trainer_of(net, None, Mine)._init_kvstore()
    step(net, trainer_of(net, None, Synchronised))


def test_stores_of_others_are_taken_at_their_word(world: type[World]) -> None:
    world.size = 4
    trainer = trainer_of(network(), mx.kv.create("teststore"))
    trainer._init_kvstore()
    assert trainer._kvstore.type == "teststore"


# -- Module and FeedForward, which only MXNet 1 has; MXNet 2 still has the functions in mxnet.model -----------------


def test_create_kvstore_of_model(world: type[World]) -> None:
    store, update_on_kvstore = mx.model._create_kvstore("horovod", 1, {})
    assert type(store) is Fake
    assert not update_on_kvstore
    assert mx.model._create_kvstore("local", 1, {}) == (None, False)
    world.size = 2
    for kvstore, has in (
        (None, "no kvstore"),
        ("local", "kvstore 'local'"),
        (mx.kv.create("device"), "kvstore 'device'"),
    ):
        with pytest.raises(errors.UnsynchronisedTrainerError, match=f"^FeedForward has {has}, but"):
            mx.model._create_kvstore(kvstore, 1, {})


def test_initialize_kvstore_broadcasts_everywhere(world: type[World]) -> None:
    Fake.root_value = 7
    on_devices = [[mx.nd.ones((2,), mx.cpu(0)), mx.nd.ones((2,), mx.cpu(1))], [mx.nd.ones((3,))]]
    arg_params = {"b": mx.nd.zeros((3,)), "a": mx.nd.zeros((2,)), "other": mx.nd.zeros((1,))}
    mx.model._initialize_kvstore(mx.kv.create("horovod"), on_devices, arg_params, ["a", "b"], False)
    assert Fake.made[0].calls == [("broadcast", "a"), ("broadcast", "b")]
    for values in [*on_devices[0], *on_devices[1], arg_params["a"], arg_params["b"]]:
        assert (values.asnumpy() == 7).all()
    assert (arg_params["other"].asnumpy() == 0).all()


def test_initialize_kvstore_of_other_stores(world: type[World]) -> None:
    store = mx.kv.create("local")
    mx.model._initialize_kvstore(store, [[mx.nd.ones((2,))]], {"a": mx.nd.ones((2,)) * 3}, ["a"], False)
    out = mx.nd.zeros((2,))
    store.pull("a", out)
    assert (out.asnumpy() == 3).all()


if not V2:

    def module_parts() -> tuple[Any, Any]:
        symbol = mx.sym.SoftmaxOutput(
            mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc"), name="softmax"
        )
        return symbol, mx.io.NDArrayIter(mx.nd.ones((8, 4)), mx.nd.zeros((8,)), 4)

    @pytest.mark.parametrize("by", ["name", "instance"])
    def test_module_starts_from_rank_0(world: type[World], by: str) -> None:
        world.size, Fake.root_value = 2, 0.5
        symbol, batches = module_parts()
        module = mx.mod.Module(symbol)
        module.bind(batches.provide_data, batches.provide_label)
        module.init_params(mx.init.Uniform(0.1))
        module.init_optimizer(kvstore="horovod" if by == "name" else mx.kv.create("horovod"))
        (store,) = Fake.made
        assert module._kvstore is store
        assert {call[1] for call in store.calls} == {"fc_weight", "fc_bias"}
        for values in (*module._arg_params.values(), *(part[0] for part in module._exec_group.param_arrays)):
            assert (values.asnumpy() == 0.5).all()

    def test_module_trains_through_the_store(world: type[World]) -> None:
        symbol, batches = module_parts()
        mx.mod.Module(symbol).fit(batches, num_epoch=1, kvstore="horovod")
        calls = Fake.made[0].calls
        assert sum(call[0] == "pushpull" for call in calls) == 4  # two parameters, two batches

    def test_module_that_would_train_alone_raises(world: type[World]) -> None:
        world.size = 2
        symbol, batches = module_parts()
        with pytest.raises(errors.UnsynchronisedTrainerError, match=r"^Module has kvstore 'local', but"):
            mx.mod.Module(symbol).fit(batches, num_epoch=1)

    def test_feed_forward_trains_through_the_store(world: type[World]) -> None:
        world.size = 2
        symbol, batches = module_parts()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            mx.model.FeedForward(symbol, num_epoch=1).fit(batches, kvstore="horovod")
        calls = Fake.made[0].calls
        assert {call[0] for call in calls} == {"broadcast", "pushpull"}
