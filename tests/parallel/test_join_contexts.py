"""Trainers in contexts: several, nested, beside other joinables, with errors and long waits."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import kvstore_hvd
from kvstore_hvd.errors import HorovodInternalError, InvalidRequestError, MismatchError
from kvstore_hvd.join import Join, Joinable
from kvstore_hvd.process import process
from support.gluon import mlp, samples
from support.uneven import (
    BATCH,
    assert_same_everywhere,
    train,
    trainer_of,
)
from support.zero_copy import meet_again, settings

mx = pytest.importorskip("mxnet")


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


@pytest.mark.slow
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
        process.current().abort("the test says so")
    else:
        with pytest.raises(HorovodInternalError, match="the test says so"), Join([trainer]):
            pass
    kvstore_hvd.reset()
    with Join([trainer]):
        train(net, trainer, data, label, [range(BATCH)] * (1 + rank))
    assert trainer._optimizer.num_update == size
    assert_same_everywhere(net, trainer, "counted anew")


@pytest.mark.slow
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

    with pytest.raises(MismatchError, match="at the end of one Join, and others at the end of another"):
        run()
    assert kvstore_hvd.allreduce(np.ones(1), "goes on")[0] == size
    kvstore_hvd.reset()  # contexts were counted differently
