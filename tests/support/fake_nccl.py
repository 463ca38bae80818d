"""A stand-in for a loaded libnccl: ranks are threads of the test, and operations run on the streams of `fake_cuda`."""

from __future__ import annotations

import ctypes
import itertools
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvstore_hvd.gpu.nccl import DTYPES, OPS
from kvstore_hvd.gpu.nccl_library import IN_PROGRESS, SUCCESS
from support.fake_cuda import FakeCuda
from support.fake_kernels import raw_of, values_of
from support.patience import patient

__all__ = ["FakeNccl"]

_NUMPY = {code: np.dtype(name) for name, code in DTYPES.items() if name != "bfloat16"}
_COMBINE: dict[int, Any] = {OPS["sum"]: np.add, OPS["product"]: np.multiply, OPS["max"]: np.fmax, OPS["min"]: np.fmin}
_REMOTE_ERROR = 6


class _World:
    """The ranks of one unique id, and what each has given to the operation under way."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.joined: set[int] = set()
        self.condition = threading.Condition()
        self.given: dict[tuple[int, int], list[Any]] = {}
        self.read: dict[int, int] = {}
        self.is_aborted = False


class _Rank:
    def __init__(self, world: _World, rank: int) -> None:
        self.world, self.rank, self.groups = world, rank, 0


class FakeNccl:
    """Answers what `NcclLibrary` answers. `calls` has every function that was called, with its arguments.

    Parameters
    ----------
    cuda : FakeCuda
    version : int
    """

    version_text = "2.99.0"

    def __init__(self, cuda: FakeCuda, version: int = 29900) -> None:
        self.version, self.path = version, "libnccl.so.2"
        self.calls: list[tuple[Any, ...]] = []
        self.results: dict[str, int] = {}  # of functions that shall fail
        self.state = SUCCESS  # what is said of every communicator that is not aborted
        self._cuda = cuda
        self._worlds: dict[bytes, _World] = {}
        self._ranks: dict[int, _Rank] = {}
        self._factors: dict[int, tuple[int, float]] = {}
        self._number = itertools.count(1)
        self._lock = threading.Lock()
        self._thread = threading.local()

    def names(self) -> list[str]:
        """The functions that were called, in order."""
        return [call[0] for call in self.calls]

    def unique_id(self) -> str:
        """A fresh one."""
        return next(self._number).to_bytes(128, "big").hex()

    def describe(self, result: int) -> str:
        """Of any failure the same."""
        return f"planted error {result}"

    def call(self, name: str, *arguments: Any) -> int:
        """As `NcclLibrary.call`."""
        with self._lock:
            self.calls.append((name, *arguments))
        if name in self.results:
            return self.results[name]
        return int(getattr(self, f"_{name[4].lower()}{name[5:]}")(*arguments) or SUCCESS)

    # -- Communicators -----------------------------------------------------------------------------------------

    def _commInitRankConfig(self, handle: Any, size: int, unique_id: Any, rank: int, config: Any) -> int:
        assert ctypes.cast(config, ctypes.POINTER(ctypes.c_size_t))[0] > 0
        with self._lock:
            world = self._worlds.setdefault(bytes(memoryview(unique_id)), _World(size))
            number = next(self._number)
            self._ranks[number] = _Rank(world, rank)
        world.joined.add(rank)
        ctypes.cast(handle, ctypes.POINTER(ctypes.c_void_p))[0] = number
        return IN_PROGRESS

    def _commGetAsyncError(self, handle: Any, state: Any) -> None:
        rank = self._ranks[handle.value]
        told = ctypes.cast(state, ctypes.POINTER(ctypes.c_int))
        if len(rank.world.joined) < rank.world.size:
            told[0] = IN_PROGRESS
        else:
            told[0] = _REMOTE_ERROR if rank.world.is_aborted else self.state

    def _commFinalize(self, handle: Any) -> None:
        pass

    def _commDestroy(self, handle: Any) -> None:
        with self._lock:
            del self._ranks[handle.value]

    def _commAbort(self, handle: Any) -> None:
        with self._lock:
            rank = self._ranks.pop(handle.value)
        with rank.world.condition:
            rank.world.is_aborted = True
            rank.world.condition.notify_all()

    def _redOpCreatePreMulSum(self, op: Any, value: int, dtype: int, residence: int, handle: Any) -> None:
        number = 1000 + next(self._number)
        factor = np.frombuffer(ctypes.string_at(value, _NUMPY[dtype].itemsize), _NUMPY[dtype])[0]
        self._factors[number] = dtype, float(factor)
        ctypes.cast(op, ctypes.POINTER(ctypes.c_int))[0] = number

    def _redOpDestroy(self, op: Any, handle: Any) -> None:
        assert op.value in self._factors

    # -- Operations --------------------------------------------------------------------------------------------

    def _groupStart(self) -> None:
        assert getattr(self._thread, "group", None) is None
        self._thread.group = []

    def _groupEnd(self) -> int:
        group, self._thread.group = self._thread.group, None
        if group:
            self._enqueue(group)
        return IN_PROGRESS

    def _allReduce(self, source: int, target: int, count: int, dtype: int, op: int, handle: Any, stream: int) -> int:
        return self._add(handle, stream, "allreduce", (source, target, count, dtype, op))

    def _reduce(
        self, source: int, target: int, count: int, dtype: int, op: int, root: int, handle: Any, stream: int
    ) -> int:
        return self._add(handle, stream, "reduce", (source, target, count, dtype, op, root))

    def _reduceScatter(
        self, source: int, target: int, count: int, dtype: int, op: int, handle: Any, stream: int
    ) -> int:
        return self._add(handle, stream, "reduce_scatter", (source, target, count, dtype, op))

    def _allGather(self, source: int, target: int, count: int, dtype: int, handle: Any, stream: int) -> int:
        return self._add(handle, stream, "all_gather", (source, target, count, dtype))

    def _broadcast(self, source: int, target: int, count: int, dtype: int, root: int, handle: Any, stream: int) -> int:
        return self._add(handle, stream, "broadcast", (source, target, count, dtype, root))

    def _send(self, source: int, count: int, dtype: int, peer: int, handle: Any, stream: int) -> int:
        return self._add(handle, stream, "send", (source, count, dtype, peer))

    def _recv(self, target: int, count: int, dtype: int, peer: int, handle: Any, stream: int) -> int:
        return self._add(handle, stream, "receive", (target, count, dtype, peer))

    def _add(self, handle: Any, stream: int, kind: str, arguments: tuple[int, ...]) -> int:
        entry = self._ranks[handle.value], stream, kind, arguments
        group = getattr(self._thread, "group", None)
        if group is None:
            self._enqueue([entry])
        else:
            group.append(entry)
        return IN_PROGRESS

    def _enqueue(self, group: list[Any]) -> None:
        rank, stream = group[0][:2]
        assert all(entry[:2] == (rank, stream) for entry in group)
        operations = [entry[2:] for entry in group]
        number, rank.groups = rank.groups, rank.groups + 1
        self._cuda.stream_at(stream).push(lambda: self._run(rank, number, operations))

    def _run(self, rank: _Rank, number: int, operations: list[Any]) -> None:
        world = rank.world
        given = [(kind, arguments, self._content(kind, arguments, world.size)) for kind, arguments in operations]
        with world.condition:
            world.given[number, rank.rank] = given
            world.condition.notify_all()
            deadline = time.monotonic() + patient(60)
            while any((number, other) not in world.given for other in range(world.size)):
                if world.is_aborted or time.monotonic() > deadline:
                    return
                world.condition.wait(0.01)
            everyone = [world.given[number, other] for other in range(world.size)]
        if any(
            _count(one, "send", other) != _count(everyone[other], "receive", me) for me, other, one in _pairs(everyone)
        ):
            world.is_aborted = True  # NCCL would wait
            return
        collectives = [[one for one in each if one[0] not in ("send", "receive")] for each in everyone]
        assert len({tuple(one[0] for one in each) for each in collectives}) == 1, "ranks enqueue different operations"
        position = 0
        taken: dict[int, int] = {}
        for kind, arguments, _ in given:
            if kind == "send":
                continue
            if kind == "receive":
                target, count, _, peer = arguments
                sent = [one for one in everyone[peer] if one[0] == "send" and one[1][3] == rank.rank]
                content = sent[taken.setdefault(peer, 0)][2]
                taken[peer] += 1
                assert len(content) == count, "a receive of another size than the send"
                ctypes.memmove(target, content, count)
                continue
            self._finish(rank, kind, arguments, [each[position][2] for each in collectives])
            position += 1

    def _content(self, kind: str, arguments: tuple[int, ...], size: int) -> bytes:
        if kind == "receive":
            return b""
        if kind == "send":
            address, count = arguments[:2]
            return ctypes.string_at(address, count)
        source, _, count, dtype = arguments[:4]
        return ctypes.string_at(source, count * _width(dtype) * (size if kind == "reduce_scatter" else 1))

    def _finish(self, rank: _Rank, kind: str, arguments: tuple[int, ...], parts: list[bytes]) -> None:
        target = arguments[1]
        if kind == "all_gather":
            result = b"".join(parts)
        elif kind == "broadcast":
            result = parts[arguments[4]]
        else:
            result = self._reduced(arguments[3], arguments[4], parts)
            if kind == "reduce" and rank.rank != arguments[5]:
                return
            if kind == "reduce_scatter":
                length = len(result) // rank.world.size
                result = result[rank.rank * length :][:length]
        ctypes.memmove(target, result, len(result))

    def _reduced(self, dtype: int, op: int, parts: list[bytes]) -> bytes:
        factor = 1.0
        if op in self._factors:
            (_, factor), op = self._factors[op], OPS["sum"]
        name = next(name for name, code in DTYPES.items() if code == dtype)
        arrays = [values_of(np.frombuffer(part, np.uint8), name) for part in parts]
        if factor != 1.0:
            arrays = [array * array.dtype.type(factor) for array in arrays]
        total = arrays[0]
        for array in arrays[1:]:
            total = _COMBINE[op](total, array)
        return bytes(raw_of(total, name))


def _pairs(everyone: list[Any]) -> Iterator[tuple[int, int, Any]]:
    """Of each rank and each other one, what the former has given."""
    for me, given in enumerate(everyone):
        yield from ((me, other, given) for other in range(len(everyone)))


def _count(given: Any, kind: str, peer: int) -> int:
    """How many of these operations are with that peer."""
    return sum(name == kind and arguments[3] == peer for name, arguments, _ in given)


def _width(dtype: int) -> int:
    return 2 if dtype == DTYPES["bfloat16"] else _NUMPY[dtype].itemsize
