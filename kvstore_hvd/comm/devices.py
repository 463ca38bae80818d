"""The thread that carries out a worker's operations on its GPU, in the order that all workers have agreed on."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvstore_hvd import native
from kvstore_hvd.errors import KVHvdError, TransportError

__all__ = ["Completion", "DeviceRequest", "DeviceThread", "Executor"]

# Between two looks at the device, which tells nobody when it is done; and at the world, while there is nothing to do.
_LOOK_S = 50e-6
_IDLE_S = 0.5


@dataclass(frozen=True)
class DeviceRequest:
    """One operation of a batch. Those of a batch differ in names, arrays, counts and parts only.

    Parameters
    ----------
    collective, name, label, inputs, outputs, count, dtype, op, prescale, as_half, root, parts, contributed
        As `Request`; addresses are of the device.
    postscale : float
        With the divisor of an average.
    """

    collective: str
    name: str
    label: str
    inputs: Sequence[int]
    outputs: Sequence[int]
    count: int
    dtype: str
    op: str
    prescale: float
    postscale: float
    as_half: bool
    root: int
    parts: Sequence[tuple[int, int, int, int]]
    contributed: int


class Completion(Protocol):
    """What was given to the device."""

    def done(self) -> bool:
        """Whether the device is through with it. Raises how it failed; then it touches no array any more."""


class Executor(Protocol):
    """Carries out batches of equal operations on a device. One thread, but for `abort`."""

    def allreduce(self, batch: Sequence[DeviceRequest]) -> Completion:
        """Begin an allreduce of every operation."""

    def broadcast(self, batch: Sequence[DeviceRequest]) -> Completion:
        """Begin a broadcast of every operation."""

    def exchange(self, batch: Sequence[DeviceRequest]) -> Completion:
        """Begin an exchange of every operation."""

    def reducescatter(self, batch: Sequence[DeviceRequest]) -> Completion:
        """Begin a reduce-scatter of every operation."""

    def abort(self) -> None:
        """End soon what has begun, on every worker. Any thread; more than once."""

    def close(self) -> None:
        """Give everything back. Nothing is under way."""


class DeviceThread:
    """The thread. It begins with the first operation on a device, and ends with the world.

    Parameters
    ----------
    engine : native.Engine
        Where the batches come from.
    make_executor : callable
        Makes the executor, given the first batch; every worker does so with the same batch, so it may talk to them.
    """

    def __init__(self, engine: Any, make_executor: Callable[[Sequence[DeviceRequest]], Executor]) -> None:
        self._engine, self._make_executor = engine, make_executor
        self._executor: Executor | None = None
        self._under_way: deque[tuple[int, Completion]] = deque()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()

    def start(self) -> None:
        """Begin, unless it has."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvstore_hvd-device", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End, after the engine has left its world."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            taken = self._engine.take_batch(_LOOK_S if self._under_way else _IDLE_S)
            if taken is not None:
                self._begin(*taken)
            self._finish()
            if self._engine.health() is not None:
                self._end_all()
        if self._executor is not None:
            self._executor.close()

    def _begin(
        self,
        number: int,
        collective: str,
        dtype: str,
        op: str,
        prescale: float,
        postscale: float,
        as_half: bool,
        root: int,
        operations: Sequence[tuple[Any, ...]],
    ) -> None:
        batch = [
            DeviceRequest(
                collective,
                name,
                label,
                inputs,
                outputs,
                count,
                dtype,
                op,
                prescale,
                postscale,
                as_half,
                root,
                parts,
                contributed,
            )
            for name, label, inputs, outputs, count, contributed, parts in operations
        ]
        try:
            if self._executor is None:
                self._executor = self._make_executor(batch)
            self._under_way.append((number, getattr(self._executor, collective)(batch)))
        except Exception as error:  # noqa: BLE001 - whatever it is, the others wait for this worker
            self._failed(number, error)

    def _finish(self) -> None:
        while self._under_way:
            number, completion = self._under_way[0]
            try:
                if not completion.done():
                    return
            except Exception as error:  # noqa: BLE001 - as above
                self._under_way.popleft()
                self._failed(number, error)
            else:
                self._under_way.popleft()
                self._engine.end_batch(number)

    def _failed(self, number: int, error: Exception) -> None:
        text = str(error) if isinstance(error, KVHvdError) else f"{type(error).__name__}: {error}"
        self._engine.end_batch(number, native.lost_code(error), text)

    def _end_all(self) -> None:
        """The world is lost: nothing may write to arrays any more once the callers have learnt of it."""
        if self._executor is not None:
            self._executor.abort()
        while self._under_way:
            number, completion = self._under_way.popleft()
            with contextlib.suppress(Exception):  # that it has ended is what counts; the reason is an older one
                while not completion.done():
                    self._stop.wait(_LOOK_S)
            self._failed(number, TransportError("its batch was ended"))
        self._stop.wait()
