"""One rank of two: hundreds of operations of rank 0 fail at once, on all threads of MXNet that start them.

``many_failures_worker.py ROUNDS FOLDER``. They wait for one computation; while it runs, rank 1 leaves the world.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import mxnet as mx

import kvstore_hvd
import kvstore_hvd.mxnet as hvd
from kvstore_hvd.errors import HorovodInternalError

OPERATIONS = 1000
SIDE = 1000


def fail_at_once(folder: Path, number: int) -> None:
    """Rank 0: submit operations that are ready together, in a world that is lost by then, and read their errors."""
    computed = weights = mx.nd.ones((SIDE, SIDE))
    for _ in range(10):
        computed = mx.nd.dot(computed, weights) / SIDE
    rows = computed.reshape((-1,))[: 4 * OPERATIONS].reshape((OPERATIONS, 4))
    sums = [
        hvd.allreduce(part, name=f"part {place}")
        for place, part in enumerate(mx.nd.split(rows, OPERATIONS, axis=0, squeeze_axis=True))
    ]
    (folder / str(number)).touch()
    try:
        sums[-1].wait_to_read()
    except HorovodInternalError:
        return
    raise AssertionError("nobody was told")


def main(rounds: int, folder: Path) -> None:
    """Lose the world as often as that."""
    hvd.init()
    for number in range(rounds):
        assert hvd.allreduce(mx.nd.ones(2), name="before", op=hvd.Sum).asnumpy().tolist() == [2, 2]
        if hvd.rank() == 0:
            fail_at_once(folder, number)
        else:
            while not (folder / str(number)).exists():
                time.sleep(0.005)  # no event tells of a file
        kvstore_hvd.reset()
    print("all rounds", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
