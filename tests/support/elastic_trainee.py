"""A worker of elastic tests: ``elastic_trainee.py FOLDER``. It trains until a file FOLDER/finish is there.

Each worker writes to FOLDER/worker-<id>.jsonl what it does, one JSON object a line, with the time of the monotonic
clock: before each step the samples it takes, after each step that it is done, commits, worlds, errors. The file
FOLDER/points.json may ask for a worker to die, or to be stopped, at a point in the middle of something.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import kvstore_hvd.mxnet as hvd

# isort: split
import numpy as np
from mxnet import gluon

import kvstore_hvd
from kvstore_hvd import elastic
from support.elastic_kinds import KINDS
from support.elastic_training import Training
from support.launched import launched


class Log:
    """What this worker did."""

    def __init__(self, folder: Path, worker: int) -> None:
        self._fd = os.open(folder / f"worker-{worker}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, what: str, **fields: Any) -> None:
        """Write a line; it is in the file when this returns, whatever becomes of this process."""
        os.write(self._fd, json.dumps({"what": what, "t": time.monotonic(), **fields}).encode() + b"\n")


class Points:
    """Points at which something is to happen to this worker.

    Each is ``{"worker", "point", "count", "delay_s", "signal"}``: the signal is sent that long after the worker has
    come to the point for the count-th time (0: the first).
    """

    def __init__(self, folder: Path, worker: int, log: Log) -> None:
        self._points = [e for e in json.loads((folder / "points.json").read_text()) if e["worker"] == worker]
        self._log = log
        self._counts: Counter[str] = Counter()

    def reach(self, name: str) -> None:
        """Come to a point."""
        for each in self._points:
            if (each["point"], each["count"]) == (name, self._counts[name]):
                if each["delay_s"]:
                    threading.Thread(target=self._suffer, args=(each,), daemon=True).start()
                else:
                    self._suffer(each)
        self._counts[name] += 1

    def _suffer(self, each: dict[str, Any]) -> None:
        time.sleep(each["delay_s"])
        self._log.write("point", point=each["point"])
        os.kill(os.getpid(), each["signal"])


class WatchedState(elastic.GluonState):  # type: ignore[misc]
    """A state whose methods are points."""

    points: Points
    step: int
    epoch: int
    worlds: list[list[int]]

    def save(self, path: Any = None) -> None:
        """The first half of commit()."""
        self.points.reach("save")
        super().save(path)

    def check_host_updates(self) -> None:
        """The second half of commit()."""
        self.points.reach("check")
        super().check_host_updates()

    def restore(self) -> None:
        """After a loss, before the workers meet again."""
        self.points.reach("restore")
        super().restore()

    def on_reset(self) -> None:
        """They have met."""
        self.points.reach("reset")
        super().on_reset()

    def sync(self) -> None:
        """All take the state of rank 0."""
        self.points.reach("sync")
        super().sync()


def train(state: Any, training: Training, log: Log, options: argparse.Namespace) -> None:
    """Train until the file is there; `state.worlds` says in which world which steps were made."""
    topology = kvstore_hvd.init()
    generation, size = topology.generation, topology.size
    # A world all of whose steps were lost has no entry.
    state.worlds = [*(each for each in state.worlds if each[2] < state.step), [generation, size, state.step]]
    log.write("world", generation=generation, rank=topology.rank, size=size, step=state.step)
    while not state.finished:
        dataset = gluon.data.SimpleDataset(list(range(training.samples)))
        loader = gluon.data.DataLoader(
            dataset, options.batch_size, sampler=state.sampler, last_batch="keep", num_workers=options.loaders
        )
        for number, batch in enumerate(loader):
            indices = batch.asnumpy().astype(int).tolist()
            log.write(
                "step", generation=generation, rank=topology.rank, step=state.step, shown=state.epoch, indices=indices
            )
            loss = training.backward(indices)
            training.step(len(indices), size)
            wait(training)
            log.write("done", generation=generation, step=state.step, loss=loss)
            state.step += 1
            state.sampler.record_batch(number, options.batch_size)
            if state.step % options.commit_every == 0:
                commit(state, log, generation)
            time.sleep(options.pause)
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        asked = np.array([(options.folder / "finish").exists()], np.int32)
        state.finished = bool(kvstore_hvd.allreduce(asked, "finish", op="max")[0])
        commit(state, log, generation)


def wait(training: Training) -> None:
    """Wait until the step is made: a failed one raises here."""
    for parameter in training.net.collect_params().values():
        parameter.data().wait_to_read()


def commit(state: Any, log: Log, generation: int) -> None:
    """Commit; the line comes before the workers are asked whether there are updates."""
    log.write("commit", generation=generation, step=state.step)
    state.commit()


def main() -> None:
    """Train and write down what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=240)
    parser.add_argument("--batch-size", type=int, default=7)
    parser.add_argument("--commit-every", type=int, default=3)
    parser.add_argument("--kind", choices=KINDS, default="Trainer")
    parser.add_argument("--loaders", type=int, default=0, help="processes that load data")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    options = parser.parse_args()
    worker = int(os.environ.get("KVHVD_WORKER", launched().rank))
    log = Log(options.folder, worker)
    log.write("begin", pid=os.getpid(), job=os.environ.get("KVHVD_JOB", ""))

    hvd.init()
    training = Training(options.kind, options.samples)
    sampler = elastic.ElasticSampler(range(options.samples), shuffle=True, seed=5)
    WatchedState.points = Points(options.folder, worker, log)
    state: Any = WatchedState(
        net=training.net, trainer=training.trainer, sampler=sampler, epoch=0, step=0, worlds=[], finished=False
    )

    @elastic.run  # type: ignore[untyped-decorator]
    def run(state: Any) -> None:
        try:
            train(state, training, log, options)
        except Exception as error:
            log.write("error", text=f"{type(error).__name__}: {error}")
            raise

    run(state)
    training.save(options.folder / f"final-{worker}.npz")
    digest = training.digest()
    log.write("end", kind=training.kind, digest=digest, steps=state.step, worlds=state.worlds, shown=state.epoch)


if __name__ == "__main__":
    main()
