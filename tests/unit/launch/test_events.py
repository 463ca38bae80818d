"""What people and programs are told of a job: event log, status line, files; readers that stand still or go away."""

import contextlib
import json
import os
import time
from argparse import Namespace

import pytest

from kvstore_hvd.base.channel import Poller
from kvstore_hvd.errors import LaunchError
from kvstore_hvd.launch.output import Output

pytestmark = pytest.mark.alike

LIMIT_S = 60
NOT_COMPLETE = "the event log cannot be written: it takes too long. What follows is lost there."


def output_to(folder=None, count=0, event_log=None, ranks=None):
    options = Namespace(output_filename=folder, event_log=event_log, ranks=ranks, timestamps=False)
    return Output(Poller(), options, count)


def written(output, read=lambda: b""):
    """Write all that waits; returns what is read meanwhile."""
    data, end = b"", time.monotonic() + LIMIT_S
    while output.pending:
        assert time.monotonic() < end
        output.step()
        data += read()
    return data + read()


def test_one_object_a_line(tmp_path):
    path = tmp_path / "log"
    path.write_text("of another job\n")
    output = output_to(event_log=str(path))
    output.log("generation_ready", {"generation": 1, "workers": [0, 2]})
    output.log("worker_exited", {"worker": 0, "code": 1, "lines": ["a\nb", "é"]})
    written(output)
    assert output.take_lost() == []
    first, second = [json.loads(line) for line in path.read_text().splitlines()]
    assert (first["event"], first["generation"], first["workers"]) == ("generation_ready", 1, [0, 2])
    assert isinstance(first["time"], float)
    assert isinstance(first["monotonic"], float)
    assert second["lines"] == ["a\nb", "é"]
    with pytest.raises(LaunchError, match="--event-log: '/no/such/log' cannot be made: No such file or directory"):
        output_to(event_log="/no/such/log")


def test_a_reader_that_stands_still_does_not_hold_the_launcher_up(tmp_path):
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    with pytest.raises(LaunchError, match="is a pipe that nobody reads"):
        output_to(event_log=path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    output = output_to(event_log=path)
    for number in range(20_000):
        output.log("many", {"number": number, "text": "x" * 60})
    output.step()
    assert output.pending
    data = written(output, lambda: read_now(reader))  # it reads again
    assert output.take_lost() == []
    assert [json.loads(line)["number"] for line in data.splitlines()] == list(range(20_000))
    for _ in range(60_000):  # more than is kept in memory
        output.log("many", {"text": "x" * 60})
    assert (output.pending, output.take_lost()) == (False, [(False, NOT_COMPLETE)])
    os.close(reader)


def test_an_event_log_that_nobody_reads_at_the_end(tmp_path):
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    output = output_to(event_log=path)
    output.log("long", {"text": "x" * 100_000})
    output.step()
    output.finish_log()
    assert (output.pending, output.take_lost()) == (False, [(False, NOT_COMPLETE)])
    os.close(reader)


def read_now(fd):
    with contextlib.suppress(BlockingIOError):
        return os.read(fd, 1 << 20)
    return b""


def test_a_full_disk_is_told_once():
    output = output_to(event_log="/dev/full")
    for event in ("job_start", "job_end"):
        output.log(event, {})
        written(output)
    text = "the event log cannot be written: No space left on device. What follows is lost there."
    assert output.take_lost() == [(False, text)]
    assert output.take_lost() == []


def test_ranks_that_are_not_shown_are_kept_all_the_same(capfd, tmp_path):
    output = output_to(str(tmp_path), 2, ranks=[1])
    for rank in range(2):
        output.add(rank, b"")
        output.feed(rank, 2, b"of %d\n" % rank)
    written(output)
    assert capfd.readouterr().err == "of 1\n"
    assert [(tmp_path / f"rank.{rank}" / "stderr").read_text() for rank in range(2)] == ["of 0\n", "of 1\n"]
    assert [output.last_lines(rank) for rank in range(2)] == [["of 0"], ["of 1"]]


def test_files_of_ranks(tmp_path):
    """Their folders have as many digits as the last rank."""
    for count, first in ((10, "rank.0"), (11, "rank.00"), (101, "rank.000")):
        output = output_to(str(tmp_path / first), count)
        names = sorted(path.name for path in (tmp_path / first).iterdir())
        assert (len(names), names[0], names[-1]) == (count, first, f"rank.{count - 1}")
        output = output_to(str(tmp_path / "kept"), 2)
    output.add(1, b"")
    output.feed(1, 2, b"one\ntw")
    output.feed(1, 2, b"")
    written(output)
    assert (tmp_path / "kept" / "rank.1" / "stderr").read_bytes() == b"one\ntw"


@pytest.fixture
def screen(monkeypatch):
    """An output to a pipe, which it takes for a terminal; and what has been written there."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    before = os.dup(2)
    os.dup2(write, 2)
    with monkeypatch.context() as patched:
        patched.setattr(os, "isatty", lambda fd: fd == 2)
        patched.setattr(os, "get_terminal_size", lambda fd: os.terminal_size((20, 5)))
        output = output_to()
        yield output, lambda: written(output, lambda: read_now(read)).decode()
    os.dup2(before, 2)
    for fd in (read, write, before):
        os.close(fd)


def test_the_line_is_shown_once_cut_to_the_terminal_and_gives_way(screen):
    output, seen = screen
    for shown in ("\r\x1b[K\x1b[2mgeneration 1, 2 of \x1b[0m", ""):
        output.show("generation 1, 2 of 2 workers")
        assert seen() == shown
    output.show("generation 2\x1b[31m\né")
    assert seen() == "\r\x1b[K\x1b[2mgeneration 2?[31m??\x1b[0m"
    output.show("one")
    seen()
    output.say("hello")
    output.show("one")
    assert seen() == "\r\x1b[Kkvhvdrun: hello\n"
    output.show("two")
    assert seen().endswith("two\x1b[0m")
    for shown in ("\r\x1b[K", ""):
        output.show("")
        assert seen() == shown


def test_a_prompt_is_shown_after_a_moment(screen, monkeypatch):
    output, seen = screen
    output.add(0, b"[0] ")
    output.feed(0, 2, b"name? ")
    assert 0 < output.step() <= 0.2
    assert seen() == ""
    later = time.monotonic() + 1
    monkeypatch.setattr(time, "monotonic", lambda: later)
    output.step()
    assert seen() == "[0] name? "
