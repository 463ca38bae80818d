"""One rank of a job that stalls: ``stall_worker.py WHAT FOLDER``. Rank 1 does in a step what it should not.

A test lets rank 1 go on, and all ranks end, by making the files ``go`` and ``end`` in the folder.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import numpy as np

import kvstore_hvd
from kvstore_hvd.process import process
from support.patience import patient
from support.small_training import SmallTraining

LATE_RANK = 1
LATE_STEP = 3
STEPS = 6
FOLDER = Path(sys.argv[2])


def wait_for(name: str) -> None:
    """Until the test has made the file."""
    while not (FOLDER / name).exists():
        time.sleep(0.01)


def write_a_long_checkpoint() -> None:
    """What the report of the late rank has to show."""
    print("late", flush=True)
    wait_for("go")


def wait_until_missed() -> None:
    """Say how many threads look for stalls once the other ranks wait for this one."""
    while not process.current().member.communicator().missed(1):
        time.sleep(0.005)
    print(f"missed, {inspectors()} inspectors", flush=True)
    wait_for("go")


def stop() -> None:
    """Until the test continues this process."""
    print(f"stopping {os.getpid()}", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def train(late: str) -> None:
    """Train; rank 1 comes late to a step."""
    training = SmallTraining()
    for step in range(STEPS):
        if step == LATE_STEP and training.store.rank == LATE_RANK:
            {"late": write_a_long_checkpoint, "missed": wait_until_missed, "stop": stop}[late]()
        try:
            training.step()
        except kvstore_hvd.HorovodInternalError as error:
            print(f"caught: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            wait_for("end")
            sys.exit(7)
    print("trained", flush=True)
    wait_for("end")


def crossed() -> None:
    """Every rank waits for an operation of its own."""
    rank = kvstore_hvd.init().rank
    try:
        kvstore_hvd.allreduce(np.ones(3), f"of-rank-{rank}")
    except kvstore_hvd.HorovodInternalError as error:
        print(f"caught: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(7)


def inspectors() -> int:
    """How many threads of this process look for stalls."""
    return sum(thread.name == "kvstore_hvd-stall" for thread in threading.enumerate())


def until_inspectors(number: int) -> None:
    """A thread that was told to end does so soon."""
    end = time.monotonic() + patient(30)
    while inspectors() != number:
        assert time.monotonic() < end, f"{inspectors()} inspectors instead of {number}"
        time.sleep(0.005)


def threads(number: int) -> None:
    """The thread follows the world of this process, into which it is told that `number` threads belong."""
    assert inspectors() == 0
    kvstore_hvd.init()
    assert inspectors() == number
    child = os.fork()
    if child == 0:
        os._exit(inspectors())
    assert os.waitpid(child, 0)[1] == 0
    kvstore_hvd.barrier("met")
    kvstore_hvd.reset()
    until_inspectors(number)
    kvstore_hvd.barrier("again")
    kvstore_hvd.shutdown()
    until_inspectors(0)
    print("counted", flush=True)
    kvstore_hvd.init()  # the exit finds it looking


if __name__ == "__main__":
    what = sys.argv[1]
    if what == "crossed":
        crossed()
    elif what.startswith("threads-"):
        threads(int(what.rpartition("-")[2]))
    else:
        train(what)
