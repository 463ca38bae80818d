"""Random histories of elastic jobs: whatever happens in whatever order, the decisions keep their promises. Workers are
played with their own knowledge only: what they are told lies in an inbox until they look, and what they say lies in an
outbox until the launcher hears it, so that words cross on the way."""

import random
import signal
from collections import deque

import pytest

from kvstore_hvd.base.channel import TO_WORKER, take
from kvstore_hvd.launch.jobs import Job
from kvstore_hvd.launch.state import End, Kill, Note, Settings, Start, Tell

pytestmark = pytest.mark.alike

HOSTS = ("a", "b", "c")
HISTORIES, PARTS = 480, 4


class Actor:
    def __init__(self, number, slot, rng):
        self.number, self.slot, self.rng = number, slot, rng
        self.identity = rng.choice(("x", "x", "y"))
        self.inbox, self.outbox = deque(), deque()  # messages; then perhaps an exit code
        self.code = None
        self.entered = self.placed = self.waiting = self.meeting = self.training = self.synced = self.stopped = False
        self.asked = 0  # to come to a commit
        self.unreached = []  # ranks of its world on a host that its own does not reach
        self.generation = -1

    def say(self, kind, **fields):
        self.outbox.append({"t": kind, **fields})

    def wait(self, cause):
        self.training, self.waiting, self.asked = False, True, 0
        cause = "start" if self.generation < 0 else cause
        unreached = self.unreached if cause == "meeting" else []
        self.say("ready", generation=self.generation, cause=cause, text="", unreached=unreached)

    def exit(self, code):
        if self.code is None:
            self.code = code
            self.training = self.waiting = False
            self.outbox.append(code)

    def look(self):
        message = self.inbox.popleft()
        kind = message["t"]
        if kind == "world":
            assert self.waiting, "a world for a worker that does not wait"
            self.generation, self.waiting, self.meeting = message["generation"], False, True
        elif kind == "rank":
            assert self.waiting, "a place for a worker that does not ask for one"
            self.waiting, self.placed = False, True
        elif kind == "lost":
            if message["generation"] == self.generation and (self.training or self.meeting):
                self.meeting = False
                self.wait("lost" if self.training else "meeting")
        elif kind == "updated":
            self.asked = message["number"]
        elif kind == "leave":
            self.exit(0)
        elif kind == "fail":
            self.exit(1)

    def go_on(self, well):
        rng = self.rng
        if not self.entered:
            self.entered = self.waiting = True  # for the first world, or a place
            self.say("enter", host=["name", self.identity], pid=1, addresses=[], ranks=[])
        elif self.placed:
            self.placed = False
            self.wait("start")
        elif self.meeting:
            self.meeting = False
            if not well and (self.unreached or rng.random() < 0.05):
                self.wait("meeting")
            else:
                self.training = True
                self.say("joined", generation=self.generation)
        elif self.training:
            if not self.synced and rng.random() < 0.5:
                self.synced = True
                self.say("synced", generation=self.generation)
            elif self.asked:
                self.wait("updated")
            elif not well and rng.random() < 0.05:
                self.wait(rng.choice(("lost", "timeout", "reset")))
            elif rng.random() < (0.3 if well else 0.01):
                self.say("finished")
                self.exit(0)


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
        self.generations = []
        self.worlds = {}  # of the generation that is being given out
        self.known_dead, self.synced, self.dismissed, self.kinds = set(), set(), set(), set()
        self.has_state = False  # all members of a world have got it, or a worker has finished
        self.gone_well = False
        self.apart = rng.choice((set(), {"a", "b"}, {"b", "c"}))  # hosts that do not reach each other
        self.ending = None
        self.job = Job(self.settings, self.now, lambda worker: ())
        self.apply()

    def apply(self):
        self.known_dead |= {worker.id for worker in self.job.workers.values() if worker.lost}  # or never started
        for action in self.job.take():
            assert self.ending is None or isinstance(action, Note), "something is done after the end"
            self.check(action)

    def check(self, action):
        if isinstance(action, Start):
            self.check_start(action)
        elif isinstance(action, Tell):
            assert action.worker not in self.known_dead, "words to a dead worker"
            assert take(action.message, TO_WORKER) == action.message
            self.kinds.add(action.message["t"])
            if action.message["t"] == "world":
                self.worlds[action.worker] = action.message
            elif action.message["t"] == "leave":
                self.dismissed.add(action.worker)
            elif action.message["t"] == "lost":
                assert action.message["generation"] == len(self.generations) - 1
            self.actors[action.worker].inbox.append(action.message)
        elif isinstance(action, Kill):
            if action.number == signal.SIGTERM:
                self.dismissed.add(action.worker)
            if action.number == signal.SIGKILL or self.rng.random() < 0.5:
                self.actors[action.worker].exit(-action.number)
        elif isinstance(action, End):
            self.ending = action
        elif action.event == "generation_ready":
            self.check_generation(action.fields)
        else:
            self.kinds.add(action.event)

    def check_start(self, action):
        slot = action.slot
        assert action.worker == len(self.actors), "a number is used twice"
        assert slot.index < self.hosts.get(slot.host, 0), "no such slot"
        held = [a for a in self.actors.values() if a.number not in self.known_dead]
        assert all(actor.slot != slot for actor in held), "two workers on a slot"
        counted = [a for a in held if a.slot.index < self.hosts.get(a.slot.host, 0) and a.number not in self.dismissed]
        assert len(counted) < self.settings.max_np, "more than --max-np"
        assert not self.gone_well, "a worker is started after a success"
        self.actors[action.worker] = Actor(action.worker, slot, self.rng)

    def check_generation(self, fields):
        number, members = fields["generation"], fields["workers"]
        assert number == len(self.generations), "a number of a generation is used twice, or left out"
        assert len(set(members)) == len(members)
        assert sorted(self.worlds) == sorted(members)
        size = len(members)
        for rank, member in enumerate(members):
            world = self.worlds[member]
            assert (world["generation"], world["rank"], world["size"]) == (number, rank, len(world["hosts"]))
            assert (world["size"], member in self.known_dead, member in self.dismissed) == (size, False, False)
        self.worlds.clear()
        of_members = [self.actors[member] for member in members]
        for actor in of_members:
            hosts = [{actor.slot.host, other.slot.host} for other in of_members]
            actor.unreached = [rank for rank, pair in enumerate(hosts) if pair == self.apart]
        assert size <= self.settings.max_np
        somebody_finished = any(worker.finished for worker in self.job.workers.values())
        assert self.gone_well or size >= self.settings.min_np or somebody_finished, "below --min-np"
        before = self.generations[-1] if self.generations else []
        old = [member for member in members if member in before]
        assert not before or (old and members[0] in old), "rank 0 is new"
        machines = [self.actors[member].identity for member in members]
        runs = [m for position, m in enumerate(machines) if position == 0 or machines[position - 1] != m]
        assert len(runs) == len(set(runs)), "workers of one machine are torn apart"
        having = [member for member in members if member in self.synced]
        assert not having or members[0] == having[0], "rank 0 has not the state"
        assert having or not (self.synced and self.has_state), "nobody has the state"
        groups = {}
        for member in old:
            groups.setdefault((member in having, self.actors[member].identity), set()).add(member)
        alike = len({has_state for has_state, _ in groups}) == 1
        for same in (*groups.values(), *([set(old)] if alike else [])):
            kept = [member for member in members if member in same]
            assert kept == [member for member in before if member in same], "the order has changed"
        for machine in set(machines):
            news = [member in old for member in members if self.actors[member].identity == machine]
            assert news == sorted(news, reverse=True), "a newcomer comes before an old worker of its machine"
            same = [rank for rank, other in enumerate(machines) if other == machine]
            same.sort(key=lambda rank: self.job.slots.order(of_members[rank].slot))
            assert [world["local_ranks"][rank] for rank in same] == list(range(len(same))), "not in the order of slots"
        self.generations.append(members)
        self.kinds.add("generation")

    def hear(self, actor):
        word = actor.outbox.popleft()
        if isinstance(word, int):
            self.known_dead.add(actor.number)
            if word == 0 and actor.number not in self.dismissed:
                self.gone_well = True
            self.job.exited(actor.number, word, self.now)
        else:
            self.job.heard(actor.number, word, self.now)
            self.synced = {worker.id for worker in self.job.workers.values() if worker.synced}
            generation, finished = self.job.generation, any(worker.finished for worker in self.job.workers.values())
            has_all = generation.begun and {member.id for member in generation.members} <= generation.synced
            self.has_state |= finished or has_all
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
                actor.exit(-9)
                self.known_dead.add(actor.number)
                actor.outbox.clear()
        self.job.host_lost(host, "a storm", self.now)
        self.apply()

    def notice_stopped(self):
        """Operations with a stopped worker time out. When all are stopped there is nobody to notice it."""
        living = [a for a in self.actors.values() if a.code is None and a.training]
        stopped = {actor.generation for actor in living if actor.stopped}
        for actor in living:
            if actor.generation in stopped and not actor.stopped:
                actor.wait("timeout")
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
            elif actor.outbox and (actor.stopped or actor.code is not None or rng.random() < 0.6):
                self.hear(actor)
            elif actor.stopped or actor.code is not None:
                return
            elif actor.inbox and rng.random() < 0.7:
                actor.look()
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
