"""Train on handwritten digits with workers that may die or join while the training goes on.

    kvhvdrun --min-np 2 --max-np 4 python examples/elastic_digits.py

Kill a worker (``kill -9 PID``; each prints its own): the others go back to the last commit and continue at once, and a
new worker takes the place of the dead one as soon as it has started. Each image is seen exactly once in every epoch,
whatever happens to the workers.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from typing import Any

import kvstore_hvd.mxnet as hvd  # lets MXNet run with today's NumPy

# isort: split
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from sklearn.datasets import load_digits

from kvstore_hvd import elastic

TEST_IMAGES = 360

Array = Any  # numpy.ndarray


def load(seed: int) -> tuple[Array, Array, Array, Array]:
    """Return training images and labels, test images and labels; images are float32 (n, 1, 8, 8) in 0..1."""
    digits = load_digits()
    images, labels = (digits.images[:, None] / 16).astype(np.float32), digits.target.astype(np.float32)
    order = np.random.default_rng(seed).permutation(len(images))
    test, train = order[:TEST_IMAGES], order[TEST_IMAGES:]
    return images[train], labels[train], images[test], labels[test]


def make_network() -> Any:
    """Return the initialised network."""
    net = nn.HybridSequential()
    net.add(
        nn.Conv2D(32, 3, padding=1, in_channels=1, activation="relu"),
        nn.Conv2D(64, 3, padding=1, in_channels=32, activation="relu"),
        nn.MaxPool2D(),
        nn.Dense(128, in_units=64 * 4 * 4, activation="relu"),
        nn.Dense(10, in_units=128),
    )
    net.initialize(mx.init.Xavier())
    net.hybridize()
    return net


def say(text: str) -> None:
    """Print a line, on one worker: which one that is may change."""
    if hvd.rank() == 0:
        print(text, flush=True)


@elastic.run
def train(state: Any, images: Array, labels: Array, options: argparse.Namespace) -> None:
    """Train the epochs that are left. Called anew whenever the workers have changed, with the state of the last commit.

    All that has to survive is in the state; what is computed from the number of workers is computed in here.
    """
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    dataset = gluon.data.ArrayDataset(images, labels)
    while state.epoch < options.epochs:
        # The sampler gives each worker its share of the images that nobody has trained on in this epoch.
        loader = gluon.data.DataLoader(dataset, options.batch_size, sampler=state.sampler, last_batch="keep")
        for number, (data, label) in enumerate(loader):
            with autograd.record():
                loss = loss_of(state.net(data), label)
            loss.backward()
            state.trainer.step(len(label))  # the mean over the workers, of the mean over this worker's batch
            state.sampler.record_batch(number, options.batch_size)
            if number % options.commit_every == options.commit_every - 1:
                state.commit()
        state.epoch += 1
        if state.epoch % 10 == 0:
            mean = hvd.allreduce(loss.mean().reshape(1), name="loss")
            say(f"epoch {state.epoch}/{options.epochs}  {hvd.size()} workers  loss {float(mean.asnumpy()[0]):.4f}")
        state.sampler.set_epoch(state.epoch)  # another order, nothing of it done
        state.commit()


def main() -> None:
    """Train and report."""
    parser = argparse.ArgumentParser(description="Train on digits while workers come and go.")
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=16, help="of each worker [16]")
    parser.add_argument("--commit-every", type=int, default=5, metavar="BATCHES", help="steps between commits [5]")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()

    hvd.init()
    mx.npx.set_np()
    mx.random.seed(options.seed)
    print(f"worker with pid {os.getpid()} is rank {hvd.rank()} of {hvd.size()}", flush=True)
    images, labels, test_images, test_labels = load(options.seed)
    net = make_network()
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", {"learning_rate": 0.05, "momentum": 0.9})
    sampler = elastic.ElasticSampler(range(len(images)), shuffle=True, seed=options.seed)
    state = elastic.GluonState(net=net, trainer=trainer, sampler=sampler, epoch=0)
    state.register_reset_callbacks([lambda: say(f"going on with {hvd.size()} workers")])

    train(state, images, labels, options)

    # Each worker looks at all test images: they have the same network, which the digests show.
    answers = net(mx.np.array(test_images)).asnumpy().argmax(axis=1)
    right = int((answers == test_labels).sum())
    parameters = b"".join(each.data().asnumpy().tobytes() for each in net.collect_params().values())
    digest = hashlib.sha256(parameters).hexdigest()[:16]
    print(f"test accuracy {100 * right / len(test_labels):.2f} %, parameters sha256 {digest}", flush=True)


if __name__ == "__main__":
    main()
