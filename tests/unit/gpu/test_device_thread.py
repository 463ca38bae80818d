"""The thread of a device, when its executor fails or waits in vain; and how batches are cut into rounds."""

import random
import threading
import time
from unittest.mock import Mock

import pytest

from kvstore_hvd import errors
from kvstore_hvd.errors import TransportError
from kvstore_hvd.gpu.executor import ALIGNMENT, DeviceThread, buffer_bytes, rounds
from support.patience import patient


class Engine:
    def __init__(self, seen):
        self.seen, self.lost, self.ended = seen, False, threading.Event()
        self._batches = [(1, "allreduce", [])]

    def take_batch(self, limit_s):
        if self._batches:
            return self._batches.pop()
        return time.sleep(min(limit_s, 0.01))

    def end_batch(self, number, error=None):
        self.seen.append(f"ended: {error!r}")
        self.lost = True
        self.ended.set()

    def health(self):
        return TransportError("lost") if self.lost else None


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (errors.TimeoutError("it is late.\n  Fix: wait."), errors.TimeoutError("it is late; wait")),
        (BaseException("of \udcff somebody"), TransportError("BaseException: of \udcff somebody")),
    ],
)
def test_whatever_fails_nobody_waits_for_it(error, told):
    seen = []
    engine = Engine(seen)
    rest = dict.fromkeys(("abort.side_effect", "close.side_effect", "end.side_effect"), ValueError("not even that"))
    thread = DeviceThread(engine, lambda ordinal: Mock(**{"start.side_effect": error, **rest}))
    thread.start(0)
    assert engine.ended.wait(patient(10))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda args: seen.append(f"escaped: {args.exc_value}"))
        thread.stop()
    assert seen == [f"ended: {told!r}"]


@pytest.mark.parametrize("waits", [False, True])
def test_a_batch_that_fails_on_the_way_ends_on_the_device_first(waits):
    seen = []
    engine, begun, aborted = Engine(seen), threading.Event(), threading.Event()

    def start(collective, batch):
        seen.append("enqueued")
        begun.set()
        if waits:
            assert aborted.wait(patient(30)), "nobody has aborted it"
        raise TransportError("failed on the way")

    device = Mock(start=start, abort=aborted.set)
    device.end.side_effect = lambda limit_s: seen.append("device ended") or True
    device.close.side_effect = lambda: seen.append("closed")
    thread = DeviceThread(engine, lambda ordinal: device)
    thread.start(0)
    assert begun.wait(patient(10))
    if waits:
        engine.lost = True  # another worker died: the thread, which waits, does not see it
    assert engine.ended.wait(patient(20))
    thread.stop()
    assert seen == ["enqueued", "device ended", "ended: TransportError('failed on the way')", "closed"]


@pytest.mark.parametrize("seed", range(20))
def test_every_element_is_in_one_place(seed):
    generator = random.Random(seed)
    item = generator.choice([1, 2, 4, 8])
    capacity, most = generator.choice([16, 100, 1000]), generator.choice([1, 2, 50])
    counts = [generator.choice([0, 1, 7, generator.randrange(2000)]) for _ in range(generator.randrange(1, 12))]
    seen = [0] * len(counts)
    for pieces in rounds(counts, item, capacity, most):
        assert 0 < len(pieces) <= most
        assert buffer_bytes(pieces, item) <= capacity
        end = 0
        for piece in pieces:
            assert piece.start == seen[piece.request]
            assert piece.length > 0
            assert piece.offset >= end
            assert piece.offset % ALIGNMENT == 0
            seen[piece.request] += piece.length
            end = piece.offset + piece.length * item
    assert seen == counts
