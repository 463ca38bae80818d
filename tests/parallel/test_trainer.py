"""Gluon's Trainer on the store: table A2 of the contract."""

from __future__ import annotations

import importlib

import numpy as np
import pytest

from kvstore_hvd.errors import MismatchError
from kvstore_hvd.mxnet_compat import engine_is_naive
from support.arrays import assert_equal_on_all_ranks, assert_same_bits
from support.gluon import array, backward, is_mxnet_2, mlp, network, parameters, samples, weights
from support.rounding import apart, sgd_roundings

mx = pytest.importorskip("mxnet")

BATCH = 24  # of all workers together; divisible by 1, 2, 3, 4 workers with two devices each


def local_trainer(net, optimizer="sgd", **options):
    """A trainer of this process alone, to compare with."""
    return mx.gluon.Trainer(net.collect_params(), optimizer, options or {"learning_rate": 0.1}, kvstore=None)


def trainer_of(net, kvstore=None, optimizer="sgd", **options):
    kvstore = mx.kv.create("horovod") if kvstore is None else kvstore
    return mx.gluon.Trainer(net.collect_params(), optimizer, options or {"learning_rate": 0.1}, kvstore=kvstore)


def shards(data, label, rank, size, contexts):
    """Split a batch over workers and devices."""
    parts = len(contexts)
    for d, ctx in enumerate(contexts):
        piece = slice(rank * parts + d, None, size * parts)
        yield array(data[piece], ctx), array(label[piece], ctx)


def relative_difference(mine, theirs):
    """The largest difference of a parameter, relative to its norm."""
    pairs = [(a.astype("float64"), b.astype("float64")) for a, b in zip(mine, theirs)]
    return max(np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in pairs)


def near(steps):
    """How far two trainings of `mlp` may be apart, by rounding alone."""
    return apart(sgd_roundings([8, 16, 16, 3], BATCH, steps))


@pytest.mark.parametrize("name", ["horovod", "dist_horovod"])
def test_string_with_one_device(rank, size, name):
    """The string trap: Trainer(kvstore='horovod') with one device trains distributed."""
    net = mlp(seed=rank)
    trainer = trainer_of(net, name)
    data, label = samples(BATCH, seed=rank)
    backward(net, [(array(data), array(label))])
    trainer.step(BATCH * size)
    assert trainer._kvstore.type == "horovod"
    assert trainer._kvstore.num_workers == size
    for i, weight in enumerate(weights(net)):
        assert_equal_on_all_ranks(weight, f"weight {i}")


def test_parameters_start_from_rank_0(rank, size):
    """Parameters are broadcast before the first update; BatchNorm's running statistics too, and never reduced."""
    nn = mx.gluon.nn
    net = network(nn.Dense(16, in_units=8), nn.BatchNorm(in_channels=16), nn.Dense(3, in_units=16), seed=rank)
    rank_0 = network(nn.Dense(16, in_units=8), nn.BatchNorm(in_channels=16), nn.Dense(3, in_units=16), seed=0)
    trainer = trainer_of(net, learning_rate=0.0)
    for param in parameters(net):
        if param.grad_req == "null":
            param.set_data(array(np.full(param.shape, rank + 1, "float32")))
    trainer.allreduce_grads()
    for param, mine, theirs in zip(parameters(net), weights(net), weights(rank_0)):
        assert_same_bits(mine, np.ones_like(theirs) if param.grad_req == "null" else theirs)
    assert not any("running" in name for name, use in trainer._kvstore.report()["keys"].items() if "pushpull" in use)


@pytest.mark.parametrize("same_store", [False, True])
def test_two_trainers(rank, size, same_store):
    """Two Trainers (a GAN) have the keys 0, 1, ... both, and never meet: with a store each, and on one store."""
    kv = mx.kv.create("horovod")
    nets = [mlp(seed=5), mlp(seed=6)]
    alone = [mlp(seed=5), mlp(seed=6)]
    trainers = [trainer_of(net, kv if same_store else None) for net in nets]
    local = [local_trainer(net) for net in alone]
    for step in range(10):
        for k in (0, 1):
            data, label = samples(BATCH, seed=100 * k + step)
            backward(nets[k], list(shards(data, label, rank, size, [mx.cpu()])))
            backward(alone[k], [(array(data), array(label))])
        for trainer in (*trainers, *local):
            trainer.step(BATCH)
    for net, other in zip(nets, alone):
        assert relative_difference(weights(net), weights(other)) <= near(10)


def test_two_trainers_of_other_shapes_on_one_store(rank, size):
    """Two Trainers on one store, whose parameters of the same key differ in shape."""
    kv = mx.kv.create("horovod")
    nets = [mlp(inputs=8, seed=rank), mlp(inputs=5, seed=rank)]
    trainers = [trainer_of(net, kv) for net in nets]
    for step in range(5):
        for net, inputs in zip(nets, (8, 5)):
            data, label = samples(BATCH, inputs=inputs, seed=step)
            backward(net, list(shards(data, label, rank, size, [mx.cpu()])))
        for trainer in trainers:
            trainer.step(BATCH)
    for k, net in enumerate(nets):
        for i, weight in enumerate(weights(net)):
            assert_equal_on_all_ranks(weight, f"net {k} weight {i}")


@pytest.mark.skipif(engine_is_naive(), reason="NaiveEngine raises inside of the Trainer")
def test_mismatch_names_the_parameter(rank, size):
    """Mismatch errors name the parameter as the network does."""
    if size == 1:
        pytest.skip("one rank cannot disagree")
    net = network(mx.gluon.nn.Dense(4 if rank == size - 1 else 3, in_units=5, use_bias=False))
    trainer = trainer_of(net, mx.kv.create("horovod"))
    (weight,) = parameters(net)
    texts = []
    # Broadcasts the weight, then reduces its gradient: the second call may already raise the first one's error.
    for step in (trainer.allreduce_grads, weight.data().wait_to_read, weight.grad().wait_to_read):
        try:
            step()
        except MismatchError as error:
            texts.append(str(error))
    name = "0.weight" if is_mxnet_2() else weight.name
    assert [text.splitlines()[0] for text in texts] == [
        f"[rank {rank}/{size}] {operation} '{name}' (key 0): ranks disagree on shape."
        for operation in ("broadcast", "allreduce")
    ]


def test_update_on_kvstore_is_refused(world):
    """update_on_kvstore=True: MXNet's ValueError, since this store has no optimizer."""
    net = mlp()
    kv = mx.kv.create("horovod")
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", kvstore=kv, update_on_kvstore=True)
    with pytest.raises(ValueError, match="update_on_kvstore=False"):
        trainer.allreduce_grads()


def test_compression_params(rank, size):
    """compression_params={'type': 'fp16'} is accepted, and takes effect."""
    net, alone = mlp(), mlp()
    trainer = mx.gluon.Trainer(
        net.collect_params(),
        "sgd",
        {"learning_rate": 0.1},
        kvstore=mx.kv.create("horovod"),
        compression_params={"type": "fp16"},
    )
    local = local_trainer(alone)
    for step in range(5):
        data, label = samples(BATCH, seed=step)
        backward(net, list(shards(data, label, rank, size, [mx.cpu()])))
        backward(alone, [(array(data), array(label))])
        trainer.step(BATCH)
        local.step(BATCH)
    difference = relative_difference(weights(net), weights(alone))
    assert difference <= 1e-2
    assert difference > near(5) or size == 1
    for i, weight in enumerate(weights(net)):
        assert_equal_on_all_ranks(weight, f"weight {i}")


def test_loss_scaler_sees_the_same_overflow(rank, size):
    """AMP: an infinite gradient of one worker makes all of them skip the step."""
    net = mlp()
    trainer = trainer_of(net)
    amp = importlib.import_module("mxnet.amp.loss_scaler" if is_mxnet_2() else "mxnet.contrib.amp.loss_scaler")
    scaler = amp.LossScaler()
    trainer._amp_loss_scaler = scaler
    trainer._amp_original_scale = trainer._scale
    data, label = samples(BATCH)
    if rank == size - 1:
        data[0, 0] = np.inf
    backward(net, [(array(data), array(label))])
    trainer.allreduce_grads()
    assert scaler.has_overflow(parameters(net))


def test_states_are_saved_and_loaded(rank, size, tmp_path):
    """save_states and load_states work on the local optimizer, whose states are equal on all workers."""
    net = mlp()
    trainer = trainer_of(net, optimizer="adam", learning_rate=0.01)

    def step(seed):
        data, label = samples(BATCH, seed=seed)
        backward(net, list(shards(data, label, rank, size, [mx.cpu()])))
        trainer.step(BATCH)

    step(0)
    file = str(tmp_path / "states")
    trainer.save_states(file)
    at_save = weights(net)
    step(1)
    then = weights(net)
    for param, value in zip(parameters(net), at_save):
        param.set_data(array(value))
    trainer.load_states(file)
    step(1)
    for a, b in zip(weights(net), then):
        assert_same_bits(a, b)
    for i, weight in enumerate(weights(net)):
        assert_equal_on_all_ranks(weight, f"weight {i}")
