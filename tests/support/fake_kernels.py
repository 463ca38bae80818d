"""What the GPU kernels do, in NumPy: as ``kvstore_hvd/gpu/kernels.py`` describes them, not as they do it.

A kernel that meets others waits for theirs, as on a GPU: for as long as it may, or until some rank's abort word is set.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import numpy as np

from kvstore_hvd import native
from kvstore_hvd.gpu import kernels

__all__ = ["raw_of", "run", "sizes", "values_of"]

_NUMPY = {name: np.dtype(name) for name in native.DTYPES if name != "bfloat16"}
_PLACES = {"start": 1, "end": 2}


def sizes() -> list[int]:
    """What the sizes kernel reports."""
    return [
        *kernels.STRUCTURES.values(),
        kernels.MAX_RANKS,
        kernels.MAX_CHANNELS,
        kernels.SLOTS,
        kernels.TILE_BYTES,
        kernels.TILE_ELEMENTS,
    ]


def run(name: str, arguments: list[Any], grid: tuple[int, ...]) -> None:
    """Carry out a kernel with these arguments, on the stream's thread."""
    if name.startswith("kvhvd_copy"):
        _copy(name, arguments[0].reshape(-1)[0])
        return
    world, launch = int(arguments[0]), arguments[1].reshape(-1)[0]
    threads = []
    for player in range(grid[1]):
        own = launch.copy()
        # The ranks of a launch have their worlds and tables one after another.
        for field in ("inputs", "outputs"):
            own[field] += np.uint64(player * int(launch[f"n_{field}"]) * kernels.SEGMENT.itemsize)
        arguments_of_one = name, world + player * kernels.WORLD.itemsize, own
        threads.append(threading.Thread(target=_collective, args=arguments_of_one, daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# -- Memory -----------------------------------------------------------------------------------------------------------


def _bytes(address: int, nbytes: int) -> Any:
    if not nbytes:
        return np.zeros(0, np.uint8)
    return np.frombuffer(memoryview((ctypes.c_char * int(nbytes)).from_address(int(address))), np.uint8)


def _table(address: int, count: int) -> Any:
    return _bytes(address, int(count) * kernels.SEGMENT.itemsize).view(kernels.SEGMENT).copy()


def values_of(raw: Any, dtype: str) -> Any:
    """The elements, as float32 where they are bfloat16."""
    if dtype == "bfloat16":
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return raw.view(_NUMPY[dtype])


def raw_of(values: Any, dtype: str) -> Any:
    """The bytes of elements, rounded to nearest even."""
    if dtype == "bfloat16":
        bits = np.asarray(values, np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(np.uint8)
    return np.ascontiguousarray(values.astype(_NUMPY[dtype])).view(np.uint8)


def _scaled(values: Any, dtype: str, scale: float) -> Any:
    if scale == 1.0:
        return values
    if dtype.startswith(("int", "uint")):
        limits = np.iinfo(dtype)
        return np.clip(np.trunc(values.astype(np.float64) * scale), limits.min, limits.max).astype(dtype)
    return values * (np.float64(scale) if dtype == "float64" else np.float32(scale))


def _wide(values: Any, dtype: str) -> Any:
    return values.astype(np.float32) if dtype in ("float16", "bfloat16") else values


# -- Copies -----------------------------------------------------------------------------------------------------------


def _copy(name: str, copy: Any) -> None:
    types = name[len("kvhvd_copy_") :].split("_") if name != "kvhvd_copy" else []
    for segment in _table(copy["segments"], copy["n_segments"]):
        count, place = int(segment["count"]), int(copy["buffer"]) + int(segment["offset"])
        if not types:
            ends = _bytes(segment["pointer"], count), _bytes(place, count)
            source, target = ends if copy["into_buffer"] else ends[::-1]
            target[:] = source
            continue
        tensor, fused = types
        # Elements, of the buffer.
        offset = int(segment["offset"]) * native.ITEM_BYTES[fused]
        place = int(copy["buffer"]) + offset
        assert offset % kernels.VECTOR_BYTES == 0
        ends = (
            (_bytes(segment["pointer"], count * native.ITEM_BYTES[tensor]), tensor),
            (_bytes(place, count * native.ITEM_BYTES[fused]), fused),
        )
        (source, one), (target, other) = ends if copy["into_buffer"] else ends[::-1]
        values = _wide(values_of(source, one), one)
        target[:] = raw_of(_scaled(values, one, float(copy["scale"])), other)


# -- Collectives ------------------------------------------------------------------------------------------------------


class _Meeting:
    """Where the ranks of a world meet: known by its control memory."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.arrived: dict[int, int] = {}
        self.statuses: dict[int, int] = {}
        self.stop = 0
        self.given: dict[tuple[int, int], Any] = {}


_meetings: dict[tuple[int, ...], _Meeting] = {}
_lock = threading.Lock()


def _meet(world: Any, launch: Any, meeting: _Meeting, place: str) -> bool:
    rank, ranks = int(world["rank"]), int(world["ranks"])
    deadline = time.monotonic() + int(launch["timeout_ns"]) / 1e9
    abort = _bytes(world["abort"], 4).view(np.uint32)
    with meeting.condition:
        number = meeting.arrived.get(rank, 0) + 1
        meeting.arrived[rank] = number
        meeting.statuses[rank] = int(world["status"])
        meeting.condition.notify_all()
        while True:
            late = [other for other in range(ranks) if meeting.arrived.get(other, 0) < number]
            if not late:
                return True
            if not meeting.stop and (abort[0] or time.monotonic() > deadline):
                meeting.stop = (2 if abort[0] else 1) | rank << 8 | late[0] << 16 | _PLACES[place] << 24
            if meeting.stop:
                for status in meeting.statuses.values():
                    _bytes(status, 4).view(np.uint32)[0] = meeting.stop
                meeting.condition.notify_all()
                return False
            meeting.condition.wait(0.005)


def _collective(name: str, address: int, launch: Any) -> None:
    world = _bytes(address, kernels.WORLD.itemsize).view(kernels.WORLD)[0].copy()
    rank, ranks = int(world["rank"]), int(world["ranks"])
    staging = [int(base) + int(launch["staging_offset"]) for base in world["staging"][:ranks]]
    inputs = _table(launch["inputs"], launch["n_inputs"])
    outputs = _table(launch["outputs"], launch["n_outputs"])
    with _lock:
        meeting = _meetings.setdefault(tuple(int(one) for one in world["control"][:ranks]), _Meeting())
    algorithm, _, what = name[len("kvhvd_") :].partition("_")
    if algorithm == "ring":
        _ring(what, world, launch, meeting, inputs, outputs)
        return
    if launch["meet"]:
        for segment in inputs:
            count = int(segment["count"])
            _bytes(staging[rank] + int(segment["offset"]), count)[:] = _bytes(segment["pointer"], count)
        if not _meet(world, launch, meeting, "start"):
            return
    else:
        assert not len(inputs)
    for segment in outputs:
        offset, count = int(segment["offset"]), int(segment["count"])
        if algorithm == "exchange":
            result = _bytes(staging[int(segment["rank"])] + offset, count)
        else:
            assert offset % kernels.VECTOR_BYTES == 0
            result = _reduced(what, launch, [_bytes(base + offset, count) for base in staging])
        _bytes(segment["pointer"], count)[:] = result
    if algorithm == "twoshot":
        _meet(world, launch, meeting, "end")


def _ring(what: str, world: Any, launch: Any, meeting: _Meeting, inputs: Any, outputs: Any) -> None:
    rank, ranks, nbytes = int(world["rank"]), int(world["ranks"]), int(launch["bytes"])
    assert len(inputs) == len(outputs) == 1
    with meeting.condition:
        number = meeting.arrived.get(rank, 0)
        meeting.given[number, rank] = _bytes(inputs[0]["pointer"], nbytes).copy()
    if not _meet(world, launch, meeting, "start"):
        return
    given = [meeting.given[number, one] for one in range(ranks)]
    if _meet(world, launch, meeting, "end"):
        _bytes(outputs[0]["pointer"], nbytes)[:] = _reduced(what, launch, given)


def _reduced(what: str, launch: Any, parts: list[Any]) -> Any:
    """In rank order, as native/reduce/reduce.hpp says."""
    dtype = what.partition("_")[0]
    op = next(name for name, code in native.OPS.items() if code == launch["op"])
    if len(parts) == 1 and launch["prescale"] == launch["postscale"] == 1.0 and not what.endswith("as_half"):
        return parts[0]
    combine: Any = {"min": np.minimum, "max": np.maximum, "product": np.multiply}.get(op, np.add)
    with np.errstate(over="ignore"):
        total = None
        for part in parts:
            values = _wide(values_of(part, dtype), dtype)
            if what.endswith("as_half"):
                values = values.astype(np.float16).astype(np.float32)
            if launch["prescale"] != 1.0:
                values = _scaled(values, dtype, float(launch["prescale"]))
                if what.endswith("as_half"):
                    values = values.astype(np.float16).astype(np.float32)
                elif dtype in ("float16", "bfloat16"):
                    values = _wide(values_of(raw_of(values, dtype), dtype), dtype)
            total = values if total is None else combine(total, values)
        total = _scaled(total, dtype, float(launch["postscale"]))
        if what.endswith("as_half"):
            total = total.astype(np.float16)
        return raw_of(total, dtype)
