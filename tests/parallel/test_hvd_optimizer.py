"""`DistributedTrainer` and `DistributedOptimizer`: training alike on all workers, as one worker with all the data."""

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


def batch_of(rank, size):
    rows = slice(BATCH * rank, BATCH * (rank + 1))
    return [tuple(array(each[rows]) for each in samples(BATCH * size))]


def reference(size, steps, **options):
    net = mlp(seed=5)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", options, kvstore=None)
    for _ in range(steps):
        backward(net, [tuple(map(array, samples(BATCH * size)))])
        trainer.step(BATCH * size)
    return weights(net)


@pytest.mark.parametrize(
    ("form", "factor", "compression", "near"),
    [("collected", 1.0, "none", 1e-5), ("list", 2.0, "none", 1e-5), ("dict", 1.0, "bf16", 5e-2)],
)
def test_trains_as_one_worker_with_all_data(rank, size, form, factor, compression, near):
    """Gradients are averaged, whatever holds the parameters, and whatever is done to them before."""
    net = mlp(seed=5 + rank)
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    params = net.collect_params()
    params = {"collected": params, "list": list(params.values()), "dict": dict(params.items())}[form]
    options = {"learning_rate": 0.1, "momentum": 0.9}
    how = {"gradient_predivide_factor": factor, "compression": getattr(hvd.Compression, compression)}
    trainer = hvd.DistributedTrainer(params, "sgd", options, prefix="a.", **how)
    assert isinstance(trainer, (mx.gluon.Trainer, hvd.DistributedTrainer))
    for _ in range(3):
        backward(net, batch_of(rank, size=size))
        trainer.step(BATCH)
    for i, (ours, expected) in enumerate(zip(weights(net), reference(size, 3, **options))):
        np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=near)
        assert_equal_on_all_ranks(ours, f"trainer/{form}/{factor}/{i}")
    if size > 1 and form == "collected":
        report = trainer._kvstore.report()["keys"]
        assert all("a." in key for key in report)
        assert {entry["algorithm"] for entry in report.values()} <= {"direct", "inline"}


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


def test_compressors_of_a_program(rank, size):
    """A class derived from ours is asked itself, and so is one with its methods only."""
    compressed = []

    class Derived(hvd.Compression.fp16):
        @classmethod
        def compress(cls, tensor):
            compressed.append(tensor)
            return super().compress(tensor)

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
    """With a warning, as in Horovod; the average is formed once. `unwrap` gives the optimizer with its own scale."""
    inner = mx.optimizer.create("sgd", learning_rate=0.1, rescale_grad=0.25)
    wrapped = hvd.DistributedOptimizer(inner, gradient_predivide_factor=2.0)
    x, gradient = array(np.zeros(2, np.float32)), array(np.full(2, rank + 1, np.float32))
    mx.optimizer.get_updater(wrapped)(0, gradient, x)
    np.testing.assert_allclose(x.asnumpy(), [-0.1 * 0.25 * (size + 1) / 2] * 2, rtol=1e-6)
    for _ in range(3):
        assert wrapped.unwrap() is inner
        assert inner.rescale_grad == wrapped.rescale_grad == 0.25
    net = mlp(seed=5)
    with pytest.warns(UserWarning, match="does not take a DistributedOptimizer"):
        trainer = hvd.DistributedTrainer(net.collect_params(), wrapped)
    assert trainer.optimizer is inner
    assert trainer._scale == 0.25 / size


@pytest.mark.parametrize("method", ["update", "update_multi_precision"])
def test_an_update_that_fails_leaves_the_scale_as_it_was(rank, size, method, monkeypatch):
    inner = mx.optimizer.create("sgd", learning_rate=0.1, rescale_grad=0.25)
    wrapped = hvd.DistributedOptimizer(inner, gradient_predivide_factor=3.0)

    def fail(*arguments):
        raise ArithmeticError("no update")

    monkeypatch.setattr(inner, method, fail)
    with pytest.raises(ArithmeticError):
        getattr(wrapped, method)(0, mx.nd.ones((2,)), mx.nd.ones((2,)), None)
    assert wrapped.rescale_grad == inner.rescale_grad == 0.25


def test_refusals(rank, size):
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
