"""The loop of `elastic.run` in a job that is not elastic: a world that is lost while all its workers live."""

import contextlib
import functools
import importlib
import itertools

import numpy as np
import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from kvstore_hvd import elastic, errors
from kvstore_hvd.elastic.run import notification_manager
from kvstore_hvd.errors import HorovodInternalError, HostsUpdatedInterrupt, InvalidRequestError, MismatchError
from kvstore_hvd.join import Join
from kvstore_hvd.mxnet import process_sets
from kvstore_hvd.world import process
from support import gluon
from support.gluon import assert_alike, batch_of, mlp

mx = pytest.importorskip("mxnet")

run_module = importlib.import_module("kvstore_hvd.elastic.run")  # the package has a function of this name


def noting(name):
    def call(self):
        self.calls.append(name)
        getattr(elastic.ObjectState, name)(self)

    return call


class Traced(elastic.ObjectState):
    def __init__(self, **values):
        super().__init__(**values)
        self.calls = []
        for name in ("callback", "another"):
            self.register_reset_callbacks([functools.partial(self.calls.append, name)])

    sync, restore, save, on_reset, reset = map(noting, ("sync", "restore", "save", "on_reset", "reset"))


@elastic.run
def interrupted(state, skip_sync=False):
    """Interrupts itself once, after a step that is saved."""
    if state.step == 0:
        state.step = 1
        state.save()
        raise HostsUpdatedInterrupt(skip_sync)
    return state.step


def lose_the_world(rank, size):
    if size == 1:
        raise HorovodInternalError("there is one worker only")
    if rank == size - 1:
        process.current().abort("lost on purpose")
    while True:
        kvstore_hvd.allreduce(np.ones(1), "goes on")


def test_nothing_happens(rank, size):
    """One sync, and what the function returns; within itself it is refused."""
    state = Traced(step=0)

    @elastic.run
    def inner(state):
        return "never"

    @elastic.run
    def train(state, more, option=0):
        state.step += more
        state.commit()
        with pytest.raises(InvalidRequestError, match="within itself"):
            inner(elastic.ObjectState(step=0))
        return state.step + option

    assert train(state, 3, option=4) == 7
    assert state.calls[0] == "sync"
    assert "on_reset" not in state.calls
    assert state.calls.count("restore") <= 1  # sync may use it
    assert train.__name__ == "train"
    assert inner(elastic.ObjectState(step=0)) == "never"


@pytest.mark.parametrize("own", [False, True])
def test_a_lost_world(rank, size, own):
    """Back to the last commit, rank 0's; then reset, callbacks, sync, in this order. Also after a loss in sync. A
    function of the program's own may be what resets. What is saved after a loss is no commit."""
    worlds, resets = [], []

    class Fragile(Traced):
        def sync(self):
            super().sync()
            if len(worlds) == 1 and process.current().topology.generation == worlds[0] + 1:
                lose_the_world(rank, size)

    state = Fragile(step=0, log=[])

    def train(state):
        worlds.append(process.current().topology.generation)
        while state.step < 6:
            assert (kvstore_hvd.allreduce(np.ones(3), "gradient") == size).all()
            state.step += 1
            state.log.append(rank)
            if state.step % 2 == 0:
                state.commit()
            if state.step == 3 and len(worlds) < 3:
                state.calls.clear()
                with pytest.raises(HorovodInternalError) as lost:
                    lose_the_world(rank, size)
                with contextlib.suppress(HorovodInternalError):
                    size == 1 or state.commit()
                raise lost.value
        return list(state.log)

    reset = (lambda: resets.append(kvstore_hvd.reset())) if own else None
    log = elastic.run_fn(train, reset)(state)
    assert len(resets) == 3 * own
    assert [generation - worlds[0] for generation in worlds] == [0, 2, 3]
    # Of what followed the commit nothing is left; that of rank 0 is everybody's.
    assert log == [0] * 2 + [rank] * 4
    calls = [each for each in state.calls if each != "save"]
    assert calls[:6] == ["restore", "on_reset", "reset", "callback", "another", "sync"]


def test_other_errors_leave(rank, size):
    before = list(notification_manager._listeners)
    for error in (ValueError("mine"), MismatchError("a mistake"), mx.base.MXNetError("of MXNet")):

        @elastic.run
        def train(state, error=error):
            raise error

        with pytest.raises(type(error)):
            train(elastic.ObjectState(step=0))
    assert list(notification_manager._listeners) == before


class Told:
    """A line to a launcher that gives out the same workers again."""

    cause = ""

    def __init__(self, update=None):
        self.update, self.said = update, []

    def next_world(self, cause, text):
        self.update, self.cause = None, cause
        return process.current().member.world.next_generation()

    def joined(self, world):
        pass

    def synced(self):
        self.said.append("synced")

    def finished(self):
        self.said.append("finished")


@pytest.mark.parametrize("how", ["added", "removed", "before the run"])
def test_updates(rank, size, how, monkeypatch):
    """One worker is told; all leave the function after the commit, and lose nothing. A newcomer may have come while the
    program prepared: nobody tells of it again."""
    result = getattr(elastic.HostUpdateResult, "removed" if how == "removed" else "added")
    came_before, is_last = how == "before the run", rank == size - 1
    if came_before:
        monkeypatch.setattr(process.current(), "control", Told((1, int(result)) if is_last else None))
    state = Traced(step=0)

    @elastic.run
    def train(state):
        while state.step < 5:
            state.step += 1
            if state.step == 2 and is_last and not came_before:
                notification_manager.handle_hosts_updated(1, result)
            state.commit()

    train(state)
    assert state.step == 5
    assert state.calls.count("on_reset") == 1
    assert came_before or state.calls.count("sync") == (1 if how == "removed" else 2)


class Late(Told):
    """It tells of an update while the next world forms: the state forgets that when it is reset."""

    def next_world(self, cause, text):
        world = super().next_world(cause, text)
        if cause == "lost":
            self.update = (2, int(elastic.HostUpdateResult.added))
            notification_manager.handle_hosts_updated(*self.update)
        return world


def test_an_update_that_comes_while_a_world_forms_counts(rank, size, monkeypatch):
    """The first commit in that world acts on it, also where only one worker was told."""
    monkeypatch.setattr(process.current(), "control", Late() if rank == size - 1 else Told())
    state = Traced(step=0, steps=[])

    @elastic.run
    def train(state):
        while state.step < 3:
            state.step += 1
            if state.step == 2 and state.calls.count("on_reset") == 0:
                lose_the_world(rank, size)
            state.steps.append((state.step, state.calls.count("on_reset")))
            state.commit()

    train(state)
    # After the loss step 2 again, whose commit ends that world; then the rest.
    assert state.steps == [(1, 0), (2, 1), (3, 2)]
    assert process.current().control.said == ["synced"] * state.calls.count("sync") + ["finished"]


@pytest.mark.parametrize("where", ["in training", "between worlds"])
def test_a_loss_after_an_update_that_skips_the_sync(rank, size, where):
    """Only that update skips it: what a loss has brought apart, a sync brings together."""
    state = Traced(step=0, of=rank)
    done = []

    def lose():
        if done == ["updated"] and where == "between worlds":
            done.append("lost")
            lose_the_world(rank, size)

    state.register_reset_callbacks([lose])

    @elastic.run
    def train(state):
        done.append("trained" if done else "updated")
        if done == ["updated"]:
            state.of = rank  # differs until there is a sync
            raise HostsUpdatedInterrupt(skip_sync=True)
        if done == ["updated", "trained"]:
            assert state.calls.count("sync") == 1
            lose_the_world(rank, size)

    train(state)
    assert state.calls.count("sync") == 2
    assert state.of == 0


@pytest.mark.parametrize(
    ("error", "has_given_up", "cause"),
    [
        (errors.TransportError, False, "lost"),
        (errors.TimeoutError, False, "timeout"),
        (errors.TransportError, True, "timeout"),
    ],
)
def test_the_launcher_is_told_of_timeouts(error, has_given_up, cause, rank, size, monkeypatch):
    """It kills at once who stands still then; the stall shutdown time is one, too."""
    line = Told()
    monkeypatch.setattr(process.current(), "control", line)
    monkeypatch.setattr(process.Process, "has_given_up", property(lambda self: has_given_up and line.cause == ""))

    @elastic.run
    def train(state):
        if not line.cause:
            raise error("waited in vain")

    train(Traced())
    assert line.cause == cause


def test_who_comes_in_an_earlier_run_is_told(rank, size, monkeypatch):
    """A newcomer begins the program at its beginning, where the others have been long ago. They go on without it."""
    monkeypatch.setattr(run_module, "_numbers", itertools.count(2 if rank == 0 else 1))
    state = Traced(step=0)
    if rank == 0:
        assert interrupted(state) == 1
    else:
        with pytest.raises(InvalidRequestError, match=f"rank {rank}/{size}.*call 1 of run.*call 2"):
            interrupted(state)
        process_sets.rejoin()  # rank 0 would lose this worker, which would end now
        state.sync()


def test_an_interrupt_on_some_skips_no_sync(rank, size):
    state = Traced(step=0)
    interrupted(state, skip_sync=rank == 0)
    assert state.calls.count("sync") == (2 if size > 1 else 1)


def test_what_was_made_before_a_loss_works_after_it(dynamic, rank, size):
    store = mx.kv.create("horovod")
    members = hvd.add_process_set(sorted({0, size - 2})) if size > 1 else hvd.global_process_set
    net = mlp()
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.1})
    state = elastic.GluonState(net=net, trainer=trainer, tries=0)

    @elastic.run
    def train(state):
        state.tries += 1
        state.commit()
        x = mx.nd.ones(4) * (rank + 1)
        store.pushpull("x", x)
        assert x.asnumpy().tolist() == [size * (size + 1) / 2] * 4
        if members.included():
            y = hvd.allreduce(mx.nd.ones(2), op=hvd.Sum, process_set=members)
            assert y.asnumpy()[0] == members.size()
        tries = state.tries
        with Join([trainer]):
            for step in range(2 + rank):
                gluon.train(net, trainer, batch_of(1))
                if tries < 3 and size > 1 and step == 1 + rank:
                    lose_the_world(rank, size)

    train(state)
    assert state.tries == (3 if size > 1 else 1)
    assert_alike(net)


def test_an_error_of_a_graph_is_recognised(rank, size):
    """MXNet may wrap our error into its own class."""
    tries = []

    @elastic.run
    def train(state):
        tries.append(1)
        if len(tries) == 1:
            raise errors.InputFailedError(
                f"an input of x failed.\n  TransportError: [rank {rank}/{size}] it was aborted."
            )
        if len(tries) == 2:
            raise mx.base.MXNetError(f"Error in operator x: PeerLostError: [rank {rank}/{size}] it died.")
        return kvstore_hvd.allreduce(np.ones(1), "after")[0]

    # Who died cannot come back in a job that is not elastic: all say so.
    with pytest.raises(HorovodInternalError, match=r"this job cannot go on without it(.|\n)*it died"):
        train(elastic.ObjectState())
    assert len(tries) == 2
    kvstore_hvd.barrier()  # they are still there
