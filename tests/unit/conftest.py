import contextlib
import errno
import importlib
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvstore_hvd import mxnet_compat
from kvstore_hvd.config import reload
from kvstore_hvd.mxnet_compat import exchangers, hooks
from kvstore_hvd.world import process

# Folders of the package that know nothing of MXNet and MPI: tests with one of each suffice.
ALIKE = {"base", "gpu", "native", "project"}


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here) and item.path.relative_to(here).parts[0] in ALIKE:
            item.add_marker(pytest.mark.alike)


@pytest.fixture
def setting(monkeypatch):
    def set_them(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        reload()

    yield set_them
    monkeypatch.undo()
    reload()


@pytest.fixture
def alone(monkeypatch):
    monkeypatch.setattr(process, "_current", process.Process())
    monkeypatch.setattr(process, "everybody", process.current()._member)


@pytest.fixture
def world(monkeypatch):
    from support.fake_store import Fake, World, mx, store_class

    for name in list(os.environ):
        if name.startswith("KVHVD_") and not name.startswith("KVHVD_TEST_"):
            monkeypatch.delenv(name)
    reload()
    registry = mx.kvstore.KVStoreBase.kv_registry
    before = dict(registry)
    for name in ("_store", "_world_size", "arena"):
        monkeypatch.setattr(hooks, name, getattr(hooks, name))
    registry.pop("horovod", None)
    monkeypatch.setattr(exchangers._Collectives, "counts", exchangers._Counts())
    mxnet_compat.install_hooks(store_class(), lambda: World.size)
    yield World
    registry.clear()
    registry.update(before)
    World.size = None
    Fake.made.clear()
    monkeypatch.undo()
    reload()


@pytest.fixture
def pair():
    """A world of two in this process: MXNet's adapter, and a rank that does what the test tells it to."""
    from support.pair import World, mx

    world = World()
    yield world
    world.close()
    mx.nd.waitall()


@pytest.fixture
def scarce(monkeypatch, caplog, fresh_log):
    """Listeners without descriptors for three connections; `check` that each was followed by a pause."""
    pauses, sleep, missing = [], time.sleep, [errno.EMFILE, errno.ENFILE, errno.EMFILE]

    class Listener(socket.socket):
        def accept(self):
            if missing:
                raise OSError(error := missing.pop(), os.strerror(error))
            return super().accept()

    def check(logged=1):
        assert (missing, pauses.count(0.1)) == ([], 3)
        assert len([each for each in caplog.messages if "Too many open files. Fix: " in each]) == logged

    monkeypatch.setattr(time, "sleep", lambda seconds: (pauses.append(seconds), sleep(seconds)))
    return SimpleNamespace(socket=Listener, check=check)


@pytest.fixture
def full_pipe():
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, bytes(4096))
    os.set_blocking(write, True)
    yield write
    os.close(read)
    os.close(write)


@pytest.fixture
def place(monkeypatch):
    """Where samplers think that they are: ``place(rank, size)``."""
    topology = SimpleNamespace(rank=0, size=1, prefix={"rank": 0, "size": 1})
    # Only for the samplers: MXNet may be imported meanwhile.
    for module in ("kvstore_hvd.elastic.sampler", "kvstore_hvd.gluon.samplers"):
        present = SimpleNamespace(current=lambda: SimpleNamespace(topology=topology))
        monkeypatch.setattr(importlib.import_module(module), "process", present)

    def put(rank, size):
        topology.rank, topology.size = rank, size

    return put
