"""A stand-in for NCCL beside `fake_cuda`: one communicator, whose operations run on the streams of its ranks."""

import ctypes
import threading
from collections import Counter
from typing import Any

import numpy as np

from kvstore_hvd.native import ITEM_BYTES
from support.fake_cuda import FakeCuda
from support.gpu_ranks import combined

# As nccl.h numbers them.
_TYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64", "bfloat16")
_OPS = {0: ("sum", 1.0), 1: ("product", 1.0), 2: ("max", 1.0), 3: ("min", 1.0)}
_INVALID, _IN_PROGRESS = 5, 7


class FakeNccl:
    """An `NcclLibrary`. It refuses calls before the one before has settled, and minima of floats, which lose NaN."""

    version, version_text = 22304, "2.23.4"

    def __init__(self, cuda: FakeCuda, size: int) -> None:
        self.size, self.ops = size, dict(_OPS)
        self.results, self.live = dict[str, int](), set[int]()  # of functions that fail; ranks with a handle
        self._cuda, self._thread, self._changed = cuda, threading.local(), threading.Condition()
        self._given, self._turns = dict[Any, Any](), Counter[Any]()
        self.describe = "result {}".format

    def call(self, name: str, *given: Any) -> int:
        thread = self._thread.__dict__
        if name == "ncclCommGetAsyncError":
            given[1]._obj.value = thread.pop("busy", 0)
        elif name == "ncclCommInitRankConfig":
            given[0]._obj.value = given[3] + 1
            self.live.add(given[3])
        elif name in ("ncclCommAbort", "ncclCommDestroy"):
            with self._changed:
                self.live.remove(given[0].value - 1)
                self._changed.notify_all()
        elif "busy" in thread:
            return _INVALID
        elif name == "ncclRedOpCreatePreMulSum":
            given[0]._obj.value = code = given[4].value + 4
            self.ops[code] = "sum", {7: ctypes.c_float, 8: ctypes.c_double}[given[2]].from_address(given[1]).value
        elif name == "ncclRedOpDestroy":
            del self.ops[given[0].value]
        elif name == "ncclGroupStart":
            thread["group"] = []
        elif name not in ("ncclCommFinalize", *self.results):
            group = thread.get("group", [])
            if name == "ncclGroupEnd":
                del thread["group"]
            else:
                how = [given[3], self.ops[given[4]], *given[5:-2]] if "Reduce" in name else given[3:-2]
                if "Reduce" in name and how[1][0] in ("min", "max") and how[0] >= 6:
                    return _INVALID
                group.append((given[-1], given[-2].value - 1, name, *given[:3], how))
            if "group" not in thread:
                thread["busy"] = _IN_PROGRESS
                for stream, *_ in group[:1]:
                    self._cuda.stream_at(stream).push(lambda: [take() for take in list(map(self._give, group))])
        return self.results.get(name, 0)

    def _give(self, operation: Any) -> Any:
        """Give the others what they take; returns a function that takes what this rank gets."""
        _, rank, name, source, target, count, how = operation
        pair = {"ncclSend": (rank, how[0]), "ncclRecv": (how[0], rank)}.get(name)
        if pair:
            target, count, how = source, target, [count]
        self._turns[rank, pair] += 1
        turn, nbytes = (pair, self._turns[rank, pair]), count * ITEM_BYTES[_TYPES[how[0]]]
        if name != "ncclRecv":
            read = 0 if name == "ncclBroadcast" and how[1] != rank else nbytes
            raw = ctypes.string_at(source, read * (self.size if name == "ncclReduceScatter" else 1))
            with self._changed:
                self._given[rank, turn] = np.frombuffer(raw, np.uint8)
                self._changed.notify_all()

        def take() -> None:
            keys = [(giver, turn) for giver in (pair[:1] if pair else range(self.size))]
            with self._changed:
                self._changed.wait_for(lambda: rank not in self.live or all(key in self._given for key in keys))
            if rank in self.live and name != "ncclSend" and (name != "ncclReduce" or how[2] == rank):
                raws = [self._given[key] for key in keys]
                raw = combined(raws, _TYPES[how[0]], *how[1]) if "Reduce" in name else np.concatenate(raws)
                raw = raw[rank * nbytes :][:nbytes] if name == "ncclReduceScatter" else raw
                ctypes.memmove(target, raw.ctypes.data, len(raw))

        return take
