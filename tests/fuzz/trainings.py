"""Random trainings of Gluon, drawn from a seed, against a model: one process that has all the data.

The model computes the gradients of every worker one after the other, adds them in the order of ranks, as the engine
promises to, and updates with MXNet's own optimizer: all parameters after every step have its bits. In a `Join`, where
gradients are weighted, they are its numbers, but for rounding. Everything is drawn alike on all workers.
"""

import contextlib
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np

import kvstore_hvd.mxnet as hvd
from fuzz.differences import drawn
from kvstore_hvd import mxnet_compat
from kvstore_hvd.join import Join
from kvstore_hvd.mxnet import sharded
from support.arrays import assert_equal_on_all_ranks, assert_same_bits, ordered_sum, sum_of_ranks
from support.gluon import array, distributed, gradients, parameters, scaler_of, weights
from support.networks import BATCH, MODES, NETWORKS, apart, built, sgd_roundings
from support.zero_copy import meet_again, zero_copy

OPTIMIZERS: dict[str, dict[str, float]] = {
    "sgd": {"learning_rate": 0.01, "momentum": 0.9, "wd": 0.01},
    "nag": {"learning_rate": 0.003, "momentum": 0.5},
    "adam": {"learning_rate": 0.01},
    "rmsprop": {"learning_rate": 0.01},
    "lamb": {"learning_rate": 0.01},
}
KINDS = ("store", "name", "DistributedTrainer", "DistributedOptimizer")
AVERAGING = (*KINDS[2:], "ShardedTrainer")
#: What may happen before a step, on all workers.
EVENTS = ("reset", "states", "learning rate", "clip", "stale", "nothing")


@dataclass(frozen=True)
class Training:
    """What all workers do. `counts` has the number of samples of every rank in every step; 0 in a Join: no step."""

    seed: int
    kind: str
    network: str
    mode: str
    dtype: str
    optimizer: str
    grad_req: str
    devices: int
    joins: bool
    events: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    memory: tuple[str, ...]  # of the gradients of every rank; see `differences`, as for the next two
    clock: tuple[tuple[float, ...], ...]
    fresh: tuple[tuple[bool, ...], ...]  # whether every rank has gradients in a step
    divides_by_all: bool  # a Join's `divide_by_initial_world_size`
    multipliers: tuple[float, ...]  # of the learning rate and weight decay of the parameters, in turns
    scales: bool  # with AMP's loss scaling
    cuts: tuple[int, int]  # of a ShardedTrainer: the least elements that are cut, and the unit of shares
    overflows: tuple[int, ...]  # the rank whose gradients overflow in a step, or -1


def draw(seed: int, size: int) -> Training:
    chance, differ = random.Random(seed), random.Random(f"differences {seed}")
    more = random.Random(f"more {seed}")
    joins = chance.random() < 0.25
    network = "dense" if joins else chance.choice(sorted(NETWORKS))
    dtype = chance.choice(["float16", "float32", "float64"]) if network == "elementwise" else "float32"
    kind = chance.choice(KINDS[:3] if joins else KINDS)
    steps = chance.randint(2, 4)
    averages = kind in AVERAGING
    if joins:
        lengths = [chance.randint(0, 3) for _ in range(size)]
        lengths[chance.randrange(size)] = 3
        counts = [drawn("samples", chance, size) for _ in range(3)]
        counts = [tuple(n * (step < end) for n, end in zip(of_step, lengths)) for step, of_step in enumerate(counts)]
    else:
        counts = [drawn("samples", chance, size) for _ in range(steps)]
    if averages and not joins:  # an average of workers is one of samples only if all have equally many
        counts = [of_step[:1] * size for of_step in counts]
    if network == "lstm":  # MXNet 2 keeps the shape of its state
        counts = [(BATCH,) * size for _ in counts]
    events = tuple("nothing" if joins else chance.choice(EVENTS) for _ in counts)
    # Of those that ask for it, and in the one call that does everything.
    fresh = [drawn("fresh gradient", differ, size) if event == "stale" else () for event in events]
    fresh = [of_step if any(of_step) and not averages else (True,) * size for of_step in fresh]
    # MXNet's RMSProp has states of float32.
    optimizers = [name for name in sorted(OPTIMIZERS) if name != "lamb" and (dtype, name) != ("float64", "rmsprop")]
    scales = not joins and dtype != "float16" and more.random() < 0.4
    optimizer = "sgd" if joins or dtype == "float16" else chance.choice(optimizers)
    grad_req = "write" if joins else chance.choice(["write", "write", "add"])
    devices = 1 if network in ("deferred", "elementwise", "tied") else chance.choice([1, 1, 2])
    overflows = [more.randrange(size) if scales and more.random() < 0.3 else -1 for _ in counts]
    # Stale gradients count as zeros; those of a skipped update stay fresh, for MXNet.
    overflows = [
        rank if rank >= 0 and of_step[rank] and after != "stale" else -1
        for rank, of_step, after in zip(overflows, fresh, (*events[1:], ""))
    ]
    if kind == "DistributedTrainer" and differ.random() < 0.6:
        kind, devices = "ShardedTrainer", 1
        optimizer = "lamb" if optimizer == "nag" else optimizer
    return Training(
        seed=seed,
        kind=kind,
        network=network,
        mode=chance.choice(sorted(MODES)),
        dtype=dtype,
        optimizer=optimizer,
        grad_req=grad_req,
        devices=devices,
        joins=joins,
        events=events,
        counts=tuple(counts),
        memory=drawn("memory", differ, size),
        clock=tuple(drawn("clock", differ, size) for _ in counts),
        fresh=tuple(fresh),
        divides_by_all=joins and more.random() < 0.5,
        multipliers=more.choice([(1.0,), (1.0, 0.5, 2.0)]),
        scales=scales,
        cuts=differ.choice([(1, 1), (20, 8), (1024, 16)]),
        overflows=tuple(overflows),
    )


def run_training(training: Training, rank: int, size: int) -> None:
    """Train in this world, and compare with the model after every step."""
    cuts = dict(zip(("_LEAST", "_UNIT"), training.cuts))
    with zero_copy(training.memory[rank] == "arena"), mxnet_compat.holding(sharded, **cuts):
        _Run(training, rank, size).run()


class _Run:
    def __init__(self, training: Training, rank: int, size: int) -> None:
        self.of, self.rank, self.size = training, rank, size
        self.contexts = [mx.cpu(device) for device in range(training.devices)]
        settings = {"mode": training.mode, "grad_req": training.grad_req, "dtype": training.dtype}
        self.net = built(training.network, seed=training.seed + 1 + rank, contexts=self.contexts, **settings)
        self.model = built(training.network, seed=training.seed, **settings)
        # In a Join results are compared but for rounding: a large step shows what a worker adds by mistake.
        options = {"learning_rate": 0.1} if training.joins else OPTIMIZERS[training.optimizer]
        self.alone = mx.gluon.Trainer(self.model.collect_params(), training.optimizer, dict(options), kvstore=None)
        self.trainer = self._trainer(dict(options))
        for net in (self.net, self.model):
            for number, param in enumerate(parameters(net)):
                param.lr_mult = param.wd_mult = training.multipliers[number % len(training.multipliers)]
        self.loss_scale = 1.0
        scaling: tuple[Any, Any] = scaler_of(self.trainer) if training.scales else (None, None)
        self.amp, self.scaler = scaling
        # Parameters without a shape get it from data. Gradients of the first step need the parameters of rank 0.
        for net, contexts in ((self.net, self.contexts), (self.model, self.contexts[:1])):
            for ctx in contexts:
                net(self._data(0, 0, 0, BATCH, ctx)).wait_to_read()
        hvd.broadcast_parameters(self.net.collect_params())
        for param, values in zip(parameters(self.model), weights(self.net)):
            param.set_data(array(values))

    def _trainer(self, options: dict[str, Any]) -> Any:
        params, name, kind = self.net.collect_params(), self.of.optimizer, self.of.kind
        if kind in AVERAGING:
            return distributed(kind, params, name, options, kvstore="horovod")
        return mx.gluon.Trainer(
            params, name, options, kvstore=mx.kv.create("horovod") if kind == "store" else "horovod"
        )

    def _data(self, step: int, part: int, piece: int, count: int, ctx: Any = None) -> Any:
        shape = list(NETWORKS[self.of.network][1])
        shape[shape.index(BATCH)] = count
        values = np.random.default_rng([self.of.seed, step, part, piece]).standard_normal(shape)
        return array(values.astype(self.of.dtype), ctx)

    def _backward(self, net: Any, step: int, rank: int, contexts: Sequence[Any], device: int = 0) -> None:
        """The gradients of one worker's samples; on one of its devices or, for several contexts, on all."""
        for part in range(2 if self.of.grad_req == "add" else 1):
            losses = []
            with mx.autograd.record():
                for offset, ctx in enumerate(contexts):
                    piece = rank * self.of.devices + device + offset
                    losses.append((net(self._data(step, part, piece, self.of.counts[step][rank], ctx)) ** 2).sum())
            for loss in losses:
                loss.backward()

    def _samples(self, step: int) -> int:
        return sum(self.of.counts[step]) * self.of.devices

    def run(self) -> None:
        by_all = self.of.divides_by_all
        join = Join([self.trainer], divide_by_initial_world_size=by_all) if self.of.joins else contextlib.nullcontext()
        with join:
            for step, event in enumerate(self.of.events):
                if self.of.counts[step][self.rank] == 0:
                    break
                self._happen(event)
                time.sleep(self.of.clock[step][self.rank])
                if self.of.fresh[step][self.rank]:
                    self._backward(self.net, step, self.rank, self.contexts)
                self.loss_scale = self.scaler.loss_scale if self.scaler else 1.0
                with self.amp.scale_loss([], self.trainer) if self.amp else contextlib.nullcontext():
                    self._scale(step)
                    self._step(step, event == "clip")
                if self.of.overflows[step] >= 0:
                    self._compare(step)
                elif not self.of.joins:
                    self._step_of_model(step, event == "clip")
                    self._compare(step)
        if self.of.joins:
            for step in range(len(self.of.counts)):
                self._step_of_model(step, False)
            self._compare_roughly()

    def _happen(self, event: str) -> None:
        if event == "reset":
            meet_again()
        elif event == "learning rate" and self.of.kind != "DistributedOptimizer":
            for trainer in (self.trainer, self.alone):
                trainer.set_learning_rate(0.002)
        elif event == "states":
            with tempfile.TemporaryDirectory() as folder:
                for trainer in (self.trainer, self.alone):
                    trainer.save_states(str(Path(folder, "states")))
                    trainer.load_states(str(Path(folder, "states")))

    def _scale(self, step: int) -> None:
        for gradient in self._gradients(self.net) if self.scaler else ():
            gradient[:] = gradient * (np.inf if self.of.overflows[step] == self.rank else self.loss_scale)

    def _step(self, step: int, clips: bool) -> None:
        own = self.of.counts[step][self.rank] * self.of.devices
        number = own if self.of.kind in AVERAGING else self._samples(step)
        if self.of.joins and self.of.kind not in AVERAGING:
            number = own * self.size
        if clips and self.of.kind in ("store", "name"):
            self.trainer.allreduce_grads()
            for gradient in self._gradients(self.net):
                gradient[:] = gradient * 0.5
            self.trainer.update(number)
        else:
            self.trainer.step(number, ignore_stale_grad=not all(self.of.fresh[step]))
        self._zero(self.net)

    def _step_of_model(self, step: int, clips: bool) -> None:
        present = [rank for rank in range(self.size) if self.of.counts[step][rank]]
        parts = []
        for rank in present:
            devices = []
            for device in range(self.of.devices):
                self._backward(self.model, step, rank, [None], device)
                fresh = self.of.fresh[step][rank]
                devices.append([values.copy() if fresh else np.zeros_like(values) for values in gradients(self.model)])
                self._zero(self.model)
            parts.append([ordered_sum(list(of_devices)) for of_devices in zip(*devices)])
        sums = [sum_of_ranks(list(of_ranks), present) for of_ranks in zip(*parts)]
        trained = [param for param in parameters(self.model) if param.grad_req != "null"]
        factor = (0.5 if clips and self.of.kind in ("store", "name") else 1) * self.loss_scale
        for param, values in zip(trained, sums):
            param.grad()[:] = array((values * factor).astype(values.dtype))
        own = self.of.counts[step][present[0]] * self.of.devices
        # In the order of what divides: in float64, (1 / 3) / 7 is not always 1 / 21.
        absent = self.size / len(present) if self.of.divides_by_all else 1  # count as zeros
        first, then = {
            "DistributedTrainer": (self.size, own),
            "ShardedTrainer": (self.size, own),
            "DistributedOptimizer": (own, self.size),
        }.get("" if self.of.joins else self.of.kind, (absent, self._samples(step)))
        self.alone._scale = 1.0 / first / self.loss_scale
        self.alone.step(then)
        self._zero(self.model)

    def _zero(self, net: Any) -> None:
        for gradient in self._gradients(net) if self.of.grad_req == "add" else ():
            gradient[:] = 0

    @staticmethod
    def _gradients(net: Any) -> list[Any]:
        different = {id(param): param for param in parameters(net)}.values()  # MXNet 2 has tied ones twice
        return [gradient for param in different if param.grad_req != "null" for gradient in param.list_grad()]

    def _compare(self, step: int) -> None:
        for device in range(self.of.devices):
            ours = [param.list_data()[device].asnumpy() for param in parameters(self.net)]
            for param, mine, models in zip(parameters(self.model), ours, weights(self.model)):
                if param.grad_req != "null":  # running statistics are each worker's own
                    assert np.isfinite(models).all(), f"step {step}: the model has overflowed"
                    assert_same_bits(mine, models)

    def _compare_roughly(self) -> None:
        near = apart(sgd_roundings([8, 16, 3], sum(map(sum, self.of.counts)), len(self.of.counts) + 1))
        for number, (mine, models) in enumerate(zip(weights(self.net), weights(self.model))):
            assert_equal_on_all_ranks(mine, f"training/{self.of.seed}/{number}")
            far = np.linalg.norm(mine - models) / np.linalg.norm(models)
            assert far <= near, f"parameter {number}: {far:.3g} apart, not {near:.3g}"
