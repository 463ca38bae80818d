"""Train a perceptron with two layers on real handwritten digits, written with CuPy alone, with any number of workers.

    kvhvdrun -np 2 python examples/digits_cupy.py
    mpirun -np 2 python examples/digits_cupy.py

Without a GPU, or without CuPy, the same program runs on NumPy arrays. Every worker computes the gradients of its share
of each batch, and `kvstore_hvd.allreduce` sums them where they are. The sums are those of the whole batch but for their
rounding, so the parameters do not depend on the number of workers, or on where they are computed:

    python examples/digits_cupy.py --cpu --save one.npz
    kvhvdrun -np 2 python examples/digits_cupy.py --compare one.npz
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_digits

import kvstore_hvd

HIDDEN = 64
BATCH = 120
TEST_IMAGES = 360
LEARNING_RATE = 0.5

Array = Any  # of NumPy or CuPy


def library(cpu: bool) -> Any:
    """Return CuPy where it finds a GPU, else NumPy."""
    if cpu:
        return np
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except Exception:  # noqa: BLE001 - CuPy's own errors have to be imported from what may be missing
        return np
    cupy.cuda.Device(kvstore_hvd.topology().local_rank % count).use()
    return cupy


def first_parameters() -> list[np.ndarray]:
    """Return the same on every worker: weights and biases of both layers."""
    random = np.random.default_rng(1)
    layers = [(64, HIDDEN), (HIDDEN, 10)]
    parameters = []
    for inputs, outputs in layers:
        weight = random.standard_normal((inputs, outputs)) / np.sqrt(inputs)
        parameters += [weight.astype(np.float32), np.zeros(outputs, np.float32)]
    return parameters


def forward(xp: Any, parameters: list[Array], images: Array) -> tuple[Array, Array]:
    """Return the activations of the hidden layer, and the probabilities of the ten digits."""
    hidden = xp.maximum(images @ parameters[0] + parameters[1], 0)
    scores = hidden @ parameters[2] + parameters[3]
    powers = xp.exp(scores - scores.max(axis=1, keepdims=True))
    return hidden, powers / powers.sum(axis=1, keepdims=True)


def gradients(xp: Any, parameters: list[Array], images: Array, labels: Array) -> list[Array]:
    """Return those of the sum of the cross-entropies of all images."""
    hidden, probabilities = forward(xp, parameters, images)
    probabilities[xp.arange(len(labels)), labels] -= 1
    back = (probabilities @ parameters[2].T) * (hidden > 0)
    return [images.T @ back, back.sum(axis=0), hidden.T @ probabilities, probabilities.sum(axis=0)]


def train(xp: Any, epochs: int) -> tuple[list[Array], float]:
    """Train; returns the parameters, and the share of test images that are recognised."""
    world = kvstore_hvd.topology()
    digits = load_digits()
    images = xp.asarray((digits.data / 16).astype(np.float32))
    labels = xp.asarray(digits.target)
    parameters = [xp.asarray(parameter) for parameter in first_parameters()]
    order = np.random.default_rng(2)  # the same on every worker
    for _ in range(epochs):
        shuffled = order.permutation(len(images) - TEST_IMAGES)
        for start in range(0, len(shuffled), BATCH):
            batch = shuffled[start : start + BATCH]
            share = xp.asarray(batch[world.rank :: world.size])
            own = gradients(xp, parameters, images[share], labels[share])
            for number, gradient in enumerate(own):
                total = xp.ascontiguousarray(gradient)  # a product of transposed arrays may be laid out otherwise
                kvstore_hvd.allreduce(total, f"gradient {number}", out=total)
                parameters[number] -= LEARNING_RATE / len(batch) * total
    _, probabilities = forward(xp, parameters, images[-TEST_IMAGES:])
    return parameters, float((probabilities.argmax(axis=1) == labels[-TEST_IMAGES:]).mean())


def main() -> None:
    """Train, and save or compare the parameters."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--cpu", action="store_true", help="use NumPy although there is a GPU")
    parser.add_argument("--save", type=Path, metavar="FILE")
    parser.add_argument("--compare", type=Path, metavar="FILE", help="parameters that --save has written")
    options = parser.parse_args()
    kvstore_hvd.init()
    xp = library(options.cpu)
    parameters, accuracy = train(xp, options.epochs)
    if kvstore_hvd.topology().rank == 0:
        values = [np.asarray(parameter if xp is np else parameter.get()) for parameter in parameters]
        size = kvstore_hvd.topology().size
        print(f"{xp.__name__}, {size} workers: {accuracy:.1%} of {TEST_IMAGES} test images recognised", flush=True)
        if options.save:
            np.savez(options.save, *values)
        if options.compare:
            saved = np.load(options.compare)
            worst = max(
                float(np.abs(value - saved[name]).max() / np.abs(saved[name]).max())
                for value, name in zip(values, saved.files)
            )
            print(f"largest difference to {options.compare.name}: {worst:.1e} of the largest value", flush=True)


if __name__ == "__main__":
    main()
