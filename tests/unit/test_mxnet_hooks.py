"""What is changed in MXNet: registration, the string trap, trainers that would train alone, Module, and errors.

Runs with the MXNet version that is installed, both are supported. The store is a fake with one worker; how many workers
there are, the tests say.
"""

from __future__ import annotations

import ctypes
import gc
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore_hvd import errors, mxnet_compat
from kvstore_hvd.config import reload
from kvstore_hvd.mxnet_compat import hooks

mx = mxnet_compat.require_mxnet()

ROOT = Path(__file__).resolve().parents[2]
V2 = mx.__version__.startswith("2")


class Fake(mx.kvstore.KVStoreBase):
    """One worker; remembers what it was asked to do."""

    made: list[Fake] = []  # noqa: RUF012 - emptied by the fixture
    root_value: float | None = None  # what rank 0 is supposed to have

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.labels: dict[int, str] | None = None
        Fake.made.append(self)

    @staticmethod
    def is_capable(capability: str) -> bool:
        return False

    @property
    def type(self) -> str:
        return "horovod"

    @property
    def rank(self) -> int:
        return 0

    @property
    def num_workers(self) -> int:
        return 1

    def _set_key_labels(self, labels: dict[int, str]) -> None:
        self.labels = labels

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        self.calls.append(("broadcast", key))
        for array in out if isinstance(out, list) else [out]:
            if self.root_value is None:
                value.copyto(array) if array is not value else None
            else:
                array[:] = self.root_value

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        self.calls.append(("pushpull", key))


class World:
    """What the hooks are told about the number of workers."""

    size: int | None = None


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[World]]:
    """Install the hooks with the fake store, and afterwards put back whatever was there."""
    for name in list(os.environ):
        if name.startswith("KVHVD_") and not name.startswith("KVHVD_TEST_"):
            monkeypatch.delenv(name)
    reload()
    registry = mx.kvstore.KVStoreBase.kv_registry
    before, state = dict(registry), (hooks._store, hooks._world_size)
    registry.pop("horovod", None)
    hooks.install_hooks(store_class, lambda: World.size)
    yield World
    registry.clear()
    registry.update(before)
    hooks._store, hooks._world_size = state
    World.size = None
    Fake.made.clear()
    Fake.root_value = None
    monkeypatch.undo()
    reload()


def store_class() -> type:
    Fake.__name__ = "Horovod"  # MXNet registers by the name of the class
    return Fake


def array(*shape: int) -> Any:
    return mx.np.ones(shape) if V2 else mx.nd.ones(shape)


def network(devices: int = 1) -> Any:
    net = mx.gluon.nn.HybridSequential()
    net.add(mx.gluon.nn.Dense(3, in_units=2), mx.gluon.nn.Dense(1, in_units=3))
    where = [mx.cpu(i) for i in range(devices)]
    net.initialize(**{"device" if V2 else "ctx": where})
    return net


def step(net: Any, trainer: Any) -> None:
    with mx.autograd.record():
        loss = net(array(4, 2)).sum()
    loss.backward()
    trainer.step(4)


def trainer_of(net: Any, kvstore: Any, cls: type | None = None) -> Any:
    return (cls or mx.gluon.Trainer)(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=kvstore)


# -- Registration -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["horovod", "HOROVOD", "dist_horovod"])
def test_both_names_create_the_store(world: type[World], name: str) -> None:
    store = mx.kv.create(name)
    assert type(store) is Fake
    assert store.type == "horovod"
    assert mx.kv.create(name) is not store


def test_registration_is_silent(world: type[World]) -> None:
    registry = mx.kvstore.KVStoreBase.kv_registry
    if V2:
        from mxnet.kvstore.horovod import Horovod as Stock

        registry["horovod"] = Stock
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        hooks.register_store(mx, store_class())
        hooks.register_store(mx, store_class())
    assert not heard
    assert registry["horovod"] is Fake


def test_replacing_the_store_of_somebody_else_warns(world: type[World]) -> None:
    other = type("Horovod", (Fake,), {"__module__": "somebody.else"})
    mx.kvstore.KVStoreBase.kv_registry["horovod"] = other
    with pytest.warns(UserWarning, match="overriding existing kvstore"):
        hooks.register_store(mx, store_class())


def test_installing_twice_wraps_once(world: type[World]) -> None:
    places = [
        (mx.model, "_create_kvstore"),
        (mx.model, "_initialize_kvstore"),
        (sys.modules["mxnet.gluon.trainer"], "_create_kvstore"),
        (mx.gluon.Trainer, "_init_kvstore"),
        (mx.gluon.Trainer, "__init__"),
    ]
    if not V2:
        places += [(mx.module.module, "_create_kvstore"), (mx.module.module, "_initialize_kvstore")]
    first = [getattr(owner, name) for owner, name in places]
    hooks.install_hooks(store_class, lambda: None)
    for function, (owner, name) in zip(first, places):
        assert getattr(owner, name) is function, name
        assert not hasattr(getattr(function, hooks._WRAPPED), hooks._WRAPPED), name


# -- The string trap ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["horovod", "Horovod", "dist_horovod"])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_string_creates_the_store(world: type[World], name: str, devices: int) -> None:
    world.size = 2
    net = network(devices)
    trainer = trainer_of(net, name)
    trainer._init_kvstore()
    assert type(trainer._kvstore) is Fake
    assert len(Fake.made) == 1
    assert not trainer._update_on_kvstore
    assert not trainer._distributed


@pytest.mark.parametrize("kvstore", ["horovod", "instance"])
def test_a_step_goes_through_the_store(world: type[World], kvstore: str) -> None:
    net = network()
    trainer = trainer_of(net, mx.kv.create("horovod") if kvstore == "instance" else kvstore)
    step(net, trainer)
    (store,) = Fake.made
    assert [call for call in store.calls if call[0] == "broadcast"] == [("broadcast", key) for key in range(4)]
    assert [call for call in store.calls if call[0] == "pushpull"] == [("pushpull", key) for key in range(4)]


def test_other_names_are_left_to_mxnet(world: type[World]) -> None:
    net = network()
    trainer = trainer_of(net, "device")
    step(net, trainer)
    assert trainer._kvstore is None
    assert not Fake.made


# -- Names of parameters ------------------------------------------------------------------------------------------


def test_the_store_learns_the_names_of_parameters(world: type[World]) -> None:
    net = network()
    trainer = trainer_of(net, "horovod")
    trainer._init_kvstore()
    params = net.collect_params()
    assert Fake.made[0].labels == dict(enumerate(sorted(params)))
    if V2:
        assert "0.weight" in params  # where every parameter calls itself 'weight' or 'bias'


def test_names_of_a_list_of_parameters(world: type[World]) -> None:
    net = network()
    params = list(net.collect_params().values())
    trainer = mx.gluon.Trainer(params, "sgd", kvstore="horovod")
    trainer._init_kvstore()
    assert Fake.made[0].labels == {key: param.name for key, param in enumerate(params)}


def test_a_store_that_wants_no_names_gets_none(world: type[World], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Fake, "_set_key_labels")
    trainer = trainer_of(network(), "horovod")
    trainer._init_kvstore()
    assert type(trainer._kvstore) is Fake


# -- Trainers that would train alone ------------------------------------------------------------------------------


@pytest.mark.parametrize(("kvstore", "devices"), [(None, 1), ("device", 1), ("local", 1), ("device", 2), ("local", 2)])
def test_a_trainer_that_would_train_alone_raises(world: type[World], kvstore: str | None, devices: int) -> None:
    world.size = 4
    trainer = trainer_of(network(devices), kvstore)
    # What was asked for: with one device MXNet creates no store for either name.
    what = "no kvstore" if kvstore is None else f"kvstore '{kvstore}'"
    for _ in range(2):  # catching it does not help
        with pytest.raises(errors.UnsynchronisedTrainerError) as caught:
            trainer.step(1)
        assert str(caught.value) == (
            f"Trainer has {what}, but there are 4 workers: each of them would train a model of its own.\n"
            "  A subclass that exchanges its gradients itself says so: _kvstore_hvd_synchronised = True.\n"
            "  Independent trainings on purpose: KVHVD_ALLOW_LOCAL_TRAINER=1.\n"
            "  Fix: pass kvstore='horovod', or the store that mx.kv.create('horovod') returned."
        )


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
    with pytest.raises(errors.UnsynchronisedTrainerError, match=r"^Mine has no kvstore"):
        trainer_of(net, None, Mine)._init_kvstore()
    step(net, trainer_of(net, None, Synchronised))


def test_stores_of_others_are_taken_at_their_word(world: type[World]) -> None:
    world.size = 4
    trainer = trainer_of(network(), mx.kv.create("teststore"))
    trainer._init_kvstore()
    assert trainer._kvstore.type == "teststore"


# -- Module and FeedForward, which only MXNet 1 has; MXNet 2 still has the functions in mxnet.model -----------------


def test_create_kvstore_of_model(world: type[World]) -> None:
    store, update_on_kvstore = mx.model._create_kvstore("horovod", 1, {})
    assert type(store) is Fake
    assert not update_on_kvstore
    assert mx.model._create_kvstore("local", 1, {}) == (None, False)
    world.size = 2
    for kvstore, has in (
        (None, "no kvstore"),
        ("local", "kvstore 'local'"),
        (mx.kv.create("device"), "kvstore 'device'"),
    ):
        with pytest.raises(errors.UnsynchronisedTrainerError, match=f"^FeedForward has {has}, but"):
            mx.model._create_kvstore(kvstore, 1, {})


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

    def test_feed_forward_trains_through_the_store(world: type[World]) -> None:
        world.size = 2
        symbol, batches = module_parts()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            mx.model.FeedForward(symbol, num_epoch=1).fit(batches, kvstore="horovod")
        calls = Fake.made[0].calls
        assert {call[0] for call in calls} == {"broadcast", "pushpull"}


# -- Errors on their way through the engine -----------------------------------------------------------------------

_kept: list[Any] = []


class _Complete(ctypes.Structure):
    """MXNet's CallbackOnComplete."""

    _fields_ = (
        ("call", ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)),
        ("engine", ctypes.c_void_p),
        ("parameter", ctypes.c_void_p),
    )


def fail_in_engine(target: Any, text: str) -> None:
    """Push an operator that writes `target` and fails with this text, as the native adapter does."""
    error = ctypes.create_string_buffer(16)  # a std::runtime_error, which is all that a dmlc::Error is
    construct = ctypes.CDLL("libstdc++.so.6")._ZNSt13runtime_errorC1EPKc
    construct(error, ctypes.c_char_p(text.encode()))

    def run(*arguments: int) -> None:
        done = _Complete.from_address(arguments[-2])  # (context, [on_start,] on_complete, parameter)
        done.call(done.engine, done.parameter, ctypes.addressof(error))

    callback = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * (4 if mxnet_compat.version_number() >= 20000 else 3))(run)
    _kept.extend([error, callback])
    handle = ctypes.c_void_p(mxnet_compat.handle_of(target))
    context = (ctypes.c_int32 * 2)(1, 0)
    push = mx.base._LIB.MXEnginePushAsyncND
    mx.base.check_call(
        push(callback, None, None, context, None, 0, ctypes.byref(handle), 1, None, 0, b"test", ctypes.c_bool(False))
    )


READS: dict[str, Callable[[Any], Any]] = {
    "wait_to_read": lambda x: x.wait_to_read(),
    "asnumpy": lambda x: x.asnumpy(),
    "downstream": lambda x: (x + 1).asnumpy(),
    "waitall": lambda x: mx.nd.waitall(),
}
CLASSES = [
    cls
    for cls in (getattr(errors, name) for name in errors.__all__)
    if isinstance(cls, type) and issubclass(cls, errors.KVHvdError)
]


@pytest.mark.skipif(mxnet_compat.engine_is_naive(), reason="NaiveEngine drops errors of operators")
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_errors_keep_class_and_text(world: type[World], cls: type[errors.KVHvdError], read: str) -> None:
    text = errors.message(
        "ranks disagree on shape.",
        rank=0,
        size=4,
        operation="allreduce",
        name="dense0_weight",
        key=3,
        details=["(256, 784): ranks 0-2", "(128, 784): rank 3", "  indented: deeper"],
        fix="build the same network: on every rank.",
    )
    x = mx.nd.ones((4,))
    x.wait_to_read()
    fail_in_engine(x, mxnet_compat.engine_text(cls(text)))
    with pytest.raises(cls) as caught:
        READS[read](x)
    assert isinstance(caught.value, mx.base.MXNetError)
    assert str(caught.value) == text
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (cls, text)
    del x
    gc.collect()
    mx.nd.waitall()


@pytest.mark.skipif(mxnet_compat.engine_is_naive(), reason="NaiveEngine drops errors of operators")
def test_errors_of_one_line_and_of_others(world: type[World]) -> None:
    x = mx.nd.ones((4,))
    fail_in_engine(x, "ShutdownError: the engine was shut down.")
    with pytest.raises(errors.ShutdownError, match=r"^the engine was shut down.$"):
        x.wait_to_read()
    y = mx.nd.ones((4,))
    fail_in_engine(y, "SomeoneElsesError: whatever.")
    with pytest.raises(mx.base.MXNetError, match="whatever") as caught:
        y.wait_to_read()
    assert not isinstance(caught.value, errors.KVHvdError)


def test_engine_text_names_the_class_of_errors_py() -> None:
    class Special(errors.PeerLostError):
        pass

    assert mxnet_compat.engine_text(Special("gone.")) == "PeerLostError: gone."


# -- What others ask about MXNet ----------------------------------------------------------------------------------


@pytest.mark.filterwarnings("error::DeprecationWarning:mxnet")
def test_questions_about_arrays() -> None:
    plain, sparse, new = mx.nd.ones((2, 3)), mx.nd.sparse.zeros("row_sparse", (2, 3)), mx.np.ones((2,), dtype="int8")
    assert [mxnet_compat.is_ndarray(x) for x in (plain, sparse, new, plain.asnumpy(), 1, None)] == [True] * 3 + [
        False
    ] * 3
    assert [mxnet_compat.is_np_ndarray(x) for x in (plain, sparse, new, plain.asnumpy())] == [False, False, True, False]
    assert [mxnet_compat.stype_of(x) for x in (plain, sparse)] == ["default", "row_sparse"]
    assert mxnet_compat.context_of(mx.nd.ones((1,), mx.cpu(1))) == mx.cpu(1)
    assert mxnet_compat.context_of(new) == mx.cpu(0)
    assert mxnet_compat.handle_of(plain) == plain.handle.value != 0
    names = ["float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"]
    assert [mxnet_compat.dtype_name(mx.nd.zeros((1,), dtype=name)) for name in names] == names
    bfloat16 = np.dtype([("bfloat16", np.uint16)])  # how MXNet tells NumPy
    assert mxnet_compat.dtype_name(mx.nd.empty((1,), dtype=bfloat16)) == "bfloat16"


def test_questions_about_the_library() -> None:
    assert mxnet_compat.version_number() == (20000 if V2 else 10901)
    assert os.path.isfile(mxnet_compat.libmxnet_path())
    assert mxnet_compat.is_imported()
    mxnet_compat.waitall()


# -- Order of imports ---------------------------------------------------------------------------------------------

INSTALL = """
from kvstore_hvd.mxnet_compat import install_hooks_on_import
install_hooks_on_import(make, lambda: None)
"""
MAKE = """
def make():
    import mxnet
    return type("Horovod", (mxnet.kvstore.KVStoreBase,), {"type": "horovod"})
"""
CHECK = """
import mxnet
assert type(mxnet.kv.create("horovod")) is mxnet.kv.KVStoreBase.kv_registry["horovod"]
assert mxnet.kv.create("dist_horovod").type == "horovod"
assert not [finder for finder in sys.meta_path if getattr(finder, "tag", "").startswith("kvstore_hvd")]
"""


@pytest.mark.parametrize("mxnet_first", [False, True])
def test_either_may_be_imported_first(mxnet_first: bool) -> None:
    start = "import mxnet\n" if mxnet_first else ""
    looked_for = "" if mxnet_first else "import importlib.util\nassert importlib.util.find_spec('mxnet')\n"
    not_imported = "" if mxnet_first else "assert 'mxnet' not in sys.modules\n"
    shim = "from kvstore_hvd.mxnet_compat import numpy_shim; numpy_shim.install()\n"
    script = f"import sys\n{shim}{start}{MAKE}{INSTALL}{not_imported}{looked_for}{CHECK}"
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:mxnet.kvstore", "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
