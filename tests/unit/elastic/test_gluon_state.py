"""`GluonState` in one process: what is saved of networks, Trainers and samplers, and that it comes back bit by bit."""

from __future__ import annotations

import numpy as np
import pytest

from kvstore_hvd import elastic
from kvstore_hvd.elastic import ElasticSampler, GluonState, StateHandler
from kvstore_hvd.errors import HorovodInternalError, InvalidRequestError, MismatchError, UnsupportedDtypeError
from kvstore_hvd.process import process
from support.gluon import array, backward, is_mxnet_2, network, samples

mx = pytest.importorskip("mxnet")
nn = mx.gluon.nn

OPTIMIZERS = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.9},
    "nadam": {},
    "lamb": {},
}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """A world of one, which other tests do not see."""
    monkeypatch.setattr(process, "_current", process.Process())


def make_net(contexts=(), **options):
    """A network with auxiliary states, and a parameter that is not trained."""
    net = network(nn.Dense(6, in_units=8), nn.BatchNorm(in_channels=6), nn.Dense(3, in_units=6), contexts=contexts)
    next(iter(net.collect_params().values())).grad_req = options.get("first", "write")
    return net


def make_trainer(net, name="sgd", **options):
    return mx.gluon.Trainer(net.collect_params(), name, {**OPTIMIZERS[name], **options}, kvstore=None)


def train(net, trainer, steps=1, seed=0, dtype="float32", contexts=None):
    """Take some steps, on other data each time."""
    contexts = contexts or [mx.cpu()]
    for step in range(steps):
        batches = []
        for number, ctx in enumerate(contexts):
            data, label = samples(4, seed=seed + 100 * step + number)
            batches.append((array(data.astype(dtype), ctx), array(label.astype(dtype), ctx)))
        backward(net, batches)
        trainer.step(4)


def values(net):
    """All values of a network on all devices, as bytes."""
    return {
        name: [each.asnumpy().tobytes() for each in parameter.list_data()]
        for name, parameter in net._collect_params_with_prefix().items()
    }


def leaves(state):
    if isinstance(state, (tuple, list)):
        return [leaf for each in state for leaf in leaves(each)]
    return [state.asnumpy().tobytes() if hasattr(state, "asnumpy") else state]


def states(trainer):
    """All that updates depend on."""
    optimizer = trainer._optimizer
    return {
        "states": [{index: leaves(state) for index, state in each.states.items()} for each in trainer._updaters],
        "counts": dict(optimizer._index_update_count),
        "num_update": optimizer.num_update,
        "rate": optimizer.learning_rate,
        "scale": trainer._scale,
    }


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_repeats_itself_bit_by_bit(name):
    """GluonState: after a restore the same steps lead to the same bits, parameters, statistics and optimizers."""
    net = make_net()
    trainer = make_trainer(net, name)
    state = GluonState(net, trainer, step=0)
    train(net, trainer, 3)
    state.step = 3
    state.commit()
    before = values(net), states(trainer)
    train(net, trainer, 2, seed=7)
    after = values(net), states(trainer)
    assert after != before
    state.step = 5
    state.restore()
    assert (values(net), states(trainer)) == before
    assert state.step == 3
    train(net, trainer, 2, seed=7)
    assert (values(net), states(trainer)) == after
    state.restore()  # again: the saved values were not touched
    assert (values(net), states(trainer)) == before


def test_restore_is_in_place():
    """GluonState.restore: arrays, dictionaries and the scheduler stay the objects that others hold."""
    net = make_net()
    schedule = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1)
    trainer = make_trainer(net, lr_scheduler=schedule)
    train(net, trainer)
    arrays = [each for p in net.collect_params().values() for each in p.list_data()]
    momentum = [each for each in trainer._updaters[0].states.values() if each is not None]
    optimizer = trainer._optimizer
    state = GluonState(net, trainer)
    train(net, trainer, 6)
    assert schedule.count > 0
    state.restore()
    assert trainer._optimizer is optimizer
    assert optimizer.lr_scheduler is schedule
    assert (schedule.count, schedule.base_lr) == (0, 0.1)
    assert all(a is b for a, b in zip(arrays, [x for p in net.collect_params().values() for x in p.list_data()]))
    assert all(a is b for a, b in zip(momentum, [x for x in trainer._updaters[0].states.values() if x is not None]))
    assert optimizer._index_update_count is optimizer._all_index_update_counts[0]


def test_two_devices():
    """GluonState: the values of every device, which differ for auxiliary states."""
    contexts = [mx.cpu(0), mx.cpu(1)]
    net = make_net(contexts)
    trainer = mx.gluon.Trainer(net.collect_params(), "nadam", kvstore="device", update_on_kvstore=False)
    state = GluonState(net, trainer)
    train(net, trainer, 2, contexts=contexts)
    state.commit()
    before = values(net), states(trainer)
    means = before[0]["1.running_mean"]
    assert means[0] != means[1]
    train(net, trainer, 2, contexts=contexts, seed=5)
    after = values(net), states(trainer)
    state.restore()
    assert (values(net), states(trainer)) == before
    train(net, trainer, 2, contexts=contexts, seed=5)
    assert (values(net), states(trainer)) == after


def test_half_precision():
    """GluonState: float16 with its float32 copy in the optimizer."""
    net = network(nn.Dense(6, in_units=8), nn.Dense(3, in_units=6))
    net.cast("float16")
    trainer = make_trainer(net, multi_precision=True)

    def update(seed):
        # There is no backward pass for halves on the CPU.
        for number, parameter in enumerate(net.collect_params().values()):
            gradient = np.random.RandomState(seed + number).standard_normal(parameter.shape)
            parameter.grad()[:] = array(gradient.astype("float16"))
            parameter.data()._fresh_grad = True
        trainer.step(4)

    state = GluonState(net, trainer)
    update(1)
    state.commit()
    before = values(net), states(trainer)
    update(2)
    after = values(net), states(trainer)
    state.restore()
    assert (values(net), states(trainer)) == before
    update(2)
    assert (values(net), states(trainer)) == after


def test_deferred_parameters_go_back_to_their_first_values():
    """GluonState: a parameter without a shape at the commit goes back to what it was when it got one."""
    net = network(nn.Dense(6), nn.BatchNorm(), nn.Dense(3), hybridize=True)
    trainer = make_trainer(net)
    state = GluonState(net, trainer)
    data, _ = samples(4)
    net(array(data))
    first = values(net)
    train(net, trainer, 2)
    trained = values(net)
    state.restore()
    assert values(net) == first
    train(net, trainer, 2)
    assert values(net) == trained
    state.commit()
    train(net, trainer, 1)
    state.restore()
    assert values(net) == trained


def test_gradients_that_add_up_begin_anew():
    """GluonState.restore: gradients of grad_req 'add' are zero, those of a step that was lost do not count twice."""
    net = network(nn.Dense(3, in_units=8))
    for parameter in net.collect_params().values():
        parameter.grad_req = "add"
    state = GluonState(net)
    data, label = samples(4)
    backward(net, [(array(data), array(label))])
    state.restore()
    for parameter in net.collect_params().values():
        assert not parameter.grad().asnumpy().any()


def test_loss_scale():
    """GluonState: what mixed precision adds to a Trainer."""
    scalers = pytest.importorskip("mxnet.amp.loss_scaler" if is_mxnet_2() else "mxnet.contrib.amp.loss_scaler")
    net = make_net()
    trainer = make_trainer(net)
    trainer._amp_loss_scaler = scaler = scalers.LossScaler()
    trainer._amp_original_scale = trainer._scale
    trainer._scale = 0.25
    state = GluonState(net, trainer)
    before = dict(vars(scaler))
    scaler._loss_scale, scaler._unskipped, trainer._scale = 8.0, 77, 3.0
    state.restore()
    assert trainer._amp_loss_scaler is scaler
    assert vars(scaler) == before
    assert trainer._scale == 0.25


def test_opaque_weights():
    """GluonState: weights that an inference pass has put into a layout of oneDNN's, saved and restored."""
    net = network(nn.Conv2D(32, 3, in_channels=16), hybridize=True)
    data = array(np.ones((2, 16, 16, 16), "float32"))
    for _ in range(3):
        net(data).asnumpy()
    state = GluonState(net)
    before, output = values(net), net(data).asnumpy()
    for parameter in net.collect_params().values():
        parameter.set_data(parameter.data() * 2)
    for _ in range(3):
        doubled = net(data).asnumpy()
    state.restore()
    assert values(net) == before
    again = net(data).asnumpy()
    assert (again != doubled).any()
    assert again.tobytes() == output.tobytes()


def test_a_save_that_fails_keeps_the_last_commit():
    """GluonState.save: whatever cannot be saved, all parts stay those of the last commit."""
    net = make_net()
    trainer = make_trainer(net)
    sampler = ElasticSampler(range(20))
    state = GluonState(net, trainer, sampler=sampler, step=1)
    train(net, trainer, 2)
    sampler.record_batch(0, 4)
    state.commit()
    before = values(net), states(trainer), sampler.state_dict()
    train(net, trainer, 2)
    sampler.record_batch(1, 4)
    state.step = (each for each in ())  # a generator cannot be copied
    with pytest.raises(InvalidRequestError, match="state 'step'"):
        state.commit()
    state.restore()
    assert (values(net), states(trainer), sampler.state_dict()) == before
    assert state.step == 1


@pytest.mark.parametrize(("part", "half"), [("trainer", "stage"), ("sampler", "receive")])
def test_what_is_interrupted_halfway_changes_nothing(part, half, monkeypatch):
    """GluonState: a save or sync that is interrupted in any of its parts leaves the last commit whole."""
    net = make_net()
    trainer = make_trainer(net)
    sampler = ElasticSampler(range(20))
    state = GluonState(net, trainer, sampler=sampler, step=0)
    train(net, trainer, 2)
    sampler.record_batch(0, 4)
    state.step = 2
    state.commit()
    before = values(net), states(trainer), sampler.state_dict()

    def interrupt():
        raise HorovodInternalError("the world is lost")

    train(net, trainer, 2)
    sampler.record_batch(1, 4)
    state.step = 4
    with monkeypatch.context() as patch:
        patch.setattr(state._handlers[part], half, interrupt)
        with pytest.raises(HorovodInternalError):
            {"stage": state.save, "receive": state.sync}[half]()
    state.restore()
    assert (values(net), states(trainer), sampler.state_dict()) == before
    assert state.step == 2


def test_assigning_replaces_and_saves():
    """GluonState: assigning to an attribute with a handler gives it the new value, which is saved."""
    one, two = make_net(), make_net()
    state = GluonState(one, other=None)
    for parameter in two.collect_params().values():
        parameter.set_data(parameter.data() + 3)
    expected = values(two)
    state.net = two
    state.other = one
    for net in (one, two):
        for parameter in net.collect_params().values():
            parameter.set_data(parameter.data() + 1)
    state.restore()
    assert state.net is two
    assert values(two) == expected
    assert values(one) != expected


def test_what_cannot_be_assigned():
    """GluonState: a value that the handler cannot save is refused, and the one before stays."""
    net = make_net()
    sampler = ElasticSampler(range(4))
    state = GluonState(net, sampler=sampler)
    expected = values(net)
    for name, value in [("net", None), ("sampler", 5), ("net", sampler), ("sampler", net)]:
        with pytest.raises(InvalidRequestError, match=f"state '{name}': .* cannot take the place of"):
            setattr(state, name, value)
    with pytest.raises(InvalidRequestError, match="it has no values"):
        state.net = nn.Dense(2, in_units=2)
    state.commit()
    for parameter in net.collect_params().values():
        parameter.set_data(parameter.data() + 1)
    state.restore()
    assert (state.net, state.sampler) == (net, sampler)
    assert values(net) == expected


def test_registered_handlers():
    """get_handler_registry: handlers of a program's own, called for save, restore, sync and reset."""
    calls = []

    class Meter:
        total = 0

    class MeterHandler(StateHandler):
        def save(self):
            calls.append("save")
            self.kept = self.value.total

        def restore(self):
            calls.append("restore")
            self.value.total = self.kept

        def sync(self):
            calls.append("sync")
            self.save()

        def reset(self):
            calls.append("reset")

    before = list(elastic.get_handler_registry())
    elastic.set_handler_registry([*before, (Meter, MeterHandler)])
    try:
        meter = Meter()
        state = GluonState(meter=meter, step=0)
    finally:
        elastic.set_handler_registry(before)
    meter.total = 5
    state.commit()
    meter.total = 7
    state.restore()
    assert state.meter is meter
    assert meter.total == 5
    state.on_reset()
    state.sync()
    assert calls == ["save", "save", "restore", "reset", "sync", "save"]


def test_refusals():
    """GluonState: what cannot be saved is refused when the state is made."""
    net = nn.Dense(3, in_units=2)
    with pytest.raises(InvalidRequestError, match=r"state 'bias'(.|\n)*Fix: call initialize"):
        GluonState(net)
    with pytest.raises(InvalidRequestError, match="'commit'"):
        GluonState(commit=make_net())
    net = make_net([mx.cpu(0), mx.cpu(1)])
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", kvstore="device", update_on_kvstore=True)
    train(net, trainer, contexts=[mx.cpu(0), mx.cpu(1)])
    with pytest.raises(InvalidRequestError, match="updated by its store"):
        GluonState(net, trainer)
    if not is_mxnet_2():
        table = mx.gluon.Parameter("table", shape=(4, 2), stype="row_sparse")
        table.initialize()
        with pytest.raises((UnsupportedDtypeError, InvalidRequestError)):
            GluonState({"table": table})


def test_what_rank_0_has_must_fit():
    """Handlers say what differs from rank 0's networks and Trainers."""
    mine = GluonState(make_net(), make_trainer(make_net()))._handlers
    other_net = network(nn.Dense(6, in_units=8), nn.Dense(5, in_units=6))
    other = GluonState(other_net, make_trainer(other_net, "nadam"))._handlers
    wide = GluonState(network(nn.Dense(7, in_units=8), nn.BatchNorm(in_channels=7), nn.Dense(3, in_units=7)))._handlers
    half = make_net()
    half.cast("float16")
    half = GluonState(half)._handlers

    def fault(here, there, name):
        copy = there[name]._saved
        return here[name].fault(copy.details, copy.image.specs)

    assert fault(mine, mine, "net") == fault(mine, mine, "trainer") == ""
    assert "there are 8 parameters here and 4 there" in fault(mine, other, "net")
    assert "parameter '0.bias' has shape (6,) instead of (7,)" in fault(mine, wide, "net")
    assert "dtype float32 instead of float16" in fault(mine, half, "net")
    assert "optimizer is SGD here, but Nadam there" in fault(mine, other, "trainer")
    assert issubclass(MismatchError, RuntimeError)
