"""Trainers and Modules: they train through the store, and those that would train alone raise."""

import contextlib

import pytest

from kvstore_hvd import errors, log, mxnet_compat
from kvstore_hvd.mxnet_compat import exchangers
from support.fake_store import V2, Fake, mx, network, step, trainer_of
from support.gluon import weights


def refused(has, exchanged="Nothing"):
    return (
        f"{has}, but there are 4 workers: each would train a model of its own.\n"
        f"  {exchanged} was exchanged since it was made.\n"
        "  Fix: pass kvstore='horovod', or the store that mx.kv.create('horovod') returned.\n"
        "    If workers train independently, or exchange parameters later (local SGD): kvstore=None."
    )


@pytest.fixture
def said(monkeypatch, caplog):
    monkeypatch.setattr(log, "_logged", set())
    monkeypatch.setattr(exchangers._Collectives, "counts", exchangers._Counts())
    return caplog


@pytest.mark.parametrize(("kvstore", "devices", "by"), [("device", 1, "step"), (mx.kv.create("local"), 2, "update")])
def test_a_trainer_that_trains_alone_raises(world, kvstore, devices, by):
    """In its third update; collectives before it was made do not count."""
    world.size = 4
    net = network(devices)
    mxnet_compat.collectives.counts.reductions += 1
    trainer = trainer_of(net, kvstore, update_on_kvstore=False)
    step(net, trainer, by)
    step(net, trainer, by)
    before = [each.tobytes() for each in weights(net)]
    for _ in range(2):  # catching it does not help
        with pytest.raises(errors.UnsynchronisedTrainerError) as caught:
            step(net, trainer, by)
        # What was asked for: with one device MXNet creates no store for either name.
        assert str(caught.value) == refused(f"Trainer has kvstore '{getattr(kvstore, 'type', kvstore)}'")
    assert [each.tobytes() for each in weights(net)] == before


def test_without_a_store_it_warns_once(world, said):
    world.size = 4
    net = network()
    counts, quiet = mxnet_compat.collectives.counts, True
    counts.broadcasts += 1  # local SGD begins with one, and is not warned of
    for trainer in [trainer_of(net, None) for _ in range(3)]:
        for number in range(1, 6):
            step(net, trainer)
            assert len(said.messages) == (not quiet and (number >= 3 or len(said.messages) > 0))
        counts.broadcasts, quiet = 0, False
    assert said.messages[0] == (
        "Trainer has no kvstore, and nothing was exchanged by its third update: each of the 4 workers trains a model of"
        " its own. If that is not on purpose, pass kvstore='horovod'."
    )


def test_broadcasts_only(world, said):
    world.size = 4
    net = network()
    trainer = trainer_of(net, "device")
    mxnet_compat.collectives.counts.broadcasts += 1
    for number in range(1, 100):
        step(net, trainer)
        assert len(said.messages) == (number >= 3)
    assert said.messages[0].startswith("Trainer has kvstore 'device', which stays in this worker, and so far there")
    with pytest.raises(errors.UnsynchronisedTrainerError) as caught:
        step(net, trainer)
    assert str(caught.value) == refused("Trainer has kvstore 'device'", "Nothing but broadcasts")


@pytest.mark.parametrize("size", [None, 1, 4])
def test_alone_is_fine_without_others_and_on_request(world, setting, size):
    """Until others come."""
    world.size = size
    if size == 4:
        setting(KVHVD_ALLOW_LOCAL_TRAINER="1")
    net = network()
    trainer = trainer_of(net, "device")
    for _ in range(4):
        step(net, trainer)
    world.size = 4
    for last in (False, False, size != 4):
        with pytest.raises(errors.UnsynchronisedTrainerError) if last else contextlib.nullcontext():
            step(net, trainer)


def test_updates_go_on_from_the_device_that_has_made_most(world):
    trainer = trainer_of(network(), None)
    counts = trainer._optimizer._all_index_update_counts
    counts.update({0: {0: 9, 1: 2}, 1: {0: 6, 1: 3}})
    mxnet_compat.count_on_own_devices(trainer)
    assert counts == {0: {0: 9, 1: 3}, 1: {0: 9, 1: 3}}


def test_a_store_of_somebody_else_may_exchange(world):
    world.size, net = 4, network()
    trainer = trainer_of(net, type("Theirs", (mx.kvstore.KVStoreBase,), dict(vars(Fake)))(), update_on_kvstore=False)
    for _ in range(4):
        step(net, trainer)


if not V2:

    def module_parts():
        layer = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc")
        return mx.sym.SoftmaxOutput(layer, name="softmax"), mx.io.NDArrayIter(mx.nd.ones((8, 4)), mx.nd.zeros((8,)), 4)

    def test_module_that_trains_alone_raises(world):
        """Once there were two updates, be it those of several buckets."""
        world.size = 4
        symbol, batches = module_parts()
        with pytest.raises(errors.UnsynchronisedTrainerError) as caught:
            mx.mod.Module(symbol).fit(batches, num_epoch=2)
        assert str(caught.value) == refused("Module has kvstore 'local'")
        buckets = mx.mod.BucketingModule(lambda key: (symbol, ["data"], ["softmax_label"]), default_bucket_key=0)
        buckets.bind(batches.provide_data, batches.provide_label)
        buckets.init_params()
        buckets.init_optimizer()
        for key in range(3):
            batches.reset()
            batch = batches.next()
            batch.bucket_key, batch.provide_data, batch.provide_label = key, batches.provide_data, batches.provide_label
            buckets.forward_backward(batch)
            with pytest.raises(errors.UnsynchronisedTrainerError) if key == 2 else contextlib.nullcontext():
                buckets.update()

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")
    @pytest.mark.parametrize(("kvstore", "size"), [("horovod", 1), ("local", 2)])
    def test_feed_forward_is_refused(world, kvstore, size):
        world.size = size
        symbol, batches = module_parts()
        model = mx.model.FeedForward(symbol, num_epoch=1)
        with pytest.raises(errors.UnsupportedMethodError, match=r"Fix: use mx\.mod\.Module"):
            model.fit(batches, kvstore=kvstore)
        with pytest.raises(errors.UnsupportedMethodError):
            model.fit(batches, None, None, "acc", None, None, kvstore)
        model.fit(batches, kvstore=None)  # an independent training
