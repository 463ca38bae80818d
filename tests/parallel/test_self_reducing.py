"""Scripts that reduce by themselves, beside a Trainer whose store stays in the worker: they run, and train as one."""

import contextlib

import numpy as np
import pytest

import kvstore_hvd.mxnet as hvd
from kvstore_hvd import log
from kvstore_hvd.errors import UnsynchronisedTrainerError
from support.arrays import assert_equal_on_all_ranks
from support.gluon import array, backward, mlp, parameters, samples, weights

mx = pytest.importorskip("mxnet")

BATCH, STEPS = 4, 3


@pytest.fixture(autouse=True)
def fresh_log(monkeypatch):
    monkeypatch.setattr(log, "_logged", set())


def batch_of(rank, step):
    return tuple(array(each) for each in samples(BATCH, seed=100 * step + rank + 1))


def trainer_of(net, kvstore, cls=None, optimizer=None):
    optimizer = optimizer or mx.optimizer.SGD(learning_rate=0.1, momentum=0.9)
    return (cls or mx.gluon.Trainer)(net.collect_params(), optimizer, kvstore=kvstore)


def reference(size):
    net = mlp(seed=3)
    trainer = trainer_of(net, None)
    for step in range(STEPS):
        batches = [batch_of(rank, step) for rank in range(size)]
        joined = tuple(array(np.concatenate([one[i].asnumpy() for one in batches])) for i in (0, 1))
        backward(net, [joined])
        trainer.step(BATCH * size)
    return weights(net)


def assert_trained(net, expected, name):
    for i, (ours, theirs) in enumerate(zip(weights(net), expected)):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
        assert_equal_on_all_ranks(ours, f"{name}/{i}")


def each_alone(net):
    for i, parameter in enumerate(parameters(net)):
        hvd.allreduce_(parameter.list_grad()[0], name=f"gradient/{i}", priority=-i)


def grouped(net):
    hvd.grouped_allreduce_([parameter.list_grad()[0] for parameter in parameters(net)], name="gradients")


def scattered(net):
    for i, parameter in enumerate(parameters(net)):
        gradient = parameter.list_grad()[0]
        part = hvd.reducescatter(gradient, op=hvd.Average, name=f"part/{i}")
        gradient[:] = hvd.allgather(part, name=f"all/{i}")


class Exchanging(mx.optimizer.SGD):
    def update_multi_precision(self, index, weight, grad, state):
        lists = isinstance(index, (list, tuple))
        for i, each in zip(index, grad) if lists else [(index, grad)]:
            hvd.allreduce_(each, name=f"own/{i}")
        super().update_multi_precision(index, weight, grad, state)


class Mine(mx.gluon.Trainer):
    """A Trainer of a user's, as Horovod's own is made."""

    def _allreduce_grads(self):
        for i, parameter in enumerate(self._params):
            hvd.allreduce_(parameter.list_grad()[0], name=f"mine/{i}", priority=-i)


@pytest.mark.parametrize(
    ("by", "kvstore"),
    [
        (each_alone, None),
        (grouped, "device"),
        (scattered, "local"),
        (Exchanging, None),
        (Exchanging, "device"),
        (Mine, "device"),
    ],
)
def test_they_train_as_one_worker(rank, size, caplog, by, kvstore):
    """A function of the program exchanges before each update, or its own optimizer or Trainer."""
    expected = reference(size)
    caplog.clear()
    net = mlp(seed=3)
    optimizer = Exchanging(learning_rate=0.1, momentum=0.9) if by is Exchanging else None
    trainer = trainer_of(net, kvstore, Mine if by is Mine else None, optimizer)
    for step in range(STEPS):
        backward(net, [batch_of(rank, step)])
        if isinstance(by, type):
            trainer.step(BATCH)
        else:
            by(net)
            trainer.update(BATCH)
    assert_trained(net, expected, f"{by.__name__}/{kvstore}")
    assert caplog.records == []


@pytest.mark.parametrize("before", ["", "broadcast", "Trainer", "Trainer of two devices"])
def test_who_exchanges_nothing_is_refused(rank, size, before):
    """In the third update; neither a broadcast before the Trainer was made nor another Trainer changes that."""
    net = mlp(seed=3)
    contexts = [mx.cpu(d) for d in range(2 if "two" in before else 1)]
    other = mlp(seed=4, contexts=contexts)
    beside = trainer_of(other, "horovod") if "Trainer" in before else None

    def step_beside(step):
        if beside is not None:
            backward(other, [tuple(each.as_in_context(ctx) for each in batch_of(rank, step)) for ctx in contexts])
            beside.step(BATCH)

    step_beside(0)
    if before == "broadcast":
        hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    trainer = trainer_of(net, "device")
    text = f"^Trainer has kvstore 'device', but there are {size} workers"
    refused = pytest.raises(UnsynchronisedTrainerError, match=text) if size > 1 else contextlib.nullcontext()
    for step in range(3):
        step_beside(step)
        backward(net, [batch_of(rank, step)])
        with refused if step == 2 else contextlib.nullcontext():
            trainer.step(BATCH)
