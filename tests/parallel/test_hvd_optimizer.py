"""`DistributedTrainer` and `DistributedOptimizer`: training alike on all workers, as one worker with all the data."""

import pickle
from unittest.mock import Mock

import numpy as np
import pytest

import kvstore_hvd.mxnet as hvd
from kvstore_hvd.errors import HorovodInternalError, InvalidRequestError
from kvstore_hvd.join import Join
from kvstore_hvd.mxnet_compat import dtype_name
from kvstore_hvd.store.kvstore import Horovod
from kvstore_hvd.world import process
from support import gluon
from support.arrays import assert_same_bits
from support.gluon import assert_alike, assert_trained, backward, batch_of, mlp, parameters, train, trained_alone

mx = pytest.importorskip("mxnet")

BATCH = 4
RATE = {"learning_rate": 0.1, "momentum": 0.9}
TOLD = "exchanges no gradients here: the optimizer, a DistributedOptimizer, does so itself"


def reference(size, devices=1, steps=3):
    of_steps = ([batch_of(s, r, d) for r in range(size) for d in range(devices)] for s in range(steps))
    return trained_alone(of_steps, **RATE)


@pytest.mark.parametrize(
    ("form", "factor", "compression", "near"), [(list, 2.0, "none", 1e-5), (dict, 1.0, "bf16", 5e-2)]
)
def test_trains_as_one_worker_with_all_data(rank, size, form, factor, compression, near):
    """Gradients are averaged, whatever holds the parameters, and whatever is done to them before."""
    net = mlp(seed=5 + rank)
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    params = parameters(net) if form is list else dict(net.collect_params().items())
    how = {"gradient_predivide_factor": factor, "compression": getattr(hvd.Compression, compression)}
    trainer = hvd.DistributedTrainer(params, "sgd", dict(RATE), prefix="a.", **how)
    assert isinstance(trainer, (mx.gluon.Trainer, hvd.DistributedTrainer))
    train(net, trainer, *(batch_of(step, rank, 0) for step in range(3)))
    assert_trained(net, reference(size), atol=near)
    if size > 1 and form is list:
        report = trainer._kvstore.report()["keys"]
        assert all("a." in key for key in report)
        assert {entry["algorithm"] for entry in report.values()} <= {"direct", "inline"}


def test_gradients_of_the_first_layers_come_first(rank, monkeypatch):
    optimizer, arrays, seen = hvd.DistributedOptimizer(mx.optimizer.SGD()), [mx.nd.ones(1)] * 2, []
    monkeypatch.setattr(Horovod, "pushpull", lambda _, key, value, priority: seen.append((key, priority)))
    optimizer.update([3, 4], arrays, arrays, [None] * 2)
    assert seen == [(3, -3), (4, -4)]


def test_compressors(kind):
    """`compress` and `decompress`: back to the dtype; integers pass through."""
    for name, dtype, sent in (
        ("none", "int32", ""),
        ("fp16", "float64", "float16"),
        ("bf16", "float32", "bfloat16"),
        ("fp16", "int32", ""),
    ):
        compressor, x = getattr(hvd.Compression, name), kind.array([1.0, -2.5, 1024.0], dtype=dtype)
        small, context = compressor.compress(x)
        back = compressor.decompress(small, context)
        assert type(back) is type(x)
        assert_same_bits(back.asnumpy(), x.asnumpy())
        assert dtype_name(small) == sent if sent else small is x


def test_compressors_of_a_program(rank, size):
    """A class derived from ours is asked itself, and so is one with its methods only, also where it works in place."""
    compressed = []

    class Derived(hvd.Compression.fp16):
        @classmethod
        def compress(cls, tensor):
            compressed.append(tensor)
            return super().compress(tensor)

    class Alike:
        compress, decompress = Derived.compress, Derived.decompress

    class InPlace:
        @staticmethod
        def compress(tensor):
            compressed.append(tensor)
            tensor *= 0.5
            return tensor, 2

        @staticmethod
        def decompress(tensor, factor):
            return tensor * factor

    for kind in (Derived, Alike, InPlace):
        compressed.clear()
        net = mlp(seed=5)
        trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", dict(RATE), compression=kind)
        train(net, trainer, batch_of(0, rank, 0))
        assert len(compressed) == len(parameters(net))
        assert_trained(net, reference(size, steps=1), atol=1e-3)


def test_a_distributed_optimizer_is_unwrapped(rank, size):
    """With a warning, as in Horovod; the average is formed once. `_unwrap` gives the optimizer with its own scale."""
    inner = mx.optimizer.create("sgd", learning_rate=0.1, rescale_grad=0.25)
    wrapped = hvd.DistributedOptimizer(inner, gradient_predivide_factor=2.0)
    x, gradient = gluon.array(np.zeros(2, np.float32)), gluon.array(np.full(2, rank + 1, np.float32))
    mx.optimizer.get_updater(wrapped)(0, gradient, x)
    np.testing.assert_allclose(x.asnumpy(), [-0.1 * 0.25 * (size + 1) / 2] * 2, rtol=1e-6)
    for _ in range(3):
        assert wrapped._unwrap() is inner
        assert inner.rescale_grad == wrapped.rescale_grad == 0.25
    with pytest.warns(UserWarning, match="does not take a DistributedOptimizer"):
        trainer = hvd.DistributedTrainer(mlp().collect_params(), wrapped)
    assert trainer.optimizer is inner
    assert trainer._scale == 0.25 / size
    wrapped = hvd.DistributedOptimizer(mx.optimizer.SGD(momentum=0.9, multi_precision=True))
    state = wrapped.create_state_multi_precision(0, mx.nd.ones(2, dtype="float16"))
    assert sorted(dtype_name(each) for each in state) == ["float32"] * 2


@pytest.mark.parametrize("method", ["update", "update_multi_precision"])
def test_an_update_that_fails_leaves_the_scale_as_it_was(rank, size, method, monkeypatch):
    inner = mx.optimizer.create("sgd", learning_rate=0.1, rescale_grad=0.25)
    wrapped = hvd.DistributedOptimizer(inner, gradient_predivide_factor=7.0)
    monkeypatch.setattr(inner, method, Mock(side_effect=ArithmeticError("no update")))
    with pytest.raises(ArithmeticError):
        getattr(wrapped, method)(0, mx.nd.ones((2,)), mx.nd.ones((2,)), None)
    assert wrapped.rescale_grad == inner.rescale_grad == 0.25


def test_refusals(rank, size):
    for options in (
        {"gradient_predivide_factor": 0},
        {"gradient_predivide_factor": "a"},
        {"gradient_predivide_factor": True},
        {"num_groups": -1},
        {"num_groups": 1.5},
        {"prefix": 3},
    ):
        with pytest.raises(ValueError, match="DistributedTrainer"):
            hvd.DistributedTrainer(mlp().collect_params(), "sgd", **options)
    wrapped = hvd.DistributedOptimizer(mx.optimizer.create("sgd"))
    for wrong in ("sgd", wrapped):
        with pytest.raises(ValueError, match="DistributedOptimizer"):
            hvd.DistributedOptimizer(wrong)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(wrapped)


# -- A DistributedOptimizer and a store: gradients are exchanged once, whatever ``kvstore`` says ------------------


def wrapping(net, store="horovod"):
    return gluon.distributed("DistributedOptimizer", net.collect_params(), "sgd", RATE, kvstore=store)


def step(net, trainer, rank, steps, devices=1):
    for number in steps:
        backward(net, [batch_of(number, rank, d, ctx=mx.cpu(d)) for d in range(devices)])
        trainer.step(BATCH * devices)


@pytest.mark.parametrize(("store", "devices"), [("horovod", 2), ("instance", 1), ("device", 2)])
def test_trainer(rank, size, fresh_log, caplog, store, devices):
    """The Trainer has no store of ours, says so once, and all workers begin with the first one's parameters."""
    is_ours = store != "device"
    net = mlp(seed=5 + (rank if is_ours else 0), contexts=[mx.cpu(d) for d in range(devices)])
    for _ in range(2):  # the second one says nothing
        trainer = wrapping(net, mx.kv.create("horovod") if store == "instance" else store)
    assert caplog.text.count(f"{TOLD}. Only the initial parameters are broadcast.") == is_ours
    trainer._init_kvstore()
    trainer._init_params()  # which the first step does, too, but that has a gradient of the worker's own parameters
    step(net, trainer, rank, range(3), devices)
    assert getattr(trainer._kvstore, "type", None) == (None if devices == 1 else "device")
    assert not trainer._update_on_kvstore
    assert_trained(net, reference(size, devices))
    if is_ours:
        with pytest.raises(InvalidRequestError, match="does not exchange gradients"):
            Join([trainer])  # a worker without input could not follow


def test_update_on_kvstore(rank, size, fresh_log, caplog):
    """Without effect, and said so: what is raised in a store's callback is lost."""
    net = mlp(seed=5, contexts=[mx.cpu(0), mx.cpu(1)])
    optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD(**RATE))
    if gluon.is_mxnet_2():
        optimizer.aggregate_num = 1  # MXNet itself refuses it with others
    trainer = mx.gluon.Trainer(net.collect_params(), optimizer, kvstore="device", update_on_kvstore=True)
    assert "update_on_kvstore=True has no effect" in caplog.text
    step(net, trainer, rank, range(2), 2)
    assert_trained(net, reference(size, 2, steps=2))
    mx.nd.waitall()
    if size > 1:
        process.current().abort("lost on purpose")
        with pytest.raises(HorovodInternalError, match="lost on purpose"):
            step(net, trainer, rank, range(100), 2)
        process.current().reset()


def test_deferred_parameters(rank, size):
    """They are broadcast when they have a shape, like those of a Trainer on a store."""
    net = gluon.network(mx.gluon.nn.Dense(4), mx.gluon.nn.Dense(3), seed=rank)
    trainer = wrapping(net)
    trainer.set_learning_rate(0.0)
    step(net, trainer, rank, [0])
    assert_alike(net)


def test_states(rank, size, tmp_path):
    """They are saved with the optimizer inside, and loaded into the `DistributedOptimizer`, which stays one."""
    net = mlp(seed=5)
    trainer = wrapping(net)
    optimizer = trainer.optimizer
    if rank:
        optimizer.set_learning_rate(9.0)
    hvd.broadcast_trainer_states(trainer)
    assert trainer.optimizer is optimizer
    assert trainer.learning_rate == 0.1
    step(net, trainer, rank, [0])
    trainer.save_states(str(tmp_path / "states"))
    _, inside = pickle.loads((tmp_path / "states").read_bytes())
    assert type(inside) is mx.optimizer.SGD
    before = gluon.weights(net)
    step(net, trainer, rank, [3])
    for parameter, values in zip(parameters(net), before):
        parameter.set_data(gluon.array(values))
    trainer.load_states(str(tmp_path / "states"))
    assert trainer.optimizer is trainer._updaters[0].optimizer is optimizer
    assert optimizer._unwrap().num_update == 1
    step(net, trainer, rank, [1, 2])
    assert_trained(net, reference(size))


def test_amp_beside_workers_that_have_joined(rank, size):
    """A worker in ``hvd.join()`` has seen no overflow, and the last worker's step is an update."""
    net = mlp(seed=5)
    trainer = wrapping(net)
    step(net, trainer, rank, [0])
    if rank == size - 1:
        gluon.scaler_of(trainer)
        before = gluon.weights(net)
        step(net, trainer, rank, [1])
        assert any((ours != theirs).any() for ours, theirs in zip(gluon.weights(net), before))
    assert hvd.join() == size - 1
