"""What is told of a job: its workers' lines, event log, status line, files; readers that stand still or go away."""

import contextlib
import json
import os
import random
import re
import time
from argparse import Namespace

import pytest

from kvstore_hvd.base.channel import Poller
from kvstore_hvd.errors import LaunchError
from kvstore_hvd.launch.output import LineStream, Output, Sink, Tail

pytestmark = pytest.mark.alike

LIMIT_S = 60
NOT_COMPLETE = "the event log cannot be written: it takes too long. What follows is lost there."


def streams(count):
    """Of workers to one sink, which is not flushed here."""
    sink = Sink(2, "")
    return sink, [LineStream(sink, f"[{rank}] ".encode()) for rank in range(count)]


@pytest.mark.parametrize(
    ("fed", "written"),
    [
        ([(0, b"one "), (1, b"uno\ndos "), (0, b"line\n"), (1, b"tres\n")], b"[1] uno\n[0] one line\n[1] dos tres\n"),
        # An unfinished line that was interrupted gets its prefix again.
        ([(0, b"name? "), (0, b""), (1, b"hello\n"), (0, b"thanks\n")], b"[0] name? \n[1] hello\n[0] thanks\n"),
        ([(0, b"10%\r20%\r"), (0, b"30%\r\n")], b"[0] 10%\r[0] 20%\r[0] 30%\r\n"),
        ([(0, b"50%\r60%"), (1, b"done\n")], b"[0] 50%\r\n[1] done\n"),
    ],
)
def test_lines_of_workers_do_not_tear(fed, written):
    sink, both = streams(2)
    for rank, data in fed:
        both[rank].feed(data) if data else both[rank].flush()
    assert bytes(sink.pending) == written


def test_binary_junk_passes_whatever_the_cuts():
    seed = random.randrange(2**32)
    rng = random.Random(seed)
    data = bytes(rng.choice(b"\r\n\0\xff\x80ab") for _ in range(3000))
    (whole, (a,)), (cut, (b,)) = streams(1), streams(1)
    without = LineStream(plain := Sink(2, ""), b"")
    for stream in (a, without):
        stream.feed(data)
    rest = data
    while rest:
        size = rng.randrange(1, 20)
        b.feed(rest[:size])
        rest = rest[size:]
    for stream in (a, b, without):
        stream.flush()
    assert whole.pending == cut.pending, f"seed {seed}"
    assert bytes(plain.pending) == data, f"seed {seed}"


def test_the_tail_is_bounded_and_knows_progress_bars():
    tail = Tail()
    stream = LineStream(Sink(2, ""), b"", tail.add)
    for piece in (piece for number in range(100) for piece in (b"li", b"ne ", b"%d\n" % number)):
        tail.add(piece)
    stream.feed(b"10%\r20%\r\nlast")
    stream.flush()
    assert tail.lines()[-3:] == ["line 99", "20%", "last"]
    assert len(tail.lines()) <= 21
    stream.feed(b"y" * 100_000 + b"\n")
    assert len("".join(tail.lines())) <= 8192


def test_the_tail_leaves_out_what_python_ignores():
    cause = [b"Traceback (most recent call last):", b'  File "train.py", line 3', b"ValueError: mine"]
    ignored = [b"Exception ignored in atexit callback: <function f>", *cause[:2]]
    ours = [b"kvstore_hvd.errors.PeerLostError: [rank 1/2] lost.", b"  Fix: restart the job."]
    theirs = [b"mxnet.base.MXNetError: Traceback (most recent call last):", b"  File x.cc", b"MXNetError: Check failed"]
    for text, shown in (
        ([*cause, *ignored, *ours], cause),
        ([*cause, *ignored, *theirs, *ignored, *ours], cause),
        ([*ignored, *ours, *cause], cause),
        ([*ignored, *theirs, b"last"], [b"last"]),
    ):
        tail = Tail()
        LineStream(Sink(2, ""), b"", tail.add).feed(b"\n".join([*text, b""]))
        assert tail.lines() == [line.decode() for line in shown]


def output_to(folder=None, count=0, event_log=None, ranks=None):
    options = Namespace(output_filename=folder, event_log=event_log, ranks=ranks, timestamps=False)
    return Output(Poller(), options, count)


def written(output, read=lambda: b""):
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
    assert [type(first[clock]) for clock in ("time", "monotonic")] == [float, float]
    assert second["lines"] == ["a\nb", "é"]
    with pytest.raises(LaunchError, match="--event-log: '/no/such/log' cannot be made: No such file or directory"):
        output_to(event_log="/no/such/log")


@pytest.fixture
def pipe(tmp_path):
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    with pytest.raises(LaunchError, match="is a pipe that nobody reads"):
        output_to(event_log=path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield path, reader
    os.close(reader)


def test_a_reader_that_stands_still_does_not_hold_the_launcher_up(pipe):
    path, reader = pipe
    output = output_to(event_log=path)
    for number in range(500):
        output.log("many", {"number": number, "text": "x" * 2500})
    output.step()
    assert (output.pending, output.held_up) == (True, False)  # workers do not wait for it
    output.drop()  # that of workers
    data = written(output, lambda: read_now(reader))  # it reads again
    assert output.take_lost() == []
    assert [json.loads(line)["number"] for line in data.splitlines()] == list(range(500))
    for _ in range(2000):  # more than is kept in memory
        output.log("many", {"text": "x" * 5000})
    assert (output.pending, output.take_lost()) == (False, [(False, NOT_COMPLETE)])
    output = output_to(event_log=path)
    output.log("long", {"text": "x" * 100_000})
    output.step()
    output.finish_log()  # nobody reads at the end
    assert (output.pending, output.take_lost()) == (False, [(False, NOT_COMPLETE)])


def read_now(fd):
    with contextlib.suppress(BlockingIOError):
        return os.read(fd, 1 << 20)
    return b""


def test_a_full_disk_is_told_once(tmp_path):
    """Of the file of a rank, as the end of the reader of the event log; other files get what they should."""
    for rank in range(2):
        (tmp_path / f"rank.{rank}").mkdir()
    (tmp_path / "rank.0" / "stdout").symlink_to("/dev/full")
    read, write = os.pipe()
    with os.fdopen(read), os.fdopen(write, "w"):
        output = output_to(str(tmp_path), 2, event_log=f"/proc/self/fd/{write}", ranks=[])
    for rank in range(2):
        output.add(rank, b"")
    for event in ("job_start", "job_end"):
        output.log(event, {})
        for rank in range(2):
            output.feed(rank, 1, b"x\n")
        written(output)
    full, broken = (f"{why}. What follows is lost there." for why in ("No space left on device", "Broken pipe"))
    texts = f"stdout of rank 0 cannot be written to its file: {full}", f"the event log cannot be written: {broken}"
    assert [output.take_lost(), output.take_lost()] == [[(False, text) for text in texts], []]
    assert (tmp_path / "rank.1" / "stdout").read_text() == "x\nx\n"


def test_files_of_ranks_whether_they_are_shown_or_not(capfd, tmp_path):
    """Their folders have as many digits as the last rank."""
    for count, first in ((10, "rank.0"), (11, "rank.00"), (101, "rank.000")):
        output_to(str(tmp_path / first), count)
        names = sorted(path.name for path in (tmp_path / first).iterdir())
        assert (len(names), names[0], names[-1]) == (count, first, f"rank.{count - 1}")
    output = output_to(str(tmp_path), 2, ranks=[1])
    for rank in range(2):
        output.add(rank, b"")
        output.feed(rank, 2, b"of %d\ntw" % rank)
        output.feed(rank, 2, b"")
    output.feed(0, 1, b"x" * 300_000 + b"\n")
    assert output.held_up
    written(output)
    assert capfd.readouterr().err.rstrip() == "of 1\ntw"
    assert [(tmp_path / f"rank.{rank}" / "stderr").read_text() for rank in range(2)] == ["of 0\ntw", "of 1\ntw"]
    assert [output.last_lines(rank) for rank in range(2)] == [["of 0", "tw"], ["of 1", "tw"]]


def test_equal_last_words_are_shown_once_and_nothing_is_reordered(capfd):
    words, output = "Traceback (most recent call last):\n  at x\nMismatchError: [rank %s/4] no.\n", output_to()
    for rank, more in enumerate(("", "  (2 other operations failed too.)\n", "more\n", "")):
        output.add(rank, b"[%d] " % rank)
        output.feed(rank, 2, f"before {rank}\n{words % rank}{more}".encode())
    output.feed(1, 1, b"goes on\n")
    time.sleep(output.step())
    output.step()
    out, err = capfd.readouterr()
    whole = [f"[0-1,3] {line}" for line in (words % "0-1,3").splitlines()]
    whole += [f"[2] {line}" for line in (words % 2).splitlines()]
    assert (out, err.splitlines()) == ("[1] goes on\n", [*(f"[{n}] before {n}" for n in range(4)), *whole, "[2] more"])


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
    output._timestamps = True
    output.add(0, b"[0] ")
    output.feed(0, 2, b"one\ntwo\nth")
    output.feed(0, 2, b"ree\n")
    output.say("four")
    lines = r"\[0\] one", r"\[0\] two", r"\[0\] three", "kvhvdrun: four"
    assert re.fullmatch("".join(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{{3}} {line}\n" for line in lines), seen())
