"""Scripts that reduce by themselves, beside a Trainer whose store stays in the worker: they run, and train as one."""

import numpy as np
import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from kvstore_hvd.mxnet_compat import exchangers
from support.gluon import assert_trained, backward, batch_of, mlp, parameters, trained_alone

mx = pytest.importorskip("mxnet")

STEPS, RATE = 3, {"learning_rate": 0.1, "momentum": 0.9}
pytestmark = pytest.mark.usefixtures("fresh_log")


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
    [(grouped, None), (scattered, "local"), (Exchanging, None), (Exchanging, "device"), (Mine, "device")],
)
def test_they_train_as_one_worker(rank, size, caplog, by, kvstore):
    """A function of the program exchanges before each update, or its own optimizer or Trainer."""
    net = mlp(seed=5)
    optimizer = (Exchanging if by is Exchanging else mx.optimizer.SGD)(**RATE)
    trainer = (Mine if by is Mine else mx.gluon.Trainer)(net.collect_params(), optimizer, kvstore=kvstore)
    for step in range(STEPS):
        backward(net, [batch_of(step, rank)])
        if isinstance(by, type):
            trainer.step(4)
        else:
            by(net)
            trainer.update(4)
    assert caplog.records == []
    assert_trained(net, trained_alone(([batch_of(step, r) for r in range(size)] for step in range(STEPS)), **RATE))


def test_what_counts_as_an_exchange(rank, size, kv, monkeypatch):
    """Calls of the program; not what a Trainer exchanges for itself."""
    x, n = mx.nd.ones(2), np.ones(2)
    net = mlp(seed=4, contexts=[mx.cpu(0), mx.cpu(1)])
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", kvstore="horovod")

    def step():
        backward(net, [batch_of(rank, ctx=ctx) for ctx in (mx.cpu(0), mx.cpu(1))])
        trainer.step(4)

    step()  # the first one broadcasts parameters, which counts
    reductions = lambda: kv.pushpull(3, x), lambda: hvd.allgather_object(1), lambda: kvstore_hvd.allreduce(n, "n")
    broadcasts = lambda: kv.broadcast(3, x), lambda: hvd.broadcast_object(1), lambda: kvstore_hvd.broadcast(n, 0, "n")
    for call in (step, *broadcasts, *reductions):
        monkeypatch.setattr(exchangers._Collectives, "counts", counts := exchangers._Counts())
        call()
        assert counts == exchangers._Counts(call in broadcasts, call in reductions)
