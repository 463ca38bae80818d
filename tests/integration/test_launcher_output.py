"""The streams of kvhvdrun's workers: prefixes, terminals, readers that leave and disks that are full."""

import os
import pty
import re
import select
import signal
import subprocess

import pytest

from support.jobs import LIMIT_S

pytestmark = pytest.mark.alike


def test_lines_are_whole_carry_the_rank_and_streams_stay_apart(run):
    """Also very long ones, of any bytes; standard input goes to rank 0."""
    program = """
for i in range(2000): sys.stdout.write(f'{rank} {i} ' + 'x' * (i % 97) + '\\n')
say(f'{sys.stdin.read()!r}\\n')
sys.stdout.buffer.write(bytes(range(128, 256)) + b'y' * 1_000_000 + b'\\n')
say('last')
say(f'err {rank}\\n', sys.stderr)
"""
    read, write = os.pipe()
    os.write(write, b"hello")
    os.close(write)
    job = run("-np 3", program, stdin=read)
    out = (job.folder / "out0").read_bytes()
    for rank in range(3):
        mine = [line[4:] for line in out.split(b"\n") if line.startswith(b"[%d] " % rank)]
        assert mine[:2000] == [b"%d %d " % (rank, i) + b"x" * (i % 97) for i in range(2000)]
        assert mine[2000:] == [b"''" if rank else b"'hello'", bytes(range(128, 256)) + b"y" * 1_000_000, b"last"]
    assert sorted(job.err.splitlines()) == ["[0] err 0", "[1] err 1", "[2] err 2"]


def test_one_worker_has_the_launchers_streams(run):
    read, write = os.pipe()
    os.write(write, b"in\n")
    os.close(write)
    program = "say(sys.stdin.read() + os.environ['OMP_NUM_THREADS']); say('e', sys.stderr); sys.exit(7)"
    job = run("-np 1", program, code=7, stdin=read, OMP_NUM_THREADS="")
    assert (job.out, job.err) == ("in\n", "e")  # which tells enough


@pytest.mark.parametrize("options", ["-np 2", "--min-np 2"])
def test_a_reader_that_leaves_ends_the_job_and_is_no_failure_of_a_worker(start, options):
    program = "signal.signal(signal.SIGTERM, lambda *_: os._exit(5))\nwhile True: say('y\\n')"
    job = start(options, program, stdout=subprocess.PIPE)
    job.process.stdout.readline()
    job.process.stdout.close()
    assert job.end(128 + signal.SIGPIPE).err == ""


def test_lost_output_is_said_once_and_ends_no_work(run):
    """The code of a worker that fails counts more."""
    with open("/dev/full", "wb") as full:
        job = run("-np 2", "for _ in range(50): say('x\\n')\nsay('done\\n', sys.stderr)", code=1, stdout=full)
        assert job.err.count("kvhvdrun: standard output cannot be written: No space left on device.") == 1
        assert job.err.count("done\n") == 2
        run("-np 2", "say('x\\n')\nif rank == 1: sys.exit(7)", code=7, stdout=full)


@pytest.mark.parametrize("fd", [0, 1, 2])
def test_streams_that_are_closed_from_the_start(run, fd):
    """Nothing can be read from the input, and what is written to the others is dropped."""
    program = "say(f'started {sys.stdin.read()!r}\\n'); say('e\\n', sys.stderr)"
    job = run("-np 2", program, preexec_fn=lambda: os.close(fd))
    assert sorted(job.out.splitlines()) == (["[0] started ''", "[1] started ''"] if fd != 1 else [])
    assert sorted(job.err.splitlines()) == (["[0] e", "[1] e"] if fd != 2 else [])


PROMPT = "say('name? ')\nforever()"
MEET = "import kvstore_hvd\nif rank == 1: wait_for('go')\nkvstore_hvd.init(); forever()"


@pytest.mark.parametrize(
    ("options", "program", "shown"),
    [
        ("-np 2", PROMPT, [r"name\? .*name\? "]),
        ("--min-np 2", PROMPT, [r"name\? .*name\? ", r"\x1b\[2mkvhvdrun: "]),
        ("-np 2", MEET, [r"\x1b\[2mkvhvdrun: 2 workers started, 1 has joined\x1b\[0m$", r"joined\x1b\[0m\r\x1b\[K$"]),
    ],
)
def test_what_a_terminal_shows(start, options, program, shown):
    """Lines without an end, which may be prompts; the status of an elastic job, or how many workers have joined."""
    ours, theirs = pty.openpty()
    job, text = start(options, program, stdout=theirs, stderr=theirs), ""
    os.close(theirs)
    for part in shown:
        while not re.search(part, text, re.DOTALL):
            assert select.select([ours], [], [], LIMIT_S)[0], text
            text += os.read(ours, 4096).decode()
        job.go()
    job.end(128 + signal.SIGINT, signal.SIGINT)
    os.close(ours)
