"""One rank of a training that goes wrong: ``fault_worker.py FAULT``, where rank 1 suffers the fault in its third step.

Every rank trains a small net with the store. A rank that sees an error prints it behind ``caught: `` and checks that
the store raises it again and that no call hangs, then exits with code 7.
"""

from __future__ import annotations

import os
import signal
import sys
import time

import kvstore_hvd

import mxnet as mx  # isort: skip
from support.small_training import SmallTraining

FAULTY_RANK = 1
FAULTY_STEP = 3


def suffer(fault: str) -> None:
    """Do to this process what the name of the fault says."""
    if fault == "sigkill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "abort":
        os.abort()
    elif fault == "sigstop":
        print(f"stopping {os.getpid()}", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "os_exit":
        os._exit(3)
    elif fault == "return":
        sys.exit(0)
    elif fault == "exit_code":
        sys.exit(5)
    elif fault == "raise":
        raise ValueError("the data set is empty")
    elif fault == "hang":
        print(f"hanging {os.getpid()}", flush=True)
        time.sleep(600)


def train(fault: str) -> None:
    """Train until the fault."""
    training = SmallTraining()
    store, net = training.store, training.net
    caught: Exception | None = None
    for step in range(1000):
        if step == FAULTY_STEP and store.rank == FAULTY_RANK:
            if fault == "diverge":
                net.weight.set_data(net.weight.data() * 2 + 1)
            suffer(fault)
        try:
            training.step()
        except Exception as error:
            caught = error
            break
        if step == FAULTY_STEP - 1:
            print("trained", flush=True)
    print(f"caught: {type(caught).__name__}: {caught}", file=sys.stderr, flush=True)
    # Never stale data as if nothing had happened: every later call raises as well.
    for _ in range(2):
        try:
            store.pushpull("late", mx.nd.ones((2,)))
        except kvstore_hvd.errors.HorovodInternalError as error:
            print(f"again: {type(error).__name__}", flush=True)
    sys.exit(7)


if __name__ == "__main__":
    train(sys.argv[1])
