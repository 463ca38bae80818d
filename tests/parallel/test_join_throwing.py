"""Contexts that throw as soon as one worker has no more input: nothing of the others' last iteration stays behind."""

import contextlib

import numpy as np
import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from kvstore_hvd.errors import HorovodInternalError, MismatchError
from kvstore_hvd.join import Join
from kvstore_hvd.world import process
from support import gluon
from support.gluon import array, assert_alike, weights
from support.joinables import Nothing
from support.patience import until

mx = pytest.importorskip("mxnet")
nn = mx.gluon.nn

EPOCHS = 2


def network():
    """Several layers that exchange statistics, one behind the other, and of the same bits on all workers."""
    layers = nn.Dense(6, in_units=5), hvd.SyncBatchNorm(in_channels=6), nn.Dense(4, in_units=6)
    return gluon.network(*layers, hvd.SyncBatchNorm(in_channels=4), nn.Dense(2, in_units=4), seed=3)


def count_of(rank, size, epoch):
    """Another worker has the least in each epoch, and some have one batch more than others."""
    return 2 + ((rank + epoch) % size > 0) + ((rank + epoch) % size > 1)


def batch_of(rank, epoch, step):
    return np.random.default_rng([rank, epoch, step]).standard_normal((4 + rank, 5)).astype("float32")


def forward(net, x):
    with mx.autograd.record():
        loss = (net(array(x)) ** 2).mean()
    loss.backward()
    return loss


def run_epoch(step, counts, rank, epoch, joinables):
    least = min(counts)
    done = 0

    def run():
        nonlocal done
        with Join(joinables, throw_on_early_termination=True):
            for number in range(counts[rank]):
                step(batch_of(rank, epoch, number))
                done += 1

    if max(counts) == least:
        run()
    else:
        text = f"^Rank {hvd.rank()} exhausted all inputs" if counts[rank] == least else "^Detected at least one rank"
        with pytest.raises(RuntimeError, match=text) as caught:
            run()
        assert type(caught.value).__name__ == "_Exhausted"
    assert done == least


def assert_nothing_is_left(size, name=""):
    """Collectives of all kinds of names meet those of the same call."""
    for place in range(3):
        assert hvd.allreduce(array(np.full(3, place + 1.0, "float32")), op=hvd.Sum).asnumpy()[0] == size * (place + 1)
    assert hvd.allgather_object((name, hvd.rank())) == [(name, rank) for rank in range(size)]
    kvstore_hvd.barrier()


@pytest.mark.sizes
def test_again_and_again(rank, size):
    """Nothing that comes after the end is declined, also by a host that has not heard of all other hosts yet."""
    for turn in range(30):
        with Join([Nothing()], throw_on_early_termination=True):
            pass
        np.testing.assert_array_equal(kvstore_hvd.allreduce(np.ones(1), f"after/{turn}"), [size])


@pytest.mark.parametrize("reads", [False, True])
def test_sync_batch_norm(rank, size, reads):
    """The forward pass comes before the step that throws; workers may read the loss in between. The network has the
    bits of one that makes the steps that all workers can make, and no others."""
    nets = [network() for _ in range(2)]
    for net in nets if reads else []:
        net.hybridize(static_alloc=True, static_shape=True)
    trainers = [hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1}) for net in nets]

    def step(x, place=0):
        loss = forward(nets[place], x)
        if reads and rank == size - 1:
            assert np.isfinite(loss.asnumpy()).all()
        trainers[place].step(len(x))

    for epoch in range(EPOCHS):
        counts = [count_of(each, size, epoch) for each in range(size)]
        run_epoch(step, counts, rank, epoch, [trainers[0]])
        run_epoch(lambda x: step(x, 1), [min(counts)] * size, rank, epoch, [trainers[1]])
        mx.nd.waitall()  # in static graphs of MXNet, a read does not wait for what operators written in Python change
        for one, other in zip(*map(weights, nets)):
            assert np.isfinite(one).all()
            np.testing.assert_array_equal(one, other)
        assert_alike(nets[0])
        for net in nets:  # outside of contexts, and of a backward pass
            forward(net, batch_of(rank, epoch, 9))
    assert_nothing_is_left(size)


@pytest.mark.parametrize("notifies", ["first", "last"])
def test_what_the_body_exchanges(rank, size, notifies):
    """Whatever it is, and in whatever order it comes with what begins an iteration."""
    sums, joinable = [], Nothing()

    def step(x):
        if notifies == "first":
            joinable.step()
        names = (None, None, "named", "named")
        sums.append([hvd.allreduce(array(x[0]), op=hvd.Sum, name=name).asnumpy() for name in names])
        gathered = hvd.allgather(array(np.full((1 + rank, 2), rank, "float32")), name="gathered")
        assert len(gathered) == size * (size + 1) // 2
        assert kvstore_hvd.allreduce(np.ones(2), "NumPy")[0] == size
        if notifies == "last":
            joinable.step()

    for epoch in range(EPOCHS):
        counts = [count_of(each, size, epoch) for each in range(size)]
        run_epoch(step, counts, rank, epoch, [joinable])
        assert len(sums) == min(counts)
        for number, found in enumerate(sums):
            total = np.sum([batch_of(each, epoch, number)[0] for each in range(size)], 0)
            for one in found:
                np.testing.assert_allclose(one, total, rtol=1e-5, atol=1e-5)
        sums.clear()
        assert_nothing_is_left(size, epoch)


@pytest.mark.parametrize(("root", "absent", "joins"), [(0, -1, "trainer"), (-1, -1, "own"), (-1, 0, "trainer")])
def test_deferred_parameters(rank, size, root, absent, joins):
    """A worker without a batch takes part when the others broadcast what they have just got the shapes of."""
    layers = nn.Conv2D(3, 2, in_channels=2), nn.Conv2D(2, 2), nn.Dense(4), hvd.SyncBatchNorm(), nn.Dense(2)
    net = gluon.network(*layers, seed=rank)
    hvd.broadcast_parameters(net.collect_params(), root_rank=root % size)
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    own = Nothing()

    def step(x):
        forward(net, np.resize(x, (len(x), 2, 4, 4)))
        if joins == "own":
            own.step()
        trainer.step(4)

    counts = [0 if each == absent % size and size > 1 else 2 for each in range(size)]
    for epoch, numbers in enumerate((counts, [2] * size, counts[::-1])):
        run_epoch(step, numbers, rank, epoch, [own if joins == "own" else trainer])
        assert_alike(net)
    assert_nothing_is_left(size)


@pytest.mark.needs(2)
def test_an_exception_in_an_iteration_that_is_not_to_be(rank, size):
    net, own, last = network(), Nothing(), size - 1

    def run():
        with Join([own], throw_on_early_termination=True):
            for number in range(1 + (rank > 0)):
                forward(net, batch_of(rank, 0, number))
                if rank == last and number == 1:
                    raise ValueError("no such file")
                own.step()

    expected = (ValueError, "no such file") if rank == last else (HorovodInternalError, "Join context with ValueError")
    with pytest.raises(expected[0], match=expected[1]):
        run()
    kvstore_hvd.reset()
    assert_nothing_is_left(size)
    run_epoch(lambda x: (forward(net, x), own.step()), [1 + (each > 0) for each in range(size)], rank, 0, [own])
    assert_nothing_is_left(size)


@pytest.mark.needs(2)
def test_errors_that_nobody_reads_are_raised_again_after_it(rank, size):
    """Only inside nobody asks for them: they may be those of what is withdrawn."""
    joinable, unread = Nothing(), []

    def step(_):
        unread.append(mx.nd.random.normal(0, -1 if rank == 0 else 1, (2,)))
        joinable.step()

    run_epoch(step, [1 + (each > 0) for each in range(size)], rank, 0, [joinable])
    with pytest.raises(mx.base.MXNetError, match="scale") if rank == 0 else contextlib.nullcontext():
        process.current().member.check()
    failing = hvd.allreduce(mx.nd.ones((2 + (rank == 0),)), name="failing")
    with pytest.raises(MismatchError, match="'failing'"):
        until(process.current().member.check)
    del failing
    assert_nothing_is_left(size)


@pytest.mark.needs(2)
def test_a_join_within_leaves_the_world_to_who_throws(rank, size):
    """An operation of its body is declined: whatever the program raises then, the world is not aborted."""
    with pytest.raises(RuntimeError, match="exhausted"), Join([Nothing()], throw_on_early_termination=True):
        if rank > 0:
            with Join([Nothing()]):
                try:
                    kvstore_hvd.allreduce(np.ones(1), "of the body")
                finally:
                    raise ValueError("no metric")
    assert_nothing_is_left(size)


@pytest.mark.needs(3)
@pytest.mark.parametrize("before", [0, 1], ids=["of the same number", "of another number"])
def test_a_join_of_a_process_set_within(rank, size, before, dynamic):
    """Who has no input declines also what the other Join of the set begins with."""
    kvstore_hvd.barrier()
    kvstore_hvd.reset()  # Joins are counted anew, in each world
    outer, inner = Nothing(), Nothing(hvd.add_process_set([0, 1]))
    for _ in range(before if rank < 2 else 0):
        with Join([inner], throw_on_early_termination=True):
            pass
    with pytest.raises(RuntimeError, match="exhausted"), Join([outer], throw_on_early_termination=True):
        if rank == 1:
            with Join([inner], throw_on_early_termination=True):
                inner.step()
        if rank > 0:
            outer.step()
    assert hvd.allreduce(mx.nd.ones(1), op=hvd.Sum).asscalar() == size


@pytest.mark.needs(3)
def test_an_error_of_a_process_set_within_is_told_to_the_others(rank, size, dynamic):
    """Its members leave the Join around it; who is none of them waits there for nobody."""
    kvstore_hvd.barrier()
    kvstore_hvd.reset()
    members = hvd.add_process_set([1, 2])
    outer, inner = Nothing(), Nothing(members)
    told = {1: (RuntimeError, "^Rank 1 exhausted all inputs"), 2: (RuntimeError, "^Detected at least one rank that")}
    error, text = told.get(rank, (HorovodInternalError, "left a Join context with RuntimeError"))
    with pytest.raises(error, match=text), Join([outer], throw_on_early_termination=True):
        if members.included():
            with Join([inner], throw_on_early_termination=True):
                for _ in range(rank):
                    inner.step()
        outer.step()
    kvstore_hvd.reset()
