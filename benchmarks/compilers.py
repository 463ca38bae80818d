"""Time the same operations with builds of two compilers: this environment's, and that of another one (a wheel of zig).

    python benchmarks/compilers.py OTHER/bin/python [--launches 5] [--json PATH]

Launches of the two take turns; kvhvdrun starts two workers for each.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import ROOT, Samples, describe, joined, median_ratio, ratio_text, size_text, table, time_text, write

_SIZES = {4: 2000, 1 << 16: 1000, 1 << 20: 200, 1 << 26: 4}  # bytes, and how often
_RUNS = 7


def worker() -> None:
    """Print the median times of this build on rank 0."""
    import mxnet as mx
    import numpy as np

    import kvstore_hvd

    kvstore_hvd.init()
    found: Samples = {}

    def timed(name: str, call: Callable[[], object], count: int) -> None:
        call()
        kvstore_hvd.barrier(name=name)
        runs = []
        for _ in range(_RUNS):
            begin = time.perf_counter()
            for _ in range(count):
                call()
            runs.append((time.perf_counter() - begin) / count)
        found[name] = [statistics.median(runs)]

    for dtype in ("float32", "float16", "int8"):
        for size, count in _SIZES.items():
            array = np.ones(max(1, size // np.dtype(dtype).itemsize), dtype)
            name = f"allreduce of {dtype}, {size_text(size)}"
            timed(name, lambda array=array: kvstore_hvd.allreduce(array, name="x"), count)  # type: ignore[misc]
    net = mx.gluon.nn.Dense(2048, in_units=1024)
    net.initialize()
    batch = mx.nd.ones((1, 1024))
    for optimizer in ("sgd", "adam", "lamb"):
        trainer = mx.gluon.Trainer(net.collect_params(), optimizer, kvstore="horovod")

        def step(trainer: Any = trainer) -> None:
            with mx.autograd.record():
                loss = net(batch).sum()
            loss.backward()
            trainer.step(1)
            mx.nd.waitall()

        timed(f"training step of 2 M parameters, {optimizer}", step, 30)
    if kvstore_hvd.topology().rank == 0:
        print(json.dumps(found))


def launch(python: str) -> Samples:
    """One launch with the package of this Python."""
    command = [str(Path(python).with_name("kvhvdrun")), "-np", "2", "--no-prefix", python, __file__, "--worker"]
    # The working folder and PYTHONPATH would have the sources come before an installed package.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=env, cwd=Path(python).parent, check=True, capture_output=True, text=True)
    found: Samples = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Run both, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("other", nargs="?", help="the Python of the other environment")
    parser.add_argument("--launches", type=int, default=5)
    parser.add_argument("--json", type=Path, default=ROOT / "benchmarks" / "results" / "compilers.json")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker()
        return
    run = describe()
    both = [(launch(sys.executable), launch(args.other)) for _ in range(args.launches)]
    here, there = (joined([pair[place] for pair in both]) for place in (0, 1))
    rows = [
        [name, time_text(statistics.median(mine)), time_text(statistics.median(there[name])),
         ratio_text(median_ratio(there[name], mine))]
        for name, mine in here.items()
    ]  # fmt: skip
    text = table(["us, median of launches", "here", "other", "other / here"], rows)
    write(args.json, run, {"here": here, "other": there}, text)


if __name__ == "__main__":
    main()
