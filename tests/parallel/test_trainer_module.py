"""The Module interface (MXNet 1) and Estimators on the store."""

from __future__ import annotations

import numpy as np
import pytest

from support.arrays import assert_equal_on_all_ranks
from support.gluon import is_mxnet_2, mlp, samples, weights

mx = pytest.importorskip("mxnet")


@pytest.mark.skipif(is_mxnet_2(), reason="MXNet 2 has no Module")
@pytest.mark.parametrize("contexts", [1, 2])
@pytest.mark.parametrize("as_string", [False, True])
def test_module(rank, size, as_string, contexts):
    """Module.fit(kvstore=kv) and kvstore='horovod' train one model on all workers."""
    data, label = samples(48, seed=rank)
    classes = label.argmax(axis=1).astype("float32")
    batches = mx.io.NDArrayIter(data, classes, batch_size=8)
    symbol = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=16)
    symbol = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.tanh(symbol), num_hidden=3), name="softmax")
    module = mx.mod.Module(symbol, context=[mx.cpu(d) for d in range(contexts)])
    mx.random.seed(rank)
    module.fit(
        batches,
        num_epoch=2,
        kvstore="horovod" if as_string else mx.kv.create("horovod"),
        optimizer_params={"learning_rate": 0.1, "rescale_grad": 1 / (8 * size)},
        initializer=mx.init.Uniform(0.5),
    )
    parameters, _ = module.get_params()
    for name in sorted(parameters):
        values = parameters[name].asnumpy()
        assert np.isfinite(values).all()
        assert np.abs(values).max() > 0
        assert_equal_on_all_ranks(values, name)


@pytest.mark.skipif(is_mxnet_2(), reason="MXNet 2 has no Module")
def test_what_sums_are_divided_by(rank, size):
    """Module and FeedForward divide by the batch size of one worker, unless they are told otherwise."""
    data, label = samples(48, seed=rank)
    batches = mx.io.NDArrayIter(data, label.argmax(axis=1).astype("float32"), batch_size=8)
    symbol = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=3, name="dense")
    symbol = mx.sym.SoftmaxOutput(symbol, name="softmax")
    first = {"dense_weight": mx.nd.zeros((3, data.shape[1])), "dense_bias": mx.nd.zeros((3,))}

    def train_module(**options):
        module = mx.mod.Module(symbol)
        start = {name: values.copy() for name, values in first.items()}
        module.fit(batches, num_epoch=2, kvstore="horovod", optimizer_params=options, arg_params=start)
        return module.get_params()[0]

    def train_feed_forward(**options):
        start = {name: values.copy() for name, values in first.items()}
        model = mx.model.FeedForward(symbol, num_epoch=2, optimizer="sgd", arg_params=start, aux_params={}, **options)
        model.fit(batches, kvstore="horovod")
        return model.arg_params

    expected = train_module(learning_rate=0.1, rescale_grad=1 / (8 * size))
    for found in (train_module(learning_rate=0.1 / size), train_feed_forward(learning_rate=0.1 / size)):
        for name, values in expected.items():
            np.testing.assert_allclose(found[name].asnumpy(), values.asnumpy(), rtol=1e-5, atol=1e-6)


def test_estimator(rank, size):
    """An Estimator trains through its Trainer."""
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
