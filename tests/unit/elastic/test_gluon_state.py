"""`GluonState` in one process: what is saved of networks, Trainers and samplers, and that it comes back bit by bit."""

import random
import zipfile
from unittest.mock import Mock

import numpy as np
import pytest

import kvstore_hvd.mxnet as hvd
from kvstore_hvd import elastic, mxnet_compat
from kvstore_hvd.elastic import ElasticSampler, GluonState, StateHandler
from kvstore_hvd.errors import HorovodInternalError, InvalidRequestError, UnsupportedDtypeError
from support.gluon import array, backward, batch_of, is_mxnet_2, network, parameters, samples, scaler_of
from support.gluon import bits_of as values
from support.gluon import states_of as states

mx = pytest.importorskip("mxnet")
nn = mx.gluon.nn

OPTIMIZERS = {"sgd": {"learning_rate": 0.1, "momentum": 0.9}, "nadam": {}}


pytestmark = pytest.mark.usefixtures("alone")


def make_net(contexts=()):
    return network(nn.Dense(6, in_units=8), nn.BatchNorm(in_channels=6), nn.Dense(3, in_units=6), contexts=contexts)


def make_trainer(net, name="sgd"):
    return mx.gluon.Trainer(net.collect_params(), name, OPTIMIZERS[name], kvstore=None)


def train(net, trainer, steps=1, seed=0, contexts=None):
    """Take some steps, on other data each time; halves, which have no backward pass on the CPU, get any gradients."""
    for step in range(steps):
        batches = [batch_of(seed, step, number, ctx=ctx) for number, ctx in enumerate(contexts or [mx.cpu()])]
        if trainer._optimizer.multi_precision:
            for number, parameter in enumerate(net.collect_params().values()):
                gradient = np.random.RandomState(seed + 100 * step + number).standard_normal(parameter.shape)
                parameter.grad()[:] = array(gradient.astype("float16"))
                parameter.data()._fresh_grad = True
        else:
            backward(net, batches)
        trainer.step(4)


def scale(net, factor):
    for parameter in net.collect_params().values():
        parameter.set_data(parameter.data() * factor + 1)


@pytest.mark.parametrize(("name", "devices", "halves"), [("sgd", 1, False), ("nadam", 2, False), ("sgd", 1, True)])
def test_training_repeats_itself_bit_by_bit(name, devices, halves):
    contexts = [mx.cpu(each) for each in range(devices)]
    net = make_net(contexts)
    if halves:
        net = network(nn.Dense(6, in_units=8), nn.Dense(3, in_units=6))
        net.cast("float16")
    else:
        next(iter(net.collect_params().values())).grad_req = "null"
    store = {"kvstore": "device", "update_on_kvstore": False} if devices > 1 else {"kvstore": None}
    options = {**OPTIMIZERS[name], "multi_precision": halves}
    trainer = mx.gluon.Trainer(net.collect_params(), name, options, **store)
    state = GluonState(None if halves else net, trainer, step=0)  # it knows the parameters of a Trainer, too
    train(net, trainer, 3, contexts=contexts)
    state.step = 3
    state.commit()
    before = values(net), states(trainer)
    assert devices == 1 or len(set(before[0]["1.running_mean"])) == 2
    train(net, trainer, 2, seed=7, contexts=contexts)
    after = values(net), states(trainer)
    assert after != before
    state.step = 5
    for _ in range(2):  # the saved values are not touched
        state.restore()
        assert (values(net), states(trainer), state.step) == (*before, 3)
        train(net, trainer, 2, seed=7, contexts=contexts)
        assert (values(net), states(trainer)) == after


@pytest.mark.parametrize("wraps", [False, True])
def test_restore_is_in_place(wraps):
    """Arrays, dictionaries and the scheduler stay the objects that others hold, also in a DistributedOptimizer."""
    hvd.init()
    net = make_net()
    schedule = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1)
    optimizer = mx.optimizer.create("sgd", momentum=0.9, lr_scheduler=schedule)
    used = hvd.DistributedOptimizer(optimizer) if wraps else optimizer
    trainer = mx.gluon.Trainer(net.collect_params(), used, kvstore=None)
    train(net, trainer)

    def objects():
        momentum = [each for each in trainer._updaters[0].states.values() if each is not None]
        return [*(each for p in net.collect_params().values() for each in p.list_data()), *momentum]

    kept = objects()
    state = GluonState(net, trainer)
    train(net, trainer, 6)
    assert schedule.count > 0
    state.restore()
    assert trainer._optimizer is used
    assert optimizer.num_update == 1
    assert optimizer.lr_scheduler is schedule
    assert (schedule.count, schedule.base_lr) == (0, 0.1)
    assert list(map(id, objects())) == list(map(id, kept))
    assert optimizer._index_update_count is optimizer._all_index_update_counts[0]
    optimizer.lr_scheduler = mx.lr_scheduler.PolyScheduler(9)
    state.restore()
    assert type(optimizer.lr_scheduler) is type(schedule)


def test_deferred_parameters_go_back_to_their_first_values():
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


def test_gradients_and_the_loss_scale(tmp_path):
    """Gradients of grad_req 'add' are zero: a step that was lost does not count twice. And mixed precision's scale."""
    net = make_net()
    for parameter in net.collect_params().values():
        parameter.grad_req = "add" if parameter.grad_req == "write" else "null"
    trainer = make_trainer(net)
    _, scaler = scaler_of(trainer)
    trainer._scale = 0.25
    state = GluonState(net, trainer)
    before = dict(vars(scaler))
    scaler._loss_scale, scaler._unskipped, trainer._scale = 8.0, 77, 3.0
    backward(net, [batch_of(1)])
    state.restore()
    assert trainer._amp_loss_scaler is scaler
    assert vars(scaler) == before
    assert trainer._scale == 0.25
    gradients = [each.grad() for each in net.collect_params().values() if each.grad_req == "add"]
    assert len(gradients) == 6
    assert not any(gradient.asnumpy().any() for gradient in gradients)
    hvd.init()
    state.save(tmp_path / "state")
    with pytest.raises(InvalidRequestError, match=r"no loss scaler here: amp.init_trainer\(\) was not called"):
        GluonState(net, make_trainer(net)).load(tmp_path / "state")


def test_opaque_weights():
    net = network(nn.Conv2D(32, 3, in_channels=16), hybridize=True)
    data = array(np.ones((2, 16, 16, 16), "float32"))

    def output():
        for _ in range(3):
            result = net(data).asnumpy()
        return result.tobytes()

    first = output()
    state = GluonState(net)
    before = values(net)
    scale(net, 2)
    assert output() != first
    state.restore()
    assert values(net) == before
    assert output() == first


@pytest.mark.parametrize("fault", ["copy", "stage", "receive"])
def test_what_fails_or_is_interrupted_keeps_the_last_commit(fault, monkeypatch):
    """Whatever cannot be saved, and whichever part of a save or sync is interrupted: all parts stay as they were."""
    net = make_net()
    trainer = make_trainer(net)
    sampler = ElasticSampler(range(20))
    state = GluonState(net, trainer, sampler=sampler, step=0)
    train(net, trainer, 2)
    sampler.record_batch(0, 4)
    state.step = 1
    state.commit()
    before = values(net), states(trainer), sampler.state_dict(), 1
    train(net, trainer, 2)
    sampler.record_batch(1, 4)
    state.step = 2
    if fault == "copy":
        state.step = (each for each in ())  # a generator cannot be copied
        with pytest.raises(InvalidRequestError, match="state 'step'"):
            state.commit()
    else:
        part, call = {"stage": ("trainer", state.save), "receive": ("sampler", state.sync)}[fault]
        with monkeypatch.context() as patch, pytest.raises(HorovodInternalError):
            patch.setattr(state._handlers[part], fault, Mock(side_effect=HorovodInternalError("the world is lost")))
            call()
    state.restore()
    assert (values(net), states(trainer), sampler.state_dict(), state.step) == before


def test_assigning_replaces_and_saves_or_is_refused():
    one, two, three = make_net(), make_net(), make_net()
    sampler = ElasticSampler(range(4))
    state = GluonState(one, make_trainer(one), sampler=sampler, other=None)
    scale(two, 3)
    expected = values(two), values(three)
    state.net = two
    state.other = one
    state.trainer = make_trainer(three)  # its parameters are in no network of the state
    for name, value in [("net", None), ("sampler", 5), ("net", sampler), ("sampler", one)]:
        with pytest.raises(InvalidRequestError, match=f"state '{name}': .* cannot take the place of"):
            setattr(state, name, value)
    with pytest.raises(InvalidRequestError, match="it has no values"):
        state.net = nn.Dense(2, in_units=2)
    scale(two, 2)
    scale(three, 2)
    state.restore()
    assert (state.net, state.sampler) == (two, sampler)
    assert (values(two), values(three)) == expected


def test_registered_handlers():
    calls = []

    class Meter:
        total = 0

    class MeterHandler(StateHandler):
        def save(self):
            self.kept = self.value.total

        def restore(self):
            self.value.total = self.kept

        sync = reset = lambda self: calls.append(self.value)

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
    assert (state.meter is meter, meter.total) == (True, 5)
    state.on_reset()
    state.sync()
    assert calls == [meter] * 2


def test_refusals():
    net = nn.Dense(3, in_units=2)
    with pytest.raises(InvalidRequestError, match=r"state 'bias'(.|\n)*Fix: call initialize"):
        GluonState(net)
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


def complete(net=None, optimizer="sgd", trainer_of=make_trainer, **objects):
    net = net or make_net()
    sampler = ElasticSampler(range(40))
    return GluonState(net, trainer_of(net, optimizer), sampler=sampler, **{"epoch": 0, **objects})


@pytest.mark.parametrize("there", ["deferred", "on another device"])
def test_another_process_goes_on_from_a_file(there, tmp_path):
    """save(path), load(path): parameters, optimizer, sampler and objects, whether layers know their shapes or not."""
    path = tmp_path / "state"
    one = complete(optimizer="nadam", losses=[1.0])
    train(one.net, one.trainer, 3)
    one.sampler.record_batch(0, 8)
    one.epoch, one.losses = 4, [1.0, 0.5]
    one.save(path)
    saved = values(one.net), states(one.trainer), one.sampler.state_dict(), 4, [1.0, 0.5]
    train(one.net, one.trainer, 2, seed=9)
    contexts = [mx.cpu(0 if there == "deferred" else 1)]
    net = network(nn.Dense(6), nn.BatchNorm(), nn.Dense(3)) if there == "deferred" else make_net(contexts)
    two = complete(net, "nadam", losses=[])
    two.load(path)
    assert (values(two.net), states(two.trainer), two.sampler.state_dict(), two.epoch, two.losses) == saved
    train(two.net, two.trainer, 2, seed=9, contexts=contexts)
    assert (values(two.net), states(two.trainer)) == (values(one.net), states(one.trainer))
    two.restore()  # what was loaded is saved
    assert (values(two.net), states(two.trainer), two.sampler.state_dict(), two.epoch, two.losses) == saved


def cast(net):
    net.cast("float16")
    return net


def partial(net, name):
    return mx.gluon.Trainer(parameters(net)[:2], name, kvstore=None)


def distributed(net, name):
    return hvd.DistributedTrainer(net.collect_params(), name)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: complete(optimizer="nadam"), "the Trainer's optimizer is Nadam here, but SGD there"),
        (lambda: complete(trainer_of=partial), "the Trainer has 2 parameters here, but 8 there"),
        (lambda: complete(trainer_of=distributed), "is a DistributedTrainer here, but a Trainer of Gluon there"),
        (lambda: GluonState(net=network(nn.Dense(3, in_units=2)), epoch=0), "it has net.*, but the state has net"),
        (lambda: complete(network(nn.Dense(6, in_units=8))), "there are 2 parameters here and 8 there"),
        (lambda: complete(cast(make_net())), "dtype float16 instead of float32"),
    ],
)
def test_a_file_that_does_not_fit_changes_nothing(make, text, tmp_path):
    complete().save(tmp_path / "state")
    state = make()
    before = values(state.net)
    with pytest.raises(InvalidRequestError, match=f"state does not fit: .*{text}(.|\n)*Fix: "):
        state.load(tmp_path / "state")
    assert values(state.net) == before


def test_a_checkpoint_has_files_of_mxnet(tmp_path):
    """MXNet reads the parameters and the optimizer's states, as it does its own files."""
    net = make_net()
    trainer = make_trainer(net, "nadam")
    train(net, trainer, 2)
    complete(net, "nadam", trainer_of=lambda *_: trainer).save(tmp_path / "state")
    with zipfile.ZipFile(tmp_path / "state") as archive:
        archive.extractall(tmp_path / "files")
    net.save_parameters(str(tmp_path / "own.params"))
    written, own = (mx.nd.load(str(each)) for each in (tmp_path / "files" / "net.params", tmp_path / "own.params"))
    assert written.keys() == own.keys()
    assert all((written[name].asnumpy() == each.asnumpy()).all() for name, each in own.items())
    other = make_net()
    other.load_parameters(str(tmp_path / "files" / "net.params"))
    assert values(other) == values(net)
    again = make_trainer(other, "nadam")
    again.load_states(str(tmp_path / "files" / "trainer.states"))
    assert states(again) == states(trainer)


def test_an_optimizer_that_cannot_be_written(tmp_path):
    state = complete()
    state.trainer._optimizer.lr_scheduler = lambda update: 0.1
    with pytest.raises(InvalidRequestError, match="the state cannot be written"):
        state.save(tmp_path / "state")


@pytest.mark.parametrize("keep", ["commit", "save"])
def test_random_numbers_are_those_of_the_commit(keep):
    """Whatever was drawn, and whether the state was restored in between; another seed has others."""

    def drawn():
        return float(mx.nd.random.uniform(shape=1).asscalar()), np.random.rand(), random.random()

    runs = []
    for seed, disturbed in ((5, False), (5, True), (6, False)):
        state, seen = elastic.GluonState(seed=seed, step=0), []
        for _ in range(4):
            if disturbed:
                drawn()
                state.restore()
            seen.append(drawn())
            getattr(state, keep)()
        runs.append(seen)
    assert runs[0] == runs[1]
    assert not set(runs[0]) & set(runs[2])
    assert len(set(runs[0])) == 4


def test_arrays_of_all_dtypes_in_a_file_of_mxnet(tmp_path):
    dtypes = ["float32", "float64", "float16", "uint8", "int32", "int8", "int64"]
    given = {dtype: np.arange(1, 7).astype(dtype).reshape(2, 3) for dtype in dtypes}
    parts = mxnet_compat.parts_of_file(
        {dtype: (x.shape, dtype, is_mxnet_2(), x.tobytes()) for dtype, x in given.items()}
    )
    (tmp_path / "all").write_bytes(data := b"".join(parts))
    found, loaded = mxnet_compat.arrays_of_file(data), mx.nd.load(str(tmp_path / "all"))
    for dtype, x in given.items():
        assert found[dtype] == x.tobytes()
        np.testing.assert_array_equal(loaded[dtype].asnumpy(), x)
