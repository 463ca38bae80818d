"""States of elastic training among workers: everything is rank 0's after a sync, and updates reach all of them."""

import random

import numpy as np
import pytest

import kvstore_hvd.mxnet as hvd
from kvstore_hvd.elastic import ElasticSampler, GluonState, HostsUpdatedInterrupt, HostUpdateResult, ObjectState
from kvstore_hvd.errors import MismatchError
from support.gluon import array, assert_alike, backward, batch_of, bits_of, network, samples, states_of, weights

mx = pytest.importorskip("mxnet")


def test_updates_add_up_over_the_workers(rank, size):
    """check_host_updates: the newest update counts, and what any worker was told; only removals skip the sync."""
    state = ObjectState()

    def skips_sync():
        with pytest.raises(HostsUpdatedInterrupt) as raised:
            state.commit()
        return raised.value.skip_sync

    state.on_hosts_updated(1 + rank, HostUpdateResult.removed)
    assert skips_sync() is True
    state.on_hosts_updated(size, HostUpdateResult.added)  # as new as the last one, whatever this worker was told
    state.commit()
    state.on_hosts_updated(size + 1, HostUpdateResult.removed)
    if rank == size - 1:
        state.on_hosts_updated(size + 1, HostUpdateResult.added)
    assert skips_sync() is False
    # What was acted on already, and is told again, is no part of the next update.
    state.on_hosts_updated(size + 1, HostUpdateResult.added)
    state.on_hosts_updated(size + 2, HostUpdateResult.removed)
    assert skips_sync() is True
    # A newcomer has seen other updates before.
    state = ObjectState()
    if rank == 0:
        state._last_update = 7
    state.on_hosts_updated(6, HostUpdateResult.added)
    state.commit()
    if rank == size - 1 and rank:
        state.on_hosts_updated(8, HostUpdateResult.added)
    assert size == 1 or skips_sync() is False


def make_net(contexts=(), seed=0, deferred=False):
    nn = mx.gluon.nn
    inputs = [{}, {}, {}] if deferred else [{"in_units": 8}, {"in_channels": 6}, {"in_units": 6}]
    layers = [nn.Dense(6, **inputs[0]), nn.BatchNorm(**inputs[1]), nn.Dense(3, **inputs[2])]
    return network(*layers, contexts=contexts, seed=seed)


def make_trainer(net, **options):
    return mx.gluon.Trainer(net.collect_params(), "sgd", {"momentum": 0.9, **options}, kvstore="horovod")


def train(net, trainer, rank, steps, is_alone=False):
    for step in range(steps):
        backward(net, [batch_of(rank, step)])
        if is_alone:
            trainer._optimizer.rescale_grad = 0.25
            trainer._update(ignore_stale_grad=False)
        else:
            trainer.step(4)


def everything(net, trainer):
    return {"values": bits_of(net), **states_of(trainer)}


def assert_like_rank_0(thing):
    of_all = hvd.allgather_object(thing)
    assert all(each == of_all[0] for each in of_all)


def test_everything_comes_from_rank_0(rank, size):
    """GluonState.sync: parameters, statistics, optimizer, counts, scheduler, sampler, objects; bit by bit."""
    schedule = mx.lr_scheduler.FactorScheduler(3, 0.5, base_lr=0.1)
    net = make_net(seed=rank)
    # As if every worker had trained alone: nothing is equal.
    trainer = make_trainer(net, lr_scheduler=schedule)
    sampler = ElasticSampler(range(40), seed=1)
    state = GluonState(net, trainer, sampler=sampler, epoch=rank)
    train(net, trainer, rank, 2 + rank, is_alone=True)
    if rank == 0:
        sampler.set_epoch(2)
        sampler.record_batch(0, 3)
    state.epoch = 5 + rank
    state.commit()
    state.epoch = 9  # undone: it is not saved
    mine = everything(net, trainer)
    state.sync()
    synced = everything(net, trainer)
    if rank == 0:
        assert synced == mine
    assert_like_rank_0(synced)
    assert (state.epoch, sampler.epoch, sampler.processed_num) == (5, 2, min(40, 3 * size))
    assert_like_rank_0((schedule.count, schedule.base_lr, sampler.state_dict()))
    assert len(sampler.remaining_indices) == 40 - sampler.processed_num
    # From here on all train together, and a restore goes back to what the sync brought.
    train(net, trainer, rank, 2)
    assert_like_rank_0(everything(net, trainer)["states"])
    state.restore()
    assert everything(net, trainer) == synced


def test_newcomers_get_what_does_not_exist_yet(rank, size):
    """GluonState.sync: optimizer states and shapes that only rank 0 knows; no first step of the Trainer waits."""
    net = make_net(seed=rank, deferred=True)
    trainer = make_trainer(net)
    state = GluonState(net, trainer)
    if rank == 0:  # the only one that has trained
        train(net, trainer, rank, 3, is_alone=True)
        trainer._init_kvstore()
        trainer._params_to_init = []
    state.commit()
    state.sync()
    assert_like_rank_0(everything(net, trainer))
    assert trainer._optimizer.num_update == 3
    train(net, trainer, rank, 3)
    assert trainer._optimizer.num_update == 6
    assert_like_rank_0(everything(net, trainer)["counts"])
    assert_like_rank_0(everything(net, trainer)["states"])


def test_a_smaller_network_than_before(rank, size):
    """GluonState.sync: one that took the place of a larger one on rank 0 only."""
    larger, smaller = (network(mx.gluon.nn.Dense(units, in_units=units), seed=rank) for units in (9, 2))
    state = GluonState(larger if rank == 0 else smaller)
    state.net = smaller
    state.sync()
    assert_alike(smaller)


def test_nobody_knows_the_shapes(rank, size):
    """GluonState.sync: parameters without shapes follow in the first step, even where some workers have them."""
    net = make_net(seed=rank, deferred=True)
    trainer = make_trainer(net)
    state = GluonState(net, trainer)
    if rank == size - 1 and rank:
        net(array(samples(4)[0]))
        trainer._params_to_init = []
    state.sync()
    train(net, trainer, rank, 2)
    result = everything(net, trainer)
    assert_like_rank_0([result["values"]["0.weight"], result["states"], result["counts"]])


def test_devices_are_kept_apart(rank, size):
    """GluonState.sync: each device has what rank 0 has on it; a worker with more devices fills them from the first."""
    contexts = [mx.cpu(0), mx.cpu(1)] if rank < 2 else [mx.cpu(0), mx.cpu(1), mx.cpu(2)]
    net = make_net(contexts, seed=rank)
    trainer = make_trainer(net)
    state = GluonState(net, trainer)
    if rank == 0:
        for parameter in net.collect_params().values():
            for number, each in enumerate(parameter.list_data()):
                each[:] = each + number
    data = samples(4)[0]
    with mx.autograd.record():
        for ctx in contexts:
            net(array(data + rank, ctx))
    for updater, ctx in zip(trainer._updaters, contexts):
        for at, parameter in enumerate(trainer._params):
            if parameter.grad_req != "null":
                updater(at, parameter.grad(ctx), parameter.data(ctx))
    state.sync()
    values = {name: each[:2] for name, each in everything(net, trainer)["values"].items()}
    assert_like_rank_0(values)
    assert any(first != second for first, second in values.values())
    assert_like_rank_0(everything(net, trainer)["states"][:2])
    assert len(trainer._updaters[-1].states) == len(trainer._updaters[0].states)
    if rank >= 2:
        assert all(each[2] == each[0] for each in everything(net, trainer)["values"].values())


def test_stores_match_whatever_trains_first(rank, size):
    """GluonState.sync: two Trainers exchange with their like, though workers take their first steps in other orders."""
    nets = [make_net(seed=1), make_net(seed=2)]
    trainers = [make_trainer(each) for each in nets]
    order = [0, 1] if rank % 2 else [1, 0]
    state = GluonState(**{f"net{at}": nets[at] for at in order}, **{f"trainer{at}": trainers[at] for at in order})
    state.sync()
    assert [bits_of(each) for each in nets] == [bits_of(make_net(seed=seed)) for seed in (1, 2)]
    for at in order:
        backward(nets[at], [batch_of(rank)])
        trainers[at]._init_kvstore()
    for at in order:
        trainers[at].step(4)
    for net, trainer in zip(nets, trainers):
        assert_like_rank_0(everything(net, trainer)["states"])


@pytest.mark.needs(2)
def test_what_does_not_fit_fails_on_all(rank, size):
    """GluonState.sync: a state unlike rank 0's on some worker: MismatchError on all of them, nothing was changed."""
    last = rank == size - 1
    shaped = network(mx.gluon.nn.Dense(4 if last else 3, in_units=5), seed=rank)
    for parts, text in (
        ({"net": shaped}, r"parameter '.*' has shape \(4,\) instead of \(3,\)"),
        (
            {"net": make_net(), **({} if last else {"sampler": ElasticSampler(range(9))})},
            "it has net .*, but rank 0 has",
        ),
        ({"best": 1.0} if last else {}, "it has .*best"),
        ({"sampler": ElasticSampler(range(39 if last else 40))}, "the sampler has samples=39 here, but"),
        ({"sampler": ElasticSampler(range(40), shuffle=last)}, r"the sampler has shuffle=\w+ here, but"),
        ({"sampler": ElasticSampler(range(40), seed=int(last))}, "the sampler has seed=1 here, but 0 there"),
    ):
        state = GluonState(**parts, step=rank) if parts.keys() & {"net", "sampler"} else ObjectState(**parts, step=rank)
        order, before = list(parts.get("sampler", [])), [each.tobytes() for each in weights(shaped)]
        with pytest.raises(MismatchError, match=rf"rank {size - 1}: {text}"):
            state.sync()
        state.restore()  # nor was what is saved
        assert (list(parts.get("sampler", [])), state.step) == (order, rank)
        assert [each.tobytes() for each in weights(shaped)] == before
        hvd.allreduce(mx.nd.ones((1,)), name="still-usable").wait_to_read()


def test_random_numbers_of_each_rank_are_its_own(size):
    GluonState(seed=5)
    drawn = random.random(), np.random.rand(), mx.nd.random.uniform(shape=1).asscalar()
    assert [len(set(each)) for each in zip(*hvd.allgather_object(drawn))] == [size] * 3
