"""Which core a worker's communication threads run on, and texts that workers tell each other."""

import errno
import os
import threading

import pytest

from kvstore_hvd.base.cores import chosen_cores, threads_on
from kvstore_hvd.errors import ConfigError
from kvstore_hvd.world import process
from kvstore_hvd.world.topology import exchange
from support.fake_native import fake_world


@pytest.fixture
def cores(monkeypatch):
    """The cores of a machine some of which are offline, and one of which the container may not use; all others are."""
    usable, current = {0, 2, 4, 6, 11}, [0]

    def pin(pid, wanted):
        if not wanted & usable:
            if max(wanted) > 1 << 31:
                raise OverflowError("CPU number too large")
            raise OSError(errno.EINVAL, "Invalid argument")
        current[:] = wanted & usable

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(current))
    monkeypatch.setattr(os, "sched_setaffinity", pin)
    return usable


def test_each_worker_of_the_host_has_its_core(cores):
    """Any core that may be used, whatever it is called, and wherever the process runs now."""
    assert [chosen_cores((6, 0, 11), rank, 3) for rank in range(3)] == [(6,), (0,), (11,)]
    assert chosen_cores((6, 0, 11), 1, 2) == (0,)
    assert chosen_cores((), 1, 2) == ()
    assert os.sched_getaffinity(0) == {0}


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        ((0,), r"for 2 workers on this host\."),
        ((0, 3), r"on this host, of which it may not use 3\."),
        ((0, 2, 1 << 40), "use 1099511627776"),
    ],
)
def test_what_cannot_be_raises_on_every_worker(cores, chosen, text):
    for rank in (0, 1):
        with pytest.raises(ConfigError, match=text):
            chosen_cores(chosen, rank, 2)
    assert os.sched_getaffinity(0) == {0}


def test_threads_started_inside_run_there_and_the_caller_where_it_did():
    before = os.sched_getaffinity(0)
    core, seen = max(before), []
    with threads_on([core]):
        thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
    assert seen == [{core}]
    assert os.sched_getaffinity(0) == before
    for unusable in ([], [100_000]):
        with threads_on(unusable):
            assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    "text", ["", "/tmp/\udcff", "\ud800", "x" * 16385], ids=["nothing", "bytes", "surrogate", "long"]
)
def test_workers_tell_each_other_texts(text):
    """Each in its place, of any length; a file name that is no UTF-8 as Python shows it."""
    with fake_world(rank=2, size=3) as connection:
        assert exchange(connection, process.current().topology, "test", text) == ["", "", text]
        assert len(connection.requests) == 2  # their lengths, and themselves
