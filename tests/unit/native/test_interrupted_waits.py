"""Ctrl-C while a worker waits for an operation: the arrays may be freed as soon as it is raised."""

import signal
import threading
import time

import numpy as np
import pytest

from kvstore_hvd import native
from kvstore_hvd.comm.base import Request
from kvstore_hvd.comm.shm import native_request
from kvstore_hvd.errors import TransportError
from support.patience import patient


def test_nothing_is_under_way_any_more():
    """A device that has begun is waited for, and the others are told why the world ends."""
    segment = native.Segment.create(2)
    ours, theirs = (native.Engine(segment, rank, patient(30.0), False) for rank in range(2))
    arrays = [np.ones(3, np.float32) for _ in range(2)]
    requests = [
        native_request(
            Request("allreduce", "x", "'x'", [a.ctypes.data], [a.ctypes.data], a.shape, "float32", on_device=True)
        )
        for a in arrays
    ]
    ended = False

    def device():
        nonlocal ended
        batch = ours.take_batch(patient(30.0))
        assert batch is not None
        signal.raise_signal(signal.SIGINT)
        while ours.health() is None:
            time.sleep(0.01)
        time.sleep(0.2)
        ended = True
        ours.end_batch(batch[0])

    work = theirs.submit(requests[1])
    thread = threading.Thread(target=device, daemon=True)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        ours.run(requests[0])
    assert ended
    thread.join()
    with pytest.raises(TransportError, match="was interrupted"):
        theirs.wait(work)
    theirs.shutdown()
    ours.shutdown()
