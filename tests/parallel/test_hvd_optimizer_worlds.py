"""`DistributedTrainer` and `DistributedOptimizer` when the number of workers changes: means are those of who is there.

The first ranks of the job are the workers of each world; the others are alone meanwhile. What came out is compared with
a replay in this process, to the last bit: it adds the workers' gradients in the order of ranks.
"""

from __future__ import annotations

import importlib
from functools import reduce

import numpy as np
import pytest

import kvstore_hvd.mxnet as hvd
from kvstore_hvd import elastic
from kvstore_hvd.join import Join
from support.arrays import assert_equal_on_all_ranks, assert_same_bits
from support.gluon import array, backward, gradients, is_mxnet_2, mlp, parameters, samples, weights

mx = pytest.importorskip("mxnet")

BATCH = 3
RATE = {"learning_rate": 0.1, "momentum": 0.9}
CHANGES = [(3, 2), (2, 4), (1, 4)]
ONE_UP_ONE_DOWN = [(3, 2), (1, 4)]


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
    """One process that does the steps of all workers."""

    def __init__(self, factor=1.0):
        self.net = mlp(seed=5)
        self.trainer = mx.gluon.Trainer(self.net.collect_params(), "sgd", dict(RATE), kvstore=None)
        self._factor = factor

    def step(self, batches):
        """Do one step with a batch for each worker."""
        parts = []
        for batch in batches:
            backward(self.net, [batch])
            parts.append([each / np.float32(self._factor) for each in gradients(self.net)])
        for parameter, of_workers in zip(parameters(self.net), zip(*parts)):
            parameter.list_grad()[0][:] = array(reduce(np.add, of_workers))
        self.trainer._scale = self._factor / len(batches)
        self.trainer.step(BATCH)


def batch_of(step, worker):
    """Return the batch of one worker in one step."""
    data, labels = samples(BATCH, seed=100 * step + worker)
    return array(data), array(labels)


def trainer_of(kind, net, factor=1.0):
    """Return one of the Trainers that form means by themselves."""
    if kind == "DistributedTrainer":
        return hvd.DistributedTrainer(net.collect_params(), "sgd", dict(RATE), gradient_predivide_factor=factor)
    optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD(**RATE), gradient_predivide_factor=factor)
    return mx.gluon.Trainer(net.collect_params(), optimizer, kvstore=None)


def assert_as_replayed(net, replay):
    assert_all_equal([(weights(net), weights(replay.net))])


def assert_all_equal(pairs):
    for ours, theirs in (each for pair in pairs for each in zip(*pair)):
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize(("before", "after"), CHANGES)
@pytest.mark.parametrize(
    ("kind", "factor"), [("DistributedTrainer", 1.0), ("DistributedTrainer", 2.0), ("DistributedOptimizer", 2.0)]
)
def test_other_workers(rank, meet, kind, before, after, factor):
    """The sums of a world are divided by its number of workers, also where the Trainer is older than the world."""
    net, replay = mlp(seed=5), Replay(factor)
    before, _ = meet(before)
    trainer = trainer_of(kind, net, factor)
    state = elastic.GluonState(net=net, trainer=trainer)
    number, found = 0, []  # looked at in the end: who fails earlier would leave the others waiting
    for asked in (before, after, before):
        workers, takes_part = meet(asked)
        state.sync()  # newcomers have done other steps meanwhile
        for _ in range(2):
            backward(net, [batch_of(number, rank)])
            trainer.step(BATCH)
            replay.step([batch_of(number, worker) for worker in range(workers)])
            number += 1
        if takes_part:
            found.append((weights(net), weights(replay.net)))
            state.save()
    assert_all_equal(found)


@pytest.mark.parametrize(("before", "after"), ONE_UP_ONE_DOWN)
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
        assert_as_replayed(net, replay)
    trainer.allreduce_grads()
    amp.unscale(trainer)
    assert trainer._scale == 1.0


@pytest.mark.parametrize(("before", "after"), ONE_UP_ONE_DOWN)
@pytest.mark.parametrize("kind", ["DistributedTrainer", "DistributedOptimizer"])
def test_states_that_are_broadcast(rank, meet, kind, before, after):
    """`broadcast_trainer_states` takes no number of workers along."""
    net, replay = mlp(seed=5), Replay()
    before, takes_part = meet(before)
    trainer = trainer_of(kind, net)
    backward(net, [batch_of(0, rank)])
    trainer.step(BATCH)
    replay.step([batch_of(0, worker) for worker in range(before)])
    workers, takes_part = meet(after)
    hvd.broadcast_parameters(net.collect_params())
    hvd.broadcast_trainer_states(trainer)
    for step in range(1, 3):
        backward(net, [batch_of(step, rank)])
        trainer.step(BATCH)
        replay.step([batch_of(step, worker) for worker in range(workers)])
    if takes_part:
        assert_as_replayed(net, replay)


@pytest.mark.parametrize(("before", "after"), ONE_UP_ONE_DOWN)
def test_a_join_in_another_world(rank, meet, before, after):
    """Workers without input count as the Join says, among those that there are."""
    net, replay = mlp(seed=5), Replay()
    meet(before)
    trainer = trainer_of("DistributedTrainer", net)
    state = elastic.GluonState(net=net, trainer=trainer)
    workers, takes_part = meet(after)
    state.sync()
    with Join([trainer], divide_by_initial_world_size=False):
        for step in range(1 + rank):
            backward(net, [batch_of(step, rank)])
            trainer.step(BATCH)
    if not takes_part:
        return
    for step in range(workers):
        replay.step([batch_of(step, worker) for worker in range(step, workers)])
    for i, (ours, theirs) in enumerate(zip(weights(net), weights(replay.net))):
        # The mean is formed as gradients are summed, not after it.
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
        assert_equal_on_all_ranks(ours, f"join/{i}")


@pytest.mark.skipif(is_mxnet_2(), reason="MXNet 2 has no Module")
@pytest.mark.parametrize(("before", "after", "devices"), [(3, 2, 1), (2, 4, 2), (1, 4, 1)])
def test_module(rank, meet, before, after, devices):
    """`Module` with a `DistributedOptimizer`: gradients are workers' ranks, so the parameter says what they were
    divided by."""
    before, _ = meet(before)
    product = mx.sym.broadcast_mul(mx.sym.Variable("data"), mx.sym.Variable("weight", shape=(1, 1)))
    module = mx.mod.Module(mx.sym.MakeLoss(product), label_names=None, context=[mx.cpu(d) for d in range(devices)])
    batch = mx.io.DataBatch([mx.nd.ones((devices, 1)) * (rank + 1)])
    module.bind([("data", (devices, 1))])
    module.init_params(mx.init.Zero())
    inner = mx.optimizer.SGD(learning_rate=1.0, rescale_grad=1.0 / devices)
    optimizer = hvd.DistributedOptimizer(inner)
    module.init_optimizer(kvstore=None if devices == 1 else "local", optimizer=optimizer)
    found, expected = [], 0.0
    for asked in (before, after, before):
        workers, takes_part = meet(asked)
        hvd.broadcast_parameters(module.get_params()[0])
        values = hvd.broadcast_object(module.get_params()[0]["weight"].asnumpy())
        module.set_params({"weight": mx.nd.array(values)}, {}, force_init=True)
        for _ in range(2):
            module.forward_backward(batch)
            module.update()
            expected -= (workers + 1) / 2  # the mean of 1, 2 ... workers
        if takes_part:
            found.append((module.get_params()[0]["weight"].asscalar(), expected))
    for ours, theirs in found:
        assert ours == pytest.approx(theirs, rel=1e-6)
    assert inner.rescale_grad == optimizer.rescale_grad == 1.0 / devices


def test_the_optimizer_inside_is_left_alone(rank, meet):
    """Its `rescale_grad` is the program's own, before and after updates, and however often it is unwrapped."""
    inner = mx.optimizer.SGD(learning_rate=1.0, rescale_grad=0.5)
    workers, takes_part = meet(3)
    optimizer = hvd.DistributedOptimizer(inner, gradient_predivide_factor=2.0)
    x, gradient = array(np.zeros(2, np.float32)), array(np.full(2, rank + 1, np.float32))
    mx.optimizer.get_updater(optimizer)(0, gradient, x)
    if takes_part:
        assert x.asnumpy().tolist() == [-0.5 * (workers + 1) / 2] * 2
    for _ in range(2):
        assert optimizer.unwrap() is inner
        assert inner.rescale_grad == optimizer.rescale_grad == 0.5
