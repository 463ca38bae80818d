"""`DistributedTrainer` and `DistributedOptimizer`: training alike on all workers, as one worker with all the data."""

from __future__ import annotations

import importlib
import pickle

import numpy as np
import pytest

import kvstore_hvd.mxnet as hvd
from kvstore_hvd.mxnet_compat import dtype_name
from support.arrays import assert_equal_on_all_ranks, assert_same_bits
from support.gluon import array, backward, gradients, is_mxnet_2, mlp, parameters, samples, weights

mx = pytest.importorskip("mxnet")

BATCH = 4


def batch_of(rank, devices=1, size=1):
    """Return the part of the data of one rank, cut for its devices."""
    data, labels = samples(BATCH * devices * size)
    first = rank * devices
    return [
        (
            array(data[BATCH * (first + d) : BATCH * (first + d + 1)], mx.cpu(d)),
            array(labels[BATCH * (first + d) : BATCH * (first + d + 1)], mx.cpu(d)),
        )
        for d in range(devices)
    ]


def reference(size, steps, devices=1, **options):
    """Train one worker with the data of all."""
    net = mlp(seed=5)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", options, kvstore=None)
    data, labels = samples(BATCH * devices * size)
    for _ in range(steps):
        backward(net, [(array(data), array(labels))])
        trainer.step(BATCH * devices * size)
    return weights(net)


@pytest.mark.parametrize(("form", "factor"), [("collected", 1.0), ("list", 2.0), ("dict", 1.0)])
def test_trains_as_one_worker_with_all_data(rank, size, form, factor):
    """Gradients are averaged, whatever holds the parameters, and whatever they are divided by before."""
    net = mlp(seed=5 + rank)
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    params = net.collect_params()
    params = {"collected": params, "list": list(params.values()), "dict": dict(params.items())}[form]
    options = {"learning_rate": 0.1, "momentum": 0.9}
    trainer = hvd.DistributedTrainer(params, "sgd", options, gradient_predivide_factor=factor, prefix="a.")
    assert isinstance(trainer, (mx.gluon.Trainer, hvd.DistributedTrainer))
    for _ in range(3):
        backward(net, batch_of(rank, size=size))
        trainer.step(BATCH)
    for i, (ours, expected) in enumerate(zip(weights(net), reference(size, 3, **options))):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5)
        assert_equal_on_all_ranks(ours, f"trainer/{form}/{factor}/{i}")
    if size > 1 and factor == 1.0:
        report = trainer._kvstore.report()["keys"]
        assert all("a." in key for key in report)
        assert {entry["algorithm"] for entry in report.values()} <= {"direct", "inline"}


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compression(rank, size, compression):
    """Rounded gradients: all workers stay alike, and near to those that round nothing."""
    net = mlp(seed=5)
    kind = getattr(hvd.Compression, compression)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, compression=kind)
    for _ in range(3):
        backward(net, batch_of(rank, size=size))
        trainer.step(BATCH)
    for i, (ours, expected) in enumerate(zip(weights(net), reference(size, 3, learning_rate=0.1))):
        np.testing.assert_allclose(ours, expected, atol=5e-2)
        assert_equal_on_all_ranks(ours, f"trainer/{compression}/{i}")


@pytest.mark.parametrize(
    ("name", "dtype"), [("none", "int32"), ("fp16", "float64"), ("bf16", "float32"), ("fp16", "int32")]
)
def test_compressors(kind, name, dtype):
    """`compress` and `decompress`: back to the dtype; integers pass through."""
    compressor = getattr(hvd.Compression, name)
    x = kind.array([1.0, -2.5, 1024.0], dtype=dtype)
    small, context = compressor.compress(x)
    back = compressor.decompress(small, context)
    assert type(back) is type(x)
    assert_same_bits(back.asnumpy(), x.asnumpy())
    if name == "none" or dtype == "int32":
        assert small is x
    else:
        assert dtype_name(small) == {"fp16": "float16", "bf16": "bfloat16"}[name]


@pytest.mark.parametrize("base", ["none", "fp16", "bf16"])
def test_compressors_of_a_program(rank, size, base):
    """A class derived from ours is asked itself, and so is one with its methods only."""
    compressed = []

    class Derived(getattr(hvd.Compression, base)):
        @classmethod
        def compress(cls, tensor):
            compressed.append(tensor)
            return super().compress(tensor) if base != "none" else (tensor, None)

    class Alike:
        compress, decompress = Derived.compress, Derived.decompress

    for kind in (Derived, Alike):
        compressed.clear()
        net = mlp(seed=5)
        trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, compression=kind)
        backward(net, batch_of(rank, size=size))
        trainer.step(BATCH)
        assert len(compressed) == len(parameters(net))
        for ours, expected in zip(weights(net), reference(size, 1, learning_rate=0.1)):
            np.testing.assert_allclose(ours, expected, atol=5e-2)


def test_a_distributed_optimizer_is_unwrapped(rank, size):
    """With a warning, as in Horovod; the average is formed once."""
    inner = mx.optimizer.create("sgd", learning_rate=0.1)
    net = mlp(seed=5)
    with pytest.warns(UserWarning, match="does not take a DistributedOptimizer"):
        trainer = hvd.DistributedTrainer(net.collect_params(), hvd.DistributedOptimizer(inner))
    assert trainer.optimizer is inner
    assert trainer._scale == 1.0 / size


def test_what_is_unwrapped_is_as_before_however_often(rank, size):
    """`unwrap` gives the optimizer with its own scale; a second time, too."""
    inner = mx.optimizer.create("sgd", learning_rate=0.1, rescale_grad=0.25)
    wrapped = hvd.DistributedOptimizer(inner, gradient_predivide_factor=3.0)
    for _ in range(3):
        assert wrapped.unwrap() is inner
        assert inner.rescale_grad == pytest.approx(0.25, rel=1e-12)


@pytest.mark.parametrize("method", ["update", "update_multi_precision"])
def test_an_update_that_fails_leaves_the_scale_as_it_was(rank, size, method, monkeypatch):
    """A program that catches the error goes on with the same one."""
    inner = mx.optimizer.create("sgd", learning_rate=0.1, rescale_grad=0.25)
    wrapped = hvd.DistributedOptimizer(inner, gradient_predivide_factor=3.0)

    def fail(*arguments):
        raise ArithmeticError("no update")

    monkeypatch.setattr(inner, method, fail)
    with pytest.raises(ArithmeticError):
        getattr(wrapped, method)(0, mx.nd.ones((2,)), mx.nd.ones((2,)), None)
    assert wrapped.rescale_grad == inner.rescale_grad == 0.25


def test_refusals(rank, size):
    """Clear texts, before a store is made."""
    net = mlp()
    for options in (
        {"gradient_predivide_factor": 0},
        {"gradient_predivide_factor": "a"},
        {"num_groups": -1},
        {"prefix": 3},
    ):
        with pytest.raises(ValueError, match="DistributedTrainer"):
            hvd.DistributedTrainer(net.collect_params(), "sgd", **options)
    with pytest.raises(ValueError, match="DistributedOptimizer"):
        hvd.DistributedOptimizer("sgd")
    wrapped = hvd.DistributedOptimizer(mx.optimizer.create("sgd"))
    with pytest.raises(ValueError, match="DistributedOptimizer"):
        hvd.DistributedOptimizer(wrapped)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(wrapped)


def test_states_are_saved_and_loaded(rank, size, tmp_path):
    """`save_states` and `load_states`: training goes on with the same bits."""
    net = mlp(seed=5)
    trainer = hvd.DistributedTrainer(net.collect_params(), "adam", {"learning_rate": 0.1})

    def step():
        backward(net, batch_of(rank, size=size))
        trainer.step(BATCH)

    step()
    trainer.save_states(str(tmp_path / "states"))
    net.save_parameters(str(tmp_path / "params"))
    step()
    expected = weights(net)
    net.load_parameters(str(tmp_path / "params"))
    trainer.load_states(str(tmp_path / "states"))
    step()
    for ours, theirs in zip(weights(net), expected):
        assert_same_bits(ours, theirs)


def test_amp(rank, size):
    """A loss scaler: overflow on one worker makes all skip, and the scale takes the average with it."""
    net = mlp(seed=5)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    amp = importlib.import_module("mxnet.amp" if is_mxnet_2() else "mxnet.contrib.amp")
    scaler = importlib.import_module(f"{amp.__name__}.loss_scaler").LossScaler()
    trainer._amp_loss_scaler, trainer._amp_original_scale = scaler, trainer._scale
    trainer._scale = trainer._amp_original_scale / scaler.loss_scale
    before = weights(net)
    backward(net, batch_of(rank, size=size))
    if rank == size - 1:
        parameters(net)[0].list_grad()[0][:] = np.inf
    trainer.step(BATCH)
    for ours, theirs in zip(weights(net), before):
        assert_same_bits(ours, theirs)
    backward(net, batch_of(rank, size=size))
    trainer.allreduce_grads()
    amp.unscale(trainer)
    assert trainer._scale == 1.0
    assert_equal_on_all_ranks(gradients(net)[0], "amp")


@pytest.mark.skipif(is_mxnet_2(), reason="MXNet 2 has no Module")
@pytest.mark.parametrize("devices", [1, 2])
def test_module(rank, size, devices):
    """`Module` with a `DistributedOptimizer`, and no store: it trains as one worker with all the data."""

    def fit(data, labels, optimizer, **options):
        symbol = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=2, name="fc")
        symbol = mx.sym.LinearRegressionOutput(symbol, mx.sym.Variable("label"), name="out")
        contexts = [mx.cpu(d) for d in range(options.get("devices", 1))]
        module = mx.mod.Module(symbol, label_names=["label"], context=contexts)
        batches = mx.io.NDArrayIter(data, labels, batch_size=len(data), label_name="label")
        module.bind(batches.provide_data, batches.provide_label)
        module.init_params(mx.init.Zero())
        module.init_optimizer(kvstore=options.get("kvstore"), optimizer=optimizer)
        for _ in range(3):
            batches.reset()
            for batch in batches:
                module.forward_backward(batch)
                module.update()
        return module.get_params()[0]["fc_weight"].asnumpy()

    data, labels = samples(BATCH * size, outputs=2)
    part = slice(BATCH * rank, BATCH * (rank + 1))
    inner = mx.optimizer.SGD(learning_rate=0.1, rescale_grad=1.0 / BATCH)
    optimizer = hvd.DistributedOptimizer(inner, gradient_predivide_factor=2.0)
    kvstore = None if devices == 1 else "local"
    ours = fit(data[part], labels[part], optimizer, devices=devices, kvstore=kvstore)
    assert_equal_on_all_ranks(ours, f"module/{devices}")
    weight, bias = np.zeros((2, 8), "float32"), np.zeros(2, "float32")
    for _ in range(3):
        error = (data @ weight.T + bias - labels) / 2  # divided by the number of outputs
        weight, bias = (
            weight - 0.1 * error.T @ data / (BATCH * size),
            bias - 0.1 * error.sum(0) / (BATCH * size),
        )
    np.testing.assert_allclose(ours, weight, rtol=1e-3, atol=1e-5)
