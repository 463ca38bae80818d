"""`clip_global_norm` and `average_running_statistics`, between the steps of a training."""

import importlib
import warnings

import numpy as np
import pytest

import kvstore_hvd.mxnet as hvd
from kvstore_hvd.errors import InvalidRequestError, InvalidTypeError
from support.gluon import backward, batch_of, is_mxnet_2, network, parameters

mx = pytest.importorskip("mxnet")

ARGUMENTS = ("sgd", {"learning_rate": 1.0})


def trainer_with(kind, gradients, dtype="float32"):
    """A Trainer, whose parameters are 0 and have these gradients on this worker."""
    found = []
    for number, values in enumerate(gradients):
        parameter = mx.gluon.Parameter(f"p{number}", shape=values.shape, dtype=dtype, init="zeros")
        parameter.initialize()
        found.append(parameter)
    trainer = mx.gluon.Trainer(found, *ARGUMENTS, kvstore="horovod") if kind == "store" else None
    trainer = trainer or getattr(hvd, kind)(found, *ARGUMENTS)
    trainer.allreduce_grads()  # broadcasts parameters, and moves gradients
    array = mx.np.array if is_mxnet_2() else mx.nd.array
    with mx.autograd.record():
        products = [(each.data() * array(values, dtype=dtype)).sum() for each, values in zip(found, gradients)]
    mx.autograd.backward(products)
    return trainer, found


def drawn(rank, scale=1.0):
    draw = np.random.RandomState(rank)
    return [scale * draw.normal(size=shape).astype(np.float32) for shape in [(40, 7), (5,), (1200,)]]


@pytest.mark.sizes
@pytest.mark.parametrize(
    ("kind", "dtype", "scale"),
    [
        ("store", "float32", 1.0),
        ("DistributedTrainer", "float16", 1.0),
        ("DistributedTrainer", "float16", 200.0),  # whose squares are no halves
        ("DistributedTrainer", "float16", 1e-3),
        ("DistributedTrainer", "float32", 1e-3),  # below the threshold
        ("ShardedTrainer", "float32", 1.0),
    ],
)
def test_gradients_are_clipped_as_by_one_process(rank, size, kind, dtype, scale):
    """With a store the gradient is a sum, with the other Trainers an average; the norm has equal bits everywhere."""
    trainer, found = trainer_with(kind, drawn(rank, scale), dtype)
    trainer.allreduce_grads()
    norm = hvd.clip_global_norm(trainer, 2.0)
    whole = [sum(each) / (1 if kind == "store" else size) for each in zip(*(drawn(r, scale) for r in range(size)))]
    tolerance = 1e-5 if dtype == "float32" else 5e-3
    assert norm == pytest.approx(np.sqrt(sum((each.astype(float) ** 2).sum() for each in whole)), rel=tolerance)
    assert hvd.allgather_object(norm) == [norm] * size
    trainer.update(1)
    for parameter, each in zip(found, whole):
        expected = -each * min(1.0, 2.0 / norm)
        np.testing.assert_allclose(parameter.data().asnumpy(), expected, rtol=10 * tolerance, atol=tolerance * scale)


def test_a_gradient_that_is_not_finite(rank, size):
    """All workers warn, wherever it comes from."""
    gradients = drawn(rank)
    if rank == size - 1:
        gradients[1][2] = np.inf
    trainer, _ = trainer_with("DistributedTrainer", gradients)
    trainer.allreduce_grads()
    with pytest.warns(UserWarning, match="nan or inf is detected"):
        assert not np.isfinite(hvd.clip_global_norm(trainer, 1.0))


@pytest.mark.skipif(is_mxnet_2(), reason="MXNet 2 has no sparse gradients in Gluon")
def test_sparse_gradients(rank, size):
    layer = mx.gluon.nn.Embedding(50, 4, sparse_grad=True)
    layer.initialize(mx.init.One())
    trainer = hvd.DistributedTrainer(layer.collect_params(), "sgd", {"learning_rate": 1.0, "lazy_update": False})
    trainer.allreduce_grads()
    with mx.autograd.record():
        layer(mx.nd.array([0, 1 + rank])).sum().backward()
    trainer.allreduce_grads()
    norm = np.sqrt(4 * (1 + size / size**2))  # row 0 of all workers, one row of each
    assert hvd.clip_global_norm(trainer, 0.5) == pytest.approx(norm, rel=1e-6)
    trainer.update(1)
    rows = layer.weight.data().asnumpy()
    np.testing.assert_allclose(rows[0], 1 - 0.5 / norm, rtol=1e-5)
    np.testing.assert_allclose(rows[1 : 1 + size], 1 - 0.5 / norm / size, rtol=1e-5)


def test_gradients_that_amp_has_unscaled_are_averages(rank, size):
    trainer, _ = trainer_with("DistributedTrainer", drawn(rank))
    trainer.allreduce_grads()
    trainer._amp_loss_scaler = None
    importlib.import_module("mxnet.amp" if is_mxnet_2() else "mxnet.contrib.amp").unscale(trainer)
    squares = sum((sum(each) ** 2).sum() for each in zip(*map(drawn, range(size))))
    assert hvd.clip_global_norm(trainer, 1e9) == pytest.approx(np.sqrt(squares) / size, rel=1e-5)


def test_gradients_of_all_devices_are_clipped():
    contexts = [mx.cpu(0), mx.cpu(1)]
    net = network(mx.gluon.nn.Dense(3, in_units=8), contexts=contexts)
    trainer = mx.gluon.Trainer(net.collect_params(), *ARGUMENTS, kvstore="horovod")
    backward(net, [batch_of(1, ctx=where) for where in contexts])
    trainer.allreduce_grads()
    hvd.clip_global_norm(trainer, 1e-3)
    for of_device in zip(*(parameter.list_grad() for parameter in parameters(net))):
        assert np.linalg.norm(np.concatenate([g.asnumpy().ravel() for g in of_device])) == pytest.approx(1e-3, rel=1e-3)


def test_only_gradients_of_a_trainer_are_clipped():
    with pytest.raises(InvalidTypeError, match="clip_global_norm: it got a list"):
        hvd.clip_global_norm([mx.nd.ones(1)], 1.0)


def test_all_workers_refuse_the_threshold_of_rank_0(rank):
    net = network(mx.gluon.nn.Dense(3, in_units=8))
    trainer = mx.gluon.Trainer(net.collect_params(), *ARGUMENTS, kvstore="horovod")
    backward(net, [batch_of(1)])
    trainer.allreduce_grads()
    before = [parameter.grad().asnumpy() for parameter in parameters(net)]
    with pytest.raises(InvalidRequestError, match=r"max_norm is -1\.0"):
        hvd.clip_global_norm(trainer, -1 if rank == 0 else 1.0)
    assert all(np.array_equal(own, parameter.grad().asnumpy()) for own, parameter in zip(before, parameters(net)))


@pytest.mark.sizes
def test_running_statistics_are_averaged_by_samples(rank, size):
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.BatchNorm(in_channels=3), mx.gluon.nn.HybridSequential())
    net[1].add(mx.gluon.nn.BatchNorm(in_channels=2))
    net.initialize()
    layers = net[0], net[1][0]
    for number, layer in enumerate(layers):
        for parameter, value in ((layer.running_mean, 10.0), (layer.running_var, 100.0)):
            values = np.full(parameter.shape, value + number + rank, np.float32)
            parameter.set_data(mx.np.array(values) if is_mxnet_2() else mx.nd.array(values))
    gamma = layers[0].gamma.data().asnumpy()
    hvd.average_running_statistics(net, samples=0)
    assert layers[0].running_mean.data().asnumpy()[0] == 10 + rank, "nobody has a sample"
    weights = [r * 2.0 if size > 1 else 1.0 for r in range(size)]
    hvd.average_running_statistics(net, samples=weights[rank])
    mean = sum(weight * r for r, weight in enumerate(weights)) / sum(weights)
    for number, layer in enumerate(layers):
        for parameter, value in ((layer.running_mean, 10.0), (layer.running_var, 100.0)):
            np.testing.assert_allclose(parameter.data().asnumpy(), value + number + mean, rtol=1e-6)
    assert (layers[0].gamma.data().asnumpy() == gamma).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        hvd.average_running_statistics(mx.gluon.nn.Dense(2, in_units=2))  # which has none


def test_iterators_of_mxnet_split_a_file(rank, size, tmp_path):
    """The recipe of docs/training.md; each worker has a copy of the file."""
    path = tmp_path / "samples"
    path.write_text("".join(f"{number} 0:1\n" for number in range(23)))
    batches = mx.io.LibSVMIter(data_libsvm=str(path), data_shape=(1,), batch_size=4, num_parts=size, part_index=rank)
    share = [label for batch in batches for label in batch.label[0].asnumpy()[: 4 - batch.pad].tolist()]
    assert [label for each in hvd.allgather_object(share) for label in each] == list(range(23))
