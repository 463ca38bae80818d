"""One rank of a training whose timeline is recorded: ``timeline_worker.py HOW PATH STEPS``.

HOW is ``ends``, or what happens to rank 1 once some operations are in its part of the timeline: ``killed`` or
``raises``; the others then end with the error that they get. ``forks`` ends like ``ends``, and so does its child.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import kvstore_hvd

import mxnet as mx  # isort: skip
from support.gluon import array, backward, mlp, samples

MANY_STEPS = 100_000  # more than there will be
ENOUGH_LINES = 20


def main(how: str, target: str, steps: int) -> None:
    """Train."""
    net = mlp()
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.1}, kvstore="horovod")
    data, label = samples(24)
    has_fault = how in ("killed", "raises")
    part = Path(f"{target}.rank-1.part")
    for _ in range(MANY_STEPS if has_fault else steps):
        backward(net, [(array(data), array(label))])
        trainer.step(24)
        mx.nd.waitall()
        if has_fault and kvstore_hvd.topology().rank == 1 and part.read_bytes().count(b"\n") > ENOUGH_LINES:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("this is a test")
    if how == "forks" and (child := os.fork()):
        assert os.waitpid(child, 0)[1] == 0
    print("trained")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
