"""A worker of elastic tests: ``elastic_trainee.py FOLDER``. It trains until a file FOLDER/finish is there.

Each worker writes to FOLDER/worker-<id>.jsonl what it does, one JSON object a line, with the time of the monotonic
clock: before each step the samples it takes, after each step that it is done, commits, worlds, errors. The file
FOLDER/points.json may ask for a worker to die, or to be stopped, at a point in the middle of something:
``{"worker", "point", "count", "delay_s", "signal"}`` sends the signal that long after the worker has come to the point
for the count-th time (0: the first).

With ``--replay`` one process does the steps in FOLDER/schedule.json, for each step the samples of each rank of each
host, and has the same bits: it adds gradients in the order of ranks, first within hosts, as the engine promises to.

There are three ways to train (``--kind``): a Trainer of Gluon on the store, a `DistributedTrainer`, and a Trainer of
Gluon with a `DistributedOptimizer`. The last two divide by the number of workers themselves.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import kvstore_hvd.mxnet as hvd

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn

import kvstore_hvd
from kvstore_hvd import elastic
from support.gluon import array, gradients, network, parameters, weights
from support.launched import launched

Array = Any  # numpy.ndarray


class Training:
    """A small convolutional network that learns digits, its trainer with momentum and a learning rate that falls.

    `kind` is empty for one process alone; the digits are made here, and as easy to learn as real ones.
    """

    def __init__(self, kind: str, samples: int) -> None:
        random = np.random.default_rng(8)
        self._labels = random.integers(0, 10, samples)
        images = random.uniform(0, 1, (10, 1, 8, 8))[self._labels] + random.normal(0, 0.25, (samples, 1, 8, 8))
        self._images = images.clip(0, 1).astype(np.float32)
        self.net = network(
            nn.Conv2D(8, 3, padding=1, in_channels=1, activation="tanh"),
            nn.AvgPool2D(),
            nn.Dense(32, in_units=8 * 4 * 4, activation="tanh"),
            nn.Dense(10, in_units=32),
            seed=3,
            hybridize=True,
        )
        # It counts updates: whoever loses that count, or the momentum, has other parameters in the end.
        schedule = mx.lr_scheduler.FactorScheduler(step=20, factor=0.95, base_lr=0.05)
        settings = {"learning_rate": 0.05, "momentum": 0.9, "lr_scheduler": schedule}
        self.kind = kind
        params = self.net.collect_params()
        if kind == "DistributedTrainer":
            self.trainer = hvd.DistributedTrainer(params, "sgd", settings)
        elif kind == "DistributedOptimizer":
            optimizer = hvd.DistributedOptimizer(mx.optimizer.create("sgd", **settings))
            self.trainer = gluon.Trainer(params, optimizer, kvstore="horovod")  # which exchanges no gradients here
        else:
            self.trainer = gluon.Trainer(params, "sgd", settings, kvstore="horovod" if kind else None)
        self._loss = gluon.loss.SoftmaxCrossEntropyLoss()

    def backward(self, indices: Sequence[int]) -> float:
        """Compute the gradients of the summed loss of these samples; returns the loss."""
        which = np.asarray(indices)
        with autograd.record():
            labels = array(self._labels[which].astype(np.float32))
            loss = self._loss(self.net(array(self._images[which])), labels).sum()
        loss.backward()
        return float(loss.asnumpy())

    def replay(self, kind: str, schedule: Sequence[Sequence[Sequence[Sequence[int]]]]) -> None:
        """Do in this process the steps of workers that train in this way."""
        for step in schedule:
            sums = []
            for host in step:
                parts = []
                for indices in host:
                    self.backward(indices)
                    parts.append([gradient.copy() for gradient in gradients(self.net)])
                sums.append([reduce(np.add, each) for each in zip(*parts)])
            for parameter, of_hosts in zip(parameters(self.net), zip(*sums)):
                parameter.list_grad()[0][:] = array(reduce(np.add, of_hosts))
            (number,) = {len(indices) for host in step for indices in host}  # the sampler sees to that
            ranks = sum(map(len, step))
            # In the order of what divides: in float64, (1 / 3) / 7 is not always 1 / 21.
            first, then = {
                "Trainer": (1, number * ranks),
                "DistributedTrainer": (ranks, number),
                "DistributedOptimizer": (number, ranks),
            }[kind]
            self.trainer._scale = 1.0 / first
            self.trainer.step(then)


class Log:
    """What this worker did. A line is in the file when `write` returns, whatever becomes of this process."""

    def __init__(self, folder: Path, worker: int) -> None:
        self._fd = os.open(folder / f"worker-{worker}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, what: str, **fields: Any) -> None:
        os.write(self._fd, json.dumps({"what": what, "t": time.monotonic(), **fields}).encode() + b"\n")


class Points:
    """Points at which something is to happen to this worker."""

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
    """A state whose methods are points: the halves of commit(), after a loss, when workers have met, the sync."""

    points: Points
    step: int
    epoch: int
    worlds: list[list[int]]

    def save(self, path: Any = None) -> None:
        self.points.reach("save")
        super().save(path)

    def check_host_updates(self) -> None:
        self.points.reach("check")
        super().check_host_updates()

    def restore(self) -> None:
        self.points.reach("restore")
        super().restore()

    def on_reset(self) -> None:
        self.points.reach("reset")
        super().on_reset()

    def sync(self) -> None:
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
        dataset = gluon.data.SimpleDataset(list(range(options.samples)))
        loader = gluon.data.DataLoader(dataset, options.batch_size, sampler=state.sampler, last_batch="keep")
        for number, batch in enumerate(loader):
            indices = batch.asnumpy().astype(int).tolist()
            log.write(
                "step", generation=generation, rank=topology.rank, step=state.step, shown=state.epoch, indices=indices
            )
            loss = training.backward(indices)
            training.trainer.step(len(indices) * (size if options.kind == "Trainer" else 1))
            for parameter in parameters(training.net):
                parameter.data().wait_to_read()  # a step that has failed raises here
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


def commit(state: Any, log: Log, generation: int) -> None:
    """Commit; the line comes before the workers are asked whether there are updates."""
    log.write("commit", generation=generation, step=state.step)
    state.commit()


def main() -> None:
    """Train, or replay, and write down what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=240)
    parser.add_argument("--batch-size", type=int, default=7)
    parser.add_argument("--commit-every", type=int, default=3)
    parser.add_argument("--kind", default="Trainer")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    parser.add_argument("--replay", action="store_true")
    options = parser.parse_args()
    if options.replay:
        training = Training("", options.samples)
        training.replay(options.kind, json.loads((options.folder / "schedule.json").read_text()))
        np.savez(options.folder / "replay.npz", *weights(training.net))
        return
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
    final = weights(training.net)
    np.savez(options.folder / f"final-{worker}.npz", *final)
    digest = hashlib.sha256(b"".join(value.tobytes() for value in final)).hexdigest()
    log.write("end", kind=training.kind, digest=digest, steps=state.step, worlds=state.worlds, shown=state.epoch)


if __name__ == "__main__":
    main()
