"""What the stall report says, and when; with a world that is told what to answer, and a clock that is set by hand."""

import contextlib
import dataclasses
import functools
import gc
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from unittest.mock import Mock

import pytest

from kvstore_hvd import native
from kvstore_hvd.errors import PeerLostError
from kvstore_hvd.native import Missed, Waiting
from kvstore_hvd.world.stall import StallInspector, program_line, python_stacks
from kvstore_hvd.world.topology import Host, Place
from support.fake_native import FakeAdapter, FakeConnection
from support.patience import until


class World(FakeConnection):
    """Answers what the test has set; every rank is this process unless `pids` says otherwise."""

    def __init__(self):
        super().__init__(FakeAdapter())
        self.answer, self.late_for, self.pids, self.segment = [], [], {}, None

    def waiting(self, age_s):
        return self.answer if self.answer is None else [one for one in self.answer if one.age_s >= age_s]

    def missed(self, most):
        return self.late_for[:most]

    def tell_line(self, line, callers, is_blocked):
        self.line = line

    def process(self, rank):
        pid = self.pids.get(rank, os.getpid())
        return pid, f"rank {rank} (node, pid {pid})"


class Stage:
    def __init__(self, log, rank=0, size=4, check_s=60.0, shutdown_s=0.0, elsewhere=(), **of_set):
        self.world, self.log = World(), log
        hosts = [Host("other", "other") if each in elsewhere else Host.here() for each in range(size)]
        topology = Place.of(rank, hosts, source="launcher", **of_set)
        self.inspector = StallInspector(self.world, topology, check_s, shutdown_s, lambda name: f"<{name}>")

    def look(self, now):
        self.log.clear()
        assert self.inspector.look(now)
        return self.log.messages


@pytest.fixture
def stage(caplog):
    return functools.partial(Stage, caplog)


def waiting(key, age_s, late=(1,), by_all=False):
    return Waiting(f"s0/{key}", f"allreduce 'w{key}' (key {key})", age_s, 1000.0 + key, late, by_all)


def test_a_stall_is_reported_again_and_again_and_when_it_is_over(stage):
    here = stage()
    for start, seconds in ((0, 300), (1000, 200)):
        reported = []
        for now in range(seconds):
            here.world.answer = [waiting(0, now), waiting(1, now - 0.5)]
            if here.look(start + now):
                reported.append(now)
        assert reported == list(range(60, seconds, 60))
        here.world.answer = []
        assert here.look(start + seconds) == [f"the stall is over: rank 0 waited {seconds - 1} s."]
        assert here.look(start + seconds + 1) == []


def test_a_process_set_is_named_with_its_ranks_among_all(stage):
    here = stage(size=3, set_number=7, all_ranks=(0, 4, 5), size_of_all=9)
    here.world.answer = [waiting(0, 61)]
    (text,) = here.look(0)
    assert text.startswith("rank 0 has waited 61 s for other workers of process set 7.\n")
    assert "submitted by ranks 0, 5, not by rank 4" in text
    here.world.answer = []
    assert here.look(1) == ["the stall of process set 7 is over: rank 0 waited 61 s."]
    late = stage(rank=1, size=3, set_number=7, all_ranks=(0, 4, 5), size_of_all=9)
    late.world.late_for = [Missed("s0/3", 1)]
    late.look(0)
    (text,) = late.look(60)
    assert text.startswith("the other workers of process set 7 have waited 60 s for rank 4.\n")


def test_the_report_names_operations_ranks_and_processes(stage):
    here = stage(elsewhere=(1,))
    here.world.answer = [waiting(0, 61), waiting(1, 62.4, (1, 3)), waiting(2, 59)]
    here.world.pids = {1: 0, 3: 0}  # the latter has never joined
    (text,) = here.look(0)
    assert text.splitlines() == [
        "rank 0 has waited 62 s for other workers.",
        "  allreduce 'w1' (key 1): 62 s, submitted by ranks 0, 2, not by ranks 1, 3",
        "  allreduce 'w0' (key 0): 61 s, submitted by ranks 0, 2-3, not by rank 1",
        "  rank 1 (node, pid 0): see its own report",
        "  rank 3 (node, pid 0)",
    ]
    shot = Mock(workers=[Mock(pid=rank, is_stopped=rank == 1) for rank in range(4)])
    here.world.segment = Mock(snapshot=lambda most: shot)
    here.world.answer = [waiting(0, 121)]
    (text,) = here.look(60)
    assert "  rank 1 (node, pid 0): its process is stopped; `kill -CONT 1` continues it" in text.splitlines()
    here.world.answer = [waiting(0, 62, (1, 2))]  # another one is late, too
    assert [len(here.look(now)) for now in (1, 2)] == [1, 0]
    large = stage(size=12)
    large.world.answer = [waiting(key, 61, range(1, 11)) for key in range(8)]
    lines = large.look(0)[0].splitlines()
    assert (lines[7], lines[16:]) == ("  ... and 2 more", ["  ... and 2 more"])


def test_to_wait_for_workers_with_more_input_is_no_stall(stage, caplog):
    """It is told once, for those who look, and never ends the world."""
    rank = stage(shutdown_s=70.0)
    left = Waiting("~left", "allreduce 'left'", 61.0, 1000.0, (2,), False)
    rank.world.answer = [left]
    with caplog.at_level(logging.INFO, "kvstore_hvd"):
        (text,) = rank.look(1061.0)
        assert text.startswith("rank 0 has no input left, and has waited 61 s for rank 2: this is no stall.")
        assert f"pid {os.getpid()}" in text
        assert caplog.records[-1].levelno == logging.INFO
        rank.world.answer = [dataclasses.replace(left, age_s=600.0)]
        assert rank.look(1600.0) == []
        rank.world.answer = [dataclasses.replace(left, since=2000.0, late=())]  # all have come
        assert rank.look(2061.0) == []
    assert rank.world.left == []


def test_the_lowest_rank_that_waits_speaks(stage):
    for rank, late, speaks in [(0, (1,), True), (2, (1,), False), (2, (0, 1), True), (3, (0, 1), False)]:
        here = stage(rank)
        here.world.answer = [waiting(0, 61, late)]
        assert bool(here.look(0)) == speaks, (rank, late)
    here = stage()  # a stall inside the collective
    here.world.answer = [waiting(0, 61, (2,), True), waiting(1, 61, (), True)]
    text = here.look(0)[0]
    assert "allreduce 'w0' (key 0): 61 s, submitted by all; rank 2 stopped inside it" in text
    assert "allreduce 'w1' (key 1): 61 s, submitted by all; none of them moves" in text


def test_a_rank_blocked_by_one_that_is_stopped_says_so(stage):
    # The system has cut the name of that process inside of a character.
    program = "open('/proc/self/comm', 'w').write(8 * 'é'); print(flush=True); import time; time.sleep(600)"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as stopped, contextlib.ExitStack() as stack:
        stack.callback(stopped.kill)
        stopped.stdout.readline()
        stopped.send_signal(signal.SIGSTOP)
        assert os.WIFSTOPPED(os.waitpid(stopped.pid, os.WUNTRACED)[1])
        here = stage()
        here.world.answer = None
        assert not any(here.look(now) for now in range(100)), "nobody is stopped: it is only busy"
        here.world.pids = {2: stopped.pid}
        (text,) = here.look(100)
        here.world.answer = []
        here.look(101)
        here.world.answer = None
        again = [here.look(now) for now in range(102, 160)]
        other = stage(2)  # rank 0 waits, too, and cannot say so
        other.world.pids, other.world.answer = {0: stopped.pid}, [waiting(0, 61)]
        told = other.look(0)
    assert told and not any(again), "it is blocked again, and not for long"
    assert text.startswith("rank 0 has been blocked in the engine for 100 s")
    assert f"kill -CONT {stopped.pid}" in text


@pytest.mark.parametrize("check_s", [60.0, 600.0])
def test_the_shutdown_time_fails_the_world_with_the_same_text(stage, check_s):
    here = stage(check_s=check_s, shutdown_s=90.0)
    here.world.answer = [waiting(0, 61)]
    assert len(here.look(0)) == (check_s == 60.0)
    assert not here.world.left
    assert not here.inspector.has_given_up
    here.world.answer = [waiting(1, 90, (3,)), waiting(0, 90.4)]
    here.look(30)
    (text,) = here.world.left
    assert text.startswith("abort: rank 0 waited 90 s, longer than the stall shutdown time, for ranks 1, 3\n")
    assert "allreduce 'w0' (key 0): 90 s, submitted by ranks 0, 2-3, not by rank 1" in text
    assert here.inspector.has_given_up
    here.world.failure = PeerLostError("lost")
    assert not here.inspector.look(31), "a lost world needs no more reports"


def test_a_late_rank_names_what_it_missed_and_where_it_is(stage):
    here = stage(1)
    reported = []
    for now in range(250):
        here.world.late_for = [Missed(f"s0/{key}", 7) for key in range(8)]
        for text in here.look(now):
            reported.append(now)
            lines = text.splitlines()
            assert lines[0] == f"the other workers have waited {now} s for rank 1."
            assert lines[1] == ("  It has not submitted <s0/0>, <s0/1>, <s0/2>, <s0/3>, <s0/4>, <s0/5>, ... and 2 more")
            assert lines[2].startswith("  main thread, innermost call last")
            assert "in test_a_late_rank_names_what_it_missed_and_where_it_is" in text
    assert reported == [60, 120, 180, 240]
    assert here.world.line.endswith(" in look")


def test_stacks_are_bounded_and_leave_out_our_own_threads():
    go, seen = threading.Event(), []

    def deep(depth):
        deep(depth - 1) if depth else go.wait()

    others = [threading.Thread(target=deep, args=(40,), name=f"reader-{i}") for i in range(5)]
    others.append(threading.Thread(target=deep, args=(1,), name="kvstore_hvd-exit"))
    for thread in others:
        thread.start()
    until(lambda: python_stacks().count("in wait") >= 3)
    # As the inspector does: from a thread of its own.
    looker = threading.Thread(target=lambda: (seen.append(python_stacks()), go.set()), name="kvstore_hvd-stall")
    looker.start()
    for thread in (looker, *others):
        thread.join()
    text = seen[0]
    assert text.startswith("main thread, innermost call last")
    assert gc.isenabled()
    assert "in test_stacks_are_bounded_and_leave_out_our_own_threads" in text
    assert ("kvstore_hvd-" in text, "outer calls left out" in text, "more threads" in text) == (False, True, True)
    assert len(text.splitlines()) < 100


def test_the_line_where_all_calls_are_of_libraries_and_the_path_is_long(monkeypatch):
    monkeypatch.setattr(native, "calls_of", lambda *_: [("x" * 90 + "/train.py", 12, "main", "mxnet.gluon")] * 2)
    assert program_line() == f"...{'x' * 71}/train.py:12 in main"


def test_the_line_is_the_programs_while_it_is_in_the_standard_library():
    lines = []
    looker = threading.Thread(target=lambda: [time.sleep(0.01) or lines.append(program_line()) for _ in range(20)])
    looker.start()
    number = sys._getframe().f_lineno + 1
    looker.join()
    place = " in test_the_line_is_the_programs_while_it_is_in_the_standard_library"
    assert [line.endswith(place) for line in lines] == [True] * 20
    assert lines[-1].endswith(f"test_stall.py:{number}{place}")
