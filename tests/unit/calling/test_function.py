"""`run` before anything is started: its options, what it refuses, and what travels between the processes."""

import inspect
import io
import os
import sys
import threading

import pytest

import kvstore_hvd
from kvstore_hvd.calling.failure import failure_of
from kvstore_hvd.calling.options import Options
from kvstore_hvd.calling.outcome import Outcome
from kvstore_hvd.calling.parcel import pack, unpack
from kvstore_hvd.calling.paths import prefixes, take_path
from kvstore_hvd.calling.reports import Kind, Reporter, Reports, Sender
from kvstore_hvd.calling.streams import OutputStream
from kvstore_hvd.errors import InvalidRequestError, InvalidTypeError, KVHvdError, PeerLostError, RunError


@pytest.fixture(autouse=True)
def _nothing_starts(monkeypatch):
    def refuse(*args, **kwargs):
        pytest.fail("a process is started")

    monkeypatch.setattr("subprocess.Popen", refuse)


def test_the_signature_is_horovods():
    """Of Horovod 0.28.1, in the order of its parameters: programs may pass them by position."""
    names = """func args kwargs num_proc min_num_proc max_num_proc slots reset_limit cooldown_range hosts hostfile
        start_timeout ssh_port ssh_identity_file disable_cache output_filename verbose use_gloo use_mpi mpi_args
        network_interface executable np min_np max_np"""
    assert list(inspect.signature(kvstore_hvd.run).parameters) == names.split()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"func": 3}, "func is 3, which cannot be called"),
        ({"args": "ab"}, "args is a str, expected a tuple"),
        ({"args": (threading.Lock(),)}, "the function or its arguments cannot be pickled: TypeError: cannot pickle"),
        ({"hosts": "localhost:2", "hostfile": "hosts"}, "both hosts and hostfile name hosts"),
        ({"use_mpi": True}, "use_mpi and mpi_args cannot be honoured"),
        ({"num_proc": 2, "np": 3}, "num_proc is 2 and np is 3, which are the same option"),
        ({"min_np": 1, "cooldown_range": (1, 2, 3)}, "expected two numbers of seconds"),
    ],
)
def test_what_is_refused_before_anything_starts(arguments, words):
    with pytest.raises(KVHvdError, match=words) as caught:
        kvstore_hvd.run(**{"func": print, **arguments})
    assert "Fix: " in str(caught.value)
    assert isinstance(caught.value, (InvalidRequestError, InvalidTypeError))


def test_options_become_those_of_kvhvdrun():
    def options(**given):
        names = [name for name in Options.__dataclass_fields__ if name not in ("num_proc", "verbose")]
        return Options(**{**dict.fromkeys(names), "num_proc": 1, "verbose": None, **given}).arguments()

    assert options() == ["--num-proc=1"]
    fixed = options(num_proc=3, hosts="localhost:3", start_timeout=2.5, output_filename="a b", verbose=2)
    texts = ["--num-proc=3", "--hosts=localhost:3", "--start-timeout=2.5", "--output-filename=a b", "--verbose"]
    assert sorted(fixed) == sorted(texts)
    elastic = options(num_proc=2, min_num_proc=1, max_num_proc=4, slots=4, reset_limit=0, cooldown_range=[10, 300])
    assert elastic == [
        *("--num-proc=2", "--min-np=1", "--max-np=4", "--slots-per-host=4", "--reset-limit=0"),
        *("--blacklist-cooldown-range", "10", "300"),
    ]


def test_parcels_have_no_name(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    fd = pack([1, 2], {"a": b"x" * 100_000})
    assert not list(tmp_path.iterdir())
    assert not os.get_inheritable(fd)
    first, second = unpack(fd), unpack(fd)  # of two processes that share the offset of the file
    assert [next(first), next(second), next(first), next(second)][::3] == [[1, 2], {"a": b"x" * 100_000}]
    os.close(fd)


def test_reports_arrive_whole_and_in_order():
    with Reports() as reports:
        reporter = Reporter(os.dup(reports.inherited))
        reports.given()
        assert list(reports.take()) == []
        sender = Sender(1, 2, 3, 4)
        reporter.send(Kind.RESULT, sender, "x" * 1_000_000)
        with pytest.raises(TypeError):
            reporter.send(Kind.RESULT, sender, threading.Lock())
        reporter.send(Kind.ENDED, Sender(), "why")
        heard = list(reports.take())
        result, end = [(each.kind, each.sender, each.value()) for each in heard]
        assert (result, end) == ((Kind.RESULT, sender, "x" * 1_000_000), (Kind.ENDED, Sender(), "why"))
        for each in heard:
            each.close()
        assert reports.is_open
        reporter._socket.close()
        assert list(reports.take()) == []
        assert not reports.is_open


class Job:
    """What workers and launcher report, and what comes of it."""

    def __init__(self):
        self.reports, self.outcome = Reports(), Outcome()
        self._reporter = Reporter(os.dup(self.reports.inherited))

    def tell(self, kind, value, **sender):
        self._reporter.send(kind, Sender(**sender), value)
        for report in self.reports.take():
            self.outcome.hear(report)


def test_results_are_those_of_the_last_world():
    job = Job()
    job.tell(Kind.RESULT, "old", rank=0, size=3, generation=1, worker=0)
    job.tell(Kind.RESULT, "left", rank=2, size=3, generation=1, worker=2)
    job.tell(Kind.RESULT, "b", rank=1, size=2, generation=2, worker=1)
    job.tell(Kind.RESULT, "a", rank=0, size=2, generation=2, worker=5)
    assert job.outcome.results(0) == ["a", "b"]
    job = Job()
    job.tell(Kind.RESULT, "a", rank=0, size=3, generation=2, worker=5)
    with pytest.raises(RunError, match="ranks 1-2 ended without a result"):
        job.outcome.results(0)


def test_consequences_are_not_taken_for_the_cause():
    """A worker that tells of another's end comes first when that one could not say anything in time."""
    job = Job()
    lost, bad = PeerLostError("rank 1 died"), ValueError("the cause")
    for rank, error in ((0, lost), (1, bad), (2, KeyError("later"))):
        job.tell(Kind.FAILED, failure_of(error, None, "the function raised"), rank=rank, size=3)
    with pytest.raises(RunError, match=r"^\[rank 1/3\] run: the function raised ValueError: the cause\.") as caught:
        job.outcome.results(1)
    assert isinstance(caught.value.__cause__, ValueError)


def test_failures_of_earlier_worlds_do_not_count():
    job = Job()
    early, late = (failure_of(ValueError(text), None, "the function raised") for text in ("early", "late"))
    job.tell(Kind.FAILED, early, rank=1, size=2, generation=0, worker=1)
    job.tell(Kind.RESULT, "a", rank=0, size=1, generation=1, worker=0)
    assert job.outcome.results(0) == ["a"]
    job.tell(Kind.FAILED, late, rank=0, size=1, generation=1, worker=0)
    with pytest.raises(RunError, match="ValueError: late"):
        job.outcome.results(1)


class Needy(Exception):
    """Cannot be unpickled: the number is not kept in `args`."""

    def __init__(self, number, text):
        super().__init__(text)


@pytest.mark.parametrize("error", [Needy(3, "lost"), ValueError(threading.Lock())])
def test_an_exception_that_cannot_travel_leaves_its_text(error):
    failure = failure_of(error, None, "the function raised")
    assert failure.error() is None
    assert type(error).__name__ in failure.fact
    assert type(error).__name__ in failure.trace


def test_another_python_keeps_its_libraries(monkeypatch):
    monkeypatch.setattr(sys, "path", ["/own"])
    take_path(["/work", "/other"], prefixes())
    assert sys.path == ["/work", "/other"]
    sys.path[:] = ["/own/lib", "/shared"]
    take_path(["/work", "/theirs/lib/python3", "/shared"], ["/theirs"])
    assert sys.path == ["/work", "/own/lib", "/shared"]


@pytest.mark.parametrize("make", [io.StringIO, lambda: io.TextIOWrapper(io.BytesIO(), write_through=True)])
def test_what_has_no_descriptor_is_written_to(make):
    """Characters that come in two parts are whole in the end."""
    target = make()
    stream = OutputStream(target)
    for data in (b"a\xce", b"\xb1\n", b"\xff"):
        os.write(stream.inherited, data)
        stream.pass_on()
    stream.given()
    stream.pass_on()
    assert stream.fileno() == -1
    target.seek(0)
    assert target.read() == "a\N{GREEK SMALL LETTER ALPHA}\n\N{REPLACEMENT CHARACTER}"
    stream.close()
