"""Trainers in contexts: several, nested, beside other joinables, with errors and long waits."""

import threading

import numpy as np
import pytest

import kvstore_hvd
from kvstore_hvd.errors import HorovodInternalError, InvalidRequestError, MismatchError
from kvstore_hvd.join import Join
from kvstore_hvd.world import process
from support.gluon import mlp, samples
from support.joinables import Counter
from support.uneven import BATCH, assert_same_everywhere, train, trainer_of
from support.zero_copy import meet_again, settings

mx = pytest.importorskip("mxnet")


@pytest.fixture
def two():
    """Two networks, their Trainers, and a function that trains one of them on a batch."""
    nets = [mlp(seed=1), mlp(seed=2)]
    trainers = [trainer_of("DistributedTrainer", nets[0]), trainer_of("DistributedTrainer", nets[1], "adam")]
    data, label = samples(BATCH)
    return nets, trainers, lambda place: train(nets[place], trainers[place], data, label, [range(BATCH)])


def assert_updates(two, first, second, name):
    for place, (net, trainer, count) in enumerate(zip(*two[:2], (first, second))):
        assert trainer._optimizer.num_update == count
        assert_same_everywhere(net, trainer, f"{name}/{place}")


def test_two_trainers_in_any_pattern(rank, size, two):
    """Each is followed by itself: one may step more often than the other."""
    with Join(two[1]):
        for step in range(3 + 2 * rank):
            two[2](0)
            if step % 2:
                two[2](1)
                two[2](1)
    assert_updates(two, 1 + 2 * size, 2 * size, "two")


@pytest.mark.parametrize("trainer_first", [False, True])
def test_with_other_joinables(rank, size, trainer_first, two):
    """Then each iteration tells that this worker is still there, as in PyTorch."""
    net, trainer, other = two[0][0], two[1][0], Counter()
    calls = [lambda: two[2](0), lambda: other.count(1)]
    with Join([trainer, other] if trainer_first else [other, trainer]):
        for _ in range(1 + rank):
            for call in calls if trainer_first else calls[::-1]:
                call()
    assert other.sums == [size - step for step in range(size)]
    assert_same_everywhere(net, trainer, f"mixed/{trainer_first}")


@pytest.mark.slow
@pytest.mark.parametrize("of", ["trainer", "own"])
def test_a_worker_that_waits_long_is_no_stall(rank, size, caplog, of):
    """To wait for workers with more input may take any time: it has no timeout, and is in no report."""
    net, own = mlp(), Counter()
    data, label = samples(BATCH)
    with settings(KVHVD_TIMEOUT="2", KVHVD_STALL_CHECK_TIME_S="1"):
        meet_again()
        trainer = trainer_of("DistributedTrainer", net)
        with Join([trainer if of == "trainer" else own]):
            for step in range(2 if rank == size - 1 else of == "own"):
                if step and size > 1:
                    threading.Event().wait(3.5)
                train(net, trainer, data, label, [range(BATCH)]) if of == "trainer" else own.count(1)
        assert_same_everywhere(net, trainer, f"patience/{of}")
        assert own.sums == ([size, 1] if of == "own" else [])
    assert "waited" not in caplog.text
    meet_again()


def test_what_is_refused(rank, size, two):
    """On all workers, before anything is submitted."""
    params, trainer = two[0][0].collect_params(), two[1][0]
    for wrong, error, text in (
        (mx.gluon.Trainer(params, "sgd", kvstore=None), InvalidRequestError, "kvstore='horovod'"),
        (mx.gluon.Trainer(params, "sgd", kvstore="device"), InvalidRequestError, "kvstore='horovod'"),
        (3, TypeError, "Trainers of Gluon, not a int"),
    ):
        with pytest.raises(error, match=text):
            Join([wrong])
    with pytest.raises(TypeError, match="divide_by_inital_world_size"):
        Join([trainer], divide_by_inital_world_size=False)
    if size > 1:
        with Join([trainer]):
            for wrong in (0, "four", float("nan")):
                with pytest.raises(InvalidRequestError, match="batch_size is"):
                    trainer.step(wrong)
            for call in (trainer.allreduce_grads, lambda: trainer.update(BATCH)):
                with pytest.raises(InvalidRequestError, match="call step"):
                    call()
            with pytest.raises(InvalidRequestError, match="its gradient is stale"):
                trainer.step(BATCH, ignore_stale_grad=True)
            two[2](0)
    assert_same_everywhere(two[0][0], trainer, "refused")
    two[2](0)
    trainer.allreduce_grads()  # outside of a Join it is what it was


def test_trainers_that_nobody_could_tell_apart(rank, size, two):
    """They are refused on all workers."""
    store = mx.kv.create("horovod")
    shared = [mx.gluon.Trainer(net.collect_params(), "sgd", kvstore=store) for net in two[0]]
    with pytest.raises(InvalidRequestError, match="two Trainers use the same store"):
        Join(shared)
    with pytest.raises(ValueError, match="given twice"):
        Join([shared[0], shared[0]])
    with Join([shared[0]]), pytest.raises(RuntimeError, match="in a Join already"), Join([shared[0]]):
        pass


@pytest.mark.parametrize("last_is_common", [False, True])
def test_steps_of_trainers_in_another_order(rank, size, last_is_common, two):
    """A worker whose own last step waits for another one follows that one meanwhile."""
    with Join(two[1]):
        for place in [0] if rank == 0 else [1, 0] if last_is_common else [1]:
            two[2](place)
            if rank and place:
                mx.nd.waitall()
    assert_updates(two, 1, int(size > 1), f"order/{last_is_common}")


def test_nested_and_nobody_last(rank, size, two):
    """All workers follow a step of the outer context's Trainer as they leave one of the inner contexts."""
    around, within = (Join([trainer]) for trainer in two[1])
    with around:
        for number in (1 + rank, size - rank):
            with within:
                for _ in range(number):
                    two[2](0)
                    two[2](1)
    assert_updates(two, 2 * size, 2 * size, "nobody last")
    two[2](0)  # outside, everybody has to step again
    assert_updates(two, 2 * size + 1, 2 * size, "after")


@pytest.mark.needs(2)
def test_again_after_different_numbers_of_contexts(rank, size, two):
    """One worker fails before it enters a context that others are in: in a new world they count anew."""
    kvstore_hvd.barrier()  # all are in this test
    if rank == size - 1:
        process.current().abort("the test says so")
    else:
        with pytest.raises(HorovodInternalError, match="the test says so"), Join(two[1][:1]):
            pass
    kvstore_hvd.reset()
    with Join(two[1][:1]):
        for _ in range(1 + rank):
            two[2](0)
    assert_updates(two, size, 0, "counted anew")


def test_one_thread_only(rank, size, two):
    """In another one than the main thread, too."""
    other = Join([two[1][1]])
    entered, left = threading.Event(), threading.Event()

    def run():
        with Join([two[1][0]]):
            entered.set()
            for _ in range(1 + rank):
                two[2](0)
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
    assert_same_everywhere(two[0][0], two[1][0], "thread")


@pytest.mark.needs(2)
def test_workers_at_the_ends_of_different_contexts(rank, size, two):
    """They would wait for each other for ever: all of them are told."""

    def run():
        with Join([two[1][0]]):
            if rank == 0:
                with Join([two[1][1]]):
                    pass

    with pytest.raises(MismatchError, match="at the end of one Join, and others at the end of another"):
        run()
    assert kvstore_hvd.allreduce(np.ones(1), "goes on")[0] == size
    kvstore_hvd.reset()  # contexts were counted differently
