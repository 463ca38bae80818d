"""Trainers in a Join: workers without input make the same updates, table D of the contract."""

from __future__ import annotations

import importlib
import threading

import numpy as np
import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from kvstore_hvd import engine
from kvstore_hvd.errors import DivergedError, HorovodInternalError, InvalidRequestError, MismatchError
from kvstore_hvd.join import Join, Joinable
from support.arrays import assert_equal_on_all_ranks
from support.gluon import array, backward, is_mxnet_2, mlp, network, parameters, samples, weights
from support.zero_copy import meet_again, settings

mx = pytest.importorskip("mxnet")

BATCH = 4
KINDS = ["Trainer", "DistributedTrainer"]
OPTIMIZERS = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01},
    "adam": {"learning_rate": 0.01},
}
SKEWS = ["none", "one", "many", "all but one"]


def counts_of(size, skew):
    """How many samples each worker has; the last batch of some is smaller than the others."""
    return [
        {
            "none": 3 * BATCH,
            "one": 3 * BATCH + (r == size - 1),
            "many": BATCH * (1 + 3 * r) + r,
            "all but one": 0 if r != size // 2 else 4 * BATCH + 1,
        }[skew]
        for r in range(size)
    ]


def batches_of(counts, rank):
    """The batches of one worker, as places in the samples of all."""
    first, count = sum(counts[:rank]), counts[rank]
    return [range(first + at, first + min(at + BATCH, count)) for at in range(0, count, BATCH)]


def trainer_of(kind, net, optimizer="sgd", **options):
    options = options or dict(OPTIMIZERS[optimizer])
    if kind == "DistributedTrainer":
        return hvd.DistributedTrainer(net.collect_params(), optimizer, options)
    return mx.gluon.Trainer(net.collect_params(), optimizer, options, kvstore="horovod")


def states(trainer):
    """Everything that an optimizer remembers."""

    def flat(state):
        if state is None:
            return []
        return [state.asnumpy()] if hasattr(state, "asnumpy") else [x for each in state for x in flat(each)]

    values = [x for updater in trainer._updaters for key in sorted(updater.states) for x in flat(updater.states[key])]
    optimizer = trainer._optimizer
    return [*values, np.array([optimizer.num_update, optimizer.learning_rate])]


def assert_same_everywhere(net, trainer, name):
    for place, values in enumerate([*weights(net), *states(trainer)]):
        assert_equal_on_all_ranks(values, f"{name}/{place}")


def train(net, trainer, data, label, batches, batch_size=len):
    for batch in batches:
        backward(net, [(array(data[list(batch)]), array(label[list(batch)]))])
        trainer.step(batch_size(batch))


def train_alone(net, optimizer, counts, data, label, batch_size, **options):
    """One process on the samples that all workers have in each step."""

    class Local(mx.gluon.Trainer):
        _kvstore_hvd_synchronised = True

    trainer = Local(net.collect_params(), optimizer, options or dict(OPTIMIZERS[optimizer]), kvstore=None)
    each = [batches_of(counts, r) for r in range(len(counts))]
    for step in range(max(map(len, each))):
        present = [batches[step] for batches in each if step < len(batches)]
        samples_of_step = [at for batch in present for at in batch]
        backward(net, [(array(data[samples_of_step]), array(label[samples_of_step]))])
        trainer.step(batch_size(present))
    return trainer


def assert_close(net, alone):
    for mine, theirs in zip(weights(net), weights(alone)):
        assert np.linalg.norm(mine - theirs) <= 1e-6 * np.linalg.norm(theirs)


@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize("optimizer", sorted(OPTIMIZERS))
@pytest.mark.parametrize("kind", KINDS)
def test_exact(rank, size, kind, optimizer, skew):
    """Parameters and states are equal on all workers, and those of one process on all samples."""
    counts = counts_of(size, skew)
    data, label = samples(sum(counts))
    net, alone = mlp(hybridize=True), mlp()
    if optimizer == "adam":  # it divides by the root of what it has seen, which enlarges the rounding of float32
        data, label = data.astype("float64"), label.astype("float64")
        for each in (net, alone):
            each.cast("float64")
    trainer = trainer_of(kind, net, optimizer)
    factor = 1 if kind == "DistributedTrainer" else size  # what the store sums is divided by batches of all workers
    with Join([trainer], divide_by_initial_world_size=False):
        train(net, trainer, data, label, batches_of(counts, rank), lambda batch: factor * len(batch))
    assert_same_everywhere(net, trainer, f"exact/{kind}/{optimizer}/{skew}")
    train_alone(alone, optimizer, counts, data, label, lambda present: sum(map(len, present)))
    assert_close(net, alone)


@pytest.mark.parametrize("skew", SKEWS)
@pytest.mark.parametrize("kind", KINDS)
def test_divided_by_the_initial_world_size(rank, size, kind, skew):
    """A worker without input counts as one with an average batch and gradients of zero."""
    counts = counts_of(size, skew)
    data, label = samples(sum(counts))
    net, alone = mlp(hybridize=True), mlp()
    trainer = trainer_of(kind, net)
    factor = 1 if kind == "DistributedTrainer" else size
    with Join([trainer]):
        train(net, trainer, data, label, batches_of(counts, rank), lambda batch: factor * len(batch))
    assert_same_everywhere(net, trainer, f"initial/{kind}/{skew}")
    train_alone(alone, "sgd", counts, data, label, lambda present: size * sum(map(len, present)) / len(present))
    assert_close(net, alone)


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


@pytest.mark.parametrize("follows", ["Trainer", "broadcast_parameters"])
@pytest.mark.parametrize("empty", ["first", "last"])
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


def test_two_trainers_in_any_pattern(rank, size):
    """Each is followed by itself: one may step more often than the other."""
    first, second = mlp(seed=1), mlp(seed=2)
    trainers = [trainer_of("DistributedTrainer", first), trainer_of("Trainer", second, "adam")]
    data, label = samples(BATCH * 2)
    batch = [range(BATCH)]
    with Join(trainers):
        for step in range(3 + 2 * rank):
            train(first, trainers[0], data, label, batch)
            if step % 2:
                train(second, trainers[1], data, label, batch * 2, lambda one: size * len(one))
    assert trainers[0]._optimizer.num_update == 1 + 2 * size
    assert trainers[1]._optimizer.num_update == 2 * size
    assert_same_everywhere(first, trainers[0], "first")
    assert_same_everywhere(second, trainers[1], "second")


def test_nested_and_again(rank, size):
    """Who has left the inner context follows the trainers of the outer one as well; contexts may be used again."""
    outer, inner = mlp(seed=1), mlp(seed=2)
    trainers = [trainer_of("DistributedTrainer", outer), trainer_of("DistributedTrainer", inner)]
    data, label = samples(BATCH)
    around, within = Join([trainers[0]]), Join([trainers[1]])
    for _ in range(2):
        with around, within:
            for _ in range(1 + rank):
                train(outer, trainers[0], data, label, [range(BATCH)])
                train(inner, trainers[1], data, label, [range(BATCH)])
    for net, trainer, name in ((outer, trainers[0], "outer"), (inner, trainers[1], "inner")):
        assert trainer._optimizer.num_update == 2 * size
        assert_same_everywhere(net, trainer, name)
    # Outside, everybody has to step again.
    train(outer, trainers[0], data, label, [range(BATCH)])
    assert_same_everywhere(outer, trainers[0], "after")


class Sum(Joinable):
    """A joinable of the program's own, beside a Trainer."""

    def __init__(self):
        super().__init__()
        self.sums = []

    def join_hook(self, **kwargs):
        joinable = self

        class Hook(kvstore_hvd.join.JoinHook):
            def main_hook(self):
                joinable.sum(0)

        return Hook()

    @property
    def join_device(self):
        return mx.cpu()

    @property
    def join_process_group(self):
        return None

    def sum(self, number):
        self.sums.append(int(kvstore_hvd.allreduce(np.array([number]), "sum of a joinable")[0]))

    def step(self, number):
        Join.notify_join_context(self)
        self.sum(number)


@pytest.mark.parametrize("trainer_first", [False, True])
def test_with_other_joinables(rank, size, trainer_first):
    """Then each iteration tells that this worker is still there, as in PyTorch."""
    net, other = mlp(), Sum()
    trainer = trainer_of("DistributedTrainer", net)
    data, label = samples(BATCH)
    joinables = [trainer, other] if trainer_first else [other, trainer]
    with Join(joinables):
        for _ in range(1 + rank):
            if not trainer_first:
                other.step(1)
            train(net, trainer, data, label, [range(BATCH)])
            if trainer_first:
                other.step(1)
    assert other.sums == [size - step for step in range(size)]
    assert_same_everywhere(net, trainer, f"mixed/{trainer_first}")


def test_throwing(rank, size):
    """All workers raise as soon as one has no more input."""
    net = mlp()
    trainer = trainer_of("DistributedTrainer", net)
    data, label = samples(BATCH)
    steps = 2 + (rank > 0)

    def run():
        with Join([trainer], throw_on_early_termination=True):
            train(net, trainer, data, label, [range(BATCH)] * steps)

    if size == 1:
        run()
        return
    with pytest.raises(RuntimeError, match="Rank 0 exhausted all inputs" if rank == 0 else "Detected at least one"):
        run()
    assert trainer._optimizer.num_update == 2
    assert_same_everywhere(net, trainer, "throwing")


def test_an_exception_frees_the_others(rank, size):
    """One that waits in the Join, and one that is in the body."""
    if size == 1:
        return
    net = mlp()
    trainer = trainer_of("DistributedTrainer", net)
    data, label = samples(BATCH)
    expected = (ValueError, "no such file") if rank == 1 else (HorovodInternalError, "rank 1 left a Join.*ValueError")
    with pytest.raises(expected[0], match=expected[1]), Join([trainer]):
        for step in range(0 if rank == 0 else 5):
            if rank == 1 and step == 2:
                raise ValueError("no such file")
            train(net, trainer, data, label, [range(BATCH)])
            mx.nd.waitall()
    kvstore_hvd.reset()
    with Join([trainer]):
        train(net, trainer, data, label, [range(BATCH)] * rank)
    assert kvstore_hvd.allreduce(np.ones(1), "goes on")[0] == size


def test_a_worker_that_waits_long_is_no_stall(rank, size, caplog):
    """To wait for workers with more input may take any time: it has no timeout, and is in no report."""
    net = mlp()
    data, label = samples(BATCH)
    with settings(KVHVD_TIMEOUT="2", KVHVD_STALL_CHECK_TIME_S="1"):
        meet_again()
        trainer = trainer_of("DistributedTrainer", net)
        with Join([trainer]):
            if rank == size - 1:
                train(net, trainer, data, label, [range(BATCH)])
                if size > 1:
                    threading.Event().wait(3.5)
                train(net, trainer, data, label, [range(BATCH)])
        assert_same_everywhere(net, trainer, "patience")
    assert "waited" not in caplog.text
    meet_again()


def test_steps_take_no_additional_operations(rank, size):
    """While all have input, nothing but the gradients is sent."""
    net = mlp()
    trainer = trainer_of("DistributedTrainer", net)
    data, label = samples(BATCH)
    with Join([trainer]):
        train(net, trainer, data, label, [range(BATCH)])
        mx.nd.waitall()
        before = sum(each.operations for each in engine.current().report().names.values())
        train(net, trainer, data, label, [range(BATCH)] * 3)
        mx.nd.waitall()
        after = sum(each.operations for each in engine.current().report().names.values())
    assert after - before == (0 if size == 1 else 3 * len(parameters(net)))


def test_a_difference_is_found_in_the_end(rank, size):
    """A learning rate that the program changes on some workers only."""
    net = mlp()
    trainer = trainer_of("DistributedTrainer", net)
    data, label = samples(BATCH)

    def run():
        with Join([trainer]):
            for step in range(2 + 2 * (rank == 0)):
                if step == 3:
                    trainer.set_learning_rate(0.5)
                train(net, trainer, data, label, [range(BATCH)])

    if size == 1:
        run()
        return
    with pytest.raises(DivergedError, match="at the end of a Join"):
        run()


def test_what_is_refused(rank, size):
    """On all workers, before anything is submitted."""
    net = mlp()
    data, label = samples(BATCH)
    with pytest.raises(InvalidRequestError, match="kvstore='horovod'"):
        Join([mx.gluon.Trainer(net.collect_params(), "sgd", kvstore=None)])
    with pytest.raises(InvalidRequestError, match="kvstore='horovod'"):
        Join([mx.gluon.Trainer(net.collect_params(), "sgd", kvstore="device")])
    with pytest.raises(TypeError, match="Trainers of Gluon, not a int"):
        Join([3])
    with pytest.raises(TypeError, match="divide_by_inital_world_size"):
        Join([trainer_of("DistributedTrainer", net)], divide_by_inital_world_size=False)
    trainer = trainer_of("DistributedTrainer", net)
    if size > 1:
        with Join([trainer]):
            for wrong in (0, -1, "four", None, float("nan")):
                with pytest.raises(InvalidRequestError, match="batch_size is"):
                    trainer.step(wrong)
            with pytest.raises(InvalidRequestError, match="call step"):
                trainer.allreduce_grads()
            with pytest.raises(InvalidRequestError, match="call step"):
                trainer.update(BATCH)
            with pytest.raises(InvalidRequestError, match="its gradient is stale"):
                trainer.step(BATCH, ignore_stale_grad=True)
            train(net, trainer, data, label, [range(BATCH)])
    assert_same_everywhere(net, trainer, "refused")
    train(net, trainer, data, label, [range(BATCH)])
    trainer.allreduce_grads()  # outside of a Join it is what it was


def test_no_worker_has_input(rank, size):
    """Nothing happens, and nothing is compared."""
    net = network(mx.gluon.nn.Dense(3))
    with Join([trainer_of("DistributedTrainer", net)]):
        pass
    assert net.collect_params() is not None


def test_disabled(rank, size):
    """Steps are as they are outside."""
    net, alone = mlp(), mlp()
    data, label = samples(BATCH)
    trainers = [trainer_of("DistributedTrainer", each) for each in (net, alone)]
    with Join([trainers[0]], enable=False):
        train(net, trainers[0], data, label, [range(BATCH)])
    train(alone, trainers[1], data, label, [range(BATCH)])
    for mine, theirs in zip(weights(net), weights(alone)):
        np.testing.assert_array_equal(mine, theirs)


def test_in_a_process_set(dynamic, rank, size):
    """The other workers do not take part."""
    if size < 3:
        return
    members = hvd.add_process_set([0, size - 1])
    net = mlp()  # on all: MXNet 1 names parameters by counters
    if rank in (0, size - 1):
        trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, process_set=members)
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


def test_trainers_that_nobody_could_tell_apart(rank, size):
    """They are refused on all workers."""
    first, second = mlp(seed=1), mlp(seed=2)
    store = mx.kv.create("horovod")
    shared = [mx.gluon.Trainer(net.collect_params(), "sgd", kvstore=store) for net in (first, second)]
    with pytest.raises(InvalidRequestError, match="two Trainers use the same store"):
        Join(shared)
    with pytest.raises(ValueError, match="given twice"):
        Join([shared[0], shared[0]])
    with Join([shared[0]]), pytest.raises(RuntimeError, match="in a Join already"), Join([shared[0]]):
        pass


@pytest.mark.parametrize("last_is_common", [False, True])
def test_steps_of_trainers_in_another_order(rank, size, last_is_common):
    """A worker whose own last step waits for another one follows that one meanwhile."""
    nets = [mlp(seed=1), mlp(seed=2)]
    trainers = [trainer_of("DistributedTrainer", net) for net in nets]
    data, label = samples(BATCH)
    order = [0] if rank == 0 else [1, 0] if last_is_common else [1]
    with Join(trainers):
        for place in order:
            train(nets[place], trainers[place], data, label, [range(BATCH)])
            if rank and place:
                mx.nd.waitall()
    for place, (net, trainer) in enumerate(zip(nets, trainers)):
        assert trainer._optimizer.num_update == (place == 0 or size > 1)
        assert_same_everywhere(net, trainer, f"order/{last_is_common}/{place}")


def test_nested_and_nobody_last(rank, size):
    """All workers follow a step of the outer context's Trainer as they leave one of the inner contexts."""
    outer, inner = (mlp(seed=seed, hybridize=True) for seed in (1, 2))
    trainers = [trainer_of("DistributedTrainer", net) for net in (outer, inner)]
    data, label = samples(BATCH)
    with Join([trainers[0]]):
        for number in (1 + rank, size - rank):
            with Join([trainers[1]]):
                for _ in range(number):
                    train(outer, trainers[0], data, label, [range(BATCH)])
                    train(inner, trainers[1], data, label, [range(BATCH)])
    for net, trainer, name in ((outer, trainers[0], "outer"), (inner, trainers[1], "inner")):
        assert trainer._optimizer.num_update == 2 * size
        assert_same_everywhere(net, trainer, f"nobody last/{name}")


def test_again_after_different_numbers_of_contexts(rank, size):
    """One worker fails before it enters a context that others are in: in a new world they count anew."""
    if size == 1:
        return
    net = mlp()
    trainer = trainer_of("DistributedTrainer", net)
    data, label = samples(BATCH)
    kvstore_hvd.barrier()  # all are in this test
    if rank == size - 1:
        engine.current().abort("the test says so")
    else:
        with pytest.raises(HorovodInternalError, match="the test says so"), Join([trainer]):
            pass
    kvstore_hvd.reset()
    with Join([trainer]):
        train(net, trainer, data, label, [range(BATCH)] * (1 + rank))
    assert trainer._optimizer.num_update == size
    assert_same_everywhere(net, trainer, "counted anew")


def test_other_joinables_wait_long_too(rank, size):
    """Who has no input waits for the others' next iteration for any time."""
    with settings(KVHVD_TIMEOUT="2", KVHVD_STALL_CHECK_TIME_S="1"):
        meet_again()
        joinable = Sum()
        with Join([joinable]):
            for step in range(1 + (rank == size - 1)):
                if size > 1 and step:
                    threading.Event().wait(3.5)
                joinable.step(1)
        assert joinable.sums == [size, 1]
    meet_again()


def test_one_thread_only(rank, size):
    """In another one than the main thread, too."""
    net = mlp()
    trainer = trainer_of("DistributedTrainer", net)
    data, label = samples(BATCH)
    other = Join([trainer_of("DistributedTrainer", mlp())])
    entered, left = threading.Event(), threading.Event()

    def run():
        with Join([trainer]):
            entered.set()
            train(net, trainer, data, label, [range(BATCH)] * (1 + rank))
            left.wait()

    thread = threading.Thread(target=run)
    thread.start()
    entered.wait()
    with pytest.raises(RuntimeError, match="another thread is in a Join"), other:
        pass
    left.set()
    thread.join()
    with other:
        pass
    assert_same_everywhere(net, trainer, "thread")


def test_workers_at_the_ends_of_different_contexts(rank, size):
    """They would wait for each other for ever: all of them are told."""
    if size == 1:
        return
    first, second = trainer_of("DistributedTrainer", mlp(seed=1)), trainer_of("DistributedTrainer", mlp(seed=2))

    def run():
        with Join([first]):
            if rank == 0:
                with Join([second]):
                    pass

    with pytest.raises(MismatchError, match="at the ends of different Joins"):
        run()
    assert kvstore_hvd.allreduce(np.ones(1), "goes on")[0] == size
    kvstore_hvd.reset()  # contexts were counted differently


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


def test_compressed_gradients(rank, size):
    """Of float16 on the wire: the same on all workers."""
    net = mlp()
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"momentum": 0.9}, compression=hvd.Compression.fp16)
    data, label = samples(BATCH)
    with Join([trainer]):
        train(net, trainer, data, label, [range(BATCH)] * (1 + rank))
    assert trainer._optimizer.num_update == size
    assert_same_everywhere(net, trainer, "compressed")
