"""The ways to sum one buffer over all ranks that are compared, all on the same memory of the same processes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from kvstore_hvd import mxnet_compat, native

# isort: split
import mxnet as mx
import numpy as np

from kvstore_hvd.world import process

__all__ = ["IN_ARENA", "Methods", "memory_of", "zeros"]

IN_ARENA = ", in arena"

Action = Callable[[], object]


def zeros(shape: Sequence[int]) -> Any:
    """Return a float32 array of MXNet."""
    return mx.nd.zeros(tuple(shape))


def memory_of(array: Any) -> Any:
    """Return a NumPy view of the memory of a float32 MXNet array. Who uses it must know that MXNet does not."""
    array.wait_to_read()
    pointer = ctypes.c_void_p()
    mx.base.check_call(mx.base._LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    assert pointer.value is not None
    return np.ctypeslib.as_array((ctypes.c_float * array.size).from_address(pointer.value))


def _raw(engine: native.Engine, memory: Any, name: str) -> Action:
    """The engine's own sum, without MXNet."""
    address = [memory.ctypes.data]
    return engine.prepare(
        native.Request("allreduce", name, name, address, address, [memory.size], "float32"), memory, memory
    )


def _of_mpi(mpi: Any, communicator: Any, memory: Any) -> Action:
    """Return MPI's allreduce of raw memory, in place."""
    allreduce, in_place, spec = communicator.Allreduce, mpi.IN_PLACE, [memory, mpi.FLOAT]

    def in_mpi() -> None:
        allreduce(in_place, spec)

    return in_mpi


class Methods:
    """Everything that stays from buffer to buffer: a store, the engine below it, MPI, and worlds of one rank.

    A world of one does what the real one does, except meeting others: its time is what a call costs by itself.

    Parameters
    ----------
    mpi : module or None
        ``mpi4py.MPI`` where there is one.
    """

    def __init__(self, mpi: Any) -> None:
        self.store = mx.kv.create("horovod")
        self._mpi = mpi
        self._alone = native.Engine(native.Segment.create(1), 0, 60.0)
        self._adapter = native.MXNetAdapter(self._alone, mxnet_compat.libmxnet_path(), mxnet_compat.engine_is_naive())

    def close(self) -> None:
        """Leave the worlds of one."""
        self._alone.shutdown()

    def arena_zeros(self, shape: Sequence[int]) -> Any:
        """Return a float32 array of MXNet in this worker's arena, where gradients of parameters lie."""
        handle = process.current().member.mxnet_adapter().new_array(tuple(shape), "float32")
        array = mx.nd.NDArray(handle=ctypes.c_void_p(handle))
        array[:] = 0
        return array

    def on(self, array: Any, name: str) -> dict[str, Action]:
        """Return the methods for one array of MXNet; each sums it in place and returns when the sum is there."""
        memory = memory_of(array)
        pushpull, wait = self.store.pushpull, array.wait_to_read

        def store() -> None:
            pushpull(name, array)
            wait()

        found = {"raw": _raw(process.current().member.others() or self._alone, memory, name), "pushpull": store}
        if self._mpi is not None:
            found["MPI"] = _of_mpi(self._mpi, self._mpi.COMM_WORLD, memory)
        return found

    def alone(self, array: Any, name: str) -> dict[str, Action]:
        """Return the same methods in a world of one, named with '(alone)'."""
        memory, handle = memory_of(array), mxnet_compat.handle_of(array)
        pushpull, wait = self._adapter.pushpull, array.wait_to_read

        def store() -> None:
            pushpull(name, name, [handle], [handle])
            wait()

        found = {"raw (alone)": _raw(self._alone, memory, name), "pushpull (alone)": store}
        if self._mpi is not None:
            found["MPI (alone)"] = _of_mpi(self._mpi, self._mpi.COMM_SELF, memory)
        return found

    def floors(self, memory: Any, other: Any) -> dict[str, Action]:
        """Return what every rank does to its own memory only: copy it with memcpy, and scale it in place."""
        memmove, to, source, length = ctypes.memmove, other.ctypes.data, memory.ctypes.data, memory.nbytes
        multiply, half = np.multiply, np.float32(0.5)

        def copy() -> None:
            memmove(to, source, length)

        def scale() -> None:
            multiply(memory, half, memory)

        return {"memcpy": copy, "scale": scale}
