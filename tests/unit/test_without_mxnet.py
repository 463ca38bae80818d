"""Where there is no MXNet, what needs none works, and all else says what to install."""

from __future__ import annotations

import subprocess
import sys

from support.jobs import LIMIT_S, variables_of

PRELUDE = """
import sys
sys.modules["mxnet"] = None
import numpy as np
import kvstore_hvd
import kvstore_hvd.mxnet as hvd
hvd.init()
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PRELUDE + program]
    return subprocess.run(command, env=variables_of(), capture_output=True, text=True, timeout=LIMIT_S)


def test_arrays_of_numpy_need_none() -> None:
    done = run("print(kvstore_hvd.allreduce(np.ones(2), 'x').tolist(), hvd.broadcast_object({'a': 1}, 0))")
    assert (done.returncode, done.stdout) == (0, "[1.0, 1.0] {'a': 1}\n"), done.stderr


def test_what_needs_it_says_so() -> None:
    """Every one is a KVHvdError with a fix, and an ImportError as before."""
    names = ["kvstore_hvd.Horovod", "hvd.DistributedTrainer", "hvd.DistributedOptimizer", "hvd.SyncBatchNorm"]
    done = run(f"""
for name in {names}:
    try:
        eval(name)
    except kvstore_hvd.KVHvdError as error:
        assert isinstance(error, ImportError), name
        assert "Fix: pip install" in str(error), str(error)
        print(name)
""")
    assert done.stdout.split() == names, done.stderr


def test_arrays_that_are_none_of_mxnets_are_refused() -> None:
    calls = ["allreduce", "allgather", "alltoall", "reducescatter", "grouped_allgather"]
    done = run(f"""
for name in {calls}:
    try:
        getattr(hvd, name)([np.ones(2)] if name.startswith("grouped") else np.ones(2))
    except kvstore_hvd.KVHvdError as error:
        assert "Fix: " in str(error), str(error)
        print(name)
""")
    assert done.stdout.split() == calls, done.stderr
