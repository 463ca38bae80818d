"""What people and programs are told of an elastic job: event log, status line, news."""

import contextlib
import json
import os

import pytest

from kvstore_hvd.errors import LaunchError
from kvstore_hvd.launch import status
from kvstore_hvd.launch.events import EventLog
from kvstore_hvd.launch.status import StatusLine
from kvstore_hvd.launcher.relay import Relay

LIMIT_S = 60


def test_one_object_a_line(tmp_path):
    path = tmp_path / "log"
    path.write_text("of another job\n")
    with EventLog(str(path)) as log:
        log.write("generation_ready", {"generation": 1, "workers": [0, 2]})
        log.write("worker_exited", {"worker": 0, "code": 1, "lines": ["a\nb", "é"]})
        log.finish(LIMIT_S)
        assert log.take_lost() == []
    first, second = [json.loads(line) for line in path.read_text().splitlines()]
    assert (first["event"], first["generation"], first["workers"]) == ("generation_ready", 1, [0, 2])
    assert isinstance(first["time"], float)
    assert isinstance(first["monotonic"], float)
    assert second["lines"] == ["a\nb", "é"]
    with pytest.raises(LaunchError, match="--event-log: '/no/such/log' cannot be made: No such file or directory"):
        EventLog("/no/such/log")


def test_a_reader_that_stands_still_does_not_hold_the_launcher_up(tmp_path):
    path = str(tmp_path / "pipe")
    os.mkfifo(path)
    with pytest.raises(LaunchError, match=r"--event-log: '.*' cannot be made: "):
        EventLog(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with EventLog(path) as log:
        writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):
            while True:  # until there is no room: nothing is written before somebody reads
                os.write(writer, b"\n" * 4096)
        os.close(writer)
        for number in range(30_000):  # more than is kept in memory
            log.write("many", {"number": number, "text": "x" * 60})
        (text,) = log.take_lost()
        assert text == "the event log is not written, and too much waits for it: what follows is left out."
        data = b""
        while log.pending:  # it reads again
            data += read_now(reader)
        log.write("one_more", {})
        log.finish(LIMIT_S)
        lines = [json.loads(line) for line in (data + read_now(reader)).splitlines() if line]
        assert log.take_lost() == []
    os.close(reader)
    *many, lost, last = lines
    assert [line["number"] for line in many] == list(range(len(many)))
    assert (lost["event"], lost["count"], last["event"]) == ("events_lost", 30_000 - len(many), "one_more")


def read_now(fd):
    with contextlib.suppress(BlockingIOError):
        return os.read(fd, 1 << 20)
    return b""


def test_a_full_disk_is_told_once():
    with EventLog("/dev/full") as log:
        log.write("job_start", {})
        log.finish(LIMIT_S)
        assert ["No space left on device" in text for text in log.take_lost()] == [True]
        log.write("job_end", {})
        log.finish(LIMIT_S)
        assert log.take_lost() == []


@contextlib.contextmanager
def screen_of(monkeypatch):
    """A relay that writes to a pipe, which the status line takes for a terminal; and what has been written to it.

    No fixture: pytest gives each phase of a test another standard error.
    """
    read, write = os.pipe()
    wake, other = os.pipe()
    os.set_blocking(read, False)
    before = os.dup(2)
    os.dup2(write, 2)
    monkeypatch.setattr(os, "isatty", lambda fd: fd == 2)
    monkeypatch.setattr(status, "_columns", lambda: 20)
    relay = Relay(wake)

    def written():
        relay.wait(0)
        while relay.pending:
            relay.wait(1)
        return read_now(read).decode()

    try:
        yield relay, written
    finally:
        os.dup2(before, 2)
        relay.close()
        for fd in (read, write, wake, other, before):
            os.close(fd)


def test_the_line_is_shown_once_cut_to_the_terminal_and_gives_way(monkeypatch):
    with screen_of(monkeypatch) as (relay, written):
        line = StatusLine(relay)
        for shown in ("\r\x1b[K\x1b[2mgeneration 1, 2 of \x1b[0m", ""):
            line.update("generation 1, 2 of 2 workers")
            assert written() == shown
        line.update("generation 2\x1b[31m\né")
        assert written() == "\r\x1b[K\x1b[2mgeneration 2?[31m??\x1b[0m"
        line.update("one")
        written()
        relay.say("hello")
        line.update("one")
        assert written() == "\r\x1b[Kkvhvdrun: hello\n"
        line.update("two")
        assert written().endswith("two\x1b[0m")
        for shown in ("\r\x1b[K", ""):
            line.erase()
            assert written() == shown
