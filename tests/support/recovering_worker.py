"""One worker of a job that loses others: ``recovering_worker.py PLAN``, a JSON object.

``victims``: for the rank at the start, seconds after which that worker kills itself, counted from the first step; or,
with a leading ``+``, from when it notices that the world is lost. ``fault``: what a victim does, a number of a signal.
``operation``: what fills the steps, ``steps``: how many. ``stillborn``: the rank that dies before all else. ``raises``:
the ranks that raise an exception half-way. ``late``: rank 3 dies and the others see it, but for rank 0, which has
finished, and lives on until they have, too. ``leaves``: the rank that ends with a code half-way. ``sleeps``: a rank
and the seconds that it sleeps, once. ``code``: the exit code of all. ``mpi``: the program initialises MPI itself. Each
worker that gets to the end writes one line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

import numpy as np

import kvstore_hvd.mxnet as hvd
from kvstore_hvd import elastic
from kvstore_hvd.elastic.run import run
from kvstore_hvd.ops import numpy_ops
from kvstore_hvd.process import process
from support.launched import launched

SIZE = 200_000


class Victim:
    """Does to this process what the plan says."""

    def __init__(self, plan: dict[str, Any], rank: int) -> None:
        text = plan["victims"].get(str(rank), "")
        self._during_recovery = text.startswith("+")
        self._after = float(text) if text else None
        self._fault = plan.get("fault", signal.SIGKILL)

    def training(self) -> None:
        """Training begins."""
        if self._after is not None and not self._during_recovery:
            self._start(self._after)

    def recovering(self) -> None:
        """The world is lost."""
        if self._after is not None and self._during_recovery:
            self._start(self._after)

    def _start(self, after: float) -> None:
        self._after = None
        threading.Thread(target=self._suffer, args=(after,), daemon=True).start()

    def _suffer(self, after: float) -> None:
        time.sleep(after)
        os.kill(os.getpid(), self._fault)


class Counted(elastic.ObjectState):
    """A state that says when the world is lost."""

    victim: Victim
    number: int
    total: float

    def restore(self) -> None:
        """As `State.restore`."""
        self.victim.recovering()
        super().restore()


def late_loss(rank: int) -> None:
    """What the workers see when the last operation succeeds on rank 0 only."""
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    elif rank != 0:
        raise elastic.HorovodInternalError("[rank ?/4] allreduce 'values': rank 3 died (SIGKILL).")


def step(operation: str, number: int) -> float:
    """One step; returns what every worker must have got."""
    topology = process.current().topology
    values = np.full(SIZE, float(number), np.float32)
    if operation == "broadcast":
        root = number % topology.size
        got = numpy_ops.broadcast(values if topology.rank == root else np.zeros_like(values), root, "values")
        expected = float(number)
    else:
        got = numpy_ops.allreduce(values, "values", op="sum")
        expected = float(number * topology.size)
    assert (got == expected).all(), (got[:4], expected)
    return expected / topology.size if operation != "broadcast" else expected


def main() -> None:
    """Train to the end of the plan."""
    plan = json.loads(sys.argv[1])
    if plan.get("stillborn") == launched().rank:
        os.kill(os.getpid(), signal.SIGKILL)
    if plan.get("mpi"):
        from mpi4py import MPI  # noqa: F401
    hvd.init()
    before = hvd.rank()
    victim = Victim(plan, before)
    Counted.victim = victim
    state = Counted(number=0, total=0.0)

    slept: list[int] = []
    sleeper, sleep_s = plan.get("sleeps", (None, 0))

    @run
    def train(state: Any) -> None:
        victim.training()
        while state.number < plan["steps"]:
            if before in plan.get("raises", ()) and state.number == plan["steps"] // 2:
                raise ValueError("the data set is empty")
            if plan.get("leaves") == before and state.number == plan["steps"] // 2:
                os._exit(3)
            if sleeper == before and state.number == plan["steps"] // 2 and not slept:
                slept.append(state.number)
                time.sleep(sleep_s)
            state.total += step(plan["operation"], state.number)
            state.number += 1
            if state.number % 5 == 0:
                state.commit()
        if plan.get("late") and process.current().topology.generation == 0:
            late_loss(before)

    train(state)
    topology = process.current().topology
    report = {"before": before, "rank": topology.rank, "size": topology.size, "generation": topology.generation}
    os.write(1, ("@" + json.dumps({**report, "number": state.number, "total": state.total}) + "\n").encode())
    if plan.get("late") and before == 0:
        sys.stdin.readline()  # of mpirun, which passes it on to rank 0
    sys.exit(plan.get("code", 0))


if __name__ == "__main__":
    main()
