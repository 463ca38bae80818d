"""``python benchmarks/elastic_commit.py``: time commit and restore of ResNet-50 and its momentum, beside memcpy.

One process, as what is timed involves no other worker: `save()`, the part of `commit()` that takes time, and
`restore()`. The state has 161 parameters of 25.6 million float32 and as much momentum. memcpy copies as many bytes, in
pieces of the same sizes, between memory that has been touched. All take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any

import kvstore_hvd.mxnet as hvd

# isort: split
import mxnet as mx
import numpy as np
from gradients import shapes_of_resnet50

from kvstore_hvd import elastic


def make_state() -> Any:
    """Return the state, with gradients and momentum that have been used."""
    shapes = shapes_of_resnet50(with_biases=False)
    params = {f"layer{n:03}": mx.gluon.Parameter(f"layer{n:03}", shape=shape) for n, shape in enumerate(shapes)}
    for param in params.values():
        param.initialize()
    trainer = mx.gluon.Trainer(params, "sgd", {"learning_rate": 0.1, "momentum": 0.9}, kvstore="horovod")
    with mx.autograd.record():
        losses = [param.data().sum() for param in params.values()]
    mx.autograd.backward(losses)
    trainer.step(1)
    mx.nd.waitall()
    return elastic.GluonState(params=params, trainer=trainer, step=0)


def timed(function: Any) -> float:
    """Return the seconds of a call, with all that it leaves to MXNet's engine."""
    mx.nd.waitall()
    start = time.perf_counter()
    function()
    mx.nd.waitall()
    return time.perf_counter() - start


def main() -> None:
    """Print the samples as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=30)
    options = parser.parse_args()
    hvd.init()
    if mx.__version__.startswith("2"):
        mx.npx.set_np()
    state = make_state()
    memories = [param.data().asnumpy() for param in state.params.values() for _ in ("value", "momentum")]
    targets = [np.ones_like(memory) for memory in memories]

    def copy() -> None:
        for target, memory in zip(targets, memories):
            np.copyto(target, memory)

    methods = {"memcpy": copy, "save": state.save, "restore": state.restore}
    for function in methods.values():
        for _ in range(3):  # both sets of saved copies have been written to
            function()
    samples: dict[str, list[float]] = {name: [] for name in methods}
    names = list(methods)
    for number in range(options.repetitions):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            samples[name].append(timed(methods[name]))
    size = sum(memory.nbytes for memory in memories)
    print(json.dumps({"bytes": size, "threads": os.environ.get("OMP_NUM_THREADS", ""), "samples": samples}))


if __name__ == "__main__":
    main()
