"""Random histories of elastic jobs: whatever happens in whatever order, the decisions keep their promises. What workers
are told lies in an inbox until they look, so that messages cross on the way."""

import random
import signal
from collections import deque

import pytest

from kvstore_hvd.launch.jobs import Job
from kvstore_hvd.launch.state import End, Kill, Note, Settings, Start, Tell
from support.elastic_workers import Worker, check, message_of, steps, told

pytestmark = pytest.mark.alike

HOSTS = ("a", "b", "c")
HISTORIES, PARTS = 480, 4


class Actor:
    def __init__(self, number, slot, rng):
        self.number, self.slot, self.rng = number, slot, rng
        self.identity = rng.choice(("x", "x", "y"))
        self.worker, self.inbox = Worker(), deque()
        self.stopped = False
        self.unreached = []  # ranks of its world on a host that its own does not reach
        self.generation = -1

    @property
    def runs(self):
        return self.worker.phase != "gone"

    def exit(self, code):
        self.worker = self.worker.ends(code)

    def look(self, kind, message):
        if kind == "world":
            self.generation = message["generation"]
        if kind != "lost" or message["generation"] == self.generation:
            self.worker = self.rng.choice(told(self.worker, kind))

    def go_on(self, well):
        rng, worker = self.rng, self.worker
        if not well and worker.phase == "meeting" and (self.unreached or rng.random() < 0.05):
            self.worker = worker.waits("meeting")
        elif not well and worker.phase == "training" and rng.random() < 0.03:
            self.worker = worker.waits(rng.choice(("lost", "timeout", "reset")))
        else:
            odds = {"sync": 0.5, "finish": 0.3 if well else 0.01}
            able = [after for step, after in steps(worker).items() if rng.random() < odds.get(step, 1.0)]
            self.worker = rng.choice(able or [worker])

    def message(self, word):
        return message_of(word, self.number, self.generation, self.identity, self.unreached)


class History:
    def __init__(self, seed):
        self.rng = rng = random.Random(seed)
        self.now = 0.0
        self.settings = Settings(
            job="random",
            min_np=rng.randint(1, 3),
            max_np=rng.choice((256, 3, 4)),
            reset_limit=rng.choice((None, None, 5)),
            elastic_timeout_s=rng.choice((5.0, 60.0)),
            timeout_s=rng.choice((3.0, 30.0)),
            cooldown=(1.0, 10.0),
        )
        self.actors, self.leaving = {}, set()
        self.discovered = {}
        self.known_dead, self.kinds = set(), set()
        self.apart = rng.choice((set(), {"a", "b"}, {"b", "c"}))  # hosts that do not reach each other
        self.ending = None
        self.job = Job(self.settings, self.now, lambda worker: ())
        self.generation = self.job.generation
        self.apply()

    def apply(self):
        self.known_dead |= {worker.id for worker in self.job.workers.values() if worker.lost}  # or never started
        actions = self.job.take()
        assert self.ending is None or all(isinstance(each, Note) for each in actions), "something is done after the end"
        check(self.job, self.generation, actions, self.hosts, self.settings)
        for action in actions:
            if isinstance(action, Start):
                assert action.worker == len(self.actors), "a number is used twice"
                self.actors[action.worker] = Actor(action.worker, action.slot, self.rng)
            elif isinstance(action, Tell):
                assert action.worker not in self.known_dead, "words to a dead worker"
                self.kinds.add(action.message["t"])
                self.actors[action.worker].inbox.append(action.message)
            elif isinstance(action, Kill) and action.number == signal.SIGKILL:
                self.actors[action.worker].exit(-action.number)
            elif isinstance(action, Kill):
                self.actors[action.worker].look("SIGTERM", {})
            elif isinstance(action, End):
                self.ending = action
            else:
                self.kinds.add(action.event)
        if self.job.generation is not self.generation:
            self.generation = self.job.generation
            members = [self.actors[member.id] for member in self.generation.members]
            for actor in members:
                pairs = [{actor.slot.host, other.slot.host} for other in members]
                actor.unreached = [rank for rank, pair in enumerate(pairs) if pair == self.apart]

    def hear(self, actor):
        word, *rest = actor.worker.words
        actor.worker = actor.worker._replace(words=tuple(rest))
        if isinstance(word, int):
            self.known_dead.add(actor.number)
            self.job.exited(actor.number, word, self.now)
        else:
            self.job.heard(actor.number, actor.message(word), self.now)
        self.apply()

    def pass_time(self, seconds):
        self.now += seconds
        self.job.tick(self.now)
        # Who was killed and did not end is taken for gone.
        self.known_dead |= {worker.id for worker in self.job.workers.values() if worker.code is not None}
        self.apply()

    def discover(self):
        rng = self.rng
        self.discovered = {host: rng.randint(1, 3) for host in HOSTS if rng.random() < 0.7}
        self.job.hosts(self.discovered, self.now)
        self.apply()

    @property
    def hosts(self):
        """But for those that are about to leave."""
        return {host: count for host, count in self.discovered.items() if host not in self.leaving}

    def warn_of_host(self):
        host = self.rng.choice(HOSTS)
        self.leaving.add(host)
        self.job.host_leaves(host, "a notice", 143, self.now)
        self.apply()

    def lose_host(self, host):
        self.leaving.discard(host)
        for actor in self.actors.values():
            if actor.slot.host == host:
                actor.worker = Worker("gone")
                self.known_dead.add(actor.number)
        self.job.host_lost(host, "a storm", self.now)
        self.apply()

    def notice_stopped(self):
        """Operations with a stopped worker time out. When all are stopped there is nobody to notice it."""
        living = [actor for actor in self.actors.values() if actor.worker.phase == "training"]
        stopped = {actor.generation for actor in living if actor.stopped}
        for actor in living:
            if actor.generation in stopped and not actor.stopped:
                actor.worker = actor.worker.waits("timeout")
        if living and all(actor.stopped for actor in living):
            living[0].stopped = False

    def step(self, well):
        rng = self.rng
        living = [a for a in self.actors.values() if a.number not in self.known_dead]
        roll = rng.random()
        if not well and roll < 0.04:
            self.discover()
        elif not well and roll < 0.045:
            self.lose_host(rng.choice(HOSTS))
        elif not well and roll < 0.05:
            self.warn_of_host()
        elif roll < 0.10:
            self.pass_time(rng.choice((0.1, 0.6, 3.0)))
        elif living:
            actor = rng.choice(living)
            if not well and rng.random() < 0.03:
                actor.exit(rng.choice((1, -9, -11)))
            elif not well and rng.random() < 0.01:
                actor.stopped = True
            elif actor.worker.words and (actor.stopped or not actor.runs or rng.random() < 0.6):
                self.hear(actor)
            elif actor.stopped or not actor.runs:
                return
            elif actor.inbox and rng.random() < 0.7:
                message = actor.inbox.popleft()
                actor.look(message["t"], message)
            else:
                actor.go_on(well)
        else:
            self.pass_time(1.0)

    def run(self):
        self.discover()
        for _ in range(self.rng.randint(50, 600)):
            if self.ending is not None:
                return
            self.step(well=False)
        # From here on all goes well, and the job has to come to its end.
        for host in set(self.leaving):
            self.lose_host(host)
        self.discovered = {"a": 3, "b": 1}
        self.job.hosts(self.discovered, self.now)
        self.apply()
        for _ in range(20_000):
            if self.ending is not None:
                return
            self.notice_stopped()
            self.step(well=True)
        pytest.fail("the job does not end")


@pytest.mark.parametrize("part", range(PARTS))
def test_random_histories(part):
    seen, codes = set(), set()
    for number in range(HISTORIES // PARTS):
        seed = part * 1_000_000 + number
        history = History(seed)
        try:
            history.run()
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {error}") from error
        assert history.ending is not None
        seen |= history.kinds
        codes.add(history.ending.code)
    assert {"world", "lost", "updated", "leave", "fail", "rank"} <= seen
    assert {"slot_blacklisted", "host_left_out", "worker_killed"} <= seen
    assert {0, 1, 137} <= codes
