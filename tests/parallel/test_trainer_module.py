"""The Module interface (MXNet 1) and Estimators on the store."""

import contextlib
import warnings

import numpy as np
import pytest

import kvstore_hvd.mxnet as hvd
from kvstore_hvd.errors import MismatchError
from kvstore_hvd.world import process
from support.arrays import assert_equal_on_all_ranks
from support.gluon import is_mxnet_2, mlp, samples, weights

mx = pytest.importorskip("mxnet")


@pytest.mark.skipif(is_mxnet_2(), reason="MXNet 2 has no Module")
@pytest.mark.parametrize(("as_string", "contexts"), [(False, 2), (True, 1)])
def test_module(rank, size, as_string, contexts):
    """Module.fit(kvstore=kv) and kvstore='horovod' train one model on all workers."""
    _, batches, symbol = classes(rank)
    module = mx.mod.Module(symbol, context=[mx.cpu(d) for d in range(contexts)])
    mx.random.seed(rank)
    store = "horovod" if as_string else mx.kv.create("horovod")
    module.fit(batches, num_epoch=2, kvstore=store, initializer=mx.init.Uniform(0.5))
    for name, values in sorted(module.get_params()[0].items()):
        assert np.isfinite(values.asnumpy()).all()
        assert np.abs(values.asnumpy()).max() > 0
        assert_equal_on_all_ranks(values.asnumpy(), name)


def classes(rank, count=48):
    data, label = samples(count, seed=rank)
    batches = mx.io.NDArrayIter(data, label.argmax(axis=1).astype("float32"), batch_size=8)
    symbol = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="dense")
    return data, batches, mx.sym.SoftmaxOutput(symbol, name="softmax")


@pytest.mark.skipif(is_mxnet_2(), reason="MXNet 2 has no Module")
@pytest.mark.parametrize("exchanges", ["store", "optimizer"])
def test_states_that_one_module_has_loaded(rank, size, exchanges, tmp_path):
    """The first step of all says so."""
    _, batches, symbol = classes(rank)
    path, member = str(tmp_path / "states"), process.current().member
    for resumes in (False, True):
        module = mx.mod.Module(symbol)
        module.bind(batches.provide_data, batches.provide_label)
        module.init_params()
        optimizer = mx.optimizer.SGD(momentum=0.9, rescale_grad=1 / (8 * size))
        given = ("horovod", optimizer) if exchanges == "store" else (None, hvd.DistributedOptimizer(optimizer))
        module.init_optimizer(*given)
        batches.reset()
        module.forward_backward(batches.next())
        if not resumes:
            module.update()
            module.save_optimizer_states(path)
            continue
        if rank == size - 1:
            module.load_optimizer_states(path)
        with pytest.raises(MismatchError, match="states of the optimizer") if size > 1 else contextlib.nullcontext():
            module.update()
            member.drain()
            member.check()
    member.drain()  # what the other parameters say would be raised by the next test
    member.forget_unread(lambda error: isinstance(error, MismatchError))


@pytest.mark.skipif(is_mxnet_2(), reason="MXNet 2 has no Module")
def test_rescale_grad(rank, size, monkeypatch):
    """As with MXNet's 'dist_sync'; of the workers that there are in an update. What the program sets stays."""
    _, batches, symbol = classes(rank)
    module = mx.mod.Module(symbol)
    module.bind(batches.provide_data, batches.provide_label)
    module.init_params(mx.init.Zero())
    module.init_optimizer(kvstore="horovod")
    optimizer = module._optimizer
    assert optimizer.rescale_grad == 1 / (8 * size)
    module.init_optimizer(kvstore="horovod", optimizer_params={"rescale_grad": 0.5})  # there is one already
    assert module._optimizer is optimizer

    def update():
        batches.reset()
        module.forward_backward(batches.next())
        module.update()

    monkeypatch.setattr(type(module._kvstore), "num_workers", size + 1)  # as after a change of an elastic job
    update()
    assert optimizer.rescale_grad == 1 / (8 * (size + 1))
    monkeypatch.undo()
    update()
    assert optimizer.rescale_grad == 1 / (8 * size)
    optimizer.rescale_grad = 0.5
    monkeypatch.setattr(type(module._kvstore), "num_workers", size + 1)
    update()
    assert optimizer.rescale_grad == 0.5


@pytest.mark.skipif(is_mxnet_2(), reason="MXNet 2 has no Module")
def test_rescale_grad_of_an_optimizer(rank, size):
    """One that the program has made keeps its own; a warning says when it is not that of all workers."""
    _, batches, symbol = classes(rank)
    for factor in (1 / (8 * size), 0.3):
        module = mx.mod.Module(symbol)
        module.bind(batches.provide_data, batches.provide_label)
        module.init_params(mx.init.Zero())
        optimizer = mx.optimizer.SGD(rescale_grad=factor)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module.init_optimizer(kvstore="horovod", optimizer=optimizer)
        found = [str(each.message) for each in caught if "rescale_grad" in str(each.message)]
        assert len(found) == (factor == 0.3)
        assert all(f"1/batch_size/num_workers is {1 / (8 * size)}" in each for each in found)
        assert optimizer.rescale_grad == factor


def test_estimator(rank, size):
    estimator = pytest.importorskip("mxnet.gluon.contrib.estimator")
    net = mlp(seed=rank)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore="horovod")
    data, label = samples(48, seed=rank)
    loader = mx.gluon.data.DataLoader(mx.gluon.data.ArrayDataset(data, label), batch_size=8)
    metric = mx.gluon.metric.MSE() if is_mxnet_2() else mx.metric.MSE()
    device = {"device" if is_mxnet_2() else "context": mx.cpu()}
    fitting = estimator.Estimator(net=net, loss=mx.gluon.loss.L2Loss(), trainer=trainer, train_metrics=metric, **device)
    fitting.fit(train_data=loader, epochs=2)
    for i, weight in enumerate(weights(net)):
        assert np.isfinite(weight).all()
        assert_equal_on_all_ranks(weight, f"weight {i}")
