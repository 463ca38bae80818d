"""One worker of a job that loses others: ``recovering_worker.py PLAN``, a JSON object.

``steps``: how many. ``dies``: the rank that kills itself half-way. ``sleeps``: a rank and the seconds that it sleeps
half-way, once. Each worker that gets to the end writes one line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from typing import Any

import numpy as np

import kvstore_hvd.mxnet as hvd
from kvstore_hvd import elastic
from kvstore_hvd.elastic.run import run
from kvstore_hvd.ops import numpy_ops
from kvstore_hvd.process import process

SIZE = 200_000


def main() -> None:
    """Train to the end of the plan."""
    plan = json.loads(sys.argv[1])
    hvd.init()
    before = hvd.rank()
    state = elastic.ObjectState(number=0, total=0.0)
    slept: list[int] = []
    sleeper, sleep_s = plan.get("sleeps", (None, 0))

    @run
    def train(state: Any) -> None:
        while state.number < plan["steps"]:
            if state.number == plan["steps"] // 2:
                if plan.get("dies") == before:
                    os.kill(os.getpid(), signal.SIGKILL)
                if sleeper == before and not slept:
                    slept.append(state.number)
                    time.sleep(sleep_s)
            values = np.full(SIZE, float(state.number), np.float32)
            got = numpy_ops.allreduce(values, "values", op="average")
            assert (got == values).all(), (got[:4], values[:4])
            state.total += float(got[0])
            state.number += 1
            if state.number % 5 == 0:
                state.commit()

    train(state)
    topology = process.current().topology
    report = {"before": before, "rank": topology.rank, "size": topology.size, "generation": topology.generation}
    os.write(1, ("@" + json.dumps({**report, "number": state.number, "total": state.total}) + "\n").encode())


if __name__ == "__main__":
    main()
