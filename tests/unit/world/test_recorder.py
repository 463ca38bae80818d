"""Timelines without other workers: the parts, the trace that is made of them, and the life of a recording."""

import contextlib
import json
import os
import re
import signal
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from kvstore_hvd.errors import InvalidRequestError, KVHvdError
from kvstore_hvd.launch import driver
from kvstore_hvd.native import TimelineEvent
from kvstore_hvd.timeline import Header, PartWriter, has_ended, main, merge, part_path, read_header, write_trace
from kvstore_hvd.world.recorder import Recorder, _text
from kvstore_hvd.world.topology import Host, Place
from support.patience import until
from support.timeline import Trace, parts_of

ALONE = Place.of(0, [Host.here()], source="single")


def header(rank=0, size=2, session="s", begin=1000, mark=False):
    return Header(session, rank, size, "host", 1, mark, begin, 10**18)


def event(name="s0/1", begin=2000, **changes):
    """An operation that waits for 1 us and takes 2."""
    times = {"submitted": begin, "since": begin, "scheduled": begin + 1000, "completed": begin + 3000}
    how = {"collective": "allreduce", "algorithm": "direct", "dtype": "float32", "op": "sum", "bytes": 12, "on_link": 0}
    made = {"name": name, "label": f"'{name[3:]}' (key 1)", "failed": False, "begins_round": False, **how, **times}
    return TimelineEvent(**{**made, **changes})


def write_part(target, header, *events, lost=0, end=True):
    part = PartWriter(str(target), header)
    part.world(0)
    part.add(events, lost)
    if end:
        part.end()
    return part.path


def test_a_part_says_who_wrote_it_and_when_it_is_complete(tmp_path):
    part = PartWriter(str(tmp_path / "t"), header(rank=1))
    assert part.path == part_path(str(tmp_path / "t"), 1)
    assert read_header(part.path) == header(rank=1)
    part.add([event()])
    assert not has_ended(part.path, "s")
    part.end()
    assert has_ended(part.path, "s")
    assert not has_ended(part.path, "another")
    assert not has_ended(part.path + "x", "s")
    for text in ("", "[]\n", '{"format": 2}\n', '{"format": 1, "colour": 3}\n', "\0\n"):  # no part
        (tmp_path / "x").write_text(text)
        assert (read_header(str(tmp_path / "x")), has_ended(str(tmp_path / "x"), "s")) == (None, False)


def test_two_cannot_write_one_part(tmp_path):
    first = PartWriter(str(tmp_path / "t"), header())
    with pytest.raises(OSError, match="another process is writing it"):
        PartWriter(str(tmp_path / "t"), header(session="another"))
    assert read_header(first.path) == header()
    child = os.fork()  # it has the file open until it ends
    if child == 0:
        signal.pause()
    first.end()
    PartWriter(str(tmp_path / "t"), header(session="another")).end()
    assert read_header(first.path) == header(session="another")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_an_operation_is_a_wait_and_a_reduction(tmp_path):
    """Ranks share a clock that begins with the first, though that of its host is 1 ms ahead."""
    target = tmp_path / "t"
    early = event("s0/v", 1000, collective="broadcast", on_link=1500)
    first = write_part(target, replace(header(0, begin=5000), error_ns=90), event("s0/w", 6000), early)
    ahead = replace(header(1, begin=1_004_000), ahead_ns=1_000_000, error_ns=70)
    write_trace(str(target), [first, write_part(target, ahead, event("s0/w", 1_006_000))])
    trace = Trace(target)
    assert trace.ranks() == [0, 1]
    for rank in range(2):
        waiting, working = trace.row(rank, "w (key 1)")
        assert (waiting["name"], waiting["ts"], waiting["dur"]) == ("NEGOTIATE_ALLREDUCE", 2.0, 1.0)
        assert (working["name"], working["ts"], working["dur"]) == ("ALLREDUCE", 3.0, 2.0)
        expected = {"bytes": 12, "dtype": "float32", "algorithm": "direct", "op": "sum", "name": "s0/w"}
        assert working["args"] == expected
    assert [(each["ts"], each["dur"]) for each in trace.row(0, "v (key 1)")] == [(0, 0)] * 2
    del expected["op"]  # nothing is reduced
    assert trace.row(0, "v (key 1)")[1]["args"] == {**expected, "name": "s0/v", "on_link_us": 1.5}
    assert (trace.about["ts_0_unix_ns"], trace.about["ts_0_monotonic_ns"]) == (10**18, 1_004_000)
    assert trace.about["clock_error_ns"] == 90


def test_rounds_begin_with_their_first_submission(tmp_path):
    target = tmp_path / "t"
    part = PartWriter(str(target), header(0, 1, mark=True))
    part.world(0)
    first, second = event("s0/b", 3000, begins_round=True), event("s0/a", 9000, begins_round=True)
    part.add([event("s0/a", 4000), first, second])
    part.world(1)
    part.add([event("s0/a", 20000, begins_round=True)])
    part.end()
    write_trace(str(target), [part.path])
    assert Trace(target).cycles(0) == [2.0, 8.0, 19.0]
    # Of each round one operation completes after the next round has begun.
    many = [event(begins_round=k == 1, submitted=10_000 * i - 500 * k) for i in range(1, 300) for k in range(2)]
    write_trace(str(target), [write_part(target, header(0, 1, mark=True), *many)])
    assert Trace(target).cycles(0) == [10.0 * i - 1.5 for i in range(1, 300)]


def test_calls_without_a_name_have_a_row_together(tmp_path):
    target = tmp_path / "t"
    names = [f"hvd/allreduce.noname.{i}" for i in range(1, 100)]
    names += [f"hvd/allgather.noname.{i}.{k}" for i in range(1, 4) for k in range(2)]
    names += [f"join/{i}/presence" for i in range(1, 4)]
    events = [event(name, 5000 * i, label=f"'{name.removeprefix('hvd/')}'") for i, name in enumerate(names)]
    write_trace(str(target), [write_part(target, header(0, 1), *events)])
    trace = Trace(target)
    assert trace.names(0) == ["allreduce.noname", "allgather.noname.0", "allgather.noname.1", "join/presence"]
    spans = trace.row(0, "allreduce.noname")
    assert len(spans) == 2 * 99
    assert spans[-1]["args"]["name"] == "hvd/allreduce.noname.99"
    overlapping = [event(f"hvd/allreduce.noname.{i}", 2000 + 1000 * i) for i in (1, 2)]
    write_trace(str(target), [write_part(target, header(0, 1), *overlapping)])
    assert len(Trace(target).names(0)) == 2


def test_process_sets_have_rows_of_their_own(tmp_path):
    part = PartWriter(str(tmp_path / "t"), header(0, 1, mark=True))
    worlds = [[(2000, None), (3000, 3), (10_000, 3)], [(20_000, None), (30_000, 3)], [(40_000, 3)]]
    for world, operations in enumerate(worlds):
        part.world(world)
        for begin, process_set in operations:
            own = {} if process_set is None else {"process_set": process_set}
            part.add([event("s0/x", begin, begins_round=True)], **own)
    part.end()
    assert Path(part.path).read_text().count('{"set":') == 3
    write_trace(str(tmp_path / "t"), [part.path])
    trace = Trace(tmp_path / "t")
    assert trace.names(0) == ["x (key 1)", "cycles", "process set 3: x (key 1)", "process set 3: cycles"]
    for name, begins, process_set in (("x (key 1)", [1, 19], None), ("process set 3: x (key 1)", [2, 9, 29, 39], 3)):
        waits, works = trace.row(0, name)[::2], trace.row(0, name)[1::2]
        assert [wait["ts"] for wait in waits] == begins
        assert {work["args"].get("process_set") for work in works} == {process_set}


def test_what_a_worker_died_in_the_middle_of_is_left_out(tmp_path):
    target = tmp_path / "t"
    path = write_part(target, header(0), event(), lost=2, end=False)
    with open(path, "a") as file:
        file.write('["s0/1","\'1')
    summary = write_trace(str(target), [path, write_part(target, header(1), event(), lost=3)])
    assert (summary.operations, summary.lost, summary.ranks, summary.unfinished) == (2, 5, [0, 1], [0])
    assert Trace(target).about["lost_operations"] == 5


def test_a_trace_is_a_new_file(tmp_path):
    """Links that lie where a part, or the trace, is written first are removed, not followed."""
    target, victim = tmp_path / "t", tmp_path / "victim"
    target.write_text("before")
    target.chmod(0o640)
    victim.write_text("{}")
    for paths in ([], [str(victim)]):
        with pytest.raises(ValueError, match="not a part"):
            write_trace(str(target), paths)
    assert target.read_text() == "before"
    for name in (f"t.{os.getpid()}.tmp", "t.rank-0.part"):
        (tmp_path / name).symlink_to(victim)
    part = write_part(target, header(0, 1), event())
    write_trace(str(target), [part])
    assert (victim.read_text(), target.is_symlink(), target.stat().st_mode & 0o777) == ("{}", False, 0o640)
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(["t", "victim", os.path.basename(part)])


def test_only_the_latest_session_counts(tmp_path, capsys):
    target = tmp_path / "t"
    assert main(["merge", str(target)]) == 1
    assert capsys.readouterr().err == f"there is no part of a timeline: {target}.rank-0.part and so on.\n"
    write_part(target, Header("old", 2, 3, "host", 1, False, 0, 10**17), event())
    write_part(target, header(0), event(), lost=7)
    assert main(["merge", str(target)]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[:2] == [f"{target}: 1 operations of rank 0", "missing: rank 1 of 2"]
    assert told[2] == "7 operations were not recorded: there were too many at a time"
    assert told[3] == f"left out, no part of this timeline: {part_path(str(target), 2)}"
    assert Trace(target).ranks() == [0]
    target.unlink()
    target.mkdir()  # cannot be replaced
    assert main(["merge", str(target)]) == 1
    assert capsys.readouterr().err.startswith("the timeline cannot be made: ")
    assert parts_of(target) == [f"t.rank-{rank}.part" for rank in (0, 2)]


NEWEST = {**asdict(header(0, 3, "newest")), "unix_ns": 2 * 10**18}
STRANGE = {
    "a rank that is text": [{**NEWEST, "rank": "7"}],
    "a time that is text": [{**NEWEST, "unix_ns": "z"}],
    "no time": [{name: value for name, value in NEWEST.items() if name != "unix_ns"}],
    "a rank without limits": [{**NEWEST, "rank": 10**12, "size": 10**13}],
    "operations without number": [NEWEST, {"lost": None}],
    "a set that is text": [NEWEST, {"set": "x"}],
    "no row": [NEWEST, None],
    "a short row": [NEWEST, [1, 2]],
    "a row with a time that is text": [NEWEST, event(completed="x")],
    "a time beyond all": [NEWEST, event(completed=10**400)],
}


@pytest.mark.parametrize("fault", [*STRANGE, "deep"])
def test_a_file_that_is_no_part_is_left_out(tmp_path, capsys, fault):
    """It seems to be newer. The others are merged, as if it were not there."""
    lines = map(json.dumps, STRANGE[fault]) if fault in STRANGE else ["[" * 100_000]
    target = tmp_path / "t"
    parts = [write_part(target, header(rank), event()) for rank in range(2)]
    Path(strange := part_path(str(target), 7)).write_text("".join(f"{line}\n" for line in lines))
    os.mkfifo(pipe := part_path(str(target), 8))
    assert main(["merge", str(target)]) == 0
    told = [f"{target}: 2 operations of ranks 0-1", f"left out, no part of this timeline: {strange}, {pipe}"]
    assert capsys.readouterr().out.splitlines() == told
    assert Trace(target).ranks() == [0, 1]
    assert sorted(merge(str(target))[1]) == parts  # these are removed after it
    with pytest.raises(ValueError, match="not a part"):
        write_trace(str(target), [*parts, strange])


def test_a_job_has_written_what_the_launcher_merges(tmp_path):
    """Parts of another one, which may still write them, are left out, also where there is none of this job."""
    target = tmp_path / "t"
    other = write_part(target, Header("other-1", 1, 2, "host", 1, False, 0, 2 * 10**18), event(), end=False)
    assert merge(str(target), "job") == ("", [])
    own = write_part(target, header(session="job-1"), event())
    text, parts = merge(str(target), "job")
    assert parts == [own]
    assert text.splitlines()[1:] == ["missing: rank 1 of 2", f"left out, no part of this timeline: {other}"]


@pytest.mark.parametrize("fault", [TypeError("of a fault of ours"), OSError("full"), KeyboardInterrupt()])
def test_a_timeline_that_cannot_be_merged_fails_no_job(monkeypatch, fault):
    monkeypatch.setattr(driver, "config", lambda: Mock(timeline="t"))
    monkeypatch.setattr("kvstore_hvd.timeline.merge", Mock(side_effect=fault))
    driver.Driver._merge_timeline(job := Mock())
    ((told,),) = (call.args for call in job._output.say.mock_calls)
    assert ("interrupted" if isinstance(fault, KeyboardInterrupt) else str(fault)) in told


def test_a_file_is_made_and_nothing_else_is_left(tmp_path):
    target = tmp_path / "t"
    recorder = Recorder()
    for _ in range(2):
        recorder.start(target, False, None, ALONE)
        with pytest.raises(InvalidRequestError, match=r"(?s)recorded already, to '.*t'.*Fix: call stop_timeline"):
            recorder.start(tmp_path / "second", False, None, ALONE)
        assert recorder.is_recording
        recorder.joined(engine := Mock(**{"take_timeline.return_value": ([], 0)}), ALONE)
        until(lambda: engine.take_timeline.called)  # before the end, each time
        recorder.stop(None, ALONE)
        assert not recorder.is_recording
        assert Trace(target).ranks() == [0]
        assert os.listdir(tmp_path) == ["t"]
    for bad in (".", "a\0b", None, b"t", "\ud800", "x" * 300):
        with pytest.raises(InvalidRequestError, match=r"(?s)\[rank 0/1\] start_timeline: .*\n  Fix: "):
            recorder.start(bad, False, None, ALONE)
        assert not recorder.is_recording


def test_a_part_that_cannot_be_written_any_more_ends_the_recording(tmp_path, caplog):
    recorder = Recorder()
    for end in (recorder.finish, lambda: recorder.stop(None, ALONE)):
        busy = Mock(**{"take_timeline.return_value": ([event()], 0)})  # has always completed an operation
        recorder.start(tmp_path / "t", False, None, ALONE)
        recorder.joined(busy, ALONE)
        recorder._part._file.close()
        recorder._part._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115 - the recording closes it
        with contextlib.nullcontext() if end == recorder.finish else pytest.raises(KVHvdError) as raised:
            end()
        assert not recorder.is_recording
        busy.stop_timeline.assert_called()
        text = str(raised.value) if raised else caplog.text
        assert re.search(r"(?s)No space left.*python -m kvstore_hvd\.timeline merge", text)
    recorder.start(tmp_path / "next", False, None, ALONE)
    recorder.joined(Mock(**{"take_timeline.return_value": ([], 3)}), ALONE)
    recorder.finish()
    lost = Trace(tmp_path / "next").about["lost_operations"]
    assert lost > 0 and lost % 3 == 0  # each time that it was asked
    assert "the timeline has gaps" in caplog.text
    text = _text(Place.of(1, [Host.here()] * 3, source="single"), "stop_timeline", ["", "full.", "gone."], "look.")
    told = "the timeline cannot be recorded.\n  rank 1: full.\n  rank 2: gone.\n  Fix: look."
    assert text == f"[rank 1/3] stop_timeline: {told}"
