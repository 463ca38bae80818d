"""A worker that sums arrays of several sizes until told otherwise, and tells what it sees: for tests of lost hosts."""

import os
import sys
import time
from pathlib import Path

import kvstore_hvd.mxnet as hvd

import mxnet as mx  # isort: skip


def say(text):
    """One line in this worker's file, with the time."""
    out.write(f"{time.time():.3f} {text}\n")


hvd.init()
out = Path(f"rank{hvd.rank()}").open("w", buffering=1)  # noqa: SIM115 - until the end
say(f"pid {os.getpid()} begins on {os.uname().nodename}")
large, small = mx.nd.ones(300_000), mx.nd.ones(10)
step, end = 0, time.monotonic() + float(sys.argv[1])
try:
    while time.monotonic() < end:
        results = [hvd.allreduce(each, name=name, op=hvd.Sum) for each, name in ((large, "large"), (small, "small"))]
        for result in results:
            assert (result.asnumpy() == hvd.size()).all()
        step += 1
        if step % 10 == 0:
            say(f"step {step}")
        time.sleep(0.01)
except hvd.HorovodInternalError as error:
    say(f"lost {type(error).__name__}: {error}")
    raise
say("end")
