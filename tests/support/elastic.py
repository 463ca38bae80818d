"""Elastic jobs whose workers train (`support.elastic_trainee`), which a test watches and disturbs while they run. In
the end `assert_all_right` looks at the steps that count, and at what they must have led to."""

import json
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np

from support.jobs import TESTS, Job, Lines, variables_of
from support.launchers import kvhvdrun
from support.patience import patient

KINDS = ("Trainer", "DistributedTrainer", "ShardedTrainer", "DistributedOptimizer")
Line = dict[str, Any]
TRAINEE = [sys.executable, str(TESTS / "support" / "elastic_trainee.py")]


class ElasticJob(Job):
    """A training under ``kvhvdrun --min-np --max-np``; `slots` is what the discovery script says at first, if any.
    `beside` is what its command begins with. `points` says what happens at which point to which worker: see
    elastic_trainee.py."""

    def __init__(
        self,
        folder: Path,
        marker: str,
        *,
        workers: int = 3,
        min_np: int = 1,
        slots: Optional[Sequence[tuple[str, int]]] = None,
        beside: Sequence[str] = (),
        options: Sequence[str] = ("--blacklist-cooldown-range", "1", "2"),
        arguments: Sequence[str] = (),
        points: Sequence[Line] = (),
        **variables: str,
    ) -> None:
        self.folder = folder
        self._write("points.json", json.dumps(list(points)))
        self._logs: dict[int, Lines] = {}
        command = [*beside, *kvhvdrun().prefix, "--min-np", str(min_np), "--max-np", str(workers)]
        command += ["--event-log", "{log}", *options]
        if slots is not None:
            self.set_slots(slots)
            command += ["--host-discovery-script", f"cat {folder}/hosts"]
        program = [*TRAINEE, str(folder), *arguments]
        super().__init__(folder, marker, [*command, *program], start_new_session=True, **variables)

    def _of(self, worker: int) -> list[Line]:
        return self._logs.setdefault(worker, Lines(self.folder / f"worker-{worker}.jsonl")).read()

    def lines(self, what: str = "", worker: Optional[int] = None) -> list[Line]:
        files = self.folder.glob("worker-*.jsonl")
        workers = [int(path.stem.partition("-")[2]) for path in files] if worker is None else [worker]
        found = (line for each in workers for line in self._of(each) if what in ("", line["what"]))
        return sorted(found, key=lambda line: float(line["t"]))

    def done(self, worker: int, generation: int) -> list[Line]:
        newest = takewhile(lambda line: line.get("generation", generation) >= generation, reversed(self._of(worker)))
        return [line for line in newest if line["what"] == "done" and line["generation"] == generation][::-1]

    def machine(self, worker: int) -> str:
        return "here"

    def until_step(self, steps: int = 3, *, size: Optional[int] = None, after: int = -1) -> int:
        """Wait until steps are made in a world after the given one, of that size; returns the number of the world."""

        def made() -> list[int]:
            worlds = [(each["generation"], each["workers"]) for each in self.events("generation_ready")]
            chosen = [world for world in worlds if world[0] > after and size in (None, len(world[1]))]
            return [number + 1 for number, workers in chosen if len(self.done(workers[0], number)) >= steps]

        found: list[int] = self.until(made, f"{steps} steps in a world of {size or 'any'} workers after world {after}")
        return found[-1] - 1

    def set_slots(self, slots: Sequence[tuple[str, int]]) -> None:
        self._write("hosts", "".join(f"{host}:{number}\n" for host, number in slots))

    def _write(self, name: str, text: str) -> None:
        """Replace a file as a whole: others may read it at any moment."""
        new = self.folder / f"{name}.new"
        new.write_text(text)
        new.rename(self.folder / name)

    def finish(self) -> None:
        self.go("finish")


class Step(NamedTuple):
    generation: int  # of the world
    shown: int  # how often all samples have been seen before: the epoch of the training
    indices: list[list[int]]  # of each rank
    workers: list[int]  # of each rank


def assert_all_right(job: ElasticJob) -> list[Step]:
    """Check that workers ended alike, no commit was lost, each sample counted once; and the bits of the parameters."""
    ends = job.lines("end")
    assert ends, job.describe()
    for end in ends:
        for field in ("kind", "digest", "steps", "worlds", "shown"):
            assert end[field] == ends[0][field], f"workers differ in {field}: {ends}"
    assert_no_commit_lost(job)
    steps = steps_that_count(job, ends[0])
    assert_each_sample_once(steps, ends[0]["samples"], ends[0]["shown"])
    assert_replay_has_the_same_parameters(job, steps, ends[0])
    return steps


def assert_no_commit_lost(job: ElasticJob) -> None:
    """Fail if a world began before a commit that all workers of an earlier world had made. Who takes a step after a
    commit knows that all have saved: commit() asks all of them for updates in between."""
    begun = {(line["generation"], line["step"]) for line in job.lines("step")}
    made = sorted({(line["generation"], line["step"]) for line in job.lines("commit")} & begun)
    for world in job.lines("world"):
        earlier = max((step for generation, step in made if generation < world["generation"]), default=0)
        assert world["step"] >= earlier, f"committed was step {earlier}, but: {world}"


def steps_that_count(job: ElasticJob, end: Line) -> list[Step]:
    """Return the steps that led to a worker's end: those that were rolled back have no trace in its state."""
    taken: dict[tuple[int, int], dict[int, Line]] = defaultdict(dict)
    for line in job.lines("step"):
        taken[line["generation"], line["step"]][line["rank"]] = line
    worlds: list[tuple[int, int, int]] = end["worlds"]
    steps = []
    for (generation, size, first), after in zip(worlds, [*(each[2] for each in worlds[1:]), end["steps"]]):
        for number in range(first, after):
            ranks = taken[generation, number]
            assert sorted(ranks) == list(range(size)), f"step {number} of world {generation} has ranks {sorted(ranks)}"
            assert len({line["shown"] for line in ranks.values()}) == 1, ranks
            lines = [ranks[rank] for rank in range(size)]
            of_ranks = [[line[what] for line in lines] for what in ("indices", "worker")]
            steps.append(Step(generation, ranks[0]["shown"], *of_ranks))
    return steps


def assert_each_sample_once(steps: list[Step], samples: int, epochs: int) -> None:
    """Fail unless each epoch has each sample once, but for what fills up its last round of all workers."""
    for shown in range(epochs):
        own = [step for step in steps if step.shown == shown]
        counts = Counter(index for step in own for indices in step.indices for index in indices)
        assert set(counts) == set(range(samples)), f"epoch {shown}: nobody had {set(range(samples)) - set(counts)}"
        padding = sum(counts.values()) - samples
        workers = len(own[-1].indices)
        assert padding < workers, f"epoch {shown}: {padding} samples too many, {workers} workers at its end"


def assert_replay_has_the_same_parameters(job: ElasticJob, steps: list[Step], end: Line) -> None:
    """Fail unless one process that does these steps has the same bits as a worker had at its end."""
    schedule = []
    for step in steps:
        hosts: dict[str, list[list[int]]] = defaultdict(list)  # the samples of each rank, in the order of sums
        for worker, indices in zip(step.workers, step.indices):
            hosts[job.machine(worker)].append(indices)
        schedule.append(list(hosts.values()))
    (job.folder / "schedule.json").write_text(json.dumps(schedule))
    command = [*TRAINEE, str(job.folder), "--replay", "--kind", end["kind"]]
    environ = {**variables_of(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=patient(300), check=False)
    assert done.returncode == 0, done.stderr
    with np.load(job.folder / "replay.npz") as expected, np.load(job.folder / f"final-{end['worker']}.npz") as found:
        assert expected.files == found.files
        for name in expected.files:
            apart = np.abs(expected[name] - found[name]).max()
            assert expected[name].tobytes() == found[name].tobytes(), f"{name}: {apart:g} from the replay's values"
