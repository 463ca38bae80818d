"""`DistributedEstimator`: one training by all workers, whatever their handlers see."""

import logging
import os

import numpy as np
import pytest

import kvstore_hvd.mxnet as hvd
from kvstore_hvd.errors import InvalidRequestError, MismatchError
from support.gluon import is_mxnet_2

mx = pytest.importorskip("mxnet")
from mxnet.gluon.contrib import estimator as library  # noqa: E402

gluon = mx.gluon
metric = gluon.metric if is_mxnet_2() else mx.metric

pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLES, BATCH = 48, 4


@pytest.fixture
def shared(tmp_path):
    return hvd.broadcast_object(str(tmp_path))


def data_of(count, seed=0):
    values = np.random.RandomState(seed).normal(size=(count, 6)).astype(np.float32)
    return gluon.data.ArrayDataset(values, (values[:, 0] > 0).astype(np.float32))


def loader_of(dataset, last="pad"):
    sampler = hvd.DistributedSampler(len(dataset), shuffle=False, last=last)
    return gluon.data.DataLoader(dataset, BATCH, sampler=sampler)


def estimator_of(kind="DistributedTrainer", rate=0.1, net=None, loss=None, **options):
    if net is None:
        net = gluon.nn.HybridSequential()
        net.add(
            gluon.nn.Dense(8, activation="relu", in_units=6),
            gluon.nn.BatchNorm(in_channels=8),
            gluon.nn.Dense(2, in_units=8),
        )
        net.initialize(mx.init.Xavier())
        hvd.broadcast_parameters(net.collect_params())
    arguments = net.collect_params(), "sgd", {"learning_rate": rate}
    if kind == "store":
        trainer = gluon.Trainer(*arguments, kvstore="horovod")
    else:
        trainer = getattr(hvd, kind)(*arguments) if kind else None
    return hvd.DistributedEstimator(net, loss or gluon.loss.SoftmaxCrossEntropyLoss(), trainer=trainer, **options)


def values_of(estimator):
    params = estimator.net.collect_params()
    return [params[name].data().asnumpy() for name in sorted(params)]


def assert_equal_everywhere(estimator):
    for everywhere in zip(*hvd.allgather_object(values_of(estimator))):
        assert all((each == everywhere[0]).all() for each in everywhere)


@pytest.mark.sizes
@pytest.mark.parametrize("kind", ["store", None])
def test_a_training(rank, size, kind):
    """Parameters, running statistics and metrics are the same everywhere; a worker may have nothing to validate."""

    class Validated(library.EpochEnd):
        priority = 1

        def epoch_end(self, estimator, *args, **kwargs):
            assert_equal_everywhere(estimator)

    estimator = estimator_of(kind, train_metrics=[metric.Accuracy()])
    held_out = data_of(2, seed=1)
    estimator.fit(loader_of(data_of(SAMPLES)), loader_of(held_out, last="keep"), epochs=3, event_handlers=Validated())
    assert_equal_everywhere(estimator)
    name, accuracy = estimator.val_metrics[0].get()
    assert name == "validation accuracy"
    predicted = estimator.net(mx.np.array(held_out._data[0]) if is_mxnet_2() else mx.nd.array(held_out._data[0]))
    assert accuracy == pytest.approx((predicted.asnumpy().argmax(axis=1) == held_out._data[1]).mean())
    training = [each.get() for each in estimator.train_metrics]
    assert hvd.allgather_object(training) == [training] * size


@pytest.mark.sizes
@pytest.mark.parametrize("batches", ["equal", "constant", "own"])
def test_a_step_is_that_of_one_process(rank, size, batches):
    """A store sums, a DistributedTrainer averages: both divide by the samples of all workers. Also where a batch is
    constant: workers have shares of other sizes, and the last batch has fewer samples; or where a program chooses
    batches of other sizes on each worker."""
    count = {"equal": 4, "constant": 14, "own": 8}[batches]
    dataset = data_of(count if batches == "constant" else count * size)
    loader, parts = loader_of(dataset), [slice(None)]
    if batches == "constant":
        sampler = hvd.DistributedBatchSampler(len(dataset), 10, shuffle=False)
        loader, parts = gluon.data.DataLoader(dataset, batch_sampler=sampler), [slice(10), slice(10, None)]
    elif batches == "own":
        halves = [np.split(np.arange(8 * r, 8 * r + 8), [2 if r % 2 else 6]) for r in range(size)]
        loader = gluon.data.DataLoader(dataset, batch_sampler=[each.tolist() for each in halves[rank]])
        parts = [np.concatenate(step) for step in zip(*halves)]
    expected, bias = np.zeros(6), 0.0
    for part in parts:
        values, labels = (each[part] for each in dataset._data)
        errors = values @ expected + bias - labels
        expected, bias = expected - (errors[:, None] * values).mean(axis=0), bias - errors.mean()
    for kind in ("store", "DistributedTrainer"):
        net = gluon.nn.Dense(1, in_units=6)
        net.initialize(mx.init.Zero())
        estimator = estimator_of(kind, rate=1.0, net=net, loss=gluon.loss.L2Loss())
        estimator.fit(loader, epochs=1, event_handlers=library.GradientUpdateHandler() if batches == "equal" else [])
        np.testing.assert_allclose(net.weight.data().asnumpy()[0], expected, rtol=1e-4, atol=1e-6)
        assert_equal_everywhere(estimator)


def test_shares_that_no_loader_takes_are_refused(size):
    dataset = data_of(2 * size + 1)
    sampler = hvd.DistributedBatchSampler(len(dataset), size, shuffle=False)
    if size > 1:
        with pytest.raises(InvalidRequestError, match=f"the last batch has 1 samples for {size} workers"):
            estimator_of().fit(gluon.data.DataLoader(dataset, batch_sampler=sampler), epochs=1)


def test_batches_begin_with_the_statistics_of_rank_0(rank, size):
    """As with one worker, each batch moves running statistics from there, the first one of a `fit` too."""
    net, norm = gluon.nn.HybridSequential(), gluon.nn.BatchNorm(in_channels=6, momentum=0.5)
    net.add(norm, gluon.nn.Dense(1, in_units=6))
    net.initialize()
    norm.running_mean.set_data(norm.running_mean.data() + rank)
    dataset = data_of(BATCH * size)
    estimator_of(net=net, loss=gluon.loss.L2Loss(), rate=0.0).fit(loader_of(dataset), epochs=1)
    means = [dataset._data[0][r::size].mean(axis=0) for r in range(size)]
    np.testing.assert_allclose(norm.running_mean.data().asnumpy(), np.mean(means, axis=0) / 2, rtol=1e-4, atol=1e-6)


def test_the_best_is_that_of_a_metric_of_all_workers(rank, size, tmp_path):
    """Also where a handler of the program updates it, and where it is seen on some workers only."""
    own = metric.Loss("own")

    class Own(library.EpochEnd):
        priority = -1

        def epoch_end(self, estimator, *args, **kwargs):
            if rank == 0:
                own.update(None, [(mx.np if is_mxnet_2() else mx.nd).ones(1)])

    best = library.CheckpointHandler(str(tmp_path), monitor=own, save_best=True, mode="max")
    estimator_of().fit(loader_of(data_of(SAMPLES)), epochs=2, event_handlers=[Own(), best])
    assert hvd.allgather_object(best.best) == [1.0] * size


def test_epochs_have_orders_of_their_own(rank, size):
    seen, orders = [], []

    class Order(library.BatchEnd, library.EpochEnd):
        def batch_end(self, estimator, *args, batch, **kwargs):
            seen.extend(batch[0].asnumpy()[:, 0].tolist())

        def epoch_end(self, estimator, *args, **kwargs):
            orders.append(list(seen))
            seen.clear()

    dataset = data_of(8 * size)
    sampler = hvd.DistributedSampler(dataset, seed=3)
    sampler.set_epoch(5)
    loader = gluon.data.DataLoader(dataset, BATCH, sampler=sampler)
    estimator_of().fit(loader, epochs=3, event_handlers=[Order()])
    for epoch, order in enumerate(orders, 5):
        sampler.set_epoch(epoch)
        assert order == [float(dataset[at][0][0]) for at in sampler]
    assert orders[0] != orders[1]


class Stop(library.BatchEnd, library.EpochEnd):
    """Of a program: stops at a batch or after an epoch, on one worker."""

    def __init__(self, batch=None, epoch=None):
        self.batch, self.epoch, self.batches, self.epochs = batch, epoch, 0, 0

    def batch_end(self, estimator, *args, **kwargs):
        self.batches += 1
        return self.batches == self.batch

    def epoch_end(self, estimator, *args, **kwargs):
        self.epochs += 1
        return self.epochs == self.epoch


@pytest.mark.parametrize(("batch", "epoch", "batches"), [(2, 1, 2), (None, 2, 2 * -(-SAMPLES // BATCH))])
def test_all_stop_when_one_does(rank, size, batch, epoch, batches):
    stop = Stop(batch, epoch) if rank == size - 1 else Stop()
    estimator = estimator_of()
    # MXNet goes on with the next epoch after a stop within one, unless that is stopped, too.
    estimator.fit(loader_of(data_of(SAMPLES * size)), epochs=5, event_handlers=[stop])
    assert stop.batches == batches
    assert_equal_everywhere(estimator)


def test_early_stopping_sees_all_samples(rank, size):
    monitor = metric.Accuracy()
    estimator = estimator_of(rate=0.0, val_metrics=[monitor])
    handler = library.EarlyStoppingHandler(monitor=monitor, patience=1, mode="max")
    loaders = loader_of(data_of(SAMPLES)), loader_of(data_of(3 * size + 1), last="keep")
    estimator.fit(*loaders, epochs=9, event_handlers=[handler])
    assert hvd.allgather_object(handler.current_epoch) == [handler.current_epoch] * size
    assert 2 <= handler.current_epoch < 9


@pytest.mark.parametrize("kind", ["DistributedTrainer", "ShardedTrainer"])
def test_rank_0_writes_checkpoints_and_all_resume(rank, size, kind, shared, tmp_path):
    folder = os.path.join(shared, "checkpoints") if rank == 0 else str(tmp_path / "empty")
    if rank == 0:
        os.makedirs(folder, exist_ok=True)
    handlers = [library.CheckpointHandler(folder, resume_from_checkpoint=True, max_checkpoints=2)]
    first = estimator_of(kind)
    first.fit(loader_of(data_of(SAMPLES)), epochs=3, event_handlers=handlers)
    assert (len([name for name in os.listdir(folder) if name.endswith(".params")]) == 2) == (rank == 0)
    again = estimator_of(kind, net=first.net)
    for parameter in again.net.collect_params().values():
        parameter.set_data(parameter.data() * 0)
    handlers, stop = [library.CheckpointHandler(folder, resume_from_checkpoint=True)], Stop()
    loader = loader_of(data_of(SAMPLES))
    again.fit(loader, epochs=5, event_handlers=[*handlers, stop])
    again.fit(loader, epochs=0)  # nothing is left
    again.fit(loader, epochs=6, event_handlers=[library.CheckpointHandler(folder, resume_from_checkpoint=True), stop])
    assert loader._batch_sampler._sampler.epoch == 6
    assert stop.epochs == 3
    assert_equal_everywhere(again)
    assert any(each.any() for each in values_of(again))
    assert again.trainer.optimizer.num_update == 6 * -(-SAMPLES // size // BATCH)


@pytest.mark.parametrize("verbose", [False, True])
def test_rank_0_logs(rank, size, verbose):
    estimator, seen = estimator_of(verbose=verbose), []
    estimator.logger.addHandler(type("Seen", (logging.Handler,), {"emit": lambda self, record: seen.append(record)})())
    estimator.fit(loader_of(data_of(SAMPLES)), epochs=1)
    assert bool(seen) == (verbose or rank == 0)


WHAT = ["batches in an epoch", "samples in an epoch", "epochs", "epochs, none", "handlers", "metrics"]


@pytest.mark.parametrize("what", WHAT)
def test_workers_that_differ(rank, size, what):
    """All of them are told who has what, before the first step."""
    if size == 1:
        return
    is_odd = rank == size - 1
    sizes = {"batches in an epoch": 2 * SAMPLES, "samples in an epoch": SAMPLES - size}
    dataset = data_of(sizes.get(what, SAMPLES) if is_odd else SAMPLES)
    metrics = [metric.Accuracy(), *([metric.F1()] if is_odd and what == "metrics" else [])]
    estimator = estimator_of(train_metrics=metrics)
    before = values_of(estimator)
    handlers = [Stop()] if is_odd and what == "handlers" else []
    epochs = {"epochs": 3, "epochs, none": 0}.get(what, 2) if is_odd else 2
    what = what.partition(",")[0]
    with pytest.raises(MismatchError, match=f"fit: workers have different {what}.(\n|.)*rank {size - 1}: "):
        estimator.fit(loader_of(dataset), epochs=epochs, event_handlers=handlers)
    assert all((one == other).all() for one, other in zip(before, values_of(estimator)))
