import copy
import gc
import pickle
import weakref
from unittest.mock import Mock

import numpy as np
import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from kvstore_hvd.elastic import GluonState
from kvstore_hvd.errors import InputFailedError
from kvstore_hvd.world import process
from support import gluon
from support.arrays import assert_same_bits
from support.gluon import array, assert_alike, batch_of, mlp, parameters, train, weights

mx = pytest.importorskip("mxnet")


def test_broadcast_object(rank, size):
    """Local functions through cloudpickle; random programs have other objects, roots and errors."""
    assert hvd.broadcast_object(lambda x: x + rank, size - 1)(1) == size


@pytest.mark.parametrize("form", [dict, list])
def test_broadcast_parameters(rank, size, form):
    net = mlp(seed=rank, contexts=[mx.cpu(0), mx.cpu(1)])
    own = weights(net)
    params = net.collect_params() if form is dict else parameters(net)
    hvd.broadcast_parameters(params, root_rank=size - 1, prefix="net.")
    assert_alike(net)
    for value, before in zip(weights(net), own) if rank == size - 1 else ():
        assert_same_bits(value, before)


@pytest.mark.parametrize("twice", [False, True])
def test_deferred_parameters(rank, size, twice):
    """Those without a shape follow as they are initialised, in another order than they were announced in. Workers may
    come to their layers in different orders, and use each one before they come to the next."""
    layers = [mx.gluon.nn.Dense(4) for _ in range(6)]
    data = array(np.ones((2, 4), "float32"))
    for layer in layers:
        mx.random.seed(rank)
        layer.initialize(mx.init.Normal(rank + 1.0), ctx=[mx.cpu(0), mx.cpu(1)])
        hvd.broadcast_parameters(layer.collect_params(), root_rank=size - 1)
        if twice:
            hvd.broadcast_parameters(layer.collect_params(), root_rank=0)
    for layer in layers[::-1] if twice else np.random.default_rng(rank).permutation(layers):
        data = layer(data)
    data.wait_to_read()
    assert_alike(*layers)
    for parameter in parameters(layers[0]) if rank == 0 else ():  # which is nobody else's affair
        (parameter.reset_device if gluon.is_mxnet_2() else parameter.reset_ctx)(mx.cpu(1))
        parameter.data().wait_to_read()


def test_copy_of_a_network_that_waits_for_its_shapes(rank, size):
    """It is initialised by itself, before or after the original, and is not broadcast."""
    net = mx.gluon.nn.Dense(4)
    net.initialize(mx.init.Constant(rank))
    state = hvd.elastic.GluonState(net=net)
    hvd.broadcast_parameters(net.collect_params(), root_rank=size - 1)
    before, after = copy.deepcopy(net), pickle.loads(pickle.dumps(copy.deepcopy(net)))
    data = array(np.ones((2, 3), "float32"))
    for each, value in ((before, rank), (net, size - 1), (after, rank)):
        assert (each(data).asnumpy() == 3 * value).all()
    reference = weakref.ref(net)
    del net, each, state
    gc.collect()
    assert reference() is None


def test_broadcast_parameters_refuses(rank, size):
    net = mlp(seed=rank)
    own = weights(net)
    for wrong in (3, "params", {"a": 3}, [np.ones(2)]):
        with pytest.raises(ValueError, match="broadcast_parameters"):
            hvd.broadcast_parameters(wrong)
    with pytest.raises(kvstore_hvd.InvalidRequestError, match="UTF-8"):
        hvd.broadcast_parameters({"a": mx.nd.ones(1), "\udc80": mx.nd.ones(1)})
    lazy = mx.gluon.nn.Dense(2, in_units=2)
    with pytest.raises(RuntimeError, match="has not been initialized"):
        hvd.broadcast_parameters([*parameters(net), *parameters(lazy)])
    for value, before in zip(weights(net), own):
        assert_same_bits(value, before)
    hvd.broadcast_parameters({})
    assert hvd.broadcast_object(rank) == 0
    if size > 1:
        differs = mx.nd.ones(2 + (rank == 0))
        hvd.broadcast_parameters({"w": differs}, prefix="net.")
        with pytest.raises(kvstore_hvd.MismatchError, match=r"broadcast 'net\.w': ranks disagree on shape"):
            differs.wait_to_read()


@pytest.mark.parametrize("how", ["broadcast", "file", "state"])
def test_states_are_counted_on_whatever_device(rank, size, how, tmp_path):
    """Workers on devices of their own take over all counts of updates: a correction of bias and a schedule go on."""
    device = mx.cpu(rank)
    nets = [mlp(seed=3, contexts=[device]) for _ in range(2)]
    whole, resumed = (
        hvd.DistributedTrainer(parameters(each), "adam", {"lr_scheduler": mx.lr_scheduler.FactorScheduler(2, 0.7)})
        for each in nets
    )
    batches = [batch_of(step, rank, ctx=device) for step in range(6)]
    train(nets[0], whole, *batches[:3])
    resumed._init_kvstore()
    resumed._init_params()  # on all, as load_states of some would do
    if how == "state":
        state = GluonState(nets[1], resumed)
    for one, other in zip(parameters(nets[1]), parameters(nets[0])):
        one.set_data(other.data(device))
    path = tmp_path / "states"
    whole.save_states(str(path))
    if how == "file":
        path.write_bytes(hvd.broadcast_object(path.read_bytes()))
    root = 0 if how == "state" else size // 2  # some have a lower rank, and some a higher one
    if how == "file" or rank == root:
        resumed.load_states(str(path))
    if how == "broadcast":
        hvd.broadcast_trainer_states(resumed, root)
    elif how == "state":
        state.sync()
    train(nets[0], whole, *batches[3:])
    train(nets[1], resumed, *batches[3:])
    assert resumed.learning_rate == whole.learning_rate
    for value, expected in zip(*map(weights, nets)):
        assert_same_bits(value, expected)
    assert_alike(nets[1])


LOADS = ["all", "one", "broadcast", "before parameters", "before Trainers"]
EXCHANGES = ["Trainer", "compressing", "optimizer"]


@pytest.mark.parametrize(
    ("loads", "momentum", "exchanges"),
    [
        *zip(LOADS, [0.9, 0.0] * 3, EXCHANGES * 2),
        *(("one", 0.9, each) for each in EXCHANGES[:1] + EXCHANGES[2:]),
        ("another number", 0.9, "Trainer"),
        *((each, 0.9, "sharding") for each in LOADS),
    ],
)
def test_states_on_one_worker_only(rank, size, loads, momentum, exchanges, tmp_path, caplog):
    """States or counts that one worker has loaded, and no other: the first step says so on all, with a fix."""

    # `broadcast_parameters` takes them to the others by itself, if these have made their Trainers.
    def make():
        net = mlp(seed=3)
        schedule = mx.lr_scheduler.FactorScheduler(step=1, factor=0.5, base_lr=0.1)
        options = {"momentum": momentum, "lr_scheduler": schedule}
        how = {"compression": gluon.OwnCompression} if exchanges == "compressing" else {}
        kinds = {"optimizer": "DistributedOptimizer", "sharding": "ShardedTrainer"}
        kind = kinds.get(exchanges, "DistributedTrainer")
        return net, gluon.distributed(kind, parameters(net), "sgd", options, **how)

    def step(net, trainer):
        train(net, trainer, batch_of(rank))
        return weights(net)

    net, trainer = make()
    step(net, trainer)
    if loads == "another number" and rank == size - 1:
        gluon.backward(net, [batch_of(rank)])
        trainer.update(4)
    trainer.save_states(str(tmp_path / "states"))
    net, trainer = make()
    if loads == "before Trainers" and rank != size - 1:
        for parameter in parameters(net):
            parameter._trainer = None
    if loads in ("all", "another number") or rank == size - 1:
        trainer.load_states(str(tmp_path / "states"))
    if loads.startswith("before"):
        hvd.broadcast_parameters(parameters(net), size - 1)
        text = f"the workers' Trainers differ: the states of their optimizers become those of rank {size - 1}, too."
        assert (text in caplog.messages) is (loads == "before parameters" and size > 1)
    if loads == "broadcast":
        hvd.broadcast_trainer_states(trainer, size - 1)
    if loads in ("one", "another number", "before Trainers") and size > 1:
        with pytest.raises(kvstore_hvd.MismatchError, match=r"(?s)states of the optimizer.*broadcast_trainer"):
            step(net, trainer)
        member = process.current().member  # what the other parameters say would be raised by the next test
        member.drain()
        member.forget_unread(lambda error: isinstance(error, (kvstore_hvd.MismatchError, InputFailedError)))
        return
    step(net, trainer)
    assert_alike(net)


def test_states_that_cannot_be_saved(rank, size):
    """Nobody waits for the worker that fails, be it the root or not; all hear of it."""
    net = mlp(seed=3)
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"momentum": 0.9}, kvstore=mx.kv.create("horovod"))
    train(net, trainer, batch_of(0))
    save = trainer.save_states
    for failing in {0, size - 1}:
        if rank == failing:
            trainer.save_states = Mock(side_effect=OSError(f"rank {rank} could not write: disk full"))
        error = OSError if rank == failing else kvstore_hvd.InvalidRequestError
        with pytest.raises(error, match=f"rank {failing} could not write"):
            hvd.broadcast_trainer_states(trainer, 0)
        trainer.save_states = save
        hvd.broadcast_trainer_states(trainer, 0)
