"""Train a small convolutional network on real handwritten digits, with any number of workers.

    kvhvdrun -np 2 python examples/digits.py

The digits are the 1797 images that scikit-learn ships; nothing is downloaded. Each epoch shifts, turns and scales every
training image anew, several times. All workers draw the same global batches and each computes on its share of every
batch. The loss is a *sum* and `Trainer.step` is given the *global* batch size, so a step does not depend on the number
of workers, and neither does the accuracy: only the rounding of sums differs. Compare for yourself:

    python examples/digits.py --save one.npz
    kvhvdrun -np 2 python examples/digits.py --compare one.npz
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvstore_hvd  # registers the store, and lets MXNet run with today's NumPy

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from sklearn.datasets import load_digits

COPIES = 12  # augmented copies of every training image in an epoch
TEST_IMAGES = 360
LEARNING_RATE = 0.1
MEASURED_EVERY = 5  # every fifth step is taken apart to see how long it waits

Array = Any  # numpy.ndarray


@dataclass
class Timing:
    """Seconds spent. A measured step computes, then waits for the sums of all workers, then updates."""

    training: float = 0.0
    images: int = 0  # of all workers
    measured_steps: int = 0
    measured: float = 0.0
    waiting: float = 0.0

    @property
    def images_per_second(self) -> float:
        """Of all workers together, without evaluation."""
        return self.images / self.training

    @property
    def waiting_share(self) -> float:
        """Share of the measured steps between own gradients computed and the sums of all workers at hand."""
        return self.waiting / self.measured if self.measured else 0.0


# -- Data ---------------------------------------------------------------------------------------------------------


def load(seed: int) -> tuple[Array, Array, Array, Array]:
    """Return training images and labels, test images and labels; images are float32 (n, 8, 8) in 0..1."""
    digits = load_digits()
    images, labels = (digits.images / 16).astype(np.float32), digits.target.astype(np.float32)
    order = np.random.default_rng(seed).permutation(len(images))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return images[train], labels[train], images[test], labels[test]


def augment(images: Array, angle: Array, scale: Array, shift: Array, noise: Array) -> Array:
    """Turn (radians), scale and shift (pixels) each image by its own values, and add its own noise."""
    count, height, width = images.shape
    rows, columns = np.mgrid[:height, :width].astype(np.float32)
    y, x = (rows - (height - 1) / 2).ravel(), (columns - (width - 1) / 2).ravel()
    sine, cosine = np.sin(angle)[:, None] / scale[:, None], np.cos(angle)[:, None] / scale[:, None]
    border = 2  # of zeros, so that what moves in from outside is empty
    padded = np.pad(images, ((0, 0), (border, border), (border, border)))
    limit = height + 2 * border - 1.001
    source_y = np.clip(cosine * y - sine * x + shift[:, :1] + (height - 1) / 2 + border, 0, limit)
    source_x = np.clip(sine * y + cosine * x + shift[:, 1:] + (width - 1) / 2 + border, 0, limit)
    top, left = source_y.astype(np.intp), source_x.astype(np.intp)
    down, right = source_y - top, source_x - left
    which = np.arange(count)[:, None]
    mixed = (1 - down) * ((1 - right) * padded[which, top, left] + right * padded[which, top, left + 1])
    mixed += down * ((1 - right) * padded[which, top + 1, left] + right * padded[which, top + 1, left + 1])
    return (mixed.reshape(images.shape) + noise).astype(np.float32)


def epoch_batches(
    images: Array, labels: Array, batch_size: int, seed: int, epoch: int, rank: int, workers: int
) -> list[tuple[Array, Array]]:
    """Return this worker's share of every global batch of an epoch.

    Everything is drawn for all samples from the seed and the epoch alone, so that the global batches are the same
    whatever the number of workers.
    """
    generator = np.random.default_rng([seed, epoch])
    total = len(images) * COPIES
    order = generator.permutation(total)
    angle = generator.uniform(-0.2, 0.2, total).astype(np.float32)
    scale = generator.uniform(0.9, 1.1, total).astype(np.float32)
    shift = generator.uniform(-0.8, 0.8, (total, 2)).astype(np.float32)
    noise = generator.standard_normal((total, *images.shape[1:]), np.float32) * np.float32(0.02)
    batches = []
    for start in range(0, total - batch_size + 1, batch_size):
        first, last = (start + batch_size * part // workers for part in (rank, rank + 1))
        mine = order[first:last]
        which = mine % len(images)
        batches.append((augment(images[which], angle[mine], scale[mine], shift[mine], noise[mine]), labels[which]))
    return batches


def to_mxnet(images: Array) -> Any:
    """Return the images as an MXNet array with a dimension for the channel."""
    return mx.np.array(images[:, None], dtype="float32")


# -- Network and training -----------------------------------------------------------------------------------------


def make_network(seed: int, hybridize: bool) -> Any:
    """Return the initialised network: the same values for the same seed, on every worker."""
    mx.random.seed(seed)
    # Smooth on purpose: where a rectifier or a maximum stands on the edge, the last bit of a sum decides, and runs that
    # sum in another order drift apart. These stay together to seven digits, which is worth seeing once.
    net = nn.HybridSequential()
    net.add(
        nn.Conv2D(32, 3, padding=1, in_channels=1, activation="tanh"),
        nn.Conv2D(64, 3, padding=1, in_channels=32, activation="tanh"),
        nn.AvgPool2D(),
        nn.Dense(128, in_units=64 * 4 * 4, activation="tanh"),
        nn.Dense(10, in_units=128),
    )
    net.initialize(mx.init.Xavier())
    if hybridize:
        net.hybridize(static_alloc=True, static_shape=True)
    return net


class Training:
    """A network, its trainer, and what training took so far."""

    def __init__(self, net: Any, store: Any, batch_size: int) -> None:
        self.net = net
        self.timing = Timing()
        self._store = store
        self._batch_size = batch_size
        self._loss = gluon.loss.SoftmaxCrossEntropyLoss()
        # The store object, not its name; and as every worker sums its losses, step() averages over the global batch.
        self._trainer = gluon.Trainer(
            net.collect_params(), "sgd", {"learning_rate": LEARNING_RATE, "momentum": 0.9}, kvstore=store
        )

    def set_progress(self, done: float) -> None:
        """Lower the learning rate along half a cosine; `done` is the share of the training that lies behind."""
        self._trainer.set_learning_rate(LEARNING_RATE * (1 + math.cos(math.pi * done)) / 2)

    def step(self, images: Array, labels: Array) -> Any:
        """Train on this worker's share of a batch; returns its summed loss, which may still be computed."""
        loss = self._backward(images, labels)
        self._trainer.step(self._batch_size)
        return loss

    def measured_step(self, images: Array, labels: Array) -> Any:
        """Do as `step`, part after part, and note how long this worker waits for the others.

        The wait begins when all of this worker's gradients are computed and ends when it has the sums of all workers.
        It includes the time by which the others are later, and nothing of it is hidden behind the backward pass: in
        the other steps, where the two overlap, the wait can only be shorter.
        """
        mx.nd.waitall()
        start = time.perf_counter()
        loss = self._backward(images, labels)
        mx.nd.waitall()
        computed = time.perf_counter()
        self._trainer.allreduce_grads()
        mx.nd.waitall()
        reduced = time.perf_counter()
        self._trainer.update(self._batch_size)
        mx.nd.waitall()
        self.timing.measured_steps += 1
        self.timing.waiting += reduced - computed
        self.timing.measured += time.perf_counter() - start
        return loss

    def _backward(self, images: Array, labels: Array) -> Any:
        with autograd.record():
            loss = self._loss(self.net(to_mxnet(images)), mx.np.array(labels, dtype="float32")).sum()
        loss.backward()
        return loss

    def correct(self, images: Array, labels: Array) -> int:
        """Count the images that the network recognises; each worker looks at its share."""
        rank, workers = self._store.rank, self._store.num_workers
        answers = self.net(to_mxnet(images[rank::workers])).asnumpy().argmax(axis=1)
        right = np.array([(answers == labels[rank::workers]).sum()], np.int64)
        return int(kvstore_hvd.allreduce(right, name="correct")[0])


# -- What people see ----------------------------------------------------------------------------------------------


class Progress:
    """A progress bar on a terminal, lines elsewhere; silent on all workers but the first."""

    def __init__(self, steps: int, shown: bool) -> None:
        self._shown = shown
        self._bar: Any = None
        if shown and sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=steps, unit="step", dynamic_ncols=True, leave=False)

    def step(self, loss: float) -> None:
        """Count one step."""
        if self._bar is not None:
            self._bar.set_postfix(loss=f"{loss:.4f}", refresh=False)
            self._bar.update()

    def line(self, text: str) -> None:
        """Show a line of text, above the bar if there is one."""
        if self._bar is not None:
            self._bar.write(text)
        elif self._shown:
            print(text, flush=True)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def fingerprint(values: list[Array]) -> str:
    """Return a digest of all bits of the parameters, the same on all workers.

    Raises
    ------
    SystemExit
        The workers have different parameters.
    """
    digest = hashlib.sha256(b"".join(value.tobytes() for value in values))
    mine = np.frombuffer(digest.digest(), np.uint8)
    lowest = kvstore_hvd.allreduce(mine, name="fingerprint/min", op="min")
    highest = kvstore_hvd.allreduce(mine, name="fingerprint/max", op="max")
    if (lowest != highest).any():
        raise SystemExit("the workers have different parameters")
    return digest.hexdigest()[:16]


def difference(values: list[Array], path: Path) -> float:
    """Return the norm of the difference to the parameters saved at `path`, relative to the norm of those."""
    with np.load(path) as saved:
        others = [saved[f"p{number}"] for number in range(len(values))]
    apart = math.sqrt(sum(float(((a.astype(np.float64) - b) ** 2).sum()) for a, b in zip(values, others)))
    return apart / math.sqrt(sum(float((b.astype(np.float64) ** 2).sum()) for b in others))


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Train a small CNN on digits, with any number of workers.")
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=120, help="of all workers together [120]")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hybridize", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the final parameters to FILE (.npz)")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="tell how far the parameters are from saved ones")
    return parser.parse_args()


def main() -> None:
    """Train and report."""
    options = parse_arguments()
    store = mx.kv.create("horovod")
    rank, workers = store.rank, store.num_workers
    if options.batch_size < workers or options.epochs < 1:
        raise SystemExit("give every worker at least one image of a batch, and train for at least one epoch")
    mx.npx.set_np()
    images, labels, test_images, test_labels = load(options.seed)
    training = Training(make_network(options.seed, options.hybridize), store, options.batch_size)
    timing = training.timing
    epoch_steps = len(images) * COPIES // options.batch_size
    progress = Progress(options.epochs * epoch_steps, shown=rank == 0)
    progress.line(
        f"{workers} worker{'s' if workers > 1 else ''}, MXNet {mx.__version__}, "
        f"{epoch_steps * options.batch_size} images per epoch in batches of {options.batch_size}"
    )
    correct = 0
    for epoch in range(options.epochs):
        batches = epoch_batches(images, labels, options.batch_size, options.seed, epoch, rank, workers)
        store.barrier()
        start = time.perf_counter()
        before: Any = None  # the loss of the step before: reading this one's would wait for it
        total = 0.0
        for number, batch in enumerate(batches):
            step = epoch * epoch_steps + number
            training.set_progress(step / (options.epochs * epoch_steps))
            # Not the first one, in which everything is set up.
            measured = step % MEASURED_EVERY == MEASURED_EVERY - 1
            loss = training.measured_step(*batch) if measured else training.step(*batch)
            if before is not None:
                total += float(before.asnumpy())
            progress.step(total / max(1, number) / len(batch[1]))
            before = loss
        total += float(before.asnumpy())
        mx.nd.waitall()
        seconds = time.perf_counter() - start
        timing.training += seconds
        timing.images += epoch_steps * options.batch_size
        correct = training.correct(test_images, test_labels)
        global_loss = kvstore_hvd.allreduce(np.array([total]), name="loss")[0] / (epoch_steps * options.batch_size)
        progress.line(
            f"epoch {epoch + 1}/{options.epochs}  loss {global_loss:.4f}  "
            f"test accuracy {100 * correct / len(test_labels):.2f} %  "
            f"{epoch_steps * options.batch_size / seconds:.0f} images/s"
        )
    progress.close()
    values = [parameter.data().asnumpy() for parameter in training.net.collect_params().values()]
    digest = fingerprint(values)
    if rank == 0:
        print(f"test accuracy  {100 * correct / len(test_labels):.2f} % ({correct} of {len(test_labels)} images)")
        print(f"speed          {timing.images_per_second:.0f} images/s, all workers together")
        print(
            f"waiting        {100 * timing.waiting_share:.1f} % of a step between own gradients and everybody's sums "
            f"({timing.measured_steps} of {options.epochs * epoch_steps} steps were measured, without overlap)"
        )
        print(f"parameters     sha256 {digest}{f', equal on all {workers} workers' if workers > 1 else ''}")
        if options.compare is not None:
            print(f"difference     {difference(values, options.compare):.1e} of the norm of {options.compare}")
        if options.save is not None:
            np.savez(options.save, **{f"p{number}": value for number, value in enumerate(values)})


if __name__ == "__main__":
    main()
