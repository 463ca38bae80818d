"""Trainers in a Join: workers without input make the same updates, table D of the contract."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from kvstore_hvd.errors import DivergedError, HorovodInternalError, InvalidRequestError, MismatchError
from kvstore_hvd.join import Join
from kvstore_hvd.world import process
from support import gluon
from support.gluon import array, assert_alike, batch_of, mlp, network, parameters, states_of, weights
from support.joinables import Counter, Nothing
from support.zero_copy import meet_again, settings

mx = pytest.importorskip("mxnet")

BATCH = 4
OPTIMIZERS = {"sgd": {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}, "adam": {"learning_rate": 0.01}}


def trainer_of(net, optimizer="sgd", **options):
    return hvd.DistributedTrainer(net.collect_params(), optimizer, options or dict(OPTIMIZERS[optimizer]))


def train(net, trainer, steps=1, seed=1):
    gluon.train(net, trainer, *[batch_of(seed)] * steps, size=BATCH)


def assert_same_everywhere(trainer):
    mine = [each.asnumpy().tobytes() for param in trainer._params for each in param.list_data()], states_of(trainer)
    assert hvd.allgather_object(mine) == [mine] * hvd.size()


@pytest.mark.parametrize("fails", [False, True])
def test_the_store_sums_after_a_join_as_before(rank, size, fails):
    store, net = mx.kv.create("horovod"), mlp()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", kvstore=store)
    if fails:
        trainer._update = lambda *_: 1 / 0
        kvstore_hvd.barrier()  # all are in this test
    errors = (ZeroDivisionError, HorovodInternalError)  # the latter where another worker has left before
    with pytest.raises(errors) if fails else contextlib.nullcontext(), Join([trainer]):
        train(net, trainer)
    if fails:
        kvstore_hvd.reset()
    x = mx.nd.ones((2,))
    store.pushpull("x", x)
    assert x.asnumpy().tolist() == [size, size]


@pytest.mark.parametrize(("follows", "empty"), [("Trainer", "first"), ("broadcast_parameters", "last")])
def test_no_batch_and_no_shape(rank, size, empty, follows):
    nn = mx.gluon.nn
    net = network(nn.Dense(5, activation="tanh"), nn.BatchNorm(), nn.Dense(3), seed=rank, hybridize=True)
    if follows == "broadcast_parameters":
        hvd.broadcast_parameters(net.collect_params(), root_rank=size - 1)
    trainer = trainer_of(net)
    absent = {"first": 0, "last": size - 1}[empty] if size > 1 else -1
    with Join([trainer], divide_by_initial_world_size=False):
        if rank != absent:
            train(net, trainer, 2)
    assert parameters(net)[0].shape == (5, 8)
    # Running statistics, too: those of one that joined last.
    assert_same_everywhere(trainer)


@pytest.mark.parametrize(("last", "beside"), [("lowest", ""), ("two", "another"), ("lowest", "a Join within")])
def test_statistics_are_those_of_who_joined_last(rank, size, last, beside):
    """Of several the one with the highest rank: the same on all workers."""
    nn = mx.gluon.nn
    net = network(nn.Dense(5, in_units=8), nn.BatchNorm(in_channels=5), nn.Dense(3, in_units=5))
    trainer = trainer_of(net)
    longest = {"lowest": [0], "two": [0, size // 2]}[last]
    within = Join([trainer_of(mlp())]) if beside == "a Join within" else contextlib.nullcontext()
    with Join([trainer, Nothing()] if beside == "another" else [trainer]):
        with within:  # whoever follows the others there may be the last one here
            if beside == "a Join within" and rank not in longest:
                train(net, trainer, 2, seed=rank)
        # The first step gives all workers what rank 0 has: two at least, or it is that.
        train(net, trainer, 4 if rank in longest else 2, seed=rank)
        own = running_statistics(net)
    everybody = hvd.allgather_object(own)
    assert len({each.tobytes() for each in everybody}) == size
    np.testing.assert_array_equal(running_statistics(net), everybody[max(longest)])
    assert_same_everywhere(trainer)


def running_statistics(net):
    return np.concatenate([each.data().asnumpy() for each in parameters(net) if "running" in each.name])


def test_steps_take_no_additional_operations(rank, size):
    net = mlp()
    trainer = trainer_of(net)
    counts = []
    with Join([trainer]):
        for steps in (1, 3):
            train(net, trainer, steps)
            mx.nd.waitall()
            counts.append(sum(each.operations for each in process.current().member.report().names.values()))
    assert counts[1] - counts[0] == (0 if size == 1 else 3 * len(parameters(net)))


def test_a_difference_is_found_in_the_end(rank, size):
    """A learning rate that the program changes on some workers only."""
    net = mlp()
    trainer = trainer_of(net)
    error = pytest.raises(DivergedError, match="at the end of a Join") if size > 1 else contextlib.nullcontext()
    with error, Join([trainer]):
        for step in range(2 + 2 * (rank == 0)):
            if step == 3:
                trainer.set_learning_rate(0.5)
            train(net, trainer)


def test_gradients_that_add_up(rank, size):
    """A worker that had no input begins its next epoch without the sums of the others. Batches differ in size."""
    (weight,) = parameters(network(mx.gluon.nn.Dense(1, in_units=1, use_bias=False)))
    weight.grad_req = "add"
    trainer = hvd.DistributedTrainer([weight], "sgd", {"learning_rate": 1.0})
    before = weight.data().asnumpy()
    for epoch in range(2):
        with Join([trainer]):
            for _ in range(3 if rank == 0 or epoch == 1 else 1):
                with mx.autograd.record():
                    weight.data().sum().backward()
                trainer.step(1 + rank)
                weight.grad()[:] = 0
    np.testing.assert_allclose(before - weight.data().asnumpy(), 4 * 2 / (size + 1) + 2 / size, rtol=1e-6)


@pytest.mark.needs(3)
def test_in_a_process_set(dynamic, rank, size):
    members = hvd.add_process_set([0, size - 1])
    net = mlp()  # on all: MXNet 1 names parameters by counters
    if rank in (0, size - 1):
        options = {"process_set": members, "compression": hvd.Compression.fp16}
        trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"momentum": 0.9}, **options)
        with Join([trainer]):
            train(net, trainer, 1 + rank)
        assert trainer._optimizer.num_update == size
        parts = hvd.allgather_object([each.tobytes() for each in weights(net)], process_set=members)
        assert parts[0] == parts[1]
        text = "mine" if rank > 0 else f"rank {size - 1} left a Join context with ValueError: mine"
        with pytest.raises(ValueError if rank > 0 else HorovodInternalError, match=text), Join([trainer]):
            if rank > 0:
                raise ValueError("mine")


def test_the_scale_of_amp(rank, size):
    net = mlp()
    trainer = trainer_of(net)
    amp, scaler = gluon.scaler_of(trainer)
    scaler._scale_seq_len = 2
    loss_of = mx.gluon.loss.L2Loss()
    data, label = gluon.samples(BATCH)
    with Join([trainer]):
        for step in range(3 + 3 * rank):
            with mx.autograd.record():
                loss = loss_of(net(gluon.array(data)), gluon.array(label))
                if step == 4:
                    loss = loss * 1e38
                with amp.scale_loss(loss, trainer) as scaled:
                    mx.autograd.backward(scaled)
            trainer.step(BATCH)
    assert trainer._optimizer.num_update == 3 * size - (size > 1)
    assert_same_everywhere(trainer)
    assert_alike(np.array([scaler.loss_scale, scaler._unskipped, trainer._scale]))


@pytest.mark.parametrize("initial", [False, True])
def test_small_gradients_of_float16(rank, size, initial):
    """They are divided by the optimizer, in float32: as means they would vanish. On two devices."""
    weight, contexts = mx.gluon.Parameter("weight", shape=(4,)), [mx.cpu(0), mx.cpu(1)]
    weight.initialize(mx.init.Zero(), ctx=contexts)
    weight.cast("float16")
    trainer = hvd.DistributedTrainer([weight], "sgd", {"learning_rate": 1.0, "multi_precision": True})
    values = np.full(4, 6.85e-5, "float16")
    batch_size = 1024 * (1 + rank)
    with Join([trainer], divide_by_initial_world_size=initial):
        for _ in range(1 + (rank == size - 1)):
            with mx.autograd.record():
                losses = [(array(values, ctx) * weight.data(ctx)).sum() for ctx in contexts]
            mx.autograd.backward(losses)
            trainer.step(batch_size)
    gradient = 2 * float(values[0])
    first = gradient * size / (1024 * size * (size + 1) / 2)
    second = gradient / (1024 * size * (size if initial else 1))
    (state,) = trainer._updaters[0].states.values()
    (master,) = (each for each in state if each is not None)
    np.testing.assert_allclose(-master.asnumpy(), np.full(4, first + second), rtol=2e-3)  # sums are rounded to float16
    assert_same_everywhere(trainer)


@pytest.fixture
def two():
    nets = [mlp(seed=1), mlp(seed=2)]
    trainers = [trainer_of(nets[0]), trainer_of(nets[1], "adam")]
    return nets, trainers, lambda place: train(nets[place], trainers[place])


def assert_updates(two, first, second):
    for trainer, count in zip(two[1], (first, second)):
        assert trainer._optimizer.num_update == count
        assert_same_everywhere(trainer)


def test_two_trainers_in_any_pattern(rank, size, two):
    """Each is followed by itself: one may step more often than the other."""
    with Join(two[1]):
        for step in range(3 + 2 * rank):
            two[2](0)
            if step % 2:
                two[2](1)
                two[2](1)
    assert_updates(two, 1 + 2 * size, 2 * size)


@pytest.mark.parametrize("trainer_first", [False, True])
def test_with_other_joinables(rank, size, trainer_first, two):
    """Then each iteration tells that this worker is still there, as in PyTorch."""
    trainer, other = two[1][0], Counter()
    calls = [lambda: two[2](0), lambda: other.count(1)]
    with Join([trainer, other] if trainer_first else [other, trainer]):
        for _ in range(1 + rank):
            for call in calls if trainer_first else calls[::-1]:
                call()
    assert other.sums == [size - step for step in range(size)]
    assert_same_everywhere(trainer)


@pytest.mark.slow
def test_a_worker_that_waits_long_is_no_stall(rank, size, caplog):
    """To wait for workers with more input may take any time: it has no timeout, and is in no report."""
    counter = Counter()
    with settings(KVHVD_TIMEOUT="2", KVHVD_STALL_CHECK_TIME_S="1"):
        meet_again()
        with Join([counter]):
            for step in range(1 + (rank == size - 1)):
                threading.Event().wait(3.5 * step)
                counter.count(1)
        assert counter.sums == [size, 1]
    assert "waited" not in caplog.text
    meet_again()


def test_what_is_refused(rank, size, two):
    params, trainer = two[0][0].collect_params(), two[1][0]
    store = mx.kv.create("horovod")
    shared = [mx.gluon.Trainer(net.collect_params(), "sgd", kvstore=store) for net in two[0]]
    for wrong, error, text in (
        ([mx.gluon.Trainer(params, "sgd", kvstore=None)], InvalidRequestError, "kvstore='horovod'"),
        ([mx.gluon.Trainer(params, "sgd", kvstore="device")], InvalidRequestError, "kvstore='horovod'"),
        ([3], TypeError, "Trainers of Gluon, not a int"),
        (shared, InvalidRequestError, "two Trainers use the same store"),
        ([trainer, trainer], ValueError, "given twice"),
    ):
        with pytest.raises(error, match=text):
            Join(wrong)
    with Join([trainer]), pytest.raises(RuntimeError, match="in a Join already"), Join([trainer]):
        pass
    with pytest.raises(TypeError, match="divide_by_inital_world_size"):
        Join([trainer], divide_by_inital_world_size=False)
    if size > 1:
        with Join([trainer]):
            for wrong in (0, -4, "four", float("nan"), float("inf")):
                with pytest.raises(InvalidRequestError, match="batch_size is"):
                    trainer.step(wrong)
            for call in (trainer.allreduce_grads, lambda: trainer.update(BATCH)):
                with pytest.raises(InvalidRequestError, match="call step"):
                    call()
            with pytest.raises(InvalidRequestError, match="its gradient is stale"):
                trainer.step(BATCH, ignore_stale_grad=True)
            two[2](0)
    assert_same_everywhere(trainer)
    for parameter in parameters(two[0][0]):
        parameter.list_grad()[0][:] = rank
    trainer.allreduce_grads()  # outside of a Join it is what it was
    assert_alike(*gluon.gradients(two[0][0]))


@pytest.mark.parametrize("last_is_common", [False, True])
def test_steps_of_trainers_in_another_order(rank, size, last_is_common, two):
    """A worker whose own last step waits for another one follows that one meanwhile."""
    with Join(two[1]):
        for place in [0] if rank == 0 else [1, 0] if last_is_common else [1]:
            two[2](place)
            if rank and place:
                mx.nd.waitall()
    assert_updates(two, 1, int(size > 1))


def test_nested_and_nobody_last(rank, size, two):
    """All workers follow a step of the outer context's Trainer as they leave one of the inner contexts."""
    around, within = (Join([trainer]) for trainer in two[1])
    with around:
        for number in (1 + rank, size - rank):
            with within:
                for _ in range(number):
                    two[2](0)
                    two[2](1)
    assert_updates(two, 2 * size, 2 * size)
    two[2](0)  # outside, everybody has to step again
    assert_updates(two, 2 * size + 1, 2 * size)


def test_a_disabled_context_around_is_not_followed(rank, size, two):
    """Its Trainer's steps wait for those of all workers."""
    with Join(two[1][:1], enable=False):
        with Join(two[1][1:]):
            for _ in range(1 + rank):
                two[2](1)
            if rank > 0:
                two[2](0)
        if rank == 0:
            two[2](0)
    assert_updates(two, 1, size)


def test_one_thread_only(rank, size, two):
    other = Join([two[1][1]])
    with Join([two[1][0]]):
        with ThreadPoolExecutor(1) as pool, pytest.raises(RuntimeError, match="another thread is in a Join"):
            pool.submit(other.__enter__).result()
        for _ in range(1 + rank):
            two[2](0)
    with other:
        pass
    assert_updates(two, size, 0)


@pytest.mark.needs(2)
def test_workers_at_the_ends_of_different_contexts(rank, size, two):

    def run():
        with Join([two[1][0]]):
            if rank == 0:
                with Join([two[1][1]]):
                    pass

    with pytest.raises(MismatchError, match="at the end of one Join, and others at the end of another"):
        run()
    assert kvstore_hvd.allreduce(np.ones(1), "goes on")[0] == size
    kvstore_hvd.reset()  # contexts were counted differently
    with Join(two[1][:1]):
        for _ in range(1 + rank):
            two[2](0)
    assert_updates(two, size, 0)
