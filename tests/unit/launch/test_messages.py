"""Messages that a daemon or a worker could send by mistake or on purpose: they cost that host, and nothing else."""

import contextlib
import functools
import json
import random
import struct

import pytest

from kvstore_hvd import __version__
from kvstore_hvd.base.channel import OF_DAEMON, TO_DAEMON, TO_WORKER, Channel, take
from kvstore_hvd.launch import command
from kvstore_hvd.launch.daemons import Daemons, _Daemon
from kvstore_hvd.launch.driver import Driver

pytestmark = pytest.mark.alike

JOBS = 160
HOSTS = ("honest", "lying")
WORLD = {"rank": 1, "size": 2, "hosts": [["a", "b"]] * 2, "pids": [1, 2], "local_ranks": [0, 0]}
WORLD["addresses"] = [["10.0.0.1:5"], []]
START = {"command": ["x", "\udce9"], "environment": {"A": "\udce9"}, "share": [0, 1], "control": True}
START |= {"stdin": False, "capture": True}
#: Values that some field cannot hold.
VALUES = [None, True, -1, -1000, 999, 1 << 40, 10**30, 1.0, float("inf"), float("nan"), "", "\ud800", "\x1b[2J"]
VALUES += [[], [0, 0], [5, "x"], [[]], {}, {"t": "up"}, {"t": []}, "1" * 100]


def of_worker(number, rank):
    enter = {"host": ["name", f"machine {number}"], "pid": 7, "ranks": [0, 1], "addresses": ["10.0.0.1:5"]}
    ready = {"generation": 0, "cause": "meeting", "text": "", "unreached": [1 - rank]}
    said = [("enter", enter), ("joined", {"generation": 0}), ("synced", {"generation": 0}), ("ready", ready)]
    return [{"t": "from", "worker": number, "message": {"t": kind, **fields}} for kind, fields in said]


def of_daemon(number):
    return [
        {"t": "up", "pid": 100, "version": __version__},
        {"t": "beat"},
        {"t": "started", "worker": number, "pid": 101},
        *of_worker(number, number),
        {"t": "say", "text": "a text"},
        {"t": "out", "worker": number, "fd": 1},
        {"t": "not_started", "worker": number, "text": "no memory", "errno": 12},
        {"t": "ending", "text": "the daemon was ended", "code": 143},
        {"t": "exited", "worker": number, "code": 3},
    ]


def mutated(message, rng):
    changed = json.loads(json.dumps(message))
    places, at = [], [changed]
    while at:
        one = at.pop()
        keys = range(len(one)) if isinstance(one, list) else one
        places += [(one, key) for key in keys]
        at += [one[key] for key in keys if isinstance(one[key], (list, dict))]
    one, key = rng.choice(places)
    if rng.random() < 0.15:
        del one[key]
    elif key == "t" and rng.random() < 0.8:
        one[key] = rng.choice(sorted([*OF_DAEMON, *TO_WORKER, "x" * 200]))
    else:
        one[key] = rng.choice(VALUES)
    return changed


@functools.cache
def plan(*options):
    hosts = ",".join(f"{host}:1" for host in HOSTS)
    return command._plan(command._options(["-np", "2", *options, "-H", hosts, "--rsh-command", "true", "true"]))


class Job:
    """A launcher whose daemons are sockets. Nothing is started."""

    def __init__(self, monkeypatch, *options):
        self.driver = driver = Driver(plan(*options))
        self.ends, self.daemons = {}, {}

        def start(_, host, ours, theirs):
            daemon = _Daemon(host, -1, Channel(ours, OF_DAEMON), 0.0, 60.0, 60.0)
            daemon.shell, daemon.code = "sh", 255
            self.daemons[host], self.ends[host] = daemon, theirs.dup()
            return daemon

        monkeypatch.setattr(Daemons, "_start_elsewhere", start)
        monkeypatch.setattr("kvstore_hvd.launch.daemons._fate", lambda daemon, now: daemon.fault)
        driver._daemons = Daemons(driver._poller, driver._clock, driver._settings, driver._plan.shell, driver._take)
        driver._take_hosts(driver._plan.hosts)
        self.turn()

    def turn(self):
        driver = self.driver
        driver._daemons.act_on_time(driver._on_lost_host)
        if driver._end is None:
            driver._look_after_job(driver._clock.now())
        driver._act()

    def say(self, host, data):
        daemon = self.daemons[host]
        if not daemon.fault:
            self.ends[host].sendall(data)
            self.driver._daemons._receive(daemon)
        self.turn()
        return daemon.fault

    def close(self):
        for host in HOSTS:
            self.ends[host].close()
            self.daemons[host].connection.close()
        self.driver._poller._epoll.close()


def framed(message, raw=b""):
    body = json.dumps(message).encode()
    return struct.pack("!II", len(body), len(raw)) + raw + body


@pytest.mark.parametrize("options", [[], ["--min-np", "1"]])
def test_a_daemon_that_says_nonsense_costs_its_host_only(monkeypatch, options):
    refused = 0
    for seed in range(JOBS):
        rng, why = random.Random(seed), ""
        with contextlib.closing(Job(monkeypatch, *options)) as job:
            said = {host: of_daemon(number) for number, host in enumerate(HOSTS)}
            spoilt = rng.randrange(len(said["lying"]))
            for at in range(len(said["honest"]) - 4):
                if not options and job.driver._end is not None:
                    break
                assert job.say("honest", framed(said["honest"][at])) == "", f"seed {seed}"
                message = said["lying"][at if at != spoilt else rng.randrange(len(said["lying"]))]
                message = mutated(message, rng) if at == spoilt else message
                why = why or job.say("lying", framed(message, rng.choice([b"", b"\xff"])))
            for message in rng.sample(said["lying"], 3):
                why = why or job.say("lying", framed(mutated(message, rng)))
            workers, driver = job.driver._job.workers, job.driver
            assert b"\x1b" not in driver._output._ours[2].pending, f"seed {seed}"
            if why:
                refused += 1
                is_new = not job.daemons["lying"].fault  # it was lost before its worker was to start, and comes again
                assert 1 not in workers or workers[1].code is not None or is_new, f"seed {seed}: {why}"
            if options:
                assert workers[0].code is None, f"seed {seed}"
            elif why and driver._end is not None:
                reason = driver._end.reason or str(driver._not_started)
                told = "lying" in reason or "send the signal to kvhvdrun" in reason  # the daemon's own words
                assert told, f"seed {seed}: {reason}"
    assert refused > JOBS / 4


@pytest.mark.parametrize("options", [[], ["--min-np", "1"]])
@pytest.mark.parametrize(
    "said",
    [
        {"t": "exited", "worker": 0, "code": 3},
        {"t": "exited", "worker": 99, "code": 3},
        {"t": "exited", "worker": -1, "code": 3},
        {"t": "up", "pid": 8, "version": __version__},
    ],
)
def test_a_daemon_speaks_for_its_own_workers_and_comes_once(monkeypatch, options, said):
    with contextlib.closing(Job(monkeypatch, *options)) as job:
        for number, host in enumerate(HOSTS):
            assert job.say(host, framed(of_daemon(number)[0])) == ""
        assert job.driver._job.workers[0].pid == 0
        assert job.say("lying", framed(said)) != ""
        worker = job.driver._job.workers[0]
        assert (worker.code, worker.pid) == (None, 0)
        assert job.driver._end is None
        job.say("honest", 2 * framed({"t": "out", "worker": 0, "fd": 1}, b"12345"))
        job.driver._daemons.acknowledge()
        received = Channel(job.ends["honest"], TO_DAEMON).receive()
        assert [message["bytes"] for message in received if message["t"] == "ack"] == [10]
        job.say("honest", framed({"t": "not_started", "worker": 0, "text": "no memory", "errno": 12}))
        told = job.driver._output._ours[2].pending.decode() + str(job.driver._not_started)
        assert ("no memory" in told, "Fix: see ulimit" in told) == (True, not options)


def test_what_is_right_arrives_as_it_was_sent():
    world = {"t": "to", "worker": 0, "message": {"t": "world", "generation": 0, "job": "x", **WORLD}}
    for message in ({"t": "start", "worker": -1, **START}, world, {"t": "signal", "worker": None, "signal": 9}):
        assert take(message, TO_DAEMON) == message
    for code in (-64, 255):  # the last signal
        assert take({"t": "exited", "worker": 0, "code": code}, OF_DAEMON)["code"] == code
    assert take({"t": "say", "text": "a\ud800\udce9"}, OF_DAEMON)["text"] == "a\\ud800\\udce9"


def test_a_command_has_as_many_words_as_linux_takes():
    """A word needs 10 of 6 MiB, which the system has for them at most."""
    start = {"t": "start", "worker": 0, **START, "command": 629145 * ["x"]}
    assert take(start, TO_DAEMON) == start
