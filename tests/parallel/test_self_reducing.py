"""Scripts that reduce by themselves, beside a Trainer whose store stays in the worker: they run, and train as one."""

from __future__ import annotations

import numpy as np
import pytest

import kvstore_hvd.mxnet as hvd
from kvstore_hvd import log
from kvstore_hvd.errors import UnsynchronisedTrainerError
from kvstore_hvd.mxnet_compat import unsynchronised
from support.arrays import assert_equal_on_all_ranks
from support.gluon import array, backward, mlp, parameters, samples, weights

mx = pytest.importorskip("mxnet")

BATCH, STEPS = 4, 6
STORES = [None, "local", "device"]


@pytest.fixture(autouse=True)
def fresh_log(monkeypatch):
    """Nothing was said yet."""
    monkeypatch.setattr(log, "_said", set())


def batch_of(rank, step):
    return tuple(array(each) for each in samples(BATCH, seed=100 * step + rank + 1))


def trainer_of(net, kvstore, cls=None, optimizer=None):
    optimizer = optimizer or mx.optimizer.SGD(learning_rate=0.1, momentum=0.9)
    return (cls or mx.gluon.Trainer)(net.collect_params(), optimizer, kvstore=kvstore)


def reference(size):
    """One worker with the data of all."""
    net = mlp(seed=3)
    trainer = trainer_of(net, None)
    trainer._kvstore_hvd_synchronised = True
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


def into_new_arrays(net):
    for i, parameter in enumerate(parameters(net)):
        parameter.list_grad()[0][:] = hvd.allreduce(parameter.list_grad()[0], name=f"gradient/{i}")


def scattered_and_gathered(net):
    for i, parameter in enumerate(parameters(net)):
        gradient = parameter.list_grad()[0]
        part = hvd.reducescatter(gradient, op=hvd.Average, name=f"part/{i}")
        gradient[:] = hvd.allgather(part, name=f"all/{i}")


def by_a_store(net):
    for i, parameter in enumerate(parameters(net)):
        by_a_store.kv.pushpull(i, parameter.list_grad(), priority=-i)
        parameter.list_grad()[0][:] /= hvd.size()


@pytest.mark.parametrize("by", ["step", "update"])
@pytest.mark.parametrize("kvstore", STORES)
@pytest.mark.parametrize(
    "exchange",
    [each_alone, grouped, into_new_arrays, scattered_and_gathered, by_a_store],
    ids=lambda each: each.__name__,
)
def test_gradients(rank, size, caplog, exchange, kvstore, by):
    """Before each update."""
    by_a_store.kv = mx.kv.create("horovod")
    net = mlp(seed=3)
    trainer = trainer_of(net, kvstore)
    for step in range(STEPS):
        backward(net, [batch_of(rank, step)])
        exchange(net)
        getattr(trainer, by)(BATCH)
    assert_trained(net, reference(size), f"{exchange.__name__}/{kvstore}/{by}")
    assert caplog.records == []


@pytest.mark.parametrize("kvstore", STORES)
def test_several_devices(rank, size, kvstore):
    """The store sums those of a worker's devices, and the script those of the workers."""
    if kvstore is None:
        pytest.skip("nobody sums those of the devices then, as without us")
    devices = [mx.cpu(0), mx.cpu(1)]
    net = mlp(seed=3, contexts=devices)
    optimizer = mx.optimizer.SGD(learning_rate=0.1, momentum=0.9)
    trainer = mx.gluon.Trainer(net.collect_params(), optimizer, kvstore=kvstore, update_on_kvstore=False)
    for step in range(STEPS):
        data, label = batch_of(rank, step)
        half = BATCH // 2
        parts = [(data[:half], label[:half]), (data[half:], label[half:])]
        backward(net, [tuple(each.as_in_context(device) for each in part) for part, device in zip(parts, devices)])
        trainer.allreduce_grads()
        for i, parameter in enumerate(parameters(net)):
            for device, gradient in enumerate(parameter.list_grad()):
                hvd.allreduce_(gradient, name=f"gradient/{i}/{device}")
        trainer.update(BATCH)
    assert_trained(net, reference(size), f"devices/{kvstore}")


class Exchanging(mx.optimizer.SGD):
    """An optimizer of a user's, which exchanges as it updates."""

    def update_multi_precision(self, index, weight, grad, state):
        """As `SGD.update_multi_precision`."""
        lists = isinstance(index, (list, tuple))
        for i, each in zip(index, grad) if lists else [(index, grad)]:
            hvd.allreduce_(each, name=f"own/{i}")
        super().update_multi_precision(index, weight, grad, state)


@pytest.mark.parametrize("kvstore", STORES)
def test_an_optimizer_of_the_users(rank, size, caplog, kvstore):
    """It is known that it exchanges once it has updated."""
    net = mlp(seed=3)
    trainer = trainer_of(net, kvstore, optimizer=Exchanging(learning_rate=0.1, momentum=0.9))
    for step in range(STEPS):
        backward(net, [batch_of(rank, step)])
        trainer.step(BATCH)
    assert_trained(net, reference(size), f"optimizer/{kvstore}")
    assert caplog.records == []


@pytest.mark.parametrize("kvstore", STORES)
def test_a_trainer_of_the_users(rank, size, caplog, kvstore):
    """As Horovod's own is made: a subclass."""

    class Mine(mx.gluon.Trainer):
        def _allreduce_grads(self):
            for i, parameter in enumerate(self._params):
                hvd.allreduce_(parameter.list_grad()[0], name=f"mine/{i}", priority=-i)

    net = mlp(seed=3)
    trainer = trainer_of(net, kvstore, Mine)
    for step in range(STEPS):
        backward(net, [batch_of(rank, step)])
        trainer.step(BATCH)
    assert_trained(net, reference(size), f"trainer/{kvstore}")
    assert caplog.records == []


def local_sgd(size, every):
    """Replay all workers of local SGD in this one."""
    nets = [mlp(seed=3) for _ in range(size)]
    trainers = [trainer_of(net, None) for net in nets]
    for trainer in trainers:
        trainer._kvstore_hvd_synchronised = True
    for step in range(STEPS):
        for rank, (net, trainer) in enumerate(zip(nets, trainers)):
            backward(net, [batch_of(rank, step)])
            trainer.step(BATCH)
        if step % every == every - 1:
            for of_all in zip(*(parameters(net) for net in nets)):
                mean = np.mean([one.data().asnumpy() for one in of_all], axis=0)
                for one in of_all:
                    one.set_data(array(mean))
    return weights(nets[0])


@pytest.mark.parametrize("every", [2, 3, 6])
@pytest.mark.parametrize("kvstore", STORES)
@pytest.mark.parametrize("broadcast", ["before", "after"])
def test_local_sgd(rank, size, caplog, kvstore, every, broadcast):
    """Parameters are averaged every few updates; before they get a Trainer, or after, they are broadcast."""
    net = mlp(seed=3 if rank == 0 else 4)
    if broadcast == "before":
        hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    trainer = trainer_of(net, kvstore)
    if broadcast == "after":
        for parameter in parameters(net):
            hvd.broadcast_(parameter.list_data()[0], root_rank=0)
    for step in range(STEPS):
        backward(net, [batch_of(rank, step)])
        trainer.step(BATCH)
        if step % every == every - 1:
            for i, parameter in enumerate(parameters(net)):
                hvd.allreduce_(parameter.list_data()[0], name=f"parameter/{i}")
    assert_trained(net, local_sgd(size, every), f"local/{kvstore}/{every}/{broadcast}")
    assert len(caplog.records) == (size > 1 and kvstore is not None)


def flat(arrays):
    return array(np.concatenate([each.asnumpy().ravel() for each in arrays]))


def weights_of(net):
    return [each.data() for each in parameters(net)]


def write_back(buffer, arrays):
    begin = 0
    for each in arrays:
        each[:] = buffer[begin : begin + each.size].reshape(each.shape)
        begin += each.size


@pytest.mark.parametrize("kvstore", STORES)
@pytest.mark.parametrize("call", ["allreduce", "allreduce_"])
def test_one_flat_buffer(rank, size, caplog, kvstore, call):
    """All gradients are copied into one array, which has their number of elements, and back."""
    net = mlp(seed=3)
    trainer = trainer_of(net, kvstore)
    for step in range(STEPS):
        backward(net, [batch_of(rank, step)])
        gradients = [each.grad() for each in parameters(net)]
        write_back(getattr(hvd, call)(flat(gradients), name="flat"), gradients)
        trainer.step(BATCH)
    assert_trained(net, reference(size), f"flat/{kvstore}/{call}")
    assert caplog.records == []


def test_a_flat_buffer_of_the_parameters_is_local_sgd(rank, size, monkeypatch):
    """It counts as an exchange as well as that of the parameters themselves."""
    monkeypatch.setattr(unsynchronised, "_UPDATES_AFTER_BROADCAST", 3)
    net = mlp(seed=3 if rank == 0 else 4)
    hvd.broadcast_parameters(net.collect_params(), root_rank=0)
    trainer = trainer_of(net, "device")
    for step in range(STEPS):
        backward(net, [batch_of(rank, step)])
        trainer.step(BATCH)
        if step % 3 == 2:
            write_back(hvd.allreduce(flat(weights_of(net)), name="flat"), weights_of(net))
    assert_trained(net, local_sgd(size, 3), "flat/local")


@pytest.mark.parametrize("kvstore", STORES)
def test_gradients_that_were_made_after_another_collective(rank, size, caplog, kvstore):
    """The Trainer is there before its parameters have shapes, and something else is reduced meanwhile."""
    net = mx.gluon.nn.Dense(3, use_bias=False)
    net.initialize(mx.init.One())
    trainer = trainer_of(net, kvstore)
    hvd.allreduce(array(np.ones(2, "float32")), name="meanwhile")
    for step in range(STEPS):
        backward(net, [batch_of(rank, step)])
        each_alone(net)
        trainer.step(BATCH)
    for i, each in enumerate(weights(net)):
        assert_equal_on_all_ranks(each, f"late/{kvstore}/{i}")
    assert caplog.records == []


def test_a_reference_model_beside_a_distributed_one(rank, size, caplog):
    """It has no store, on purpose: one warning, whatever becomes of it."""
    net, other = mlp(seed=3), mlp(seed=4)
    trainer = hvd.DistributedTrainer(net.collect_params(), mx.optimizer.SGD(learning_rate=0.1, momentum=0.9))
    alone = trainer_of(other, None)
    for step in range(STEPS):
        for each, one in ((net, trainer), (other, alone)):
            backward(each, [batch_of(rank, step)])
            one.step(BATCH)
    assert_trained(net, reference(size), "beside")
    assert [record.getMessage()[:22] for record in caplog.records] == ["Trainer has no kvstore"] * (size > 1)


@pytest.mark.parametrize("kvstore", ["local", "device"])
def test_who_exchanges_nothing_is_refused(rank, size, kvstore):
    """Also beside collectives of other arrays, and of other networks."""
    net, other = mlp(seed=3), mlp(seed=4)
    trainer = trainer_of(net, kvstore)
    backward(net, [batch_of(rank, 0)])
    backward(other, [batch_of(rank, 0)])
    each_alone(other)
    hvd.allreduce(mx.nd.ones((2,)))
    hvd.broadcast(flat(weights_of(net)), root_rank=0)
    if size == 1:
        trainer.step(BATCH)
        return
    before = weights(net)
    with pytest.raises(UnsynchronisedTrainerError, match=f"^Trainer has kvstore '{kvstore}', but there are {size}"):
        trainer.step(BATCH)
    for old, new in zip(before, weights(net)):
        assert (old == new).all()


def test_an_array_of_the_size_of_the_only_parameter_is_no_flat_buffer(size):
    """It may be anything: a loss, say."""
    net = mx.gluon.nn.Dense(1, in_units=1, use_bias=False)
    net.initialize()
    trainer = trainer_of(net, "device")
    backward(net, [(array(np.ones((2, 1), "float32")), array(np.ones((2, 1), "float32")))])
    hvd.allreduce(array(np.ones(1, "float32")))
    if size == 1:
        trainer.step(2)
        return
    with pytest.raises(UnsynchronisedTrainerError):
        trainer.step(2)
