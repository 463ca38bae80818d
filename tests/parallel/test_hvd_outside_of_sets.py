"""Trainers and optimizers of a process set on workers that are not in it: they train on their own gradients."""

import numpy as np
import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from kvstore_hvd.mxnet import process_sets
from kvstore_hvd.world import process
from support.gluon import array, backward, gradients, mlp, parameters, samples, weights

mx = pytest.importorskip("mxnet")

BATCH = 4
RATE = 0.1
each_kind = pytest.mark.parametrize("kind", ["DistributedTrainer", "DistributedOptimizer"])


@pytest.fixture
def few(dynamic, size):
    """Return a set that some workers are in, and some are not."""
    if size < 2:
        pytest.skip("needs two workers")
    return hvd.add_process_set([0] if size == 2 else [0, size - 1])


def trainer_of(kind, net, process_set, **options):
    """Return one of the Trainers that form means by themselves."""
    if kind == "DistributedTrainer":
        params = net.collect_params()
        return hvd.DistributedTrainer(params, "sgd", {"learning_rate": RATE}, process_set=process_set, **options)
    optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=RATE), process_set=process_set, **options)
    return mx.gluon.Trainer(net.collect_params(), optimizer, kvstore=None)


def batch_of(worker, step=0, ctx=None):
    data, labels = samples(BATCH, seed=100 * step + worker)
    return array(data, ctx), array(labels, ctx)


def gradients_of(worker, values, step=0):
    """Return the gradients of a worker's batch at these values of the parameters."""
    with mx.name.NameManager():  # MXNet 1 numbers all layers, and not every worker makes as many of these networks
        net = mlp(seed=5)
    for parameter, value in zip(parameters(net), values):
        parameter.set_data(array(value))
    backward(net, [batch_of(worker, step)])
    return gradients(net)


def assert_stepped(few, rank, net, values, step=0):
    """The parameters are those after a step: of the mean of the members' gradients, else of this worker's own ones.

    Horovod divides by the number of members on all workers.
    """
    takers = few.ranks if rank in few.ranks else [rank]
    sums = [sum(each) for each in zip(*(gradients_of(worker, values, step) for worker in takers))]
    for ours, value, each in zip(weights(net), values, sums):
        np.testing.assert_allclose(ours, value - RATE * each / len(few.ranks) / BATCH, rtol=1e-4, atol=1e-6)


@each_kind
def test_each_worker_steps(few, rank, kind):
    """Members average; the others take their own gradients, scaled as Horovod's are; nobody waits for anybody else."""
    net = mlp(seed=5)
    trainer = trainer_of(kind, net, few, gradient_predivide_factor=2.0)
    for step in range(3):
        before = weights(net)
        backward(net, [batch_of(rank, step)])
        trainer.step(BATCH)
        assert_stepped(few, rank, net, before, step)
    assert hvd.allreduce(mx.nd.ones((2,)), op=hvd.Sum).asnumpy()[0] == hvd.size()


@each_kind
def test_the_others_need_not_step(few, rank, kind):
    """They may have made it because all workers run the same lines."""
    net = mlp(seed=5)
    trainer = trainer_of(kind, net, few)
    before = weights(net)
    if few.included():
        backward(net, [batch_of(rank)])
        trainer.step(BATCH)
        assert_stepped(few, rank, net, before)
    hvd.barrier()


def test_scale_and_batches(few, rank):
    """Both see the same scale; on several devices the gradients of all of them count, and what is not sent is exact."""
    contexts = [mx.cpu(0), mx.cpu(1)]
    net = mlp(seed=5, contexts=contexts)
    trainer = trainer_of("DistributedTrainer", net, few, compression=hvd.Compression.fp16)
    assert trainer._scale == 1 / len(few.ranks)
    before = weights(net)
    backward(net, [batch_of(rank, 0, contexts[0]), batch_of(rank, 1, contexts[1])])
    trainer.step(BATCH)
    if not few.included():
        both = zip(*(gradients_of(rank, before, step) for step in (0, 1)))
        expected = [value - RATE * sum(each) / len(few.ranks) / BATCH for value, each in zip(before, both)]
        for device in (0, 1):
            for ours, each in zip(weights(net, device), expected):
                np.testing.assert_allclose(ours, each, rtol=1e-4, atol=1e-6)


def test_collectives_still_need_a_member(few, rank):
    """The Trainer is the exception: whoever calls an operation of the set is in it, and the error says who is."""
    net = mlp(seed=5)
    trainer = trainer_of("DistributedTrainer", net, few)
    if not few.included():
        for call in (hvd.allreduce, hvd.broadcast_object):
            with pytest.raises(ValueError, match="this worker is not one of the members"):
                call(mx.nd.ones((2,)), process_set=few)
        number, size = few.process_set_id, hvd.size()
        with pytest.raises(kvstore_hvd.InvalidTypeError, match=f"rank {rank}/{size}, outside of process set {number}"):
            trainer._kvstore_params["kvstore"].pushpull("a", 3)
    with pytest.raises(ValueError, match="is not registered"):
        trainer_of("DistributedTrainer", net, hvd.ProcessSet([0]))


def test_trainers_made_in_one_order(few, rank, size):
    """A set's Trainers meet those that were made in the same place, whoever was outside before or after."""
    other = hvd.add_process_set([1] if size == 2 else [1, size - 1])
    sets = [other, few, other, few]
    nets = [mlp(seed=5 + place) for place in range(4)]
    trainers = [trainer_of("DistributedTrainer", net, of) for net, of in zip(nets, sets)]
    before = [weights(net) for net in nets]
    for place, (net, trainer) in reversed(list(enumerate(zip(nets, trainers)))):
        backward(net, [batch_of(rank, place)])
        trainer.step(BATCH)
    for place, net in enumerate(nets):
        assert_stepped(sets[place], rank, net, before[place], place)


@pytest.mark.needs(2)
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
        backward(net, [batch_of(rank)])
        trainer.step(BATCH)
        assert few.included() is (rank in members)
        assert_stepped(few, rank, net, before)
