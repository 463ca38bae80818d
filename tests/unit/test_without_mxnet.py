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


def test_arrays_of_numpy_need_none_and_what_does_says_so() -> None:
    """Each of the others is a KVHvdError with a fix; what is missing is an ImportError as before."""
    missing = ["kvstore_hvd.Horovod", "hvd.DistributedTrainer", "hvd.DistributedOptimizer", "hvd.SyncBatchNorm"]
    calls = [f"hvd.{name}(np.ones(2))" for name in ("allreduce", "allgather", "alltoall", "reducescatter")]
    program = f"""
print(kvstore_hvd.allreduce(np.ones(2), 'x').tolist(), hvd.broadcast_object({{'a': 1}}, 0))
for name in {missing + calls}:
    try:
        eval(name)
    except kvstore_hvd.KVHvdError as error:
        assert "(" in name or isinstance(error, ImportError) and "Fix: pip install" in str(error), name
        assert "Fix: " in str(error), str(error)
        print(name)
"""
    command = [sys.executable, "-c", PRELUDE + program]
    done = subprocess.run(command, env=variables_of(), capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout.splitlines() == ["[1.0, 1.0] {'a': 1}", *missing, *calls], done.stderr
