"""Trainers and optimizers of a process set on workers that are not in it: they train on their own gradients."""

import numpy as np
import pytest

import kvstore_hvd.mxnet as hvd
from kvstore_hvd.mxnet import process_sets
from kvstore_hvd.world import process
from support.gluon import array, backward, batch_of, distributed, gradients, mlp, parameters, train, weights

mx = pytest.importorskip("mxnet")

pytestmark = pytest.mark.needs(2)
BATCH = 4
RATE = 0.1
each_kind = pytest.mark.parametrize("kind", ["DistributedTrainer", "DistributedOptimizer"])


@pytest.fixture
def few(dynamic, size):
    return hvd.add_process_set([0] if size == 2 else [0, size - 1])


def trainer_of(kind, net, process_set, **how):
    params = net.collect_params()
    return distributed(kind, params, "sgd", {"learning_rate": RATE}, process_set=process_set, **how)


def assert_stepped(few, net, values, own, *others, device=0):
    """The parameters are those after a step from `values` on the sum of these batches, divided by the members. Horovod
    divides by the number of members on all workers: those outside take a part of their own gradients."""
    with mx.name.NameManager():  # MXNet 1 numbers all layers, and not every worker makes as many of these networks
        model = mlp(seed=5)
    for parameter, value in zip(parameters(model), values):
        parameter.set_data(array(value))
    sums = 0
    for batch in (own, *others):
        backward(model, [batch])
        sums = [one + other for one, other in zip(gradients(model), sums or [0] * len(values))]
    for ours, value, each in zip(weights(net, device), values, sums):
        np.testing.assert_allclose(ours, value - RATE * each / len(few.ranks) / BATCH, rtol=1e-4, atol=1e-6)


def batches_of(few, rank, step=0):
    return [batch_of(step, worker) for worker in (few.ranks if rank in few.ranks else [rank])]


@each_kind
def test_each_worker_steps(few, rank, kind):
    """Members average; the others take their own gradients, scaled as Horovod's are; nobody waits for anybody else."""
    net = mlp(seed=5)
    trainer = trainer_of(kind, net, few, gradient_predivide_factor=2.0)
    for step in range(3):
        if step == 2 and not few.included():
            continue  # who is outside need not step
        before = weights(net)
        train(net, trainer, batch_of(step, rank))
        assert_stepped(few, net, before, *batches_of(few, rank, step))
    assert hvd.allreduce(mx.nd.ones((2,)), op=hvd.Sum).asnumpy()[0] == hvd.size()


def test_scale_and_batches(few, rank):
    """Both see the same scale; on several devices the gradients of all of them count, and what is not sent is exact."""
    contexts = [mx.cpu(0), mx.cpu(1)]
    net = mlp(seed=5, contexts=contexts)
    trainer = trainer_of("DistributedTrainer", net, few, compression=hvd.Compression.fp16)
    assert trainer._scale == 1 / len(few.ranks)
    before = weights(net)
    backward(net, [batch_of(device, rank, ctx=ctx) for device, ctx in enumerate(contexts)])
    trainer.step(BATCH)
    if not few.included():
        for device in (0, 1):
            assert_stepped(few, net, before, batch_of(0, rank), batch_of(1, rank), device=device)


def test_trainers_made_in_one_order(few, rank, size):
    """A set's Trainers meet those that were made in the same place, whoever was outside before or after."""
    other = hvd.add_process_set([1] if size == 2 else [1, size - 1])
    sets = [other, few, other, few]
    nets = [mlp(seed=5 + place) for place in range(4)]
    trainers = [trainer_of("DistributedTrainer", net, of) for net, of in zip(nets, sets)]
    before = [weights(net) for net in nets]
    for place in reversed(range(4)):
        train(nets[place], trainers[place], batch_of(place, rank))
    for place, net in enumerate(nets):
        assert_stepped(sets[place], net, before[place], *batches_of(sets[place], rank, place))


@each_kind
def test_who_is_outside_may_be_a_member_in_the_next_world(dynamic, rank, size, kind):
    """As when others have left an elastic job, and ranks have changed: a Trainer goes by the present ones."""
    few = hvd.add_process_set([0])
    net = mlp(seed=5)
    trainer = trainer_of(kind, net, few)
    registered = process_sets._registry().sets[few.process_set_id]
    for members in ([0], [size - 1], [0]):
        # What another world of all does: the set has the same part of this process, and other workers.
        process.current().sets.remove(registered.member)
        process.current().member.keep_arenas(registered.member)
        registered.member.leave("the world has changed")
        registered.member._ranks, few._ranks = tuple(members), members
        process.current().join_set(members, few.process_set_id, registered.member)
        before = weights(net)
        train(net, trainer, batch_of(0, rank))
        assert few.included() is (rank in members)
        assert_stepped(few, net, before, *batches_of(few, rank))
