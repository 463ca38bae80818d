"""A worker of elastic tests: ``elastic_trainee.py FOLDER``. It trains until a file FOLDER/finish is there.

Each worker writes to FOLDER/worker-<id>.jsonl what it does, one JSON object a line, with the time of the monotonic
clock: before each step the samples it takes, after each step that it is done, commits, worlds, its end. The file
FOLDER/points.json may ask for a worker to die, or to be stopped, at a point in the middle of something:
``{"worker", "point", "count", "delay_s", "signal"}`` sends the signal that long after the worker has come to the point
for the count-th time (0: the first).

With ``--replay`` one process does the steps in FOLDER/schedule.json, for each step the samples of each rank of each
host, and has the same bits: it adds gradients in the order of ranks, first within hosts, as the engine promises to.

There are four ways to train (``--kind``): a Trainer of Gluon on the store, a `DistributedTrainer`, a `ShardedTrainer`,
and a Trainer of Gluon with a `DistributedOptimizer`. All but the first divide by the number of workers themselves.
"""

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
from support.gluon import array, distributed, gradients, network, parameters, weights

SAMPLES = 240
# Methods of a state that are points: the halves of commit(), after a loss, when workers have met, the sync.
POINTS = {"save": "save", "check_host_updates": "check", "restore": "restore", "on_reset": "reset", "sync": "sync"}


class Training:
    """A small convolutional network that learns digits, its trainer with momentum and a learning rate that falls.

    `kind` is empty for one process alone; the digits are made here, and as easy to learn as real ones.
    """

    def __init__(self, kind: str) -> None:
        random = np.random.default_rng(8)
        self._labels = random.integers(0, 10, SAMPLES)
        images = random.uniform(0, 1, (10, 1, 8, 8))[self._labels] + random.normal(0, 0.25, (SAMPLES, 1, 8, 8))
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
        if kind not in ("", "Trainer"):  # beside an optimizer that does so itself, a store exchanges no gradients
            self.trainer = distributed(kind, params, "sgd", settings, kvstore="horovod")
        else:
            self.trainer = gluon.Trainer(params, "sgd", settings, kvstore="horovod" if kind else None)
        self._loss = gluon.loss.SoftmaxCrossEntropyLoss()

    def backward(self, indices: Sequence[int]) -> None:
        which = np.asarray(indices)
        with autograd.record():
            labels = array(self._labels[which].astype(np.float32))
            loss = self._loss(self.net(array(self._images[which])), labels).sum()
        loss.backward()

    def replay(self, kind: str, schedule: Sequence[Sequence[Sequence[Sequence[int]]]]) -> None:
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
                "ShardedTrainer": (ranks, number),
                "DistributedOptimizer": (number, ranks),
            }[kind]
            self.trainer._scale = 1.0 / first
            self.trainer.step(then)


class Worker:
    def __init__(self, folder: Path) -> None:
        self.id = int(os.environ["KVHVD_WORKER"])
        self._fd = os.open(folder / f"worker-{self.id}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._points = [e for e in json.loads((folder / "points.json").read_text()) if e["worker"] == self.id]
        self._counts: Counter[str] = Counter()

    def write(self, what: str, **fields: Any) -> None:
        """Write a line; it is in the file when this returns, whatever becomes of this process."""
        line = {"what": what, "t": time.monotonic(), "worker": self.id, **fields}
        os.write(self._fd, json.dumps(line).encode() + b"\n")

    def reach(self, name: str) -> None:
        for each in self._points:
            if (each["point"], each["count"]) == (name, self._counts[name]):
                if each["delay_s"]:
                    threading.Timer(each["delay_s"], os.kill, (os.getpid(), each["signal"])).start()
                else:
                    os.kill(os.getpid(), each["signal"])
        self._counts[name] += 1

    def state(self) -> type[Any]:
        def watched(name: str) -> Any:
            def method(state: Any, *arguments: Any) -> None:
                self.reach(POINTS[name])
                getattr(elastic.GluonState, name)(state, *arguments)

            return method

        return type("WatchedState", (elastic.GluonState,), {name: watched(name) for name in POINTS})


def train(state: Any, training: Training, worker: Worker, options: argparse.Namespace) -> None:
    """Train until the file is there; `state.worlds` says in which world which steps were made."""
    topology = kvstore_hvd.init()
    generation, rank, size = topology.generation, topology.rank, topology.size
    # A world all of whose steps were lost has no entry.
    state.worlds = [*(each for each in state.worlds if each[2] < state.step), [generation, size, state.step]]
    worker.write("world", generation=generation, rank=rank, size=size, step=state.step)

    def commit() -> None:  # the line comes before the workers are asked whether there are updates
        worker.write("commit", generation=generation, step=state.step)
        state.commit()

    while not state.finished:
        dataset = gluon.data.SimpleDataset(list(range(SAMPLES)))
        loader = gluon.data.DataLoader(dataset, options.batch_size, sampler=state.sampler, last_batch="keep")
        for number, batch in enumerate(loader):
            indices, place = batch.asnumpy().astype(int).tolist(), {"generation": generation, "step": state.step}
            worker.write("step", **place, rank=rank, shown=state.epoch, indices=indices)
            training.backward(indices)
            training.trainer.step(len(indices) * (size if options.kind == "Trainer" else 1))
            for parameter in parameters(training.net):
                parameter.data().wait_to_read()  # a step that has failed raises here
            worker.write("done", **place)
            state.step += 1
            state.sampler.record_batch(number, options.batch_size)
            if state.step % options.commit_every == 0:
                commit()
            time.sleep(options.pause)
        state.epoch += 1
        state.sampler.set_epoch(state.epoch)
        asked = np.array([(options.folder / "finish").exists()], np.int32)
        state.finished = bool(kvstore_hvd.allreduce(asked, "finish", op="max")[0])
        commit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batch-size", type=int, default=7)
    parser.add_argument("--commit-every", type=int, default=3)
    parser.add_argument("--kind", default="Trainer")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step")
    parser.add_argument("--replay", action="store_true")
    options = parser.parse_args()
    if options.replay:
        training = Training("")
        training.replay(options.kind, json.loads((options.folder / "schedule.json").read_text()))
        np.savez(options.folder / "replay.npz", *weights(training.net))
        return
    worker = Worker(options.folder)
    hvd.init()
    training = Training(options.kind)
    sampler = elastic.ElasticSampler(range(SAMPLES), shuffle=True, seed=5)
    of_training = {"net": training.net, "trainer": training.trainer, "sampler": sampler}
    state = worker.state()(**of_training, epoch=0, step=0, worlds=[], finished=False)
    elastic.run(train)(state, training, worker, options)
    final = weights(training.net)
    np.savez(options.folder / f"final-{worker.id}.npz", *final)
    digest = hashlib.sha256(b"".join(value.tobytes() for value in final)).hexdigest()
    training_of = {"kind": training.kind, "samples": SAMPLES, "shown": state.epoch}
    worker.write("end", **training_of, digest=digest, steps=state.step, worlds=state.worlds)


if __name__ == "__main__":
    main()
