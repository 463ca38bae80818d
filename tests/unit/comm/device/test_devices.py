"""The thread of a device, when its executor fails or waits for a worker that does not come."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from kvstore_hvd import errors
from kvstore_hvd.comm.device.devices import DeviceThread
from kvstore_hvd.errors import KVHvdError, TransportError
from support.patience import patient


class Engine:
    """Hands out one batch, and hears how it ended."""

    def __init__(self, seen: list[str]) -> None:
        self.seen, self.lost = seen, False
        self.ended = threading.Event()
        self._batches = [(1, "allreduce", [])]

    def take_batch(self, limit_s: float) -> Any:
        if self._batches:
            return self._batches.pop()
        time.sleep(min(limit_s, 0.01))
        return None

    def end_batch(self, number: int, error: Exception | None = None) -> None:
        self.seen.append(f"ended: {error!r}")
        self.lost = True
        self.ended.set()

    def health(self) -> Exception | None:
        return TransportError("lost") if self.lost else None


class Device:
    """Enqueues something, and then fails, or waits for a worker until it is aborted."""

    def __init__(self, seen: list[str], waits: bool) -> None:
        self.seen, self.waits = seen, waits
        self.begun, self.aborted = threading.Event(), threading.Event()

    def allreduce(self, batch: Any) -> Any:
        self.seen.append("enqueued")
        self.begun.set()
        if self.waits:
            assert self.aborted.wait(patient(30)), "nobody has aborted it"
        raise TransportError("failed on the way")

    def abort(self) -> None:
        self.aborted.set()

    def end(self, limit_s: float) -> bool:
        self.seen.append("device ended")
        return True

    def close(self) -> None:
        self.seen.append("closed")


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (errors.TimeoutError("it is late.\n  Fix: wait."), errors.TimeoutError("it is late; wait")),
        (BaseException("of \udcff somebody"), TransportError("BaseException: of \\udcff somebody")),
    ],
)
def test_whatever_fails_nobody_waits_for_it(error: BaseException, told: KVHvdError) -> None:
    class Broken(Device):
        def allreduce(self, batch: Any) -> Any:
            raise error

        def end(self, limit_s: float) -> bool:
            raise ValueError("not even that")

        abort = close = end  # type: ignore[assignment]

    seen: list[str] = []
    engine = Engine(seen)
    thread = DeviceThread(engine, lambda ordinal: Broken(seen, False))  # type: ignore[arg-type,return-value]
    thread.start(0)
    assert engine.ended.wait(patient(10))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", lambda args: seen.append(f"escaped: {args.exc_value}"))
        thread.stop()
    assert seen == [f"ended: {told!r}"]


@pytest.mark.parametrize("waits", [False, True])
def test_a_batch_that_fails_on_the_way_ends_on_the_device_first(waits: bool) -> None:
    seen: list[str] = []
    engine, device = Engine(seen), Device(seen, waits)
    thread = DeviceThread(engine, lambda ordinal: device)  # type: ignore[arg-type,return-value]
    thread.start(0)
    assert device.begun.wait(patient(10))
    if waits:
        engine.lost = True  # another worker died: the thread, which waits, does not see it
    assert engine.ended.wait(patient(20))
    thread.stop()
    assert seen == ["enqueued", "device ended", "ended: TransportError('failed on the way')", "closed"]
