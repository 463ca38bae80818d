"""Gluon's Trainer on the store: table A2 of the contract."""

import numpy as np
import pytest

import kvstore_hvd.mxnet as hvd
from kvstore_hvd.errors import MismatchError
from support.arrays import assert_equal_on_all_ranks, assert_same_bits
from support.gluon import array, backward, is_mxnet_2, mlp, network, parameters, samples, weights

mx = pytest.importorskip("mxnet")

BATCH = 24  # of all workers together


def trainer_of(net, kvstore=None, **options):
    kvstore = mx.kv.create("horovod") if kvstore is None else kvstore
    return mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=kvstore, **options)


def shards(seed, rank, size):
    data, label = samples(BATCH, seed=seed)
    yield array(data[rank::size]), array(label[rank::size])


@pytest.mark.parametrize("name", ["horovod", "dist_horovod"])
def test_string_with_one_device(rank, size, name):
    """The string trap: Trainer(kvstore='horovod') with one device trains distributed."""
    net = mlp(seed=rank)
    trainer = trainer_of(net, kvstore=name)
    backward(net, list(shards(0, rank, size)))
    trainer.step(BATCH)
    assert (trainer._kvstore.type, trainer._kvstore.num_workers) == ("horovod", size)
    assert_equal_on_all_ranks(weights(net)[0], f"weight of {name}")


@pytest.mark.needs(2)
def test_compression_params(size):
    """They take effect: float16 has no number between 1 and 1 + 2**-10."""
    net = network(mx.gluon.nn.Dense(1, in_units=1, use_bias=False))
    trainer = trainer_of(net, compression_params={"type": "fp16"})
    with mx.autograd.record():
        loss = net(array(np.full((1, 1), 1 + 2**-12, np.float32)))
    loss.backward()
    trainer.allreduce_grads()
    assert parameters(net)[0].grad().asnumpy().tolist() == [[size]]


def test_parameters_start_from_rank_0(rank, size):
    """Parameters are broadcast before the first update; BatchNorm's running statistics too, and never reduced."""
    nn = mx.gluon.nn
    net = network(nn.Dense(16, in_units=8), nn.BatchNorm(in_channels=16), nn.Dense(3, in_units=16), seed=rank)
    rank_0 = network(nn.Dense(16, in_units=8), nn.BatchNorm(in_channels=16), nn.Dense(3, in_units=16), seed=0)
    trainer = trainer_of(net)
    for param in parameters(net):
        if param.grad_req == "null":
            param.set_data(array(np.full(param.shape, rank + 1, "float32")))
    trainer.allreduce_grads()
    for param, mine, theirs in zip(parameters(net), weights(net), weights(rank_0)):
        assert_same_bits(mine, np.ones_like(theirs) if param.grad_req == "null" else theirs)
    assert not any("running" in name for name, use in trainer._kvstore.report()["keys"].items() if "pushpull" in use)


@pytest.mark.needs(2)
def test_mismatch_names_the_parameter(rank, size):
    """Mismatch errors name the parameter as the network does."""
    net = network(mx.gluon.nn.Dense(4 if rank == size - 1 else 3, in_units=5, use_bias=False))
    trainer = trainer_of(net)
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
    with pytest.raises(ValueError, match="update_on_kvstore=False"):
        trainer_of(mlp(), update_on_kvstore=True).allreduce_grads()


def test_only_some_workers_load_states(rank, size, tmp_path):
    """They make no store and broadcast nothing before the first step, in which all workers do."""
    path = str(tmp_path / "states")
    nets = [mlp(seed=rank + number) for number in range(2)]
    momentum = {"learning_rate": 0.1, "momentum": 0.9}
    trainers = [mx.gluon.Trainer(net.collect_params(), "sgd", momentum, kvstore="horovod") for net in nets]
    if rank == 0:
        for trainer in trainers[::-1]:
            trainer.save_states(path)
            trainer.load_states(path)
    for net in nets:
        hvd.broadcast_parameters(net.collect_params())
        assert_equal_on_all_ranks(weights(net)[0], "weight")
    for number, (net, trainer) in enumerate(zip(nets, trainers)):
        backward(net, list(shards(number, rank, size)))
        trainer.step(BATCH)
        for place, value in enumerate(weights(net)):
            assert_equal_on_all_ranks(value, f"weight {place} of {number}")
