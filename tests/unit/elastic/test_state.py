"""`State` and `ObjectState` in one process: what is saved, what comes back, and what updates do."""

import fcntl
import importlib
import itertools
import math
import os
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

import kvstore_hvd
from kvstore_hvd import elastic
from kvstore_hvd.elastic import HostsUpdatedInterrupt, HostUpdateResult, ObjectState, State, checkpoint
from kvstore_hvd.elastic.run import NotificationManager, _Loop
from kvstore_hvd.elastic.state import deep_copy
from kvstore_hvd.errors import InvalidRequestError, InvalidTypeError, KVHvdError
from kvstore_hvd.world import process

pytestmark = pytest.mark.usefixtures("alone")


def state(**values):
    return ObjectState(lambda value: value, lambda: 0, **values)


def test_attributes_roll_back():
    one = state(epoch=0, losses=[1.0], best={"step": [3]}, table=np.zeros(3))
    one.epoch, one.losses = 1, [1.0, 0.5]
    one.commit()
    one.epoch = 2
    one.losses.append(0.25)
    one.best["step"].append(4)
    one.table += 1
    one.restore()
    assert (one.epoch, one.losses, one.best) == (1, [1.0, 0.5], {"step": [3]})
    assert one.table.tolist() == [0, 0, 0]
    # What came back is a copy, too; attributes that share an object share its copy.
    one.best = one.losses
    one.save()
    for back in (one.restore, one.sync):  # both go back to what was saved
        one.losses.append(7)
        one.epoch = 3
        back()
        assert (one.epoch, one.losses, one.best is one.losses) == (1, [1.0, 0.5], True)


@pytest.fixture
def job_checkpoint(monkeypatch, tmp_path):
    settings = SimpleNamespace(checkpoint=str(tmp_path / "kept"), checkpoint_every_s=600)
    monkeypatch.setattr(checkpoint, "config", lambda: settings)
    monkeypatch.setattr(checkpoint, "_tried", -math.inf)
    monkeypatch.setattr(checkpoint, "_state", None)
    return settings


def kept(tmp_path):
    one = state(step=0)
    one.load(tmp_path / "kept")
    return one.step


def test_the_jobs_checkpoint(job_checkpoint, monkeypatch, tmp_path, caplog):
    """Rank 0 writes commits of the state that is trained, when that is due, and the last one at the end or before it
    leaves; training goes on if a file cannot be written."""
    path = tmp_path / "kept"
    ranks = [1]
    one = ObjectState(lambda value: value, lambda: ranks[0], step=1)
    assert "there is no checkpoint" in checkpoint.resume(one, is_newcomer=False)
    with pytest.raises(InvalidRequestError, match="has something of this name"):
        state(commit=1)
    one.commit()
    one.save(path)
    state(step=7).commit()
    assert not path.exists()  # of rank 1, and of another state
    ranks[0] = 0
    one.commit()
    assert kept(tmp_path) == 1
    one.step = 2
    one.commit()
    assert kept(tmp_path) == 1
    one.on_hosts_updated(1, HostUpdateResult.removed)
    with pytest.raises(HostsUpdatedInterrupt):
        one.commit()
    assert kept(tmp_path) == 2
    one.step = 3
    one.commit()
    one.step = 4
    checkpoint.finish()
    assert kept(tmp_path) == 3
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: os.stat(tmp_path / "missing"))
        monkeypatch.setattr(checkpoint, "_tried", -math.inf)
        one.commit()
        one.commit()  # not tried again at once
    assert caplog.text.count(f"the checkpoint {path} was not written, the last one stays") == 1
    one.restore()
    assert (one.step, kept(tmp_path)) == (4, 3)
    assert "goes on from the checkpoint" in checkpoint.resume(one, is_newcomer=False)
    assert one.step == 3
    path.write_text("another file")
    assert checkpoint.resume(one, is_newcomer=True) == ""
    one.step = lambda: 5
    one.commit()
    checkpoint.finish()
    assert "was not written, the last one stays: save: the state cannot be written" in caplog.text
    newcomer = state(step=6)
    assert checkpoint.resume(newcomer, is_newcomer=True) == ""
    newcomer.commit()
    checkpoint.finish()
    assert kept(tmp_path) == 6


def test_only_the_first_run_of_a_process_loads_the_checkpoint(job_checkpoint, monkeypatch, tmp_path):
    """And each writes its last commit, due or not, as it ends."""
    monkeypatch.setattr(importlib.import_module(_Loop.__module__), "_numbers", itertools.count(1))
    state(step=3).save(tmp_path / "kept")
    one = state(step=0)

    @elastic.run
    def train(one):
        monkeypatch.setattr(checkpoint, "_tried", time.monotonic())
        one.step += 1
        one.commit()
        one.step += 100

    train(one)
    assert kept(tmp_path) == 4
    one.step = 7
    one.save()
    train(one)
    assert kept(tmp_path) == 8


def test_what_cannot_be_a_checkpoint_is_refused_at_once(job_checkpoint, tmp_path):
    """A state that cannot be pickled, one without load(), a folder; a file that another process is writing."""
    with pytest.raises(InvalidRequestError, match=r"cannot be written: .*pickle(.|\n)*Fix: "):
        checkpoint.resume(state(act=lambda: None), is_newcomer=False)
    with pytest.raises(InvalidTypeError, match="cannot be written to a file"):
        checkpoint.resume(State(lambda value: value, lambda: 0), is_newcomer=False)
    with pytest.raises(InvalidRequestError, match="is a folder"):
        state(step=0).save(tmp_path)
    with pytest.raises(InvalidRequestError, match=r"cannot be written: .*pickle(.|\n)*Fix: "):
        state(act=lambda: None).save(tmp_path / "kept")
    with (tmp_path / "kept.part").open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(InvalidRequestError, match="another process is writing"):
            state(step=0).save(tmp_path / "kept")
    state(step=5).save(tmp_path / "kept")  # what the other process has left is removed
    (tmp_path / "link").symlink_to("kept")
    state(step=6).save(tmp_path / "link")
    assert kept(tmp_path) == 6
    assert sorted(each.name for each in tmp_path.iterdir()) == ["kept", "link"]


def test_files_that_are_not_whole(tmp_path, monkeypatch):
    """A cut, changed or foreign file is refused; a write that fails leaves the last file."""
    path = tmp_path / "kept"
    state(step=6).save(path)
    good = path.read_bytes()
    foreign = [good.replace(b"version 2", b"version 3", 1), b"kvstore_hvd-state-1 0 1\n", b"", b"\n"]
    for bad in (good[:-1], good[: len(good) // 2], *foreign):
        path.write_bytes(bad)
        with pytest.raises(InvalidRequestError, match=r"is no checkpoint|is of an older version"):
            kept(tmp_path)
    refused = 0
    for at in range(len(good)):  # a byte may be one of a time, which nobody reads
        path.write_bytes(good[:at] + bytes([good[at] ^ 0x41]) + good[at + 1 :])
        try:
            assert kept(tmp_path) == 6
        except InvalidRequestError:
            refused += 1
    assert refused > len(good) / 2
    path.write_bytes(good)
    with monkeypatch.context() as patch, pytest.raises(FileNotFoundError):
        patch.setattr(os, "fsync", lambda _: os.stat(tmp_path / "missing"))
        state(step=7).save(path)
    assert kept(tmp_path) == 6


@pytest.mark.parametrize("kind", ["symlink", "hardlink", "fifo", "leftover"])
def test_a_checkpoint_is_a_new_file(tmp_path, kind):
    """Whatever lies where it is written first is removed, not followed, not written to and not waited for."""
    victim, part, where = tmp_path / "victim", tmp_path / "kept.part", tmp_path / "kept"
    victim.write_text("mine")
    {
        "symlink": lambda: part.symlink_to(victim),
        "hardlink": lambda: os.link(victim, part),
        "fifo": lambda: os.mkfifo(part),
        "leftover": lambda: part.write_text("half a state"),
    }[kind]()
    state(step=6).save(where)
    assert (victim.read_text(), kept(tmp_path), where.is_symlink()) == ("mine", 6, False)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["kept", "victim"]
    assert where.stat().st_mode == victim.stat().st_mode
    where.chmod(0o640)  # it keeps its mode
    state(step=7).save(where)
    assert (kept(tmp_path), where.stat().st_mode & 0o777) == (7, 0o640)
    part.mkdir()
    with pytest.raises(InvalidRequestError, match=rf"{part}, where .* is a folder\.\n  Fix: move it"):
        state(step=8).save(where)
    assert kept(tmp_path) == 7


def test_a_save_that_fails_keeps_the_last_one():
    """A value that cannot be copied is named; an array whose computation failed is not saved, either."""
    mx = pytest.importorskip("mxnet")
    one = state(a=1, b=mx.nd.ones((2,)))
    one.a = 10
    with pytest.raises(mx.base.MXNetError):
        mx.nd.random.normal(0, -1, shape=(2,), out=one.b)  # fails where it is computed
        one.save()
    one.b = threading.Lock()
    with pytest.raises(InvalidRequestError, match=r"state 'b': a value of lock cannot be copied(.|\n)*Fix: "):
        one.save()
    one.restore()
    assert (one.a, one.b.asnumpy().tolist()) == (1, [1, 1])


def test_updates_interrupt_once():
    one = state(step=0)
    one.check_host_updates()
    one.on_hosts_updated(3, HostUpdateResult.added)
    one.on_hosts_updated(2, HostUpdateResult.removed)  # late
    one.step = 4
    with pytest.raises(HostsUpdatedInterrupt) as raised:
        one.check_host_updates()
    assert raised.value.skip_sync is False
    one.step = 5
    one.restore()
    assert one.step == 4
    one.commit()
    one.on_hosts_updated(3, HostUpdateResult.added)  # told again
    one.on_hosts_updated(2, HostUpdateResult.removed)  # late
    one.commit()


@pytest.mark.parametrize(
    ("told", "skips"), [([1], True), ([2], False), ([3], False), ([2, 1], False), ([1, 1], True)], ids=str
)
def test_only_removals_skip_the_sync(told, skips):
    """Workers that only go need no sync; updates that were not acted on add up, and a reset forgets them."""
    one = state()
    for number, result in enumerate(told, 1):
        one.on_hosts_updated(number, result)
    with pytest.raises(HostsUpdatedInterrupt) as raised:
        one.commit()
    assert raised.value.skip_sync is skips
    one.on_hosts_updated(9, HostUpdateResult.added)
    one.on_reset()
    one.commit()


def test_horovods_names():
    """HostsUpdatedInterrupt passes ``except KVHvdError``; kvstore_hvd.mxnet.elastic is a module and an attribute."""
    assert issubclass(HostsUpdatedInterrupt, RuntimeError)
    assert not issubclass(HostsUpdatedInterrupt, KVHvdError)
    assert HostsUpdatedInterrupt(True).skip_sync is True
    assert kvstore_hvd.HostsUpdatedInterrupt is HostsUpdatedInterrupt
    assert (HostUpdateResult.no_update, HostUpdateResult.removed, HostUpdateResult.added) == (0, 1, 2)
    assert HostUpdateResult.mixed == 3
    module = importlib.import_module("kvstore_hvd.mxnet.elastic")
    assert importlib.import_module("kvstore_hvd.mxnet").elastic is module
    assert all(getattr(module, name) is getattr(elastic, name) for name in elastic.__all__)


@pytest.mark.parametrize("kind", ["nd", "np"])
def test_arrays_of_mxnet_are_copied(kind):
    mx = pytest.importorskip("mxnet")
    x = getattr(mx, kind).array([1.5, 2.5], dtype="float16", ctx=mx.cpu(1))
    with mx.util.np_shape(True):
        y = mx.np.ones((0, 3))

    class Holder:
        def __init__(self):
            self.array = x

    copied = deep_copy({"list": [x, x], "tuple": (y,), "object": Holder()})
    x[:] = 0
    first, second = copied["list"]
    assert first is second is copied["object"].array
    assert (type(first), first.ctx, first.asnumpy().tolist()) == (type(x), mx.cpu(1), [1.5, 2.5])
    assert copied["tuple"][0].shape == (0, 3)


def test_samplers_are_no_objects():
    """A sync would give every worker rank 0's share of the samples."""
    pytest.importorskip("mxnet")
    sampler, later = elastic.ElasticSampler(range(8)), state(sampler=None)
    later.sampler = sampler
    for make in (lambda: state(sampler=sampler), lambda: state(step=1, both=[{"first": sampler}]), later.commit):
        with pytest.raises(InvalidRequestError, match=r"ElasticSampler(.|\n)*Fix: pass it to GluonState\(sampler="):
            make()


def test_a_state_that_cannot_hear_of_updates_is_refused():
    class Partial:
        def sync(self):
            pytest.fail("it begins")

        restore = on_reset = sync

    with pytest.raises(InvalidTypeError, match=r"the state, of type Partial, has no on_hosts_updated\(\)\."):
        elastic.run(lambda state: None)(Partial())


def test_a_state_that_raises_does_not_end_who_listens_to_the_launcher(monkeypatch, caplog):
    line = SimpleNamespace(on_update=None, update=(1, HostUpdateResult.added))
    process.current().init()
    monkeypatch.setattr(process.current(), "control", line)
    manager = NotificationManager()
    manager.init()
    manager.register_listener(Mock(**{"on_hosts_updated.side_effect": ValueError("mine")}))
    line.on_update(*line.update)
    assert "on_hosts_updated() of the state has raised ValueError: mine" in caplog.text
    with pytest.raises(ValueError, match="mine"):  # in the program
        manager.repeat()
