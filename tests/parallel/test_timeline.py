"""Timelines of real worlds: one file for all ranks, whatever happens to the world meanwhile."""

import json
import os
import time
from pathlib import Path

import numpy as np
import pytest

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from kvstore_hvd.errors import InvalidRequestError
from kvstore_hvd.world import process
from kvstore_hvd.world.topology import clock_ahead
from support.gluon import batch_of, mlp, parameters, train
from support.timeline import Trace, parts_of
from support.zero_copy import meet_again

mx = pytest.importorskip("mxnet")

STEPS = 4


@pytest.fixture
def target(tmp_path, rank, size):
    """Return a path in a folder of this test that is the same on every rank; nothing else may be left in there."""
    folder = Path(hvd.broadcast_object(str(tmp_path)))
    yield folder / "timeline.json"
    kvstore_hvd.stop_timeline()
    kvstore_hvd.barrier()  # all have read it
    assert parts_of(folder / "timeline.json") == []


def total(size, name, count=10):
    assert kvstore_hvd.allreduce(np.ones(count), name)[0] == size


def test_every_operation_of_every_rank(target, rank, size):
    """Rows, names, sizes and times of what was submitted between start and stop, and of nothing else."""
    total(size, "before")
    kvstore_hvd.start_timeline(target)
    begin = time.monotonic_ns()
    for _ in range(STEPS):
        total(size, "small")
        total(size, "large", 100_000)
        kvstore_hvd.broadcast(np.ones(7, np.float32), size - 1, "root")
    end = time.monotonic_ns()
    kvstore_hvd.stop_timeline()
    total(size, "after")
    trace = Trace(target)
    assert trace.ranks() == list(range(size))
    assert trace.about["lost_operations"] == 0
    assert trace.about["unfinished_ranks"] == []
    for r in range(size):
        assert set(trace.names(r)) == ({"small", "large", "root"} if size > 1 else set())
        assert trace.cycles(r) == []
    if size == 1:
        return
    hosts = process.current().topology.host_count
    for r in range(size):
        for name, what, bytes_, dtype in (
            ("small", "ALLREDUCE", 80, "float64"),
            ("large", "ALLREDUCE", 800_000, "float64"),
            ("root", "BROADCAST", 28, "float32"),
        ):
            spans = trace.row(r, name)
            assert [span["name"] for span in spans] == [f"NEGOTIATE_{what}", what] * STEPS
            for span in spans[1::2]:
                assert (span["args"]["bytes"], span["args"]["dtype"]) == (bytes_, dtype)
                assert "failed" not in span["args"]
                if hosts > 1 and name != "small":  # which goes with the announcements
                    assert 0 < span["args"]["on_link_us"] <= span["dur"]
                else:
                    assert "on_link_us" not in span["args"]
    # One clock for all ranks: that of time.monotonic(), right within the stated error, printed in whole ns.
    error_ns = trace.about["clock_error_ns"] + 1
    for span in (span for (r, _), spans in trace.rows().items() if r == rank for span in spans):
        ts_ns = trace.about["ts_0_monotonic_ns"] + span["ts"] * 1e3
        assert begin <= ts_ns + error_ns and ts_ns + span["dur"] * 1e3 <= end + error_ns


def test_a_path_that_one_rank_cannot_write_raises_everywhere(target, rank, size):
    """The rank is named; the parts that the others have begun are gone."""
    blocked = target.with_name(f"{target.name}.rank-{size - 1}.part")
    if rank == 0:
        blocked.mkdir()
    kvstore_hvd.barrier()
    with pytest.raises(InvalidRequestError, match=rf"rank-{size - 1}.part' cannot be written: Is a directory"):
        kvstore_hvd.start_timeline(target)
    kvstore_hvd.barrier()
    assert parts_of(target) == [blocked.name]
    kvstore_hvd.barrier()
    if rank == 0:
        blocked.rmdir()


def test_only_rank_0_says_where(target, rank, size):
    """As in Horovod, the others' paths do not count. While one is recorded, start raises, and the recording goes on. A
    second recording replaces the file of the first, and has nothing of it."""
    for name in ("first", "second"):
        kvstore_hvd.start_timeline(target if rank == 0 else target.with_name("other"), mark_cycles=rank == 0)
        text = rf"\[rank {rank}/{size}\] start_timeline: a timeline is being recorded"
        with pytest.raises(InvalidRequestError, match=text):
            kvstore_hvd.start_timeline(target.with_name("another"))
        total(size, name)
        kvstore_hvd.stop_timeline()
        assert os.listdir(target.parent) == [target.name]
        trace = Trace(target)
        assert all(trace.cycles(r) and name in trace.names(r) for r in range(size if size > 1 else 0))
        assert not any("first" in trace.names(r) for r in range(size if name == "second" else 0))
        kvstore_hvd.barrier()  # nobody starts anew while another one reads


def test_a_training_goes_on_over_a_reset(target, rank, size):
    """Both worlds are in one file, with the names of the parameters; what ranks disagree about is in it, too."""
    net = mlp()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=mx.kv.create("horovod"))
    train(net, trainer, batch_of(1))  # broadcasts, too
    mx.nd.waitall()
    kvstore_hvd.start_timeline(str(target), mark_cycles=True)
    for world in range(2):
        train(net, trainer, *[batch_of(1)] * 2)
        mx.nd.waitall()
        if size > 1 and world == 0:
            with pytest.raises(kvstore_hvd.MismatchError):
                kvstore_hvd.allreduce(np.ones(3 + (rank == 0)), "unlike")
            meet_again()
    kvstore_hvd.stop_timeline()
    trace = Trace(target)
    for r in range(size if size > 1 else 0):
        names = [name for name in trace.names(r) if "weight" in name or "bias" in name]
        assert len(names) == len(parameters(net))
        for name in names:
            assert [span["name"] for span in trace.row(r, name)] == ["NEGOTIATE_ALLREDUCE", "ALLREDUCE"] * 4
        assert trace.cycles(r) == sorted(trace.cycles(r))
        assert len(trace.cycles(r)) >= 4
        assert trace.row(r, "unlike")[1]["args"]["failed"] is True


@pytest.mark.needs(3)
def test_process_sets_are_recorded(target, rank, size, dynamic):
    """Those that were there before, and those that come; over a reset; until they are removed."""
    before = hvd.add_process_set([0, 1])
    kvstore_hvd.start_timeline(target, mark_cycles=True)
    later = hvd.add_process_set([1, 2])

    def once(*sets):
        for each in sets:
            if each.included():
                hvd.allreduce(mx.nd.ones((7,)), name="x", process_set=each).wait_to_read()

    once(before, later)
    numbers = [each.process_set_id for each in (before, later)]
    hvd.remove_process_set(before)
    total(size, "after")
    once(later)
    meet_again()
    before = hvd.add_process_set([0, 1])
    once(before, later)
    numbers.append(before.process_set_id)
    kvstore_hvd.stop_timeline()
    trace = Trace(target)
    for r in range(size):
        assert "after" in trace.names(r)
        rows = {name: trace.row(r, name) for name in trace.names(r) if name.endswith(": x")}
        assert {name: len(spans) for name, spans in rows.items()} == {
            f"process set {number}: x": length
            for number, members, length in zip(numbers, ([0, 1], [1, 2], [0, 1]), (2, 6, 2))
            if r in members
        }
        for spans in rows.values():
            assert spans[1]["args"]["bytes"] == 28
            assert spans[1]["name"] == "ALLREDUCE"


@pytest.mark.needs(2)
def test_mxnets_profiler_names_operations(target, rank, size):
    """MXNet records our operations from when their arrays are ready until they are over, by the tensor's name."""
    file = target.parent / f"profile-{rank}.json"
    mx.profiler.set_config(profile_imperative=True, profile_symbolic=True, filename=str(file))
    mx.profiler.set_state("run")
    store = mx.kv.create("horovod")
    store.pushpull("single", mx.nd.ones((5,)))
    net = mlp()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore=store)
    train(net, trainer, *[batch_of(1)] * 2)
    mx.nd.waitall()
    mx.profiler.set_state("stop")
    mx.profiler.dump()
    events = json.loads(file.read_text())["traceEvents"]
    file.unlink()
    times = {}
    for event in events:
        if event.get("cat") == "operator" and event["name"].startswith("allreduce "):
            times.setdefault((event["name"], event["ph"]), []).append(event["ts"])
    names = {name for name, _ in times}
    assert "allreduce 'single'" in names
    assert any(name.endswith(f"(key 0) and {len(parameters(net)) - 1} more") for name in names)
    for name in names:
        assert len(times[name, "B"]) == len(times[name, "E"])
        assert all(begin <= end for begin, end in zip(sorted(times[name, "B"]), sorted(times[name, "E"])))


@pytest.mark.sizes
def test_clocks_of_other_hosts(world, rank, size, monkeypatch):
    """Rank 0's clock is that of all; by how much another host's is ahead is known within the error that is told."""
    place = process.current().topology
    if place.host_count == 1:
        pytest.skip("needs several hosts")
    ahead_ns, clock = (0 if place.host == place.hosts[0] else 5_000_000_000), time.monotonic_ns
    with monkeypatch.context() as patched:
        patched.setattr(time, "monotonic_ns", lambda: clock() + ahead_ns)
        found, error_ns = clock_ahead(process.current().member.engine(), place, "test/clock")
    assert (error_ns == 0) == (ahead_ns == 0)
    assert abs(found - ahead_ns) <= error_ns < 1_000_000_000
