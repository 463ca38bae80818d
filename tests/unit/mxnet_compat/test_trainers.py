"""Trainers and Modules: they train through the store, and those that would train alone raise."""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from typing import Any

import pytest

from kvstore_hvd import errors, log, mxnet_compat
from kvstore_hvd.config import reload
from kvstore_hvd.mxnet_compat import unsynchronised
from support.fake_store import V2, Fake, World, array, backward, mx, network, parameters, step, trainer_of, update

# -- Trainers that would train alone ------------------------------------------------------------------------------


def refused(has: str, workers: int = 4) -> str:
    return (
        f"{has}, but there are {workers} workers: each of them would train a model of its own.\n"
        "  Neither its gradients nor its parameters were exchanged by anything else.\n"
        "  Independent trainings on purpose, or an exchange that cannot be seen (of copies): kvstore=None.\n"
        "  Fix: pass kvstore='horovod', or the store that mx.kv.create('horovod') returned."
    )


def chunk_of(handle: int) -> int:
    """What identifies memory."""
    data = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.MXNDArrayGetData(ctypes.c_void_p(handle), ctypes.byref(data)))
    return data.value or 0


def note(arrays: Any, reduces: bool = True) -> None:
    mxnet_compat.note_exchange(arrays, chunk_of, reduces)


@pytest.fixture
def fresh_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was said yet."""
    monkeypatch.setattr(log, "_said", set())


@pytest.mark.parametrize(("kvstore", "devices"), [("device", 1), ("local", 1), ("device", 2), ("local", 2)])
@pytest.mark.parametrize("by", ["step", "update"])
def test_a_trainer_that_would_train_alone_raises(world: type[World], kvstore: str, devices: int, by: str) -> None:
    world.size = 4
    net = network(devices)
    trainer = trainer_of(net, kvstore, update_on_kvstore=None if by == "step" else False)
    before = parameters(net)
    for _ in range(2):  # catching it does not help
        with pytest.raises(errors.UnsynchronisedTrainerError) as caught:
            step(net, trainer, by)
        # What was asked for: with one device MXNet creates no store for either name.
        assert str(caught.value) == refused(f"Trainer has kvstore '{kvstore}'")
    assert parameters(net) == before


@pytest.mark.parametrize("by", ["step", "update"])
def test_without_a_store_it_warns_once(
    world: type[World], fresh_log: None, caplog: pytest.LogCaptureFixture, by: str
) -> None:
    world.size = 4
    net = network()
    for trainer in (trainer_of(net, None), trainer_of(net, None)):
        for number in range(1, 6):
            step(net, trainer, by)
            assert len(caplog.records) == (number >= 3 or len(caplog.records) > 0)
    (record,) = caplog.records
    assert record.getMessage() == (
        "Trainer has no kvstore, and none of its gradients or parameters was exchanged in its first 3 updates: each of"
        " the 4 workers trains a model of its own. If that is not on purpose, pass kvstore='horovod'."
    )


@pytest.mark.parametrize("what", ["gradient", "parameter"])
@pytest.mark.parametrize("kvstore", [None, "device", "local"])
@pytest.mark.parametrize("by", ["step", "update"])
def test_a_script_that_reduces_by_itself_is_left_alone(
    world: type[World], fresh_log: None, caplog: pytest.LogCaptureFixture, kvstore: str | None, what: str, by: str
) -> None:
    """Also where the arrays are others than when the Trainer was made."""
    world.size = 4
    net = network()
    trainer = trainer_of(net, kvstore)
    net.cast("float64")
    first = next(iter(net.collect_params().values()))
    for _ in range(5):
        backward(net)
        note([array(2), first.grad() if what == "gradient" else first.list_data()[0]])
        update(trainer, by)
    assert caplog.records == []


@pytest.mark.parametrize("kvstore", [None, "device"])
def test_parameters_that_were_only_broadcast(
    world: type[World], fresh_log: None, caplog: pytest.LogCaptureFixture, kvstore: str | None
) -> None:
    """They may be exchanged later, as those of local SGD are."""
    world.size = 4
    net = network()
    trainer = trainer_of(net, kvstore)
    note([next(iter(net.collect_params().values())).data()], reduces=False)
    for _ in range(100):
        step(net, trainer)
    texts = [record.getMessage() for record in caplog.records]
    if kvstore is None:
        assert texts == []
        step(net, trainer)
    else:
        (text,) = texts
        assert text.startswith("Trainer has kvstore 'device', which stays in this worker, and so far its parameters")
        with pytest.raises(errors.UnsynchronisedTrainerError, match=r"^Trainer has kvstore 'device'"):
            step(net, trainer)


def test_an_array_that_is_no_more_counts_for_nobody(world: type[World]) -> None:
    """Another one may have got its id."""
    world.size = 4
    net = network()
    trainer = trainer_of(net, "device")
    note([])  # the arrays are known now
    watch = unsynchronised._watches[trainer]
    other = array(2)
    unsynchronised._by_chunk[id(other)] = [watch]  # type: ignore[index]
    note([other])
    with pytest.raises(errors.UnsynchronisedTrainerError):
        step(net, trainer)


class Exchanging(mx.optimizer.SGD):
    """Reduces as it updates, or does not."""

    exchanges = True

    def _note(self, gradients: Any) -> None:
        if self.exchanges:
            note(gradients if isinstance(gradients, (list, tuple)) else [gradients])

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """As `SGD.update`."""
        self._note(grad)
        super().update(index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """As `SGD.update_multi_precision`."""
        self._note(grad)
        super().update_multi_precision(index, weight, grad, state)


@pytest.mark.parametrize("exchanges", [False, True])
def test_an_optimizer_of_the_users(world: type[World], exchanges: bool) -> None:
    world.size = 4
    net = network()
    optimizer = Exchanging(learning_rate=0.1)
    optimizer.exchanges = exchanges
    trainer = mx.gluon.Trainer(net.collect_params(), optimizer)
    for _ in range(3):
        with contextlib.nullcontext() if exchanges else pytest.raises(errors.UnsynchronisedTrainerError):
            step(net, trainer)


def test_a_trainer_of_the_users(world: type[World]) -> None:
    """It reduces between the steps of MXNet's."""

    class Mine(mx.gluon.Trainer):
        def _allreduce_grads(self) -> None:
            note([parameter.list_grad()[0] for parameter in self._params])

    world.size = 4
    net = network()
    step(net, trainer_of(net, "local", Mine))


@pytest.mark.parametrize("size", [None, 1])
def test_alone_is_fine_when_there_is_nobody_else(world: type[World], size: int | None) -> None:
    world.size = size
    net = network()
    step(net, trainer_of(net, "device"))


def test_alone_is_fine_on_request(world: type[World], monkeypatch: pytest.MonkeyPatch) -> None:
    world.size = 4
    monkeypatch.setenv("KVHVD_ALLOW_LOCAL_TRAINER", "1")
    reload()
    net = network()
    step(net, trainer_of(net, "device"))


def test_subclasses_are_checked_unless_they_synchronise(world: type[World]) -> None:
    class Mine(mx.gluon.Trainer):
        pass

    class Synchronised(Mine):
        _kvstore_hvd_synchronised = True

    world.size = 4
    net = network()
    with pytest.raises(errors.UnsynchronisedTrainerError, match=r"^Mine has kvstore 'device', but"):
        step(net, trainer_of(net, "device", Mine))
    step(net, trainer_of(net, "device", Synchronised))


def test_stores_of_others_are_taken_at_their_word(world: type[World]) -> None:
    world.size = 4
    net = network()
    trainer = trainer_of(net, mx.kv.create("teststore"))
    step(net, trainer)
    assert trainer._kvstore.type == "teststore"


# -- Module, which only MXNet 1 has; MXNet 2 still has the functions in mxnet.model --------------------------------


def test_create_kvstore_of_model(world: type[World]) -> None:
    store, update_on_kvstore = mx.model._create_kvstore("horovod", 1, {})
    assert type(store) is Fake
    assert not update_on_kvstore
    assert mx.model._create_kvstore("local", 1, {}) == (None, False)


def test_initialize_kvstore_broadcasts_everywhere(world: type[World]) -> None:
    Fake.root_value = 7
    on_devices = [[mx.nd.ones((2,), mx.cpu(0)), mx.nd.ones((2,), mx.cpu(1))], [mx.nd.ones((3,))]]
    arg_params = {"b": mx.nd.zeros((3,)), "a": mx.nd.zeros((2,)), "other": mx.nd.zeros((1,))}
    mx.model._initialize_kvstore(mx.kv.create("horovod"), on_devices, arg_params, ["a", "b"], False)
    assert Fake.made[0].calls == [("broadcast", "a"), ("broadcast", "b")]
    for values in [*on_devices[0], *on_devices[1], arg_params["a"], arg_params["b"]]:
        assert (values.asnumpy() == 7).all()
    assert (arg_params["other"].asnumpy() == 0).all()


def test_initialize_kvstore_of_other_stores(world: type[World]) -> None:
    store = mx.kv.create("local")
    mx.model._initialize_kvstore(store, [[mx.nd.ones((2,))]], {"a": mx.nd.ones((2,)) * 3}, ["a"], False)
    out = mx.nd.zeros((2,))
    store.pull("a", out)
    assert (out.asnumpy() == 3).all()


if not V2:

    def module_parts() -> tuple[Any, Any]:
        symbol = mx.sym.SoftmaxOutput(
            mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=2, name="fc"), name="softmax"
        )
        return symbol, mx.io.NDArrayIter(mx.nd.ones((8, 4)), mx.nd.zeros((8,)), 4)

    @pytest.mark.parametrize("by", ["name", "instance"])
    def test_module_starts_from_rank_0(world: type[World], by: str) -> None:
        world.size, Fake.root_value = 2, 0.5
        symbol, batches = module_parts()
        module = mx.mod.Module(symbol)
        module.bind(batches.provide_data, batches.provide_label)
        module.init_params(mx.init.Uniform(0.1))
        module.init_optimizer(kvstore="horovod" if by == "name" else mx.kv.create("horovod"))
        (store,) = Fake.made
        assert module._kvstore is store
        assert {call[1] for call in store.calls} == {"fc_weight", "fc_bias"}
        for values in (*module._arg_params.values(), *(part[0] for part in module._exec_group.param_arrays)):
            assert (values.asnumpy() == 0.5).all()

    def test_module_trains_through_the_store(world: type[World]) -> None:
        symbol, batches = module_parts()
        mx.mod.Module(symbol).fit(batches, num_epoch=1, kvstore="horovod")
        calls = Fake.made[0].calls
        assert sum(call[0] == "pushpull" for call in calls) == 4  # two parameters, two batches

    def test_module_that_would_train_alone_raises(world: type[World]) -> None:
        world.size = 2
        symbol, batches = module_parts()
        with pytest.raises(errors.UnsynchronisedTrainerError, match=r"^Module has kvstore 'local', but"):
            mx.mod.Module(symbol).fit(batches, num_epoch=1)

    @pytest.mark.parametrize("kvstore", [None, "local"])
    @pytest.mark.parametrize("by", ["script", "optimizer"])
    def test_module_of_a_script_that_reduces_by_itself(
        world: type[World], fresh_log: None, caplog: pytest.LogCaptureFixture, kvstore: str | None, by: str
    ) -> None:
        world.size = 2
        symbol, batches = module_parts()
        module = mx.mod.Module(symbol)
        module.bind(batches.provide_data, batches.provide_label)
        module.init_params(mx.init.Uniform(0.1))
        optimizer = Exchanging(learning_rate=0.1) if by == "optimizer" else "sgd"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of rescale_grad
            module.init_optimizer(kvstore=kvstore, optimizer=optimizer)
        for _ in range(5):
            batches.reset()
            module.forward_backward(batches.next())
            if by == "script":
                note([of_devices[0] for of_devices in module._exec_group.grad_arrays])
            module.update()
        assert caplog.records == []

    def test_module_without_a_store_warns_once(
        world: type[World], fresh_log: None, caplog: pytest.LogCaptureFixture
    ) -> None:
        world.size = 2
        symbol, batches = module_parts()
        mx.mod.Module(symbol).fit(batches, num_epoch=3, kvstore=None)
        (record,) = caplog.records
        assert record.getMessage().startswith("Module has no kvstore, and none of its gradients or parameters was")

    @pytest.mark.parametrize(("kvstore", "size"), [("horovod", 1), ("local", 2)])
    def test_feed_forward_is_refused(world: type[World], kvstore: str, size: int) -> None:
        world.size = size
        symbol, batches = module_parts()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            model = mx.model.FeedForward(symbol, num_epoch=1)
        with pytest.raises(errors.UnsupportedMethodError, match=r"Fix: use mx\.mod\.Module"):
            model.fit(batches, kvstore=kvstore)
