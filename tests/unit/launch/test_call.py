"""`run` without workers: its options, what it refuses, and what it makes of what launcher and workers tell it."""

import functools
import inspect
import io
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import kvstore_hvd
from kvstore_hvd.errors import InvalidRequestError, InvalidTypeError, LaunchError, PeerLostError, RunError
from kvstore_hvd.launch import call
from kvstore_hvd.mxnet_compat.hooks import in_one_line

pytestmark = pytest.mark.alike


class Launcher:
    """In the place of `subprocess.Popen`: tells what it is given at once, and has ended."""

    def __init__(self):
        self.code, self.command, self.told, self.output = 0, [], [], [b""]

    def __call__(self, command, **options):
        self.command, folder = command, Path(command[5])
        with (folder / "call").open("rb") as file:
            self.call = [pickle.load(file) for _ in range(4)]
        for second, report in enumerate(self.told):
            report(folder)
            for path in (each for each in folder.iterdir() if each.stat().st_mtime > 1000):
                os.utime(path, (second, second))
        ends = [os.pipe(), os.pipe()]
        self.stdout, self.stderr = (os.fdopen(reader, "rb") for reader, _ in ends)
        for data in self.output:
            os.write(ends[0][1], data)
        for _, writer in ends:
            os.close(writer)
        return self

    def tell(self, kind, value, *place):
        self.told.append(lambda folder: call._report(folder, kind, value, *place))

    def fail(self, error, place=(-1, 0, 1)):
        def report(folder):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(call, "_place", lambda: place)
                call._fail(folder, f"the function raised {in_one_line(error)}", "correct it.", error, of_function=True)

        self.told.append(report)

    def poll(self):
        return self.code

    wait = poll


@pytest.fixture(autouse=True)
def launcher(monkeypatch):
    made = Launcher()
    monkeypatch.setattr(subprocess, "Popen", made)
    return made


run = functools.partial(kvstore_hvd.run, print)


def test_the_signature_is_horovods():
    """Of Horovod 0.28.1, in the order of its parameters: programs may pass them by position."""
    names = """func args kwargs num_proc min_num_proc max_num_proc slots reset_limit cooldown_range hosts hostfile
        start_timeout ssh_port ssh_identity_file disable_cache output_filename verbose use_gloo use_mpi mpi_args
        network_interface executable np min_np max_np"""
    assert list(inspect.signature(kvstore_hvd.run).parameters) == names.split()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"func": 3}, "func is 3, args a tuple, kwargs a NoneType"),
        ({"args": "ab"}, "args a str, kwargs a NoneType"),
        ({"args": (threading.Lock(),)}, "the function or its arguments cannot be pickled: TypeError: cannot pickle"),
        ({"kwargs": [1]}, "args a tuple, kwargs a list"),
        ({"use_mpi": True}, "use_mpi and mpi_args cannot be honoured"),
        ({"min_np": 1, "min_num_proc": 2}, "min_num_proc is 2 and min_np is 1, which are the same option"),
        ({"min_np": 1, "cooldown_range": (1, 2, 3)}, "expected two numbers of seconds"),
    ],
)
def test_what_is_refused_before_anything_starts(launcher, arguments, words):
    with pytest.raises((InvalidRequestError, InvalidTypeError), match=rf"{words}(.|\n)*Fix: "):
        kvstore_hvd.run(**{"func": print, **arguments})
    assert launcher.command == [], "a process is started"


def test_options_become_those_of_kvhvdrun(launcher):
    def options(**given):
        launcher.tell("result", 1)
        assert run(**given) == [1]
        return launcher.command[6 : launcher.command.index("--")]

    assert options() == ["--num-proc=1"]
    fixed = options(num_proc=3, hosts="localhost:3", start_timeout=2.5, output_filename="a b", verbose=2)
    texts = ["--num-proc=3", "--hosts=localhost:3", "--start-timeout=2.5", "--output-filename=a b", "--verbose"]
    assert sorted(fixed) == sorted(texts)
    elastic = options(np=2, min_np=1, max_num_proc=4, slots=4, reset_limit=0, cooldown_range=[10, 300])
    assert elastic == [
        *("--num-proc=2", "--min-np=1", "--max-np=4", "--slots-per-host=4", "--reset-limit=0"),
        *("--blacklist-cooldown-range", "10", "300"),
    ]
    assert options(max_np=2) == ["--max-np=2"]
    assert options(num_proc=2, np=2, verbose=False) == ["--num-proc=2"]
    assert kvstore_hvd.run(max, [3], {"default": 1}, executable="another") == [1]
    assert launcher.call == [sys.path, False, sys.argv, (max, (3,), {"default": 1})]
    package, folder = str(Path(kvstore_hvd.__file__).parents[1]), launcher.command[5]
    assert (launcher.command[3], *launcher.command[-2:], os.path.exists(folder)) == (package, package, folder, False)


def test_a_launcher_that_cannot_be_started(monkeypatch):
    def refuse(*args, **kwargs):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(LaunchError, match=r"the launcher cannot be started: .* unavailable\."):
        run()
    assert os.listdir("/proc/self/fd") == before
    monkeypatch.setattr(call, "_dump", refuse)
    with pytest.raises(LaunchError, match=r"cannot be written to a temporary folder: .*\n  Fix: set TMPDIR"):
        run()


EARLY, LATE, LONG = ValueError("early"), ValueError("late"), "b" * 1_000_000


@pytest.mark.parametrize(
    ("reports", "code", "outcome"),
    [
        # Workers without a world are in the order of their numbers.
        ([("result", 3, (-1, 3, 0)), ("result", 1, (-1, 1, 0))], 0, [1, 3]),
        ([("result", "left", (1, 2, 3)), ("result", LONG, (2, 1, 2)), ("result", "a", (2, 0, 2))], 0, ["a", LONG]),
        ([("result", "a", (2, 0, 3))], 0, "ranks 1-2 ended without a result"),
        # A worker that tells of another's end comes first when that one could not say anything in time.
        (
            [("failure", PeerLostError("rank 1 died"), (-1, 0, 3)), ("failure", LATE, (-1, 1, 3))],
            1,
            r"^\[rank 1/3\] run: the function raised ValueError: late\.",
        ),
        ([("failure", EARLY, (-1, 1, 2)), ("failure", LATE, (-1, 0, 2))], 1, "ValueError: early"),
        ([("failure", PeerLostError("a"), (0, 1, 2)), ("failure", PeerLostError("b"), (0, 0, 2))], 3, "Error: a"),
        # Failures of earlier worlds do not count.
        ([("failure", EARLY, (0, 1, 2)), ("result", "a", (1, 0, 1))], 0, ["a"]),
        ([("failure", EARLY, (0, 1, 2)), ("failure", LATE, (1, 0, 1))], 1, "ValueError: late"),
        ([("result", 1), ("ended", "rank 0 exited with code 3.")], 0, "run: rank 0 exited with code 3"),
        ([("refused", "no such command")], 0, "no such command"),
        ([], 0, "run: the workers ended without a result, and without an error"),
        ([("result", 1)], -9, r"run: the launcher \(kvhvdrun\) ended by signal 9"),
    ],
)
def test_results_and_errors_are_what_launcher_and_workers_tell(launcher, reports, code, outcome):
    launcher.code = code
    for kind, *report in reports:
        launcher.fail(*report) if kind == "failure" else launcher.tell(kind, *report)
    if isinstance(outcome, list):
        assert run() == outcome
        return
    with pytest.raises(LaunchError if reports and reports[0][0] == "refused" else RunError, match=outcome) as caught:
        run()
    assert isinstance(caught.value.__cause__, ValueError) == (code == 1)


class Needy(Exception):
    """Cannot be unpickled: the number is not kept in `args`."""

    def __init__(self, number, text):
        super().__init__(text)


@pytest.mark.parametrize("error", [Needy(3, "lost"), ValueError(threading.Lock())])
def test_an_exception_that_cannot_travel_leaves_its_text(launcher, error):
    launcher.code = 1
    launcher.fail(error)
    with pytest.raises(RunError) as caught:
        run()
    assert caught.value.__cause__ is None
    fact, trace = str(caught.value).split("on rank 0:")
    assert type(error).__name__ in fact
    assert type(error).__name__ in trace


@pytest.mark.parametrize("make", [io.StringIO, lambda: io.TextIOWrapper(io.BytesIO(), write_through=True)])
def test_what_has_no_descriptor_is_written_to(launcher, monkeypatch, make):
    """Characters that come in two parts are whole in the end."""
    target = make()
    monkeypatch.setattr(sys, "stdout", target)
    launcher.tell("result", 1)
    launcher.output = [b"x" * 99, b"\xce\xb1\n\xff"]
    monkeypatch.setattr(call, "_CHUNK", 100)
    run()
    target.seek(0)
    assert target.read() == "x" * 99 + "\N{GREEK SMALL LETTER ALPHA}\n\N{REPLACEMENT CHARACTER}"
