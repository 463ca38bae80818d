"""The streams of kvhvdrun's workers: prefixes, terminals, readers that leave and disks that are full."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys

import pytest

from support.jobs import LIMIT_S, run, start, variables_of
from support.launchers import kvhvdrun

# Slow: the short choice of tests is for another MXNet and MPI, which nothing here has to do with.
pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]


def test_lines_carry_the_rank_and_streams_stay_apart(marker: str) -> None:
    code, out, err = run(marker, 3, "say(f'out {rank}\\n'); say(f'err {rank}\\n', sys.stderr)")
    assert code == 0
    assert sorted(out.splitlines()) == [b"[0] out 0", b"[1] out 1", b"[2] out 2"]
    assert sorted(err.splitlines()) == [b"[0] err 0", b"[1] err 1", b"[2] err 2"]


def test_no_prefix(marker: str) -> None:
    code, out, _ = run(marker, 2, "say('x\\n')", "--no-prefix")
    assert (code, out) == (0, b"x\nx\n")


def test_one_worker_has_the_launchers_streams(marker: str) -> None:
    code, out, err = run(marker, 1, "say(sys.stdin.read()); say('e', sys.stderr)", input=b"in\n")
    assert (code, out, err) == (0, b"in\n", b"e")


def test_no_output_is_lost_or_torn(marker: str) -> None:
    program = "for i in range(3000): sys.stdout.write(f'{rank} {i} ' + 'x' * (i % 97) + '\\n')\nsay('last')"
    code, out, _ = run(marker, 3, program)
    assert code == 0
    for rank in range(3):
        mine = [line[4:] for line in out.split(b"\n") if line.startswith(b"[%d] " % rank)]
        assert mine == [b"%d %d " % (rank, i) + b"x" * (i % 97) for i in range(3000)] + [b"last"]


def test_long_lines_and_binary_junk(marker: str) -> None:
    program = "sys.stdout.buffer.write(bytes(range(256)).replace(b'\\r', b'') + b'y' * 3_000_000 + b'\\n')"
    code, out, _ = run(marker, 2, program)
    assert code == 0
    junk = bytes(range(256)).replace(b"\r", b"")
    head, tail = junk.split(b"\n")
    for rank in range(2):
        assert b"[%d] " % rank + head + b"\n" in out
    assert out.count(tail) == 2
    assert out.count(b"y") >= 6_000_000


def test_stdin_goes_to_rank_0(marker: str) -> None:
    code, out, _ = run(marker, 3, "say(f'{sys.stdin.read()!r}\\n')", input=b"hello")
    assert code == 0
    assert sorted(out.splitlines()) == [b"[0] 'hello'", b"[1] ''", b"[2] ''"]


def test_a_reader_that_leaves_ends_the_job(marker: str) -> None:
    process = start(marker, 2, "while True: say('y\\n')")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(LIMIT_S) == 128 + signal.SIGPIPE


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_reader_that_leaves_is_no_failure_of_a_worker(marker: str, stream: str) -> None:
    program = f"signal.signal(signal.SIGTERM, lambda *_: os._exit(5))\nwhile True: say('y\\n', sys.{stream})"
    process = start(marker, 2, program)
    reader = getattr(process, stream)
    reader.readline()
    reader.close()
    if stream == "stdout":
        assert process.stderr is not None
        assert process.stderr.read() == b""
    assert process.wait(LIMIT_S) == 128 + signal.SIGPIPE


def test_lost_output_is_said_once_and_ends_no_work(marker: str) -> None:
    with open("/dev/full", "wb") as full:
        program = "for _ in range(50): say('x\\n')\nsay('done\\n', sys.stderr)"
        code, _, err = run(marker, 2, program, stdout=full)
    assert code == 1
    assert err.count(b"kvhvdrun: standard output cannot be written: No space left on device.") == 1
    assert err.count(b"done\n") == 2


# The last write takes long, and fails when nothing else is left to wait for.
FAILS_LATE = """
import errno, sys, threading
from kvstore_hvd import launch
from kvstore_hvd.launcher import writer
from kvstore_hvd.launcher.belonging import Remains
rest_is_over, writers = threading.Event(), []
init, write_all, step = writer.Writer.__init__, writer._write_all, Remains.step
def made(self, *args, **kwargs):
    init(self, *args, **kwargs)
    writers.append(self)
def write_late(fd, data):
    if fd != 1:
        return write_all(fd, data)
    rest_is_over.wait()
    raise OSError(errno.ENOSPC, "No space left on device")
def step_and_wait(self, now):
    done = step(self, now)
    if done:
        rest_is_over.set()
        for each in writers:
            assert each.wait(600)
    return done
writer.Writer.__init__, writer._write_all, Remains.step = made, write_late, step_and_wait
sys.exit(launch.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("options", [["-np", "2"], ["-np", "2", "--min-np", "1"]])
def test_the_last_output_may_be_lost_last_of_all(options: list[str]) -> None:
    worker = '[ "${KVHVD_RANK:-$KVHVD_WORKER}" = 0 ] && echo last; exec >&- 2>&-; sleep 1'
    done = subprocess.run(
        [sys.executable, "-c", FAILS_LATE, *options, "sh", "-c", worker],
        env=variables_of(),
        stderr=subprocess.PIPE,
        timeout=LIMIT_S,
        check=False,
    )
    assert (done.returncode, done.stderr.count(b"standard output cannot be written")) == (1, 1)


def test_lost_output_on_stderr_too_gives_a_code(marker: str) -> None:
    with open("/dev/full", "wb") as full:
        assert run(marker, 2, "say('x\\n', sys.stderr)", stderr=full)[:2] == (1, b"")
        assert run(marker, 2, "say('x\\n')", stdout=full, stderr=subprocess.STDOUT)[0] == 1


def test_the_code_of_a_failed_worker_counts_more_than_lost_output(marker: str) -> None:
    with open("/dev/full", "wb") as full:
        assert run(marker, 2, "say('x\\n')\nif rank == 1: sys.exit(7)", stdout=full)[0] == 7


@pytest.mark.parametrize(("fd", "name"), [(1, "output"), (2, "error")])
def test_a_stream_closed_from_the_start_is_refused(marker: str, fd: int, name: str) -> None:
    code, out, err = run(marker, 2, "say('started\\n')", preexec_fn=lambda: os.close(fd))
    assert code == 2
    assert (out + err).startswith(b"kvhvdrun: standard %s is closed." % name.encode())
    assert b"Fix: " in out + err
    assert b"started" not in out + err


def test_stdin_closed_from_the_start_is_empty(marker: str) -> None:
    code, out, err = run(marker, 2, "say(f'{sys.stdin.read()!r}\\n')", preexec_fn=lambda: os.close(0))
    assert (code, sorted(out.splitlines()), err) == (0, [b"[0] ''", b"[1] ''"], b"")


@pytest.mark.parametrize("path", ["/dev/full", "pipe"])
def test_help_that_cannot_be_written(path: str) -> None:
    if path == "pipe":
        ours, theirs = os.pipe()
        os.close(ours)
    else:
        theirs = os.open(path, os.O_WRONLY)
    try:
        done = subprocess.run(
            [*kvhvdrun().prefix, "--help"],
            env=variables_of(),
            stdout=theirs,
            stderr=subprocess.PIPE,
            timeout=LIMIT_S,
            check=False,
        )
    finally:
        os.close(theirs)
    expected = (
        (128 + signal.SIGPIPE, b"")
        if path == "pipe"
        else (1, b"kvhvdrun: standard output cannot be written: No space left on device.\n")
    )
    assert (done.returncode, done.stderr) == expected


def test_on_a_terminal_workers_have_one_too(marker: str) -> None:
    ours, theirs = pty.openpty()
    process = start(marker, 2, "say(f'{sys.stdout.isatty()} name? ')\nforever()", stdout=theirs, stderr=theirs)
    os.close(theirs)
    text = b""
    while text.count(b"name? ") < 2:  # unfinished lines are shown: they may be prompts
        assert select.select([ours], [], [], LIMIT_S)[0], text
        text += os.read(ours, 4096)
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == 128 + signal.SIGINT
    os.close(ours)
    assert b"[0] True name? " in text
    assert b"[1] True name? " in text
