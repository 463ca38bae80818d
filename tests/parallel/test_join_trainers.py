"""What Trainers compute in a Join: workers without input make the same updates, table D of the contract."""

import contextlib
import importlib

import numpy as np
import pytest

import kvstore_hvd.mxnet as hvd
from kvstore_hvd.errors import DivergedError
from kvstore_hvd.join import Join
from kvstore_hvd.world import process
from support.arrays import assert_equal_on_all_ranks
from support.gluon import array, backward, is_mxnet_2, mlp, network, parameters, samples, weights
from support.joinables import Nothing
from support.uneven import (
    BATCH,
    assert_close,
    assert_same_everywhere,
    batches_of,
    counts_of,
    states,
    train,
    train_alone,
    trainer_of,
)

mx = pytest.importorskip("mxnet")


@pytest.mark.parametrize(("kind", "skew"), [("Trainer", "many"), ("DistributedTrainer", "all but one")])
def test_exact(rank, size, kind, skew):
    """Parameters and states are equal on all workers, and those of one process on all samples.

    Divided by the initial number of workers, one without input counts as one with an average batch and no gradients.
    Random trainings divide by the number of those that still have input.
    """
    counts = counts_of(size, skew)
    data, label = samples(sum(counts))
    net, alone = mlp(hybridize=True), mlp()
    trainer = trainer_of(kind, net)
    factor = 1 if kind == "DistributedTrainer" else size  # what the store sums is divided by batches of all workers
    with Join([trainer]):
        train(net, trainer, data, label, batches_of(counts, rank), lambda batch: factor * len(batch))
    assert_same_everywhere(net, trainer, f"exact/{kind}/{skew}")
    train_alone(alone, counts, data, label, lambda present: size * sum(map(len, present)) / len(present))
    assert_close(net, alone)


def test_the_store_sums_after_a_join_as_before(rank, size):
    store, net = mx.kv.create("horovod"), mlp()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", kvstore=store)
    data, label = samples(BATCH)
    with Join([trainer]):
        train(net, trainer, data, label, [range(BATCH)])
    x = mx.nd.ones((2,))
    store.pushpull("x", x)
    assert x.asnumpy().tolist() == [size, size]


def test_several_devices_and_a_schedule(rank, size):
    """All devices of all workers stay equal, and the learning rate follows the updates."""
    contexts = [mx.cpu(0), mx.cpu(1)]
    net = mlp(contexts=contexts)
    schedule = mx.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.1)
    trainer = trainer_of("DistributedTrainer", net, "sgd", learning_rate=0.1, momentum=0.9, lr_scheduler=schedule)
    steps = 2 + 2 * rank
    data, label = samples(8 * size * 2, seed=4)
    with Join([trainer], divide_by_initial_world_size=False):
        for step in range(steps):
            at = slice((rank + step) % 8, None, 8)
            backward(net, [(array(data[at], ctx), array(label[at], ctx)) for ctx in contexts])
            trainer.step(2 * len(data[at]))
    assert trainer._optimizer.num_update == 2 * size
    assert_same_everywhere(net, trainer, "devices")
    for first, second in zip(weights(net, 0), weights(net, 1)):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(("follows", "empty"), [("Trainer", "first"), ("broadcast_parameters", "last")])
def test_no_batch_and_no_shape(rank, size, empty, follows):
    """A worker without any input learns the shapes of its parameters from the others."""
    nn = mx.gluon.nn
    net = network(nn.Dense(5, activation="tanh"), nn.BatchNorm(), nn.Dense(3), seed=rank, hybridize=True)
    if follows == "broadcast_parameters":
        hvd.broadcast_parameters(net.collect_params(), root_rank=size - 1)
    trainer = trainer_of("DistributedTrainer", net)
    absent = {"first": 0, "last": size - 1}[empty] if size > 1 else -1
    data, label = samples(12, seed=7)
    with Join([trainer], divide_by_initial_world_size=False):
        if rank != absent:
            train(net, trainer, data, label, [range(6), range(6, 12)])
    assert parameters(net)[0].shape == (5, 8)
    # Running statistics, too: those of one that joined last.
    assert_same_everywhere(net, trainer, f"shapes/{empty}/{follows}")


@pytest.mark.parametrize(("last", "beside"), [("lowest", False), ("two", True)])
def test_statistics_are_those_of_who_joined_last(rank, size, last, beside):
    """Of several the one with the highest rank: the same on all workers."""
    nn = mx.gluon.nn
    net = network(nn.Dense(5, in_units=8), nn.BatchNorm(in_channels=5), nn.Dense(3, in_units=5))
    trainer = trainer_of("DistributedTrainer", net)
    longest = {"lowest": [0], "two": [0, size // 2]}[last]
    data, label = samples(BATCH, seed=20 + rank)
    with Join([trainer, Nothing()] if beside else [trainer]):
        # The first step gives all workers what rank 0 has: two at least, or it is that.
        train(net, trainer, data, label, [range(BATCH)] * (4 if rank in longest else 2))
        own = running_statistics(net)
    everybody = hvd.allgather_object(own)
    assert len({each.tobytes() for each in everybody}) == size
    np.testing.assert_array_equal(running_statistics(net), everybody[max(longest)])
    assert_same_everywhere(net, trainer, f"last/{last}/{beside}")


def running_statistics(net):
    return np.concatenate([each.data().asnumpy() for each in parameters(net) if "running" in each.name])


def test_steps_take_no_additional_operations(rank, size):
    """While all have input, nothing but the gradients is sent."""
    net = mlp()
    trainer = trainer_of("DistributedTrainer", net)
    data, label = samples(BATCH)
    with Join([trainer]):
        train(net, trainer, data, label, [range(BATCH)])
        mx.nd.waitall()
        before = sum(each.operations for each in process.current().member.report().names.values())
        train(net, trainer, data, label, [range(BATCH)] * 3)
        mx.nd.waitall()
        after = sum(each.operations for each in process.current().member.report().names.values())
    assert after - before == (0 if size == 1 else 3 * len(parameters(net)))


def test_a_difference_is_found_in_the_end(rank, size):
    """A learning rate that the program changes on some workers only."""
    net = mlp()
    trainer = trainer_of("DistributedTrainer", net)
    data, label = samples(BATCH)
    error = pytest.raises(DivergedError, match="at the end of a Join") if size > 1 else contextlib.nullcontext()
    with error, Join([trainer]):
        for step in range(2 + 2 * (rank == 0)):
            if step == 3:
                trainer.set_learning_rate(0.5)
            train(net, trainer, data, label, [range(BATCH)])


def test_no_worker_has_input(rank, size):
    """Nothing happens, and nothing is compared."""
    net = network(mx.gluon.nn.Dense(3))
    trainer = trainer_of("DistributedTrainer", net)
    with Join([trainer]):
        pass
    with pytest.raises(mx.gluon.parameter.DeferredInitializationError):
        parameters(net)[0].data()
    assert trainer._optimizer.num_update == 0


def test_gradients_that_add_up(rank, size):
    """A worker that had no input begins its next epoch without the sums of the others."""
    net = network(mx.gluon.nn.Dense(1, in_units=1, use_bias=False))
    (weight,) = parameters(net)
    weight.grad_req = "add"
    trainer = hvd.DistributedTrainer([weight], "sgd", {"learning_rate": 1.0})
    before = weight.data().asnumpy()
    for epoch in range(2):
        with Join([trainer]):
            for _ in range(3 if rank == 0 or epoch == 1 else 1):
                with mx.autograd.record():
                    loss = weight.data().sum()
                loss.backward()
                trainer.step(1)
                weight.grad()[:] = 0
    np.testing.assert_allclose(before - weight.data().asnumpy(), 1 + 2 / size + 3, rtol=1e-6)


def test_disabled(rank, size):
    """Steps are as they are outside."""
    nets = [mlp(), mlp()]
    data, label = samples(BATCH)
    for net in nets:
        trainer = trainer_of("DistributedTrainer", net)
        with Join([trainer], enable=False) if net is nets[0] else contextlib.nullcontext():
            train(net, trainer, data, label, [range(BATCH)])
    for mine, theirs in zip(*map(weights, nets)):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.needs(3)
@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_in_a_process_set(dynamic, rank, size, compression):
    """The other workers do not take part; the same of compressed gradients."""
    members = hvd.add_process_set([0, size - 1])
    net = mlp()  # on all: MXNet 1 names parameters by counters
    if rank in (0, size - 1):
        options = {"process_set": members, "compression": getattr(hvd.Compression, compression)}
        trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"momentum": 0.9}, **options)
        data, label = samples(BATCH)
        with Join([trainer]):
            train(net, trainer, data, label, [range(BATCH)] * (1 + rank))
        assert trainer._optimizer.num_update == size
        parts = hvd.allgather_object([each.tobytes() for each in weights(net)], process_set=members)
        assert parts[0] == parts[1]


def test_the_scale_of_amp(rank, size):
    """Steps that overflow are skipped by all, and the scale grows and shrinks alike."""
    amp = importlib.import_module("mxnet.amp" if is_mxnet_2() else "mxnet.contrib.amp")
    scaler = importlib.import_module(amp.__name__ + ".loss_scaler").LossScaler()
    scaler._scale_seq_len = 2
    net = mlp()
    trainer = trainer_of("DistributedTrainer", net)
    trainer._amp_loss_scaler, trainer._amp_original_scale = scaler, trainer._scale
    loss_of = mx.gluon.loss.L2Loss()
    data, label = samples(BATCH)
    with Join([trainer]):
        for step in range(3 + 3 * rank):
            with mx.autograd.record():
                loss = loss_of(net(array(data)), array(label))
                if step == 4:
                    loss = loss * 1e38
                with amp.scale_loss(loss, trainer) as scaled:
                    mx.autograd.backward(scaled)
            trainer.step(BATCH)
    assert trainer._optimizer.num_update == 3 * size - (size > 1)
    assert_same_everywhere(net, trainer, "amp")
    assert_equal_on_all_ranks(np.array([scaler.loss_scale, scaler._unskipped, trainer._scale]), "scale")


class Product(mx.gluon.Block):
    """Multiplies with a parameter: something that MXNet can do in float16 on a CPU."""

    def __init__(self):
        super().__init__()
        make = mx.gluon.Parameter if is_mxnet_2() else self.params.get
        self.weight = make("weight", shape=(4,))

    def forward(self, x):
        return x * self.weight.data()


@pytest.mark.parametrize("initial", [False, True])
def test_small_gradients_of_float16(rank, size, initial):
    """They are divided by the optimizer, in float32: as means they would vanish."""
    net = Product()
    net.initialize(mx.init.Zero())
    net.cast("float16")
    trainer = trainer_of("DistributedTrainer", net, learning_rate=1.0, multi_precision=True)
    x = array(np.full(4, 1.37e-4, "float16"))
    batch_size = 1024 * (1 + rank)
    with Join([trainer], divide_by_initial_world_size=initial):
        for _ in range(1 + (rank == size - 1)):
            with mx.autograd.record():
                loss = net(x).sum()
            loss.backward()
            trainer.step(batch_size)
    gradient = float(np.float16(1.37e-4))
    first = gradient * size / (1024 * size * (size + 1) / 2)
    second = gradient / (1024 * size * (size if initial else 1))
    (master,) = (each for each in states(trainer)[:-1] if each.dtype == np.float32)
    np.testing.assert_allclose(-master, np.full(4, first + second), rtol=2e-3)  # sums are rounded to float16
    assert_same_everywhere(net, trainer, f"halves/{initial}")
