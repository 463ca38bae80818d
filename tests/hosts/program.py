"""A worker that sums arrays of several sizes until told otherwise, and tells what it sees: for tests of lost hosts."""

import os
import sys
import time
from pathlib import Path

import numpy as np

import kvstore_hvd


def say(text):
    out.write(f"{time.time():.3f} {text}\n")


topology = kvstore_hvd.init()
out = Path(f"rank{topology.rank}").open("w", buffering=1)  # noqa: SIM115 - until the end
say(f"pid {os.getpid()} begins on {os.uname().nodename}")
arrays = {"large": np.ones(300_000, np.float32), "small": np.ones(10, np.float32)}
step, end = 0, time.monotonic() + float(sys.argv[1])
try:
    while time.monotonic() < end:
        for name, array in arrays.items():
            assert (kvstore_hvd.allreduce(array, name) == topology.size).all()
        step += 1
        if step % 10 == 0:
            say(f"step {step}")
        time.sleep(0.01)
except kvstore_hvd.HorovodInternalError as error:
    say(f"lost {type(error).__name__}: {error}")
    raise
say("end")
