"""What is changed in MXNet: the store is registered, its names create it, and it learns the names of parameters."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from kvstore_hvd.mxnet_compat import hooks, wrapping
from support.fake_store import V2, Fake, World, mx, network, store_class, trainer_of
from support.patience import patient

ROOT = Path(__file__).resolve().parents[3]

# -- Registration -------------------------------------------------------------------------------------------------


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
        (mx.gluon.Trainer, "_reset_kvstore"),
        (mx.optimizer.Updater, "get_states"),
    ]
    if not V2:
        places += [(mx.module.module, "_create_kvstore"), (mx.module.module, "_initialize_kvstore")]
        places += [(mx.mod.Module, "init_optimizer"), (mx.model.FeedForward, "fit")]
    first = [getattr(owner, name) for owner, name in places]
    hooks.install_hooks(store_class, lambda: None)
    for function, (owner, name) in zip(first, places):
        assert getattr(owner, name) is function, name
        inner, makers = function, []
        while wrapping.is_wrapped(inner):
            makers.append(getattr(inner, wrapping._MAKER))
            inner = getattr(inner, wrapping._WRAPPED)
        assert 1 <= len(makers) == len(set(makers)), name


# -- The string trap ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Horovod", "dist_horovod"])
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


# -- Names of parameters ------------------------------------------------------------------------------------------


def test_the_store_learns_the_names_of_parameters(world: type[World]) -> None:
    net = network()
    trainer = trainer_of(net, "horovod")
    trainer._init_kvstore()
    params = net.collect_params()
    assert Fake.made[0].labels == dict(enumerate(sorted(params)))
    if V2:
        assert "0.weight" in params  # where every parameter calls itself 'weight' or 'bias'


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


def test_mxnet_may_be_imported_later() -> None:
    looked_for = "import importlib.util\nassert importlib.util.find_spec('mxnet')\n"
    not_imported = "assert 'mxnet' not in sys.modules\n"
    shim = "from kvstore_hvd.mxnet_compat import numpy_shim; numpy_shim.install()\n"
    script = f"import sys\n{shim}{MAKE}{INSTALL}{not_imported}{looked_for}{CHECK}"
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:mxnet.kvstore", "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patient(100),
    )
    assert done.returncode == 0, done.stderr
