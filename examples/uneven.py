"""Train on handwritten digits with a different number of samples on each worker; no sample is dropped.

    kvhvdrun -np 4 python examples/uneven.py

Worker r of N has r+1 parts of 1+2+...+N of the training images, so the last worker has the most batches, and every
worker's last batch is small. Without `Join` the last worker would be left alone in the middle of an epoch, and would
wait for the others until its timeout. With it, an exhausted worker shadows the others: it adds zeros to the gradients
and makes the same updates. ``divide_by_initial_world_size=False`` divides by the actual number of samples, so each
sample has the same weight, whichever worker has it.
"""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

import kvstore_hvd.mxnet as hvd  # lets MXNet run with today's NumPy

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from sklearn.datasets import load_digits

from kvstore_hvd import Join

TEST_IMAGES = 360
LEARNING_RATE = 0.1

Array = Any  # numpy.ndarray


def load(seed: int) -> tuple[Array, Array, Array, Array]:
    """Return training images and labels, test images and labels; images are float32 (n, 1, 8, 8) in 0..1."""
    digits = load_digits()
    images, labels = (digits.images[:, None] / 16).astype(np.float32), digits.target.astype(np.float32)
    order = np.random.default_rng(seed).permutation(len(images))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return images[train], labels[train], images[test], labels[test]


def own_part(total: int, rank: int, workers: int) -> range:
    """Return the places of this worker's images: r+1 parts of 1+2+...+N."""
    parts = workers * (workers + 1) // 2
    first, last = (total * (r * (r + 1) // 2) // parts for r in (rank, rank + 1))
    return range(first, last)


def make_network() -> Any:
    """Return the initialised network."""
    net = nn.HybridSequential()
    net.add(
        nn.Conv2D(16, 3, padding=1, in_channels=1, activation="relu"),
        nn.MaxPool2D(),
        nn.Dense(64, in_units=16 * 4 * 4, activation="relu"),
        nn.Dense(10, in_units=64),
    )
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def train_epoch(net: Any, trainer: Any, images: Array, labels: Array, order: Array, batch_size: int) -> None:
    """Take one step for each batch of this worker."""
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        with autograd.record():
            loss = loss_of(net(mx.np.array(images[batch])), mx.np.array(labels[batch]))
        loss.backward()
        trainer.step(len(batch))


def main() -> None:
    """Train and report."""
    parser = argparse.ArgumentParser(description="Train on digits that are split unevenly.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=16, help="of each worker [16]")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    hvd.init()
    mx.npx.set_np()
    mx.random.seed(options.seed)
    images, labels, test_images, test_labels = load(options.seed)
    mine = np.array(own_part(len(images), hvd.rank(), hvd.size()))
    batches = -(-len(mine) // options.batch_size)
    of_all = hvd.allgather_object((len(mine), batches))
    if hvd.rank() == 0:
        for rank, (count, steps) in enumerate(of_all):
            print(f"worker {rank}: {count} images, {steps} batches in an epoch")

    net = make_network()
    # The learning rate belongs in a scheduler: an exhausted worker takes part in updates, but runs none of this loop.
    steps = options.epochs * max(number for _, number in of_all)
    schedule = mx.lr_scheduler.CosineScheduler(steps, base_lr=LEARNING_RATE)
    settings = {"learning_rate": LEARNING_RATE, "momentum": 0.9, "lr_scheduler": schedule}
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", settings)
    for epoch in range(options.epochs):
        order = np.random.default_rng([options.seed, epoch, hvd.rank()]).permutation(mine)
        with Join([trainer], divide_by_initial_world_size=False):
            train_epoch(net, trainer, images, labels, order, options.batch_size)

    answers = net(mx.np.array(test_images)).asnumpy().argmax(axis=1)
    parameters = b"".join(each.data().asnumpy().tobytes() for each in net.collect_params().values())
    digests = hvd.allgather_object(hashlib.sha256(parameters).digest())
    if hvd.rank() == 0:
        right = int((answers == test_labels).sum())
        print(f"steps          {trainer.optimizer.num_update} on every worker")
        print(f"test accuracy  {100 * right / len(test_labels):.2f} % ({right} of {len(test_labels)} images)")
        # Not their digest: MXNet rounds otherwise on another kind of processor, and with another number of threads.
        print(f"parameters     {'equal' if len(set(digests)) == 1 else 'DIFFERENT'} on all workers")


if __name__ == "__main__":
    main()
