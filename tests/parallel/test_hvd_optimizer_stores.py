"""A `DistributedOptimizer` and a store: gradients are exchanged once, whatever ``kvstore`` says."""

import importlib
import pickle

import numpy as np
import pytest

import kvstore_hvd.mxnet as hvd
from kvstore_hvd import log
from kvstore_hvd.errors import HorovodInternalError, InvalidRequestError
from kvstore_hvd.join import Join
from kvstore_hvd.world import process
from support.arrays import assert_equal_on_all_ranks
from support.gluon import array, backward, is_mxnet_2, mlp, network, parameters, samples, weights

mx = pytest.importorskip("mxnet")

BATCH = 4
RATE = {"learning_rate": 0.1, "momentum": 0.9}
MXNET_1 = pytest.mark.skipif(is_mxnet_2(), reason="MXNet 2 has no Module")
TOLD = "exchanges no gradients here: the optimizer, a DistributedOptimizer, does so itself"
STORES = {"name": lambda: "horovod", "instance": lambda: mx.kv.create("horovod"), "none": lambda: None}
STORES["device"] = lambda: "device"
CASES = pytest.mark.parametrize(
    ("store", "devices"), [("name", 1), ("name", 2), ("instance", 1), ("none", 1), ("device", 2)]
)


@pytest.fixture
def fresh_log(monkeypatch):
    monkeypatch.setattr(log, "_logged", set())


def batches_of(rank, devices, seed=1):
    """Return one batch of this worker for each of its devices, equal in all tests."""
    first = rank * devices
    return [tuple(array(each, mx.cpu(d)) for each in samples(BATCH, seed=seed + first + d)) for d in range(devices)]


def wrapped(net, store="horovod", **options):
    optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD(**RATE))
    return mx.gluon.Trainer(net.collect_params(), optimizer, kvstore=store, **options)


def train(net, trainer, rank, steps, devices=1):
    for step in steps:
        backward(net, batches_of(rank, devices, 100 * step))
        trainer.step(BATCH * devices)


def reference(size, devices=1, steps=3):
    net = mlp(seed=5)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", dict(RATE), kvstore=None)
    for step in range(steps):
        of_all = [batches_of(rank, devices, 100 * step) for rank in range(size)]
        data, labels = (np.concatenate([one[i].asnumpy() for of in of_all for one in of]) for i in (0, 1))
        backward(net, [(array(data), array(labels))])
        trainer.step(BATCH * devices * size)
    return weights(net)


def assert_trained(net, size, name, devices=1, steps=3):
    for device in range(devices):
        for i, (ours, theirs) in enumerate(zip(weights(net, device), reference(size, devices, steps))):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
            assert_equal_on_all_ranks(ours, f"{name}/{device}/{i}")


@CASES
def test_trainer(rank, size, fresh_log, caplog, store, devices):
    """The Trainer has no store of ours, says so once, and all workers begin with the first one's parameters."""
    is_ours = store in ("name", "instance")
    net = mlp(seed=5 + (rank if is_ours else 0), contexts=[mx.cpu(d) for d in range(devices)])
    for _ in range(2):  # the second one says nothing
        trainer = wrapped(net, STORES[store]())
    assert caplog.text.count(TOLD) == is_ours
    trainer._init_kvstore()
    trainer._init_params()  # which the first step does, too, but that has a gradient of the worker's own parameters
    train(net, trainer, rank, range(3), devices)
    assert getattr(trainer._kvstore, "type", None) == (None if devices == 1 else "device")
    assert not trainer._update_on_kvstore
    assert_trained(net, size, f"trainer/{store}", devices)
    if is_ours:
        with pytest.raises(InvalidRequestError, match="does not exchange gradients"):
            Join([trainer])  # a worker without input could not follow


def test_update_on_kvstore(rank, size, fresh_log, caplog):
    """Without effect, and said so: what is raised in a store's callback is lost."""
    net = mlp(seed=5, contexts=[mx.cpu(0), mx.cpu(1)])
    optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD(**RATE))
    if is_mxnet_2():
        optimizer.aggregate_num = 1  # MXNet itself refuses it with others
    trainer = mx.gluon.Trainer(net.collect_params(), optimizer, kvstore="device", update_on_kvstore=True)
    assert "update_on_kvstore=True has no effect" in caplog.text
    train(net, trainer, rank, range(3), 2)
    assert_trained(net, size, "update_on_kvstore", 2)
    mx.nd.waitall()
    if size > 1:
        process.current().abort("lost on purpose")
        with pytest.raises(HorovodInternalError, match="lost on purpose"):
            train(net, trainer, rank, range(100), 2)
        process.current().reset()


def test_deferred_parameters(rank, size):
    """They are broadcast when they have a shape, like those of a Trainer on a store."""
    net = network(mx.gluon.nn.Dense(4), mx.gluon.nn.Dense(3), seed=rank)
    trainer = wrapped(net)
    trainer.set_learning_rate(0.0)
    train(net, trainer, rank, [0])
    for i, ours in enumerate(weights(net)):
        assert_equal_on_all_ranks(ours, f"deferred/{i}")


def test_states(rank, size, tmp_path):
    """They are saved with the optimizer inside, and loaded into the `DistributedOptimizer`, which stays one."""
    net = mlp(seed=5)
    trainer = wrapped(net)
    optimizer = trainer.optimizer
    if rank:
        optimizer.set_learning_rate(9.0)
    hvd.broadcast_trainer_states(trainer)
    assert trainer.optimizer is optimizer
    assert trainer.learning_rate == 0.1
    train(net, trainer, rank, [0])
    trainer.save_states(str(tmp_path / "states"))
    _, inside = pickle.loads((tmp_path / "states").read_bytes())
    assert type(inside) is mx.optimizer.SGD
    before = weights(net)
    train(net, trainer, rank, [3])
    for parameter, values in zip(parameters(net), before):
        parameter.set_data(array(values))
    trainer.load_states(str(tmp_path / "states"))
    assert trainer.optimizer is trainer._updaters[0].optimizer is optimizer
    assert optimizer.unwrap().num_update == 1
    train(net, trainer, rank, [1, 2])
    assert_trained(net, size, "states")


def test_amp(rank, size):
    """An overflow on one worker makes all skip: who skipped alone would leave the others waiting."""
    net = mlp(seed=5)
    trainer = wrapped(net)
    amp = importlib.import_module("mxnet.amp" if is_mxnet_2() else "mxnet.contrib.amp")
    scaler = importlib.import_module(f"{amp.__name__}.loss_scaler").LossScaler()
    trainer._amp_loss_scaler, trainer._amp_original_scale = scaler, trainer._scale  # as amp.init_trainer does
    for step, overflows in ((0, False), (1, True), (1, False), (2, False)):
        backward(net, batches_of(rank, 1, 100 * step))
        before = weights(net)
        with amp.scale_loss(mx.nd.ones(1), trainer):
            for parameter in parameters(net):
                parameter.list_grad()[0][:] = parameter.list_grad()[0] * scaler.loss_scale
            if overflows and rank == size - 1:
                parameters(net)[1].list_grad()[0][:] = np.inf
            trainer.step(BATCH)
        assert all((ours == theirs).all() for ours, theirs in zip(weights(net), before)) is overflows
    assert_trained(net, size, "amp")
    assert_equal_on_all_ranks(np.array([scaler.loss_scale, scaler._unskipped]), "scaler")
    assert scaler.loss_scale == 2.0**15


def test_amp_beside_workers_that_have_joined(rank, size):
    """A worker in ``hvd.join()`` has seen no overflow, and the last worker's step is an update."""
    net = mlp(seed=5)
    trainer = wrapped(net)
    train(net, trainer, rank, [0])
    if rank == size - 1:
        amp = importlib.import_module("mxnet.amp" if is_mxnet_2() else "mxnet.contrib.amp")
        scaler = importlib.import_module(f"{amp.__name__}.loss_scaler").LossScaler()
        trainer._amp_loss_scaler, trainer._amp_original_scale = scaler, trainer._scale
        before = weights(net)
        backward(net, batches_of(rank, 1, 100))
        trainer.step(BATCH)
        assert any((ours != theirs).any() for ours, theirs in zip(weights(net), before))
    assert hvd.join() == size - 1


# -- Module -------------------------------------------------------------------------------------------------------


def regression():
    symbol = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="fc")
    return mx.sym.LinearRegressionOutput(symbol, mx.sym.Variable("label"), name="out")


def expected_regression(size, seed, steps, batch):
    generator = np.random.RandomState(seed)
    weight, bias = generator.uniform(-1, 1, (3, 8)).astype("float32"), np.zeros(3, "float32")
    data, labels = (np.concatenate(each) for each in zip(*(samples(batch, seed=rank) for rank in range(size))))
    for _ in range(steps):
        error = (data @ weight.T + bias - labels) / 3  # divided by the number of outputs
        weight, bias = weight - 0.1 * error.T @ data / len(data), bias - 0.1 * error.sum(0) / len(data)
    return weight


def first_weights(seed):
    generator = np.random.RandomState(seed)
    return {"fc_weight": mx.nd.array(generator.uniform(-1, 1, (3, 8))), "fc_bias": mx.nd.zeros(3)}


def trained(module, batches, first, store, optimizer):
    module.bind(batches.provide_data, batches.provide_label)
    module.init_params(arg_params=first)
    module.init_optimizer(kvstore=store, optimizer=optimizer)
    for _ in range(3):
        if hasattr(module, "update_full_grads"):
            module.update_full_grads(batches)
        batches.reset()
        for each in batches:
            module.forward_backward(each)
            module.update()
    return module.get_params()[0]["fc_weight"].asnumpy()


@MXNET_1
@CASES
def test_module(rank, size, fresh_log, caplog, store, devices):
    batch = BATCH * devices
    is_ours = store in ("name", "instance")
    batches = mx.io.NDArrayIter(*samples(batch, seed=rank), batch_size=batch, label_name="label")
    module = mx.mod.Module(regression(), label_names=["label"], context=[mx.cpu(d) for d in range(devices)])
    optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=0.1, rescale_grad=1.0 / batch))
    ours = trained(module, batches, first_weights(rank if is_ours else 0), STORES[store](), optimizer)
    assert getattr(module._kvstore, "type", None) == (None if devices == 1 else "device")
    assert not module._update_on_kvstore
    assert caplog.text.count(TOLD) == is_ours
    assert_equal_on_all_ranks(ours, f"module/{store}/{devices}")
    np.testing.assert_allclose(ours, expected_regression(size, 0, 3, batch), rtol=1e-3, atol=1e-5)


@MXNET_1
def test_bucketing_module(rank, size):
    """Its Modules share one optimizer, and no store."""
    module = mx.mod.BucketingModule(lambda key: (regression(), ["data"], ["label"]), default_bucket_key=1)
    data, labels = samples(BATCH, seed=rank)
    shapes = [("data", (BATCH, 8))], [("label", (BATCH, 3))]
    module.bind(*shapes)
    module.init_params(arg_params=first_weights(rank))
    optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=0.1, rescale_grad=1.0 / BATCH))
    module.init_optimizer(kvstore="horovod", optimizer=optimizer)
    for key in (1, 2, 1):
        batch = mx.io.DataBatch([mx.nd.array(data)], [mx.nd.array(labels)], 0, None, key, *shapes)
        module.forward_backward(batch)
        module.update()
    ours = module.get_params()[0]["fc_weight"].asnumpy()
    assert_equal_on_all_ranks(ours, "bucketing")
    np.testing.assert_allclose(ours, expected_regression(size, 0, 3, BATCH), rtol=1e-3, atol=1e-5)
