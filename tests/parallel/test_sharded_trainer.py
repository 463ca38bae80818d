"""A ShardedTrainer: its bits with each network (others: `test_trainings`), shares, files of states, refusals."""

import tempfile
from pathlib import Path

import numpy as np
import pytest

import kvstore_hvd.mxnet as hvd
from kvstore_hvd import mxnet_compat
from kvstore_hvd.errors import InvalidRequestError, MismatchError
from kvstore_hvd.join import Join
from kvstore_hvd.mxnet import sharded
from kvstore_hvd.world import process
from support.arrays import assert_equal_on_all_ranks
from support.gluon import array, batch_of, bits_of, is_mxnet_2, mlp, network, parameters, train, weights
from support.networks import NETWORKS, built
from support.zero_copy import meet_again

mx = pytest.importorskip("mxnet")

pytestmark = pytest.mark.usefixtures("world")
ADAM = {"learning_rate": 0.01, "wd": 0.01}


@pytest.fixture
def small_cuts():
    with mxnet_compat.holding(sharded, _LEAST=1, _UNIT=1):
        yield


def trainer_of(kind, net, optimizer="adam", **options):
    return getattr(hvd, kind)(net.collect_params(), optimizer, options or dict(ADAM))


def elements(state):
    if isinstance(state, (tuple, list)):
        return sum(map(elements, state))
    return 0 if state is None else state.size


@pytest.mark.parametrize("name", sorted(NETWORKS))
@pytest.mark.parametrize("optimizer", ["adam", "lamb", "rmsprop"])
def test_bits_with_inference_between_the_steps(small_cuts, rank, name, optimizer):
    values = []
    for kind in ("DistributedTrainer", "ShardedTrainer"):
        net = built(name, seed=3, contexts=[mx.cpu()], mode="static", grad_req="write", dtype="float32")
        trainer = trainer_of(kind, net, optimizer, learning_rate=0.01)
        outputs = []
        for step in range(3):
            data = array(np.random.default_rng([rank, step]).standard_normal(NETWORKS[name][1]).astype("float32"))
            with mx.autograd.record():
                (net(data) ** 2).sum().backward()
            trainer.step(4)
            outputs.append(net(data).asnumpy().tobytes())
        values.append((outputs, bits_of(net)))
    assert values[0] == values[1]


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "lamb"])
def test_rates_of_a_schedule_where_parameters_have_other_counts(small_cuts, optimizer):
    """As in a fine-tuning: a layer is left out for some steps."""
    values = []
    for kind in ("DistributedTrainer", "ShardedTrainer"):
        net = mlp(seed=5)
        schedule = mx.lr_scheduler.FactorScheduler(1, 0.7, base_lr=0.1)
        trainer = trainer_of(kind, net, optimizer, learning_rate=0.1, lr_scheduler=schedule)
        for step in range(5):
            with mx.autograd.record():
                loss = sum((each.data() ** 2).sum() for each in parameters(net)[2 if step in (1, 2) else 0 :])
            loss.backward()
            trainer.step(1, ignore_stale_grad=True)
        values.append(bits_of(net))
    assert values[0] == values[1]


class RowMeans(mx.optimizer.Optimizer):
    """Of a program: looks at the shape of a weight, keeps a state of another one, and counts after it has its rate."""

    def create_state(self, index, weight):
        return mx.nd.zeros(1)

    def update(self, index, weight, grad, state):
        several = isinstance(index, (list, tuple))
        for i, w, g, s in zip(index, weight, grad, state) if several else [(index, weight, grad, state)]:
            rate = self._get_lr(i)
            self._update_count(i)
            weights, gradients = w.as_nd_ndarray(), g.as_nd_ndarray()
            if weights.ndim > 1:
                gradients = gradients - gradients.mean(axis=1, keepdims=True)
            s[:] = s + 1
            weights[:] = weights - rate * gradients * s

    update_multi_precision = step = update


def test_an_optimizer_that_looks_at_whole_parameters(tmp_path):
    values = []
    for kind in ("DistributedTrainer", "ShardedTrainer"):
        net = mlp(seed=5)
        schedule = mx.lr_scheduler.FactorScheduler(1, 0.7, base_lr=0.1)
        trainer = getattr(hvd, kind)(net.collect_params(), RowMeans(learning_rate=0.1, lr_scheduler=schedule))
        for step in range(4):
            train(net, trainer, batch_of(step))
            if step == 1:
                trainer.save_states(str(tmp_path / "states"))
                trainer.load_states(str(tmp_path / "states"))
        values.append(bits_of(net))
    assert values[0] == values[1]


@pytest.mark.parametrize(("optimizer", "kept"), [("adam", 2), ("sgd", 1)])
def test_each_worker_keeps_its_share_of_the_states(size, optimizer, kept):
    net = network(mx.gluon.nn.Dense(300, in_units=400), mx.gluon.nn.Dense(100, in_units=300))
    options = {} if optimizer == "adam" else {"momentum": 0.9}
    trainer = trainer_of("ShardedTrainer", net, optimizer, learning_rate=0.01, **options)
    train(net, trainer, (array(np.ones((4, 400), "float32")), array(np.ones((4, 100), "float32"))))
    mine = sum(map(elements, trainer._updaters[0].states.values()))
    whole = kept * sum(param.data().size for param in parameters(net))
    assert mine <= whole / size * 1.02
    assert sum(hvd.allgather_object(mine)) == whole


def test_files_of_states_are_those_of_any_trainer(small_cuts):
    def trained(kind, path, other):
        net = mlp(seed=5)
        trainer = trainer_of(kind, net)
        train(net, trainer, batch_of(1), batch_of(2))
        trainer.save_states(str(path))
        hvd.barrier()
        trainer.load_states(str(other))
        train(net, trainer, batch_of(3))
        return weights(net)

    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, "whole"), Path(folder, "sharded")]
        expected = trained("DistributedTrainer", paths[0], paths[0])
        for own, other in ((paths[1], paths[0]), (paths[1], paths[1])):
            for mine, theirs in zip(trained("ShardedTrainer", own, other), expected):
                np.testing.assert_array_equal(mine, theirs)
        for mine, theirs in zip(trained("DistributedTrainer", paths[0], paths[1]), expected):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.needs(2)
def test_another_place_in_the_world_is_refused(small_cuts, size):
    net = mlp(seed=5)
    trainer = trainer_of("ShardedTrainer", net)
    train(net, trainer, batch_of(1))
    meet_again()
    train(net, trainer, batch_of(2))  # the same place
    assert_equal_on_all_ranks(weights(net)[0], "weights")
    updater = trainer._updaters[0]
    updater._place = (0, size + 1)
    with pytest.raises(InvalidRequestError, match=rf"(?s)states of rank 0 of {size + 1}, .*load_states"):
        updater([0], [parameters(net)[0].grad()], [parameters(net)[0].data()])
    with pytest.raises(InvalidRequestError, match="save_states"):
        updater.get_states()


@pytest.mark.needs(2)
def test_workers_that_share_out_differently_are_told(rank):
    """Before anything is changed, and steps go on with the same ones."""
    net = mlp(seed=5)
    before = weights(net)
    trainer = trainer_of("ShardedTrainer", net, "sgd" if rank == 0 else "lamb", learning_rate=0.1)
    with pytest.raises(MismatchError, match=r"(?s)who updates which elements.*rank 0: SGD, .*rank 1: LAMB, "):
        train(net, trainer, batch_of(1))
    for mine, theirs in zip(weights(net), before):
        np.testing.assert_array_equal(mine, theirs)
    train(net, trainer_of("ShardedTrainer", net), batch_of(1))
    assert_equal_on_all_ranks(weights(net)[0], "weights")


@pytest.mark.needs(2)
def test_states_of_another_network_are_refused(tmp_path):
    path, nets = str(tmp_path / "states"), [network(mx.gluon.nn.Dense(50, in_units=units)) for units in (80, 70)]
    data = [(array(np.ones((4, units), "float32")), array(np.ones((4, 50), "float32"))) for units in (80, 70)]
    train(nets[0], mine := trainer_of("DistributedTrainer", nets[0]), data[0])
    mine.save_states(path)
    trainer = trainer_of("ShardedTrainer", nets[1])
    trainer.load_states(path)
    before = weights(nets[1])
    with pytest.raises(InvalidRequestError, match=r"(?s)other shapes than their.*rank 0: '[\w.]+weight' \(key"):
        train(nets[1], trainer, data[1])
    for now, then in zip(weights(nets[1]), before):
        np.testing.assert_array_equal(now, then)


def test_entangled_optimizers_are_refused(tmp_path):
    class Mine(mx.optimizer.Nadam):
        pass

    class Counting(RowMeans):
        def update(self, index, weight, grad, state):
            self._update_count("all")

        update_multi_precision = step = update

    path, net = str(tmp_path / "states"), mlp(seed=5)
    with pytest.raises(InvalidRequestError, match="Nadam updates no parameter alone"):
        hvd.ShardedTrainer(net.collect_params(), Mine())
    train(net, other := trainer_of("DistributedTrainer", net, "nadam", learning_rate=0.1), batch_of(1))
    other.save_states(path)
    trainer = trainer_of("ShardedTrainer", net)
    with pytest.raises(InvalidRequestError, match="Nadam updates no parameter alone"):
        trainer.load_states(path)
    train(net, trainer, batch_of(1))
    if process.current().topology.size > 1:
        with pytest.raises(InvalidRequestError, match="counts updates of 'all'"):
            train(net, hvd.ShardedTrainer(net.collect_params(), Counting()), batch_of(1))


def test_an_exhausted_worker_updates_its_share(small_cuts, rank):
    """With a Trainer that is not sharded in the same Join, as in PyTorch's tutorial."""
    nets = [mlp(seed=5), mlp(seed=5), mlp(seed=5)]
    kinds = ("DistributedTrainer", "ShardedTrainer", "ShardedTrainer")
    trainers = [trainer_of(kind, net) for kind, net in zip(kinds, nets)]
    with Join(trainers):
        for step in range(2 + rank):
            for net, trainer in zip(nets, trainers):
                train(net, trainer, batch_of(step, rank))
    assert bits_of(nets[0]) == bits_of(nets[1]) == bits_of(nets[2])
    assert_equal_on_all_ranks(weights(nets[0])[0], "weights")


@pytest.mark.needs(3)
def test_of_a_process_set(small_cuts, dynamic, rank):
    members = hvd.add_process_set([0, 2])
    values = []
    for kind in (hvd.DistributedTrainer, hvd.ShardedTrainer):
        net = mlp(seed=5)
        trainer = kind(net.collect_params(), "adam", dict(ADAM), process_set=members)
        train(net, trainer, batch_of(1, rank), batch_of(2, rank))
        values.append(bits_of(net))
    assert values[0] == values[1]


def test_refusals():
    net = mlp(contexts=[mx.cpu(0), mx.cpu(1)])
    with pytest.raises(InvalidRequestError, match=r"ShardedTrainer: .*cpu\(0\), cpu\(1\), and not on one"):
        trainer_of("ShardedTrainer", net)
    with pytest.raises(InvalidRequestError, match="Nadam updates no parameter alone"):
        trainer_of("ShardedTrainer", mlp(), "nadam", learning_rate=0.1)
    if not is_mxnet_2():
        embedding = network(mx.gluon.nn.Embedding(5, 3, sparse_grad=True))
        with pytest.raises(InvalidRequestError, match="row_sparse"):
            trainer_of("ShardedTrainer", embedding)
