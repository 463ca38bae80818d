"""`DistributedTrainer` and `DistributedOptimizer` when the number of workers changes: means are those of who is there.

The first ranks of the job are the workers of each world; the others are alone meanwhile. What came out is compared with
a replay in this process, to the last bit: it adds the workers' gradients as the engine does.
"""

import importlib

import numpy as np
import pytest

import kvstore_hvd.mxnet as hvd
from kvstore_hvd import elastic
from support.arrays import assert_same_bits, sum_of_ranks
from support.gluon import array, backward, gradients, is_mxnet_2, mlp, parameters, samples, weights

mx = pytest.importorskip("mxnet")

BATCH = 3
RATE = {"learning_rate": 0.1, "momentum": 0.9}


@pytest.fixture
def meet(rank, size):
    """Return what makes the first ranks a world, as many as there are, and says how many, and whether this is one."""

    def make(workers):
        workers = min(workers, size)
        hvd.shutdown()
        hvd.init(comm=list(range(workers)))
        assert hvd.size() == (workers if rank < workers else 1)
        return workers, rank < workers

    yield make
    hvd.shutdown()
    hvd.init(comm=list(range(size)))


class Replay:
    def __init__(self, factor=1.0):
        self.net = mlp(seed=5)
        self.trainer = mx.gluon.Trainer(self.net.collect_params(), "sgd", dict(RATE), kvstore=None)
        self._factor = factor

    def step(self, batches):
        parts = []
        for batch in batches:
            backward(self.net, [batch])
            parts.append([each / np.float32(self._factor) for each in gradients(self.net)])
        for parameter, of_workers in zip(parameters(self.net), zip(*parts)):
            parameter.list_grad()[0][:] = array(sum_of_ranks(list(of_workers)))
        self.trainer._scale = self._factor / len(batches)
        self.trainer.step(BATCH)


def batch_of(step, worker):
    data, labels = samples(BATCH, seed=100 * step + worker)
    return array(data), array(labels)


def trainer_of(kind, net, factor=1.0):
    if kind == "DistributedTrainer":
        return hvd.DistributedTrainer(net.collect_params(), "sgd", dict(RATE), gradient_predivide_factor=factor)
    optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD(**RATE), gradient_predivide_factor=factor)
    return mx.gluon.Trainer(net.collect_params(), optimizer, kvstore=None)


def assert_all_equal(pairs):
    for ours, theirs in (each for pair in pairs for each in zip(*pair)):
        assert_same_bits(ours, theirs)


def train(net, trainer, replay, rank, workers, steps):
    for step in steps:
        backward(net, [batch_of(step, rank)])
        trainer.step(BATCH)
        replay.step([batch_of(step, worker) for worker in range(workers)])


@pytest.mark.parametrize(
    ("kind", "factor", "before", "after"),
    [("DistributedTrainer", 1.0, 3, 2), ("DistributedOptimizer", 2.0, 2, 4), ("DistributedOptimizer", 2.0, 1, 4)],
)
def test_other_workers(rank, meet, kind, before, after, factor):
    """The sums of a world are divided by its number of workers, also where the Trainer is older than the world."""
    net, replay = mlp(seed=5), Replay(factor)
    before, _ = meet(before)
    trainer = trainer_of(kind, net, factor)
    state = elastic.GluonState(net=net, trainer=trainer)
    found = []  # looked at in the end: who fails earlier would leave the others waiting
    for number, asked in enumerate((before, after, before)):
        workers, takes_part = meet(asked)
        state.sync()  # newcomers have done other steps meanwhile
        train(net, trainer, replay, rank, workers, (2 * number, 2 * number + 1))
        if takes_part:
            found.append((weights(net), weights(replay.net)))
            state.save()
    assert_all_equal(found)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (1, 4)])
def test_a_commit_of_another_world(rank, meet, before, after):
    """What was saved among some workers is restored among others: the scale is theirs, AMP's as well."""
    amp = importlib.import_module("mxnet.amp" if is_mxnet_2() else "mxnet.contrib.amp")
    scaler = importlib.import_module(f"{amp.__name__}.loss_scaler").LossScaler()
    net, replay = mlp(seed=5), Replay()
    before, _ = meet(before)
    trainer = trainer_of("DistributedTrainer", net)
    trainer._amp_loss_scaler, trainer._amp_original_scale = scaler, trainer._scale  # as amp.init_trainer does
    state = elastic.GluonState(net=net, trainer=trainer)
    state.sync()
    with amp.scale_loss(mx.nd.ones(1), trainer):
        assert trainer._scale * scaler.loss_scale == 1 / hvd.size()
    state.save()
    workers, takes_part = meet(after)
    state.restore()
    state.sync()
    assert trainer._amp_original_scale == 1 / hvd.size()
    assert trainer._scale * scaler.loss_scale == 1 / hvd.size()
    for step in range(2):
        backward(net, [batch_of(step, rank)])
        for parameter in parameters(net):
            parameter.list_grad()[0][:] = parameter.list_grad()[0] * scaler.loss_scale
        with amp.scale_loss(mx.nd.ones(1), trainer):
            trainer.step(BATCH)
        replay.step([batch_of(step, worker) for worker in range(workers)])
    if takes_part:
        assert_all_equal([(weights(net), weights(replay.net))])
    trainer.allreduce_grads()
    amp.unscale(trainer)
    assert trainer._scale == 1.0


@pytest.mark.parametrize(("kind", "before", "after"), [("DistributedTrainer", 3, 2), ("DistributedOptimizer", 1, 4)])
def test_states_that_are_broadcast(rank, meet, kind, before, after):
    """`broadcast_trainer_states` takes no number of workers along."""
    net, replay = mlp(seed=5), Replay()
    before, takes_part = meet(before)
    trainer = trainer_of(kind, net)
    train(net, trainer, replay, rank, before, [0])
    workers, takes_part = meet(after)
    hvd.broadcast_parameters(net.collect_params())
    hvd.broadcast_trainer_states(trainer)
    train(net, trainer, replay, rank, workers, [1, 2])
    if takes_part:
        assert_all_equal([(weights(net), weights(replay.net))])
