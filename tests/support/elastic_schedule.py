"""What the workers of an elastic job did, as their lines say: the steps that count, and what they must have led to."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from typing import Any, NamedTuple

import numpy as np

import kvstore_hvd
from support.elastic import ElasticJob, Line
from support.launchers import environment, with_tests
from support.patience import patient

__all__ = ["Step", "assert_all_right", "steps_that_count"]

REPLAY_LIMIT_S = patient(300)


class Step(NamedTuple):
    """One step of all workers."""

    generation: int  # of the world
    shown: int  # how often all samples have been seen before: the epoch of the training
    indices: list[list[int]]  # of each rank
    workers: list[int]  # of each rank


def assert_all_right(job: ElasticJob, samples: int) -> list[Step]:
    """Check that workers ended alike, no commit was lost, each sample counted once; and the bits of the parameters."""
    ends = job.lines("end")
    assert ends, job.describe()
    for end in ends:
        for field in ("kind", "digest", "steps", "worlds", "shown"):
            assert end[field] == ends[0][field], f"workers differ in {field}: {ends}"
    assert_no_commit_lost(job)
    steps = steps_that_count(job, ends[0])
    assert_each_sample_once(steps, samples, ends[0]["shown"])
    assert_replay_has_the_same_parameters(job, steps, samples, ends[0])
    return steps


def assert_no_commit_lost(job: ElasticJob) -> None:
    """Fail if a world began before a commit that all workers of an earlier world had made.

    Who takes a step after a commit knows that all have saved: commit() asks all of them for updates in between.
    """
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
        missing = sorted(set(range(samples)) - set(counts))
        assert not missing, f"epoch {shown}: nobody had the samples {missing}"
        padding = sum(counts.values()) - samples
        workers = len(own[-1].indices)
        assert padding < workers, f"epoch {shown}: {padding} samples too many, {workers} workers at its end"


def by_host(job: ElasticJob, step: Step) -> list[list[list[int]]]:
    """The samples of each rank of each host, in the order of sums."""
    hosts: dict[str, list[list[int]]] = defaultdict(list)
    for worker, indices in zip(step.workers, step.indices):
        hosts[job.machine(worker)].append(indices)
    return list(hosts.values())


def assert_replay_has_the_same_parameters(job: ElasticJob, steps: list[Step], samples: int, end: Line) -> None:
    """Fail unless one process that does these steps has the same bits as a worker had at its end."""
    schedule, result = job.folder / "schedule.json", job.folder / "replay.npz"
    schedule.write_text(json.dumps([by_host(job, step) for step in steps]))
    packages = os.path.dirname(os.path.dirname(kvstore_hvd.__file__))
    command = [sys.executable, "-m", "support.elastic_training", str(schedule), str(result), "--samples", str(samples)]
    command += ["--kind", end["kind"]]
    variables: dict[str, Any] = {**environment(), "OMP_NUM_THREADS": "1", "PYTHONPATH": packages}
    done = subprocess.run(
        command, env=with_tests(variables), capture_output=True, text=True, timeout=REPLAY_LIMIT_S, check=False
    )
    assert done.returncode == 0, done.stderr
    with np.load(result) as expected, np.load(job.folder / f"final-{end['worker']}.npz") as found:
        assert expected.files == found.files
        for name in expected.files:
            apart = np.abs(expected[name] - found[name]).max()
            assert expected[name].tobytes() == found[name].tobytes(), f"{name}: {apart:g} from the replay's values"
