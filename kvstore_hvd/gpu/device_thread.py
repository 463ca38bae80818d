"""The thread that carries out a worker's operations on its GPU, in the order that all workers have agreed on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from kvstore_hvd import log, native
from kvstore_hvd.base.clocks import Deadline
from kvstore_hvd.errors import HorovodInternalError, InvalidRequestError, KVHvdError, TransportError, message
from kvstore_hvd.gpu.executor import END_S, Completion, Executor
from kvstore_hvd.native.records import DeviceOperation

# Between two looks at the device, which tells nobody when it is done; and at the world, while there is nothing to do.
_LOOK_S = 50e-6
_IDLE_S = 0.5
# How long the thread may take to end: what it does then has limits of its own, which are shorter together.
_STOP_S = 60.0


class DeviceThread:
    """The thread. It begins with the first operation on a device, and ends with the world."""

    def __init__(
        self, engine: native.Engine, make_executor: Callable[[int], Executor], speaker: dict[str, Any] | None = None
    ) -> None:
        self._engine, self._make_executor = engine, make_executor
        self._speaker = speaker or {}
        self._device = 0
        self._executor: Executor | None = None
        self._under_way: deque[tuple[int, Completion]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def start(self, device: int) -> None:
        """Begin, unless it has."""
        with self._lock:
            if self._stop.is_set():
                return  # the next request fails
            if self._thread is not None and device != self._device:
                fact = f"an array is on GPU {device}, but this worker's operations take place on GPU {self._device}."
                fix = "keep all arrays of a worker on one GPU: that of its local_rank."
                raise InvalidRequestError(message(fact, fix=fix, **self._speaker))
            if self._thread is None:
                self._device = device
                self._thread = threading.Thread(target=self._run, name="kvstore_hvd-device", daemon=True)
                self._thread.start()
                threading.Thread(target=self._watch, name="kvstore_hvd-device-watch", daemon=True).start()

    def stop(self) -> None:
        """End, after the engine has left its world."""
        with self._lock:
            self._stop.set()
        # In a forked child the thread is not there, and its executor is the parent's.
        if self._thread is None or not self._thread.is_alive():
            return
        self._abort_if_lost()
        self._thread.join(_STOP_S)
        if self._thread.is_alive():
            log.logger.warning("the thread of GPU %d does not end; it is left behind", self._device)

    def _run(self) -> None:
        while not self._stop.is_set():
            taken = self._engine.take_batch(_LOOK_S if self._under_way else _IDLE_S)
            if taken is not None:
                self._begin(*taken)
            self._finish()
            if self._engine.health() is not None:
                self._end_all()
        if self._executor is not None:
            if self._under_way:
                self._abort(self._executor)
            try:
                self._executor.close()
            except Exception as error:  # noqa: BLE001 - of a device that has failed; who had to know has been told
                log.logger.debug("GPU %d is not given back: %s", self._device, error)

    def _watch(self) -> None:
        """Once the world is lost, end what the thread itself may be waiting for: a worker that does not come."""
        while not self._stop.wait(_IDLE_S):
            if self._abort_if_lost():
                return

    def _abort_if_lost(self) -> bool:
        executor = self._executor
        if executor is None or self._engine.health() is None:
            return False
        self._abort(executor)
        return True

    @staticmethod
    def _abort(executor: Executor) -> None:
        with contextlib.suppress(Exception):  # of a device that has failed: there is a reason already
            executor.abort()

    def _begin(self, number: int, collective: str, operations: list[DeviceOperation]) -> None:
        try:
            if self._executor is None:
                self._executor = self._make_executor(self._device)
            self._under_way.append((number, getattr(self._executor, collective)(operations)))
        except BaseException as error:  # noqa: BLE001 - whatever it is, the others wait for this worker
            if self._executor is not None:
                # A part of it may be enqueued: the arrays are the caller's again when the device is done with them.
                with contextlib.suppress(Exception):
                    self._executor.end(END_S)
            self._engine.end_batch(number, _loss(error))

    def _finish(self) -> None:
        while self._under_way:
            number, completion = self._under_way[0]
            try:
                if not completion.done():
                    return
            except BaseException as error:  # noqa: BLE001 - as above
                self._under_way.popleft()
                self._engine.end_batch(number, _loss(error))
            else:
                self._under_way.popleft()
                self._engine.end_batch(number)

    def _end_all(self) -> None:
        """The world is lost: nothing may write to arrays any more once the callers have learnt of it."""
        if self._executor is not None:
            self._abort(self._executor)
        end = Deadline(END_S)  # of all of them: the engine waits no longer, either
        while self._under_way:
            number, completion = self._under_way.popleft()
            with contextlib.suppress(Exception):  # that it has ended is what counts; the reason is an older one
                while not completion.done() and end.left() > 0:
                    time.sleep(_LOOK_S)
            self._engine.end_batch(number, TransportError("its batch was ended"))
        self._stop.wait()


def _loss(error: BaseException) -> KVHvdError:
    """What the other workers are told: the text becomes the fact of an error with a fix of its own."""
    text = str(error) if isinstance(error, KVHvdError) else f"{type(error).__name__}: {error}"
    fact = "; ".join(part.rstrip(".") for part in text.split("\n  Fix: "))
    kind = type(error) if isinstance(error, HorovodInternalError) else TransportError
    return kind(fact)
